// Finds LayerNormalization over the last axis with constant weight and bias. Exports of opset 17 and later have one
// node; earlier ones write
//
//     d = x - ReduceMean(x)
//     y = d / Sqrt(ReduceMean(d^2) + epsilon) weight + bias
//
// This order of operations is the only one that exporters write, so no other order is recognized.
#pragma once

#include <functional>
#include <optional>
#include <vector>

#include "match/graph.h"

namespace ortolan::match {

// (x - mean) / sqrt(variance + epsilon) weight + bias, with at least two elements in a row.
struct Norm {
  Value weight = nullptr, bias = nullptr;  // float32 or float16 [n]; a null bias is zeros
  float epsilon = 0;
  std::vector<const Node*> nodes;  // in graph order; the last one computes the result

  Value Output() const { return nodes.back()->Output(0); }
};

// Return the norm of x, whose rows have n elements, if x and the intermediate values have no other consumers.
std::optional<Norm> FindNorm(const Graph& graph, Value x, int64_t n);

// A norm of any value that is not constant, with the additions before it whose sums have no other consumer.
struct SumNorm {
  Norm norm;
  std::vector<Value> operands;    // up to kMostSumOperands values, added from left to right
  std::vector<const Node*> sums;  // the additions, last one first
};

// Return the norm that begins at a node, or nullopt. columns_of: length of a value's last axis, or nullopt. may_take:
// whether a node may be part of it.
std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& first,
                                   const std::function<std::optional<int64_t>(Value)>& columns_of,
                                   const std::function<bool(const Node&)>& may_take);

}  // namespace ortolan::match
