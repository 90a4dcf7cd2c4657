// A graph as the finders see it: its nodes, and the producer and consumers of each value. Valid as long as ONNX
// Runtime's graph.
#pragma once

#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "provider/node.h"

namespace ortolan::provider {

// Replacements for some values and nodes of a graph, applied before the finders read it.
struct View {
  std::unordered_map<Value, Value> instead;       // replacement of each value
  std::unordered_set<const Node*> hidden;         // nodes that finders do not see
  std::unordered_map<Value, Constant> constants;  // outputs of hidden nodes that are constant
};

class Graph {
 public:
  // A consumer of a value: a node and its input index, or -1 if a subgraph of the node reads the value.
  struct Use {
    const Node* node;
    int64_t index;
  };

  Graph(const HostApi& host, const OrtGraph& graph);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  const HostApi& host() const { return host_; }

  // Apply a view; all other functions then describe the graph with these replacements. The data of the view's constants
  // must stay valid as long as the graph.
  void See(View view);
  Value Seen(Value value) const { return provider::Seen(view_.instead, value); }

  // The nodes in topological order.
  std::span<const Node> nodes() const { return nodes_; }
  // Return the node that computes a value; null for inputs, initializers and values of an outer graph.
  const Node* Maker(Value value) const;
  std::span<const Use> Uses(Value value) const;
  bool IsOutput(Value value) const;
  // Return the only consumer of a value; null if the value has more consumers or uses, is read by a subgraph, or is an
  // output of the graph.
  const Node* OnlyReader(Value value) const;

  // Return whether these nodes can run as one: true if no path leaves the set and re-enters it. behind: further nodes
  // that can only run after the set.
  bool CanBeOne(std::span<const Node* const> nodes, std::span<const Node* const> behind = {}) const;

  // Helpers of finders.
  std::optional<Constant> ConstantOf(Value value) const;
  std::optional<float> NumberOf(Value value) const;
  bool IsConstantValue(Value value) const;
  bool IsFloat(Value value) const { return TypeOf(host_, value) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  bool IsFloatOrHalf(Value value) const { return IsFloatType(TypeOf(host_, value)); }
  // Return whether a node is a Cast between float32 and float16.
  bool IsFloatCast(const Node& node) const;

 private:
  struct ValueUses {
    const Node* maker = nullptr;
    std::vector<Use> uses;
    bool is_output = false;
  };
  void FindUses();
  const ValueUses& Of(Value value) const;
  size_t IndexOf(const Node& node) const { return static_cast<size_t>(&node - nodes_.data()); }

  const HostApi& host_;
  std::vector<Node> nodes_;
  std::vector<Value> outputs_;
  View view_;
  std::unordered_map<Value, ValueUses> uses_;
};

// Return the other operand of a binary operator.
inline Value Other(const Node& node, Value operand) { return node.Input(0) == operand ? node.Input(1) : node.Input(0); }

}  // namespace ortolan::provider
