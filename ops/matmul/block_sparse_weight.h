// int8 weights in blocks of 4 outputs x 1 input (formats/block_sparse_4x1.h), and what the kernels compute with them: x
// is quantized to u8 token by token (a token is a row of x).
//
//     h_i  = max(0, max over l of x[i, l]) / 2 - min(0, min over l of x[i, l]) / 2,   but at least 2^-100
//     f_i  = 127.5 / h_i
//     s_i  = h_i / 127.5                                                   NaN if the row holds an Inf or a NaN
//     z_i  = round(-min(0, min over l of x[i, l]) f_i)                     the u8 that stands for 0
//     q_il = min(round(x[i, l] f_i) + z_i, 255)                            round: to nearest, ties to even
//
//     y[i, j] = (sum over l of (q_il - z_i) q[l, j]) * (s_i scales[j])  + bias[j]         i < m, l < k, j < n
//
// The range is not symmetric about 0: after ReLU, GELU and the like nearly all of a row has one sign, and the step is
// then half that of -127 … 127. For other rows it is as good, and it costs no more than one product of vectors for each
// vector of sums.
//
// The inner sums are integers within int32 (255 x 128 x k, k at most 2^16), so they are exact; q, z and s are the same
// on every CPU. The product is not rounded before the bias is added, so that y has the same bits on every CPU, too.
// What float32 adds to that (u = 2^-24, inner sums D):
//
//     |y - exact| <= 4 u |D s_i scales[j]|  + u |y|                        and results below 2^-126
//
// Against the product of the float row with the dequantized weights that is, with the rounding of q,
//
//     |y - sum over l of x[i, l] W[l, j] - bias[j]| <= s_i / 2 (1 + 2^-14) sum over l of |W[l, j]|  + the above.
//
// A row with an Inf or a NaN gives NaN in all of y[i, :]; a row of zeros gives the bias.
//
// Where a FixedRange is given, s and z are those of all rows, f = 1 / s, and q is cut off at 0 as well; a NaN counts as
// the largest number.
//
// A hidden layer has a fixed range, and its y is the next layer's x, with a range of its own: u8 numbers of which a
// table makes others (an activation):
//
//     q'_ij = table[clamp(round(D_ij (s scales[j] / t) + bias[j] / t) + u, 0, 255)]           t, u: the range before it
//
// In float32 the argument of round is off by at most 8 2^-24 of the sum of its terms' magnitudes: next to the exact
// formula the number is the same or, near a tie, one step away. Here, too, the bias is added to the unrounded product.
#pragma once

#include <cstdint>

#include "formats/block_sparse_4x1.h"
#include "matmul/kernel.h"

namespace ortolan {

// The number q stands for scale (q - zero_point).
struct FixedRange {
  float scale = 0.0f;      // more than 0, and no denormal number; 0: there is no such range
  int32_t zero_point = 0;  // 0 … 255
};

struct BlockSparseWeight : MatMulWeight {
  BlockSparseView view;           // has passed ValidateBlockSparse
  const int32_t* sums = nullptr;  // SumsOfOutputs(view)
  const float* scales = nullptr;  // [n]
  FixedRange x_range;             // of x, if it has one

  // The range for all rows of x; null if each has its own.
  const FixedRange* Fixed() const { return x_range.scale > 0.0f ? &x_range : nullptr; }
};

// Of a packed token of k numbers: k padded to two vectors of 64, s and z; a multiple of 64. Number: what a kernel keeps
// for each, q in a byte or q - z in a word.
inline constexpr int64_t PaddedInputs(int64_t k) { return (k + 127) / 128 * 128; }
template <typename Element>
constexpr int64_t PackedTokenBytes(int64_t k) {
  return PaddedInputs(k) * static_cast<int64_t>(sizeof(Element)) + 64;
}

// A hidden layer has an x_range.
struct HiddenLayerWeight : BlockSparseWeight {
  FixedRange table_x;              // of the numbers that the table takes
  FixedRange table_y;              // of those that it gives
  const uint8_t* table = nullptr;  // [256]
};

// w is a HiddenLayerWeight, and there is no y. A kernel computes the columns of `next` that its panels are; panel 0
// brings the range.
struct HiddenLayerArgs : MatMulArgs {
  void* next = nullptr;  // m rows of w->n numbers, as pack makes them for the next layer
};

}  // namespace ortolan
