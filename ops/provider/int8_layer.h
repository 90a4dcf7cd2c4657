// int8 layers whose inputs are quantized at run time, in the forms that ONNX Runtime's quantize_dynamic writes and its
// optimizer produces:
//
//     DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul by scales
//     DynamicQuantizeLinear -> com.microsoft.MatMulIntegerToFloat
//     com.microsoft.DynamicQuantizeMatMul
//
// The rules are those of graph_passes/find/quantized_forms.py and stored_int8.py. Our layer quantizes each row of X
// separately, which is closer to the float model (ops/matmul/bitmap_weight.h).
#pragma once

#include "provider/layer.h"

namespace ortolan::provider {

// See ReadLayer.
std::optional<Layer> ReadInt8Layer(const Graph& graph, const Node& node);

}  // namespace ortolan::provider
