// int8 layers of models whose activations have fixed ranges (qdq_pairs.h), in the forms of quantize_static and of
// models with 8-bit weights only:
//
//     MatMul or Gemm, the weight behind DequantizeLinear, possibly transposed
//     QLinearMatMul; com.microsoft.QGemm; com.microsoft.MatMulIntegerToFloat behind QuantizeLinear
//
// The rules are those of graph_passes/find/quantized_forms.py and stored_int8.py: our layer quantizes each row of the
// floats in front separately. Without a range in front it is a layer too.
#pragma once

#include "provider/layer.h"
#include "provider/qdq_pairs.h"

namespace ortolan::provider {

// As ReadLayer.
std::optional<Layer> ReadStaticLayer(const Graph& graph, const QdqPairs& roundings, const Node& node);

}  // namespace ortolan::provider
