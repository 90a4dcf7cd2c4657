// VNNISpMM: y = x W + bias, W int8 in blocks of 4 outputs x 1 input (formats/block_sparse_4x1.h), x quantized to u8
// token by token (a token is a row of x).
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
// on every CPU. What float32 adds to that (u = 2^-24, inner sums D):
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
// formula the number is the same or, near a tie, one step away. Kernels agree with each other likewise.
//
// A kernel works on rows that a Pack function has quantized, and on a range of panels (16 outputs each). It allocates
// nothing and knows no threads. A range of rows is x, y and m of those rows; it begins at a multiple of row_block.
#pragma once

#include <cstdint>
#include <span>

#include "formats/block_sparse_4x1.h"
#include "isa/features.h"
#include "matmul/matmul_args.h"

namespace ortolan {

struct VnniSpmmArgs : MatMulArgs {
  BlockSparseView w;              // has passed ValidateBlockSparse
  const int32_t* sums = nullptr;  // SumsOfOutputs(w)
  const float* scales = nullptr;  // [w.n]
};

// The number q stands for scale (q - zero_point).
struct FixedRange {
  float scale = 0.0f;      // more than 0, and no denormal number
  int32_t zero_point = 0;  // 0 … 255
};

struct HiddenLayerArgs : VnniSpmmArgs {  // without y
  FixedRange x_range;                    // of x
  FixedRange table_x;                    // of the numbers that the table takes
  FixedRange table_y;                    // of those that it gives
  const uint8_t* table = nullptr;        // [256]
  void* next = nullptr;                  // rows of w.n numbers, as pack makes them for the next layer
};

// Computes y for the panels panel_begin … panel_end-1 and all m rows.
using VnniSpmmFn = void(const VnniSpmmArgs& args, int64_t panel_begin, int64_t panel_end);

// Quantizes m rows of k floats, k <= kMostSparseInputs: q, s and z, in an order that is the kernel's own but for this:
// row i, a multiple of row_block, begins at byte i x PackedRowBytes(k). Writes PackedBytes(m, k) or less; packed is
// aligned to 4 bytes or more. fixed: null if each row has a range of its own.
using PackTokensFn = void(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, const FixedRange* fixed,
                          void* packed);

// Computes the columns of next that the panels panel_begin … panel_end-1 are, of all m rows. Panel 0 brings the range.
using HiddenLayerFn = void(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end);

struct VnniSpmmKernel {
  const char* name;
  Features needs;
  int64_t row_block;
  int64_t least_rows;   // from how many rows of x on it is the best of its tier
  int64_t most_inputs;  // k for which it works
  PackTokensFn* pack;
  VnniSpmmFn* multiply;
  HiddenLayerFn* multiply_hidden;

  // k padded to two vectors, s and z; a multiple of 64.
  static constexpr int64_t PackedRowBytes(int64_t k) { return (k + 127) / 128 * 128 + 64; }
  // A pack function may fill the last block.
  int64_t PackedBytes(int64_t m, int64_t k) const {
    return (m + row_block - 1) / row_block * row_block * PackedRowBytes(k);
  }
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const VnniSpmmKernel> VnniSpmmKernels();

// The best kernel for m rows of k numbers on a CPU of this tier. Never fails.
const VnniSpmmKernel& SelectVnniSpmm(Features features, int64_t m, int64_t k);

}  // namespace ortolan
