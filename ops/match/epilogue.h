// Finds the operations after a linear layer that its operator can compute: Y = activation(X W + b) factor + residual,
// and the LayerNormalization of Y (norm.h).
#pragma once

#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "epilogue/epilogue.h"
#include "match/norm.h"

namespace ortolan::match {

// Return the activation of x if x has no other consumer; add its nodes to `nodes` and set x to its output. Return kNone
// and change nothing if there is no activation. formula.h recognizes activations that several nodes compute.
Activation TakeActivation(const Graph& graph, Value& x, std::vector<const Node*>& nodes);

// Return the one of `factors` that x is multiplied with, if both have no other consumer, and add the Mul to `nodes` and
// set x to its output; otherwise null.
Value TakeFactor(const Graph& graph, std::span<const Value> factors, Value& x, std::vector<const Node*>& nodes);

// Return the Add that is the only consumer of x; null if no such node exists.
const Node* SumOf(const Graph& graph, Value x);

struct Epilogue {
  Activation activation = Activation::kNone;
  Value factor = nullptr;  // has the shape of the layer's output
  // Added by the rules of ONNX Add. It may be computed only shortly before the last of `nodes`.
  Value residual = nullptr;
  const Node* sum = nullptr;  // the Add of the residual
  std::optional<Norm> norm;
  std::vector<const Node*> nodes;  // in graph order
  Value output = nullptr;          // of the last node; the layer's output if there are no nodes
};

// Return the longest epilogue of a layer's output. factors: values of the same shape as `output`. columns: length of
// the layer's rows. may_take: whether nodes may be part of it; they then are.
Epilogue FindEpilogue(const Graph& graph, Value output, std::span<const Value> factors, int64_t columns,
                      const std::function<bool(const Node&)>& may_take);

}  // namespace ortolan::match
