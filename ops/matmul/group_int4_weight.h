// 4-bit weights in groups with scales and zero points (formats/int4_group.h), and what the kernels compute with them: x
// is quantized to int8 group by group (EGEMV, equation 3).
//
//     a_ig = max over the l of group g of |x[i, l]|, but at least 2^-100
//     s_ig = a_ig / 127                                 NaN if the group holds an Inf or a NaN
//     q_il = x[i, l] * (127 / a_ig), rounded to the nearest integer, ties to even: -127 … 127
//
//     y[i, j] = sum over g of s_ig scales[g, j] * (sum over the l of group g of q_il (w[l, j] - zero_points[g, j]))
//               + bias[j]                               i < m, l < k, j < n;   w 0 … 15
//
// The inner sums are integers below 2^24, so they are exact. What float32 adds to that (u = 2^-24, inner sums D):
//
//     |y - exact| <= (groups + 4) u sum over g of |s_ig scales[g, j] D_g|  + u |y|
//
// and results below 2^-126, where float32 loses bits. Against the product of the float row with the dequantized weights
// that is, with the rounding of q,
//
//     |y - sum over l of x[i, l] W[l, j] - bias[j]| <= sum over l of s_ig / 2 (1 + 2^-14) |W[l, j]|  + the above.
//
// q and s are the same on every CPU. A row with an Inf or a NaN gives NaN in all of y[i, :]; a row of zeros gives the
// bias.
#pragma once

#include <cstdint>

#include "formats/int4_group.h"
#include "matmul/kernel.h"

namespace ortolan {

// Inputs of a group, or all of a smaller one, whose products may be added up in words of 16 bits, inputs 0 and 1 of
// each quad in one word, 2 and 3 in the other: 32 x 8 x 127 fits.
inline constexpr int64_t kInt4ChunkInputs = 64;

struct GroupInt4Weight : MatMulWeight {
  Int4GroupView view;  // has passed ValidateInt4Group

  int64_t ChunkInputs() const { return view.group < kInt4ChunkInputs ? view.group : kInt4ChunkInputs; }
  // k padded to whole tiles, two numbers a group and one a chunk; a multiple of 64.
  int64_t PackedRowBytes() const {
    const int64_t padded_k = kInt4Bitmap.PaddedK(k);
    const int64_t numbers = 2 * ScaleRows(k, view.group) + padded_k / ChunkInputs();
    return padded_k + (4 * numbers + 63) / 64 * 64;
  }
};

}  // namespace ortolan
