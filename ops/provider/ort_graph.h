// ONNX Runtime's graph as a match::Graph.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "match/graph.h"
#include "provider/ort_api.h"

namespace ortolan::provider {

using match::Constant;
using match::ElementType;
using match::Graph;
using match::IsCode;
using match::IsFloatType;
using match::Node;
using match::Other;
using match::Shape;
using match::Value;
using match::View;

// The reason why a node is left to ONNX Runtime.
using UnfitError = match::RefusedError;

inline void Expect(bool holds, const std::string& reason) {
  if (!holds) match::Refuse(match::ReasonCode::kText, reason);
}

// Return a string attribute of any size; empty if it is missing. Node::String lacks strings of more than
// kMostTextBytes, such as embedded weights.
std::string ReadText(const HostApi& host, const OrtNode& node, const char* name);
inline constexpr size_t kMostTextBytes = size_t{1} << 16;

// Return the shape of a value as integers, with -1 for unknown dimensions; nullopt if its rank is unknown.
std::optional<Shape> DeclaredShape(Value value);

// Valid as long as ONNX Runtime's graph.
class OrtModelGraph {
 public:
  // around: the graph around a branch, whose values are visible by name; may be null.
  OrtModelGraph(const HostApi& host, const OrtGraph& graph, const OrtModelGraph* around = nullptr);
  // A graph with only this node.
  OrtModelGraph(const HostApi& host, const OrtNode& node);

  Graph& graph() { return graph_; }
  const Graph& graph() const { return graph_; }
  // Return the only node of a graph with one node.
  const Node& node() const { return graph_.nodes().front(); }
  const OrtNode& OrtNodeOf(const Node& node) const { return *ort_nodes_[node.index()]; }
  // Return whether it is the body of an If, Loop or Scan.
  bool IsBranch() const { return is_branch_; }

 private:
  void AddNode(const OrtNode& node);
  Value AddValue(const OrtValueInfo* value);
  std::vector<Value> AddValues(const std::vector<const OrtValueInfo*>& values);
  std::optional<Constant> Read(const match::ValueInfo& value) const;

  const HostApi& host_;
  // Values of one graph are equal if their addresses are equal.
  std::unordered_map<const OrtValueInfo*, Value> values_;
  std::unordered_map<std::string, Value> by_name_;
  std::unordered_map<Value, const OrtValueInfo*> ort_values_;
  std::vector<const OrtNode*> ort_nodes_;  // by Node::index
  const OrtModelGraph* around_ = nullptr;
  bool is_branch_ = false;
  Graph graph_;
};

}  // namespace ortolan::provider
