// The interface of matmul kernels: y = x W + bias, with W packed in one of eight formats.
//
// A kernel multiplies rows of x, rounded or quantized by its own pack function, with a range of panels (16 columns of W
// each). It allocates no memory and starts no threads. Formulas and error bounds are documented with the kinds of
// weight: bitmap_weight.h (bf16, int8, int4), group_weight.h (groups and subgroups), k_quant_loop.h,
// block_sparse_weight.h.
//
// A row of y depends on its row of x only. How the rows and panels are divided does not change the result.
#pragma once

#include <cstdint>
#include <span>

#include "formats/bitmap.h"
#include "isa/features.h"

namespace ortolan {

// W with k inputs and n outputs. Each kind of weight derives from it, and its data has been validated.
struct MatMulWeight {
  int64_t k = 0;
  int64_t n = 0;
};

struct MatMulArgs {
  int64_t m = 0;
  const void* x = nullptr;  // m rows, packed by the kernel's pack function for this weight
  const MatMulWeight* w = nullptr;
  const float* bias = nullptr;  // [w->n], or null
  float* y = nullptr;           // must not overlap other operands
  int64_t y_row_bytes = 0;      // stride of y's rows, a multiple of 4
  int64_t y_panel = 0;          // the panel at y's first column

  // Row i of y, from the first column of a panel.
  float* Y(int64_t i, int64_t panel) const {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(y) + i * y_row_bytes) + (panel - y_panel) * kPanelColumns;
  }
};

// The weight of the arguments; the kernel's table determines its kind.
template <typename Weight>
const Weight& WeightOf(const MatMulArgs& args) {
  return static_cast<const Weight&>(*args.w);
}

// Return the arguments for rows first … first+most-1, or up to the last row. first is a multiple of the kernel's
// row_block.
inline MatMulArgs RowsOf(MatMulArgs args, int64_t first, int64_t most, int64_t packed_row_bytes) {
  args.m = args.m - first < most ? args.m - first : most;
  args.x = static_cast<const char*>(args.x) + first * packed_row_bytes;
  args.y = reinterpret_cast<float*>(reinterpret_cast<char*>(args.y) + first * args.y_row_bytes);
  return args;
}

// Return the size of a packed row in bytes.
using PackedRowBytesFn = int64_t(const MatMulWeight& w);

// Pack m rows of w.k floats. The kernel chooses the order, except that row i, for i a multiple of row_block, starts at
// byte i x packed_row_bytes. Writes at most PackedBytes; packed is aligned to at least 4 bytes.
using PackRowsFn = void(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed);

// Compute y for panels panel_begin … panel_end-1 and all m rows.
using MultiplyFn = void(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end);

struct HiddenLayerArgs;
// Compute the outputs of a hidden layer, written as packed rows of the next layer.
using MultiplyHiddenFn = void(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end);

// Return whether the kernel multiplies w. The next row of the table multiplies other weights.
using TakesFn = bool(const MatMulWeight& w);

// Below kManyRows rows a call is memory-bound, so kernels may process kPanelsOfFewRows panels together.
inline constexpr int64_t kManyRows = 4;
inline constexpr int64_t kPanelsOfFewRows = 4;

// The functions of a target for a kind of weight (target_functions.h).
struct MatMulFunctions {
  int64_t row_block;
  int64_t most_inputs;  // largest supported k
  PackedRowBytesFn* packed_row_bytes;
  PackRowsFn* pack;
  MultiplyFn* multiply;
  MultiplyHiddenFn* multiply_hidden = nullptr;  // block-sparse weights only
  int64_t panels_together = 1;                  // panels multiplied at once
  int64_t speed = 1;                            // throughput relative to vectors
  TakesFn* takes = nullptr;                     // null: weights of up to most_inputs inputs

  bool Takes(const MatMulWeight& w) const { return w.k <= most_inputs && (takes == nullptr || takes(w)); }
  // Return the maximum number of bytes that a pack function writes for m rows: it may fill the last block.
  int64_t PackedBytes(const MatMulWeight& w, int64_t m) const {
    return (m + row_block - 1) / row_block * row_block * packed_row_bytes(w);
  }
};

struct MatMulKernel : MatMulFunctions {
  const char* name;
  Features needs;
  int64_t least_rows;  // rows of x from which this kernel is the fastest on a CPU that supports it
};

// The largest row_block of all kernels.
inline constexpr int64_t kMostRowBlock = 64;

// The rows of <kind>_kernels.inc in this build, best first; the last one runs on any CPU.
std::span<const MatMulKernel> Bf16Kernels();
std::span<const MatMulKernel> Int8Kernels();
std::span<const MatMulKernel> Int4Kernels();
std::span<const MatMulKernel> GroupInt4Kernels();
std::span<const MatMulKernel> GroupInt8Kernels();
std::span<const MatMulKernel> SubgroupKernels();
std::span<const MatMulKernel> KQuantKernels();
std::span<const MatMulKernel> BlockSparseKernels();

}  // namespace ortolan
