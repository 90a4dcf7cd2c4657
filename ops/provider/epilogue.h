// Finds the operators after a linear layer that can be computed with it: a bias, an activation, the product with
// another linear layer's output, a residual, LayerNormalization.
//
// The rules are those of graph_passes/find/epilogue.py and layer_norm.py; formula.h recognizes activations for both.
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

// Move the addition of a constant [n] to the layer's output into the layer, unless it already has a bias.
void TakeBias(const Graph& graph, Layer& layer);

// Return the activation of x if x has no other consumer; add its nodes to `nodes` and set x to its output. Return kNone
// and change nothing if there is no activation.
Activation TakeActivation(const Graph& graph, Value& x, std::vector<const Node*>& nodes);

// Return the parameters of a LayerNormalization of rows with constant weight and bias and one output; nullopt for other
// nodes and for rows of one element, which the preceding addition could have broadcast.
std::optional<Norm> ReadNorm(const Graph& graph, const Node& node);

// Return the LayerNormalization of x, whose rows have n elements, if x has no other consumer.
std::optional<Norm> FindNorm(const Graph& graph, Value x, int64_t n);

}  // namespace ortolan::provider
