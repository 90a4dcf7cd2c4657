// int8 weights in blocks of 4 outputs x 1 input (formats/block_sparse_4x1.h), and the formulas of their kernels. x is
// quantized to u8 per token (a token is a row of x):
//
//     h_i  = max(0, max over l of x[i, l]) / 2 - min(0, min over l of x[i, l]) / 2,   but at least 2^-100
//     f_i  = 127.5 / h_i
//     s_i  = h_i / 127.5                                                   NaN if the row holds an Inf or a NaN
//     z_i  = round(-min(0, min over l of x[i, l]) f_i)                     the zero point
//     q_il = min(round(x[i, l] f_i) + z_i, 255)                            round: to nearest, ties to even
//
//     y[i, j] = (sum over l of (q_il - z_i) q[l, j]) * (s_i scales[j])  + bias[j]         i < m, l < k, j < n
//
// The range is asymmetric because after ReLU, GELU and the like almost all of a row has one sign: the step is then half
// that of -127 … 127. Other rows lose nothing, and the cost is at most one vector product per vector of sums.
//
// The inner sums are exact: they fit int32 (255 x 128 x k, k at most 2^16). q, z and s are the same on every CPU. The
// product is not rounded before the bias is added, so y also has the same bits on every CPU. The float32 operations add
// at most (u = 2^-24, inner sums D)
//
//     |y - exact| <= 4 u |D s_i scales[j]|  + u |y|                        and results below 2^-126
//
// Compared with the product of the float row and the dequantized weights, including the rounding of q,
//
//     |y - sum over l of x[i, l] W[l, j] - bias[j]| <= s_i / 2 (1 + 2^-14) sum over l of |W[l, j]|  + the bound above.
//
// A row with an Inf or a NaN gives NaN in all of y[i, :]; a row of zeros gives the bias.
//
// With a FixedRange, s and z are the same for all rows, f = 1 / s, q is clamped to 0 … 255, and a NaN counts as the
// largest value.
//
// A hidden layer has a fixed range, and its y is the x of the next layer, which has its own range: u8 values mapped by
// a table (an activation):
//
//     q'_ij = table[clamp(round(D_ij (s scales[j] / t) + bias[j] / t) + u, 0, 255)]           t, u: scale and zero
//                                                                                           point before the table
//
// In float32 the argument of round is off by at most 8 2^-24 of the sum of its terms' magnitudes, so the result equals
// the exact formula or, near a tie, is one step away. Here too the bias is added to the unrounded product.
#pragma once

#include <cstdint>

#include "formats/block_sparse_4x1.h"
#include "matmul/kernel.h"

namespace ortolan {

// q represents the value scale (q - zero_point).
struct FixedRange {
  float scale = 0.0f;      // positive and normal; 0 if there is no fixed range
  int32_t zero_point = 0;  // 0 … 255
};

struct BlockSparseWeight : MatMulWeight {
  BlockSparseView view;           // has passed ValidateBlockSparse
  const int32_t* sums = nullptr;  // SumsOfOutputs(view)
  const float* scales = nullptr;  // [n]
  FixedRange x_range;             // x's fixed range, if it has one

  // The range shared by all rows of x; null if each row has its own.
  const FixedRange* Fixed() const { return x_range.scale > 0.0f ? &x_range : nullptr; }
};

// Size of a packed token of k values: k padded to two vectors of 64, s and z; a multiple of 64. Element: what the
// kernel stores per value, q as a byte or q - z as a word.
inline constexpr int64_t PaddedInputs(int64_t k) { return (k + 127) / 128 * 128; }
template <typename Element>
constexpr int64_t PackedTokenBytes(int64_t k) {
  return PaddedInputs(k) * static_cast<int64_t>(sizeof(Element)) + 64;
}

// A hidden layer; it has an x_range.
struct HiddenLayerWeight : BlockSparseWeight {
  FixedRange table_x;              // range of the table's inputs
  FixedRange table_y;              // range of the table's outputs
  const uint8_t* table = nullptr;  // [256]
};

// w is a HiddenLayerWeight, and y is not used. A kernel writes the columns of `next` that belong to its panels; panel 0
// also writes the range.
struct HiddenLayerArgs : MatMulArgs {
  void* next = nullptr;  // m rows of w->n values, in the packed order of the next layer
};

}  // namespace ortolan
