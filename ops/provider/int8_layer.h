// Layers of int8 numbers whose inputs are rounded when the model runs, in the forms that ONNX Runtime's
// quantize_dynamic writes and its optimizer makes of them:
//
//     DynamicQuantizeLinear -> MatMulInteger -> Cast -> Mul by scales
//     DynamicQuantizeLinear -> com.microsoft.MatMulIntegerToFloat
//     com.microsoft.DynamicQuantizeMatMul
//
// The rules are those of graph_passes/find/quantized_forms.py and stored_int8.py. Our layer rounds each row of X by
// itself, which is nearer to the floats: ops/matmul/bitmap_weight.h.
#pragma once

#include "provider/layer.h"

namespace ortolan::provider {

// As ReadLayer.
std::optional<Layer> ReadInt8Layer(const Graph& graph, const Node& node);

}  // namespace ortolan::provider
