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
// A kernel works on rows that a Pack function has quantized, and on a range of panels (16 outputs each). It allocates
// nothing and knows no threads. A range of rows is x, y and m of those rows; it begins at a multiple of row_block.
#pragma once

#include <cstdint>
#include <span>

#include "formats/block_sparse_4x1.h"
#include "isa/isa.h"
#include "support/matmul_args.h"

namespace ortolan {

struct VnniSpmmArgs : MatMulArgs {
  BlockSparseView w;              // has passed ValidateBlockSparse
  const int32_t* sums = nullptr;  // SumsOfOutputs(w)
  const float* scales = nullptr;  // [w.n]
};

// Computes y for the panels panel_begin … panel_end-1 and all m rows.
using VnniSpmmFn = void(const VnniSpmmArgs& args, int64_t panel_begin, int64_t panel_end);

// Quantizes m rows of k floats, k <= kMostSparseInputs: q, s and z, in an order that is the kernel's own but for this:
// row i, a multiple of row_block, begins at byte i x PackedRowBytes(k). Writes PackedBytes(m, k) or less; packed is
// aligned to 4 bytes or more.
using PackTokensFn = void(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed);

struct VnniSpmmKernel {
  const char* name;
  Isa isa;
  int64_t row_block;
  int64_t least_rows;   // from how many rows of x on it is the best of its tier
  int64_t most_inputs;  // k for which it works
  PackTokensFn* pack;
  VnniSpmmFn* multiply;

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
const VnniSpmmKernel& SelectVnniSpmm(Isa isa, int64_t m, int64_t k);

}  // namespace ortolan
