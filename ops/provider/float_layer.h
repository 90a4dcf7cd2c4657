// Linear layers with float32 or float16 weights: MatMul and Gemm with a constant matrix. They are claimed only if the
// session option `precision` converts them to bf16 or int8.
#pragma once

#include "provider/layer.h"

namespace ortolan::provider {

// Return whether the node multiplies by a constant matrix.
bool IsFloatLayer(const Graph& graph, const Node& node);

// Throws UnfitError, with the reason, for unsupported nodes.
Layer ReadFloatLayer(const Node& node, Precision precision);

}  // namespace ortolan::provider
