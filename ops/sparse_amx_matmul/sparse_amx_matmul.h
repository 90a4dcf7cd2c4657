// SparseAMXMatMul: y = x W + bias with W stored as bitmap + non-zero bf16 weights (SparAMX, sections 4.2 to 4.4).
//
//     y[i, j] = sum over l of bf16(x[i, l]) * W[l, j]  + bias[j]        i < m, l < k, j < n
//
// x and y are float32; bf16() rounds to nearest even; products and sums are float32. The order of the sums, and so the
// last bits of y, depend on the kernel; they do not depend on how rows and panels are divided among threads.
// avx512bf16 kernels treat denormal operands as zero and flush denormal results (the instruction's own rule).
// Inf and NaN spread as in the dense product: a stored or unstored zero times Inf is NaN.
//
// A kernel works on rows that a Pack function has rounded, and on a range of panels (16 columns each). It allocates
// nothing and knows no threads. A range of rows is x, y and m of those rows; it begins at a multiple of row_block.
#pragma once

#include <cstdint>
#include <span>

#include "formats/bitmap.h"
#include "isa/features.h"
#include "matmul/matmul_args.h"

namespace ortolan {

// x: packed rows, [m][BitmapPaddedK(w.k)] of the kernel's activation type.
struct SparseMatMulArgs : MatMulArgs {
  BitmapView w;  // has passed ValidateBitmap; bitmap or dense storage, with the same result bit by bit
};

// Computes y for the panels panel_begin … panel_end-1 and all m rows.
using SparseMatMulFn = void(const SparseMatMulArgs& args, int64_t panel_begin, int64_t panel_end);

// Rounds m rows of k floats to bf16 and writes them, BitmapPaddedK(k) activations each, padded with zeros, in an order
// that is the kernel's own but for this: row i, a multiple of row_block, begins at activation i x BitmapPaddedK(k).
// Writes PackedBytes(m, k) or less.
using PackActivationsFn = void(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed);

struct SparseMatMulKernel {
  const char* name;
  Features needs;
  int64_t activation_bytes;  // of one packed activation: 2 (bf16) or 4 (float32 that holds a bf16 value)
  int64_t row_block;
  int64_t least_rows;  // from how many rows of x on it is the best of its tier

  int64_t PackedRowBytes(int64_t k) const { return BitmapPaddedK(k) * activation_bytes; }
  // The size of the buffer for m packed rows: a pack function may fill the last block.
  int64_t PackedBytes(int64_t m, int64_t k) const { return PackedRows(m, row_block) * PackedRowBytes(k); }

  PackActivationsFn* pack;
  SparseMatMulFn* multiply;
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const SparseMatMulKernel> SparseMatMulKernels();

// The best kernel for m rows of x on a CPU of this tier. Never fails.
const SparseMatMulKernel& SelectSparseMatMul(Features features, int64_t m);

}  // namespace ortolan
