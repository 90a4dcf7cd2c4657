// Finds the linear layers of a graph, Y = X W + bias with a constant W in any stored form, or the reason why a similar
// node is not one.
//
//     kFloat        MatMul or Gemm; the weight may be computed from constants
//     kBlocks       com.microsoft.MatMulNBits: 4 or 8 bits in blocks of inputs
//     kInt4, kInt8  MatMul or Gemm whose weight is the output of a DequantizeLinear, possibly transposed
//     kInt8         com.microsoft.DynamicQuantizeMatMul and MatMulIntegerToFloat;
//                   MatMulInteger (-> Add of an int32 bias) -> Cast -> Mul by scales; QLinearMatMul; QGemm
//
// A match names roles and reads only small constants. Its users read the weight and decide whether kernels can compute
// with its values (matmul/nbits_weight.h, matmul/int8_weight.h).
#pragma once

#include <array>
#include <optional>
#include <variant>
#include <vector>

#include "match/graph.h"

namespace ortolan::match {

inline constexpr int64_t kMostLayerInputs = 1 << 17;  // with more, int32 accumulators could overflow

enum class WeightForm { kFloat, kBlocks, kInt4, kInt8 };
// Names for Python, in the order of WeightForm.
inline constexpr const char* kWeightForms[] = {"float", "blocks", "int4", "int8"};

// W = scales (codes - zero points), or the floats themselves.
struct LayerWeight {
  WeightForm form = WeightForm::kFloat;
  Value value = nullptr;  // the weight input of the layer's node
  // [k, n], or [n, k] if transposed; kBlocks: uint8 [n, blocks, block_size * bits / 8]. Null for kFloat.
  Value codes = nullptr;
  bool transposed = false;
  // The weight is columns of a wider matrix: the first of them, and the number of all; 0: it is the whole matrix.
  int64_t first_column = 0, all_columns = 0;
  int64_t bits = 0;
  int64_t block_size = 0;          // inputs per scale; 0: the scales are one for all, or one per column
  std::vector<Value> scales;       // the scale is the product of these constants, each with one value or one per column
  Value scale_divisor = nullptr;   // the product is divided by this constant scalar
  Value zero_points = nullptr;     // may be null
  std::vector<const Node*> nodes;  // nodes that dequantize the weight, from the last to the first
  // Reason why the stored integers cannot be kept: then only the dequantized floats are a weight.
  std::optional<Reason> why_not_kept;
};

struct Linear {
  const Node* node = nullptr;            // reads the weight
  std::vector<const Node*> nodes;        // the node, Add of an int32 bias, Cast and Muls; the last computes the output
  std::vector<const Node*> scale_nodes;  // compute products of scales for the Muls
  // The Add of a float bias that follows, which is not one of `nodes`. May be null.
  const Node* add = nullptr;
  Value x = nullptr;  // floats; null if x is stored as codes of a fixed range
  LayerWeight weight;
  bool transposed = false;  // `weight.value` is [n, k], as for Gemm with transB
  Value bias = nullptr;     // may be null
  int64_t k = 0;
  int64_t n = 0;
  ElementType type = ElementType::kFloat;  // of X and Y, unless they are quantized

  // Set if the node reads X as 8-bit codes.
  Value x_codes = nullptr;
  Value x_scale = nullptr, x_zero_point = nullptr;
  const Node* quantize = nullptr;  // the DynamicQuantizeLinear that computes them; null: constants
  // Constants, set if the output is 8-bit.
  Value y_scale = nullptr, y_zero_point = nullptr;
  // The bias is int32, in steps of the scale of X times the scale of W.
  bool bias_in_steps = false;
  // A scale has two axes, so the output has at least two axes even if X has only one.
  bool scales_have_rows = false;

  Value output() const { return (add != nullptr ? add : nodes.back())->Output(0); }
};

// A node that multiplies by a matrix but is not a linear layer.
struct NotLinear {
  const Node* node = nullptr;
  Reason reason;
  std::optional<WeightForm> form;  // nullopt: the weight is not constant, or its operator is not supported
  bool of_weight = false;          // the operator, or the form in which it stores its weight, is the reason
};

using FoundLinear = std::variant<Linear, NotLinear>;

// Return the scales [n] of an 8-bit weight with a scale for each column. divided: by `scale_divisor`. Throws
// RefusedError if constants cannot be read.
std::vector<float> ScalesOf(const Graph& graph, const Linear& linear, bool divided = true);
// Return the zero points [n] of such a weight, in the range of the codes' type.
std::vector<int16_t> ZeroPointsOf(const Graph& graph, const Linear& linear);

// Return nullopt if the node does not multiply by a matrix.
std::optional<FoundLinear> MatchLinear(const Graph& graph, const Node& node);
// Return the query, key and value layers inside of com.microsoft's Attention or QAttention (attention.h), which have
// these widths; their biases belong to the attention. Throws RefusedError.
std::array<Linear, 3> PackedLinears(const Graph& graph, const Node& node, const std::array<int64_t, 3>& widths);
// Return the layers and similar nodes of a graph, in graph order, without its subgraphs.
std::vector<FoundLinear> FindLinears(const Graph& graph);

}  // namespace ortolan::match
