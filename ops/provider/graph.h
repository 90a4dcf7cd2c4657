// A graph as the finders see it: its nodes, and the producer and consumers of each value. Valid as long as ONNX
// Runtime's objects.
#pragma once

#include <memory>
#include <span>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "provider/node.h"

namespace ortolan::provider {

// Replacements for some of a graph's values and nodes, as finders see them.
struct View {
  std::unordered_map<Value, Value> instead;       // of a value
  std::unordered_set<const Node*> hidden;         // nodes
  std::unordered_map<Value, Constant> constants;  // what hidden nodes make
};

class Graph {
 public:
  // A node that reads a value, and at which input; -1: a graph inside of it does.
  struct Use {
    const Node* node;
    int64_t index;
  };

  Graph(const HostApi& host, const OrtGraph& graph);
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  const HostApi& host() const { return host_; }

  // All that follows is said of the graph as it is seen from now on; at first it is seen as it is. The numbers of
  // constants must be there as long as the graph.
  void See(View view);
  Value Seen(Value value) const { return provider::Seen(view_.instead, value); }

  // In an order in which each value is made before it is read.
  std::span<const Node> nodes() const { return nodes_; }
  // Of this graph; null: an input, an initializer, or a value of a graph around it.
  const Node* Maker(Value value) const;
  std::span<const Use> Uses(Value value) const;
  bool IsOutput(Value value) const;
  // The one node that reads the value, once; null if there are more, or others see it: a graph inside of a node, or
  // whoever runs the graph.
  const Node* OnlyReader(Value value) const;

  // Return whether these nodes can run as one: true if no path leaves the set and re-enters it. behind: further nodes
  // that wait for them.
  bool CanBeOne(std::span<const Node* const> nodes, std::span<const Node* const> behind = {}) const;

  // Helpers of finders.
  std::optional<Constant> ConstantOf(Value value) const;
  std::optional<float> NumberOf(Value value) const;
  bool IsConstantValue(Value value) const;
  bool IsFloat(Value value) const { return TypeOf(host_, value) == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  bool IsFloatOrHalf(Value value) const { return IsFloatType(TypeOf(host_, value)); }
  // Whether a node converts between float32 and float16.
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

// The other operand of an operator of two.
inline Value Other(const Node& node, Value operand) { return node.Input(0) == operand ? node.Input(1) : node.Input(0); }

}  // namespace ortolan::provider
