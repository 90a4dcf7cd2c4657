// Layers of float32 or float16, which are taken only where the session's options say what they become: MatMul and Gemm
// with a constant matrix.
#pragma once

#include "provider/layer.h"

namespace ortolan::provider {

// A product by a constant matrix.
bool IsFloatLayer(const Graph& graph, const Node& node);

// Throws UnfitError, with the reason, for unsupported nodes.
Layer ReadFloatLayer(const Node& node, Precision precision);

}  // namespace ortolan::provider
