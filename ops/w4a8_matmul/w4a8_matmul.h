// W4A8MatMul: y = x W + bias, W 4-bit in groups with scales and zero points, x quantized to int8 group by group (EGEMV,
// equation 3).
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
//
// A kernel works on rows that a Pack function has quantized, and on a range of panels (16 columns each). It allocates
// nothing and knows no threads. A range of rows is x, y and m of those rows; it begins at a multiple of row_block.
#pragma once

#include <cstdint>
#include <span>

#include "formats/int4_group.h"
#include "isa/features.h"
#include "matmul/matmul_args.h"

namespace ortolan {

struct W4A8MatMulArgs : MatMulArgs {
  Int4GroupView w;  // has passed ValidateInt4Group
};

// Computes y for the panels panel_begin … panel_end-1 and all m rows.
using W4A8MatMulFn = void(const W4A8MatMulArgs& args, int64_t panel_begin, int64_t panel_end);

// Quantizes m rows of k floats, k <= 2^17: q and, for each group, s and the sum of q, in an order that is the kernel's
// own but for this: row i, a multiple of row_block, begins at byte i x PackedRowBytes(k, group). Writes PackedBytes(m,
// k, group) or less; packed is aligned to 4 bytes or more.
using PackW4A8ActivationsFn = void(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group,
                                   void* packed);

struct W4A8MatMulKernel {
  const char* name;
  Features needs;
  int64_t row_block;
  int64_t least_rows;  // from how many rows of x on it is the best of its tier
  PackW4A8ActivationsFn* pack;
  W4A8MatMulFn* multiply;

  // k padded to whole tiles, three numbers a group; a multiple of 64.
  static constexpr int64_t PackedRowBytes(int64_t k, int64_t group) {
    return kInt4Bitmap.PaddedK(k) + (12 * ScaleRows(k, group) + 63) / 64 * 64;
  }
  // A pack function may fill the last block.
  int64_t PackedBytes(int64_t m, int64_t k, int64_t group) const {
    return PackedRows(m, row_block) * PackedRowBytes(k, group);
  }
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const W4A8MatMulKernel> W4A8MatMulKernels();

// The best kernel for m rows of x on a CPU of this tier. Never fails.
const W4A8MatMulKernel& SelectW4A8MatMul(Features features, int64_t m);

}  // namespace ortolan
