// What follows a linear layer and can be computed with it: a bias, an activation, a product with another layer's
// output, a sum, LayerNormalization.
//
// As graph_passes/find/epilogue.py and layer_norm.py do; formula.h tells activations for both.
#pragma once

#include <optional>
#include <vector>

#include "epilogue/epilogue.h"
#include "provider/layer.h"

namespace ortolan::provider {

struct Norm {
  const Node* node = nullptr;
  std::vector<float> weight, bias;  // [n]
  float epsilon = 0;
};

// Adds to the layer, if it has no bias yet, the sum with a constant [n] behind it.
void TakeBias(const Graph& graph, Layer& layer);

// Return the activation of x if x has no other consumer; add its nodes to `nodes` and set x to the result. kNone: there
// is no activation, and nothing changes.
Activation TakeActivation(const Graph& graph, Value& x, std::vector<const Node*>& nodes);

// The node, if it is a LayerNormalization of rows by constants and puts out nothing else. Rows of one number are left:
// they could be repeated by what was added to them.
std::optional<Norm> ReadNorm(const Graph& graph, const Node& node);

// That of rows of n numbers, if x goes nowhere else.
std::optional<Norm> FindNorm(const Graph& graph, Value x, int64_t n);

}  // namespace ortolan::provider
