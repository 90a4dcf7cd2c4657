// Symbolic inference of the shapes and element types of a graph's values, and of the integers that shapes are computed
// from.
//
// Exports write `x.view(batch, length, heads, -1)` as a chain of Shape, Gather, Concat and Reshape. Dimensions
// evaluates such chains: a dimension is an integer, or a symbol that equals only itself (dim.h).
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <unordered_map>
#include <vector>

#include "match/dim.h"
#include "match/graph.h"

namespace ortolan::match {

inline constexpr size_t kMostElements = 16;  // limit for the elements of a tensor that are tracked

class Dimensions {
 public:
  // The graph must outlive this object. around: dimensions of the outer graph if `graph` is a branch; null: values of
  // an outer graph have their declared shapes.
  explicit Dimensions(const Graph& graph, const Dimensions* around = nullptr);

  const Graph& graph() const { return graph_; }
  const Symbols& symbols() const { return *symbols_; }

  // Return the dimensions of a value; nullopt if its rank is unknown or the value is null.
  std::optional<DimShape> ShapeOf(Value value) const;
  // Return the rank of a value, or nullopt.
  std::optional<size_t> Rank(Value value) const;
  // Return the elements of a short vector or scalar, some of them unknown; nullopt if their count is unknown.
  std::optional<Elements> ElementsOf(Value value) const;
  // Return the constant value of a scalar or one-element vector, or nullopt.
  std::optional<double> NumberOf(Value value) const;
  // NumberOf, if it is a finite float32.
  std::optional<double> Scalar(Value value) const;
  // Return a value's element type, kUndefined if unknown.
  ElementType TypeOf(Value value) const;
  // Return the target of a Reshape with zeros replaced by input dimensions. Unknown elements and -1 are nullopt.
  std::optional<std::vector<std::optional<Dim>>> ReshapeTarget(const Node& node) const;
  // Return the sorted axes of a Squeeze, Unsqueeze or reduction of a tensor of this rank, from its attribute or second
  // input; the axes of an Unsqueeze count in its output. Empty if the node has none, nullopt if they are unknown.
  std::optional<std::vector<size_t>> AxesOf(const Node& node, size_t rank) const;
  // Return whether a node's output equals its input: Identity, or a Cast to the same type.
  bool ChangesNothing(const Node& node) const;
  // Return "unknown" or the shape as text, for reasons.
  std::string ShapeText(Value value) const;

 private:
  // Return the shape that the model states.
  std::optional<DimShape> Declared(Value value) const;
  void Visit(const Node& node);
  // Return the branches of an If that may be taken.
  std::vector<std::unique_ptr<Dimensions>> BranchesOf(const Node& node) const;

  const Graph& graph_;
  const Dimensions* around_;
  int depth_;                         // number of graphs around this one
  std::shared_ptr<Symbols> symbols_;  // one table for a graph and its branches
  std::unordered_map<Value, DimShape> shapes_;
  std::unordered_map<Value, Elements> elements_;
  std::unordered_map<Value, ElementType> types_;
  mutable std::unordered_map<Value, std::optional<Elements>> constants_;  // elements of constants read so far
};

// Return the index of an axis that may be negative; nullopt if it is outside the rank.
std::optional<size_t> AxisOf(std::optional<int64_t> axis, size_t rank);
// Return the permutation of a Transpose of a tensor of this rank; nullopt if the attribute does not fit it.
std::optional<std::vector<size_t>> Permutation(const Node& node, size_t rank);

}  // namespace ortolan::match
