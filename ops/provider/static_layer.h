// int8 layers of models whose activations have fixed ranges (qdq_pairs.h). Forms written by quantize_static, and forms
// of models that quantize only their weights:
//
//     MatMul or Gemm whose weight is the output of a DequantizeLinear, possibly transposed
//     QLinearMatMul; com.microsoft.QGemm; com.microsoft.MatMulIntegerToFloat after QuantizeLinear
//
// The rules are those of graph_passes/find/quantized_forms.py and stored_int8.py. Our layer reads the floats before the
// QuantizeLinear and quantizes each row separately. X need not be quantized in the model.
#pragma once

#include "provider/layer.h"
#include "provider/qdq_pairs.h"

namespace ortolan::provider {

// See ReadLayer.
std::optional<Layer> ReadStaticLayer(const Graph& graph, const QdqPairs& roundings, const Node& node);

}  // namespace ortolan::provider
