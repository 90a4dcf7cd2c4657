// SparseAMXMatMul with quantized weights: y = x W + bias, W int8 or int4 in a bitmap format, x quantized row by row.
//
//     a_i  = max over l of |x[i, l]|, but at least 2^-100
//     s_i  = a_i / 127                                 NaN if the row holds an Inf or a NaN
//     q_il = x[i, l] * (127 / a_i), rounded to the nearest integer, ties to even: -127 … 127
//
//     int8   y[i, j] = (sum over l of q_il W[l, j]) * (s_i scales[0, j])  + bias[j]
//     int4   y[i, j] = s_i * sum over g of scales[g, j] * (sum over the l of group g of q_il W[l, j])  + bias[j]
//
// i < m, l < k, j < n; groups of inputs and the packed order of scales: formats/scales.h.
// s, q and the rest outside of the inner sums are float32. The inner sums are exact: k is at most 2^17, so that
// 128 * 127 * k fits an int32. What float32 adds to that (u = 2^-24, exact inner sums D):
//
//     int8   |y - exact| <= 4 u |D s_i scales[0, j]|                       + u |y|
//     int4   |y - exact| <= (groups + 4) u s_i sum over g of |scales[g, j] D_g|  + u |y|
//
// and results below 2^-126, where float32 loses bits. Against the product of the float row with the dequantized weights
// that is, with the rounding of q (|x - s q| <= s_i / 2, and its float32 arithmetic, 2^-14 of that),
//
//     |y - sum over l of x[i, l] scale W[l, j] - bias[j]| <= s_i / 2 (1 + 2^-14) sum over l of |scale W[l, j]|  + the
//     above.
//
// Sparsity itself adds none. q and s are the same on every CPU. A row with an Inf or a NaN gives NaN in all of y[i, :];
// a row of zeros gives the bias. A weight that is stored and zero is allowed, and -128 and -8 are weights like others.
//
// A kernel works on rows that a Pack function has quantized, and on a range of panels (16 columns each). It allocates
// nothing and knows no threads. A range of rows is x, y and m of those rows; it begins at a multiple of row_block.
#pragma once

#include <cstdint>
#include <span>

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/scales.h"
#include "isa/features.h"
#include "sparse_amx_matmul/sparse_amx_matmul.h"

namespace ortolan {

// x is packed by the kernel's own pack function, with the same k and group; w has passed ValidateBitmap with
// kInt8Bitmap or kInt4Bitmap.
struct SparseInt8MatMulArgs : SparseMatMulArgs {
  int64_t group = kWholeColumn;  // int4: 32, 64 or 128
  const void* scales = nullptr;  // [panels][ScaleRows(w.k, group)][16] float (int8) or bf16 (int4), at any address

  // The 16 scales of a group.
  const uint8_t* Scales(int64_t panel, int64_t g) const {
    return static_cast<const uint8_t*>(scales) +
           (panel * ScaleRows(w.k, group) + g) * kPanelColumns * ScaleBytes(group);
  }
};

// Computes y for the panels panel_begin … panel_end-1 and all m rows.
using SparseInt8MatMulFn = void(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end);

// Quantizes m rows of k floats, k <= 2^17: q, s and, for each group, a sum of q where the kernel wants one, in an order
// that is the kernel's own but for this: row i, a multiple of row_block, begins at byte i x PackedRowBytes(k, group).
// Writes PackedBytes(m, k, group) or less; packed is aligned to 4 bytes or more.
using PackInt8ActivationsFn = void(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group,
                                   void* packed);

// int8 and int4 are two kernels on the same packed rows.
struct SparseInt8MatMulKernel {
  const char* name;
  Features needs;
  int64_t row_block;
  int64_t least_rows;  // from how many rows of x on it is the best of its tier
  PackInt8ActivationsFn* pack;
  SparseInt8MatMulFn* multiply_int8;
  SparseInt8MatMulFn* multiply_int4;

  // k padded to whole tiles, a scale, a sum a group; a multiple of 64.
  static constexpr int64_t PackedRowBytes(int64_t k, int64_t group) {
    return kInt8Bitmap.PaddedK(k) + (4 + 4 * ScaleRows(k, group) + 63) / 64 * 64;
  }
  // A pack function may fill the last block.
  int64_t PackedBytes(int64_t m, int64_t k, int64_t group) const {
    return PackedRows(m, row_block) * PackedRowBytes(k, group);
  }
};

// The rows of kernels_int8.inc that this build has, best first; the last one runs on any CPU.
std::span<const SparseInt8MatMulKernel> SparseInt8MatMulKernels();

// The best kernel for m rows of x on a CPU of this tier. Never fails.
const SparseInt8MatMulKernel& SelectSparseInt8MatMul(Features features, int64_t m);

}  // namespace ortolan
