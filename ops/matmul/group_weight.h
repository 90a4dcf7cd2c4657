// Weights in groups, of 4 bits (formats/int4_group.h) or 8 bits (formats/int8_group.h), or in groups with subgroups
// (formats/subgroup.h), and the formulas of their kernels. x is quantized to int8 per group. Reference: EGEMV,
// equation 3.
//
//     a_ig = max over the l of group g of |x[i, l]|, but at least 2^-100
//     s_ig = a_ig / 127                                 NaN if the group holds an Inf or a NaN
//     q_il = x[i, l] * (127 / a_ig), rounded to the nearest integer, ties to even: -127 … 127
//
//     y[i, j] = sum over g of s_ig scales[g, j] * D_g  + bias[j]                      i < m, j < n
//     D_g     = sum over the l of group g of q_il (w[l, j] - zero_points[g, j])       8 bits: no zero point
//             = sum over the l of group g of q_il v[l, j]                             with subgroups
//
// With minimums (4 bits only), products use zero point 8 and the minimum is adjusted for it:
//
//     y[i, j] = sum over g of s_ig scales[g, j] * D_g + (minimums[g, j] + 8 scales[g, j]) * (s_ig S_ig)  + bias[j]
//     D_g     = sum over the l of group g of q_il (w[l, j] - 8),    S_ig = sum over the l of group g of q_il
//
// Fractional zero points work the same way: scales[g, j] (8 - zero_points[g, j] / 16) replaces the term in parentheses.
//
// D_g and S_ig are integers below 2^24, so they are exact. The float32 operations add at most (u = 2^-24)
//
//     |y - exact| <= (groups + 4) u sum over g of |s_ig scales[g, j] D_g|  + u |y|
//     |y - exact| <= (2 groups + 4) u sum over g of (|s_ig scales[g, j] D_g| + |(minimums[g, j] + 8 scales[g, j]) s_ig
//                    S_ig|)  + u |y|                    with minimums
//
// plus the error of results below 2^-126, where float32 loses bits. Compared with the product of the float row and the
// dequantized weights, including the rounding of q,
//
//     |y - sum over l of x[i, l] W[l, j] - bias[j]| <= sum over l of s_ig / 2 (1 + 2^-14) |W[l, j]|  + the bound above.
//
// q and s are the same on every CPU. A row with an Inf or a NaN gives NaN in all of y[i, :]; a row of zeros gives the
// bias, if scales and minimums are finite. With minimums, s_ig S_ig must be finite too, which holds for |x| < 2^121.
#pragma once

#include <cstdint>

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/group.h"
#include "matmul/kernel.h"

namespace ortolan {

// Inputs of a group, at most, whose products with nibbles may be summed in 16-bit words: inputs 0 and 1 of each quad in
// one word, 2 and 3 in the other. 32 x 8 x 127 fits.
inline constexpr int64_t kGroupChunkInputs = 64;

struct GroupWeight : MatMulWeight {
  GroupView view;  // has passed ValidateGroups

  int64_t ChunkInputs() const { return view.group < kGroupChunkInputs ? view.group : kGroupChunkInputs; }
  // Return whether groups need s_ig S_ig: for minimums and fractional zero points.
  bool TakesScaledSums() const { return view.minimums != nullptr || view.HasFractions(); }
  // k padded to whole tiles, two values per group (three with scaled sums) and one per chunk; a multiple of 64.
  // Inlined, because the linker could keep a copy that was compiled for another CPU.
  __attribute__((always_inline)) int64_t PackedRowBytes() const {
    static_assert(kInt4Bitmap.PaddedK(1) == kInt8Bitmap.PaddedK(1));
    const int64_t padded_k = kInt8Bitmap.PaddedK(k);
    const int64_t of_groups = TakesScaledSums() ? 3 : 2;
    const int64_t count = of_groups * ScaleRows(k, view.group) + padded_k / ChunkInputs();
    return padded_k + (4 * count + 63) / 64 * 64;
  }
};

}  // namespace ortolan
