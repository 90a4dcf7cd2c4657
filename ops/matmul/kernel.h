// The kernels of the matmul family: y = x W + bias, W packed in one of six ways.
//
// A kernel works on rows of x that its own pack function has rounded or quantized, and on a range of panels (16 columns
// of W each). It allocates nothing and knows no threads. What it computes, and how exactly, is said where its kind of
// weight is: bitmap_weight.h (bf16, int8, int4), group_weight.h (int4 and int8 in groups), block_sparse_weight.h.
//
// A row of y depends on that row of x alone; neither rows nor panels depend on how they are divided.
#pragma once

#include <cstdint>
#include <span>

#include "formats/bitmap.h"
#include "isa/features.h"

namespace ortolan {

// W: k inputs, n outputs. Each kind of weight derives from it; what it points to has been validated.
struct MatMulWeight {
  int64_t k = 0;
  int64_t n = 0;
};

struct MatMulArgs {
  int64_t m = 0;
  const void* x = nullptr;  // m rows, packed by the kernel's own pack function for this weight
  const MatMulWeight* w = nullptr;
  const float* bias = nullptr;  // [w->n], or null
  float* y = nullptr;           // must overlap nothing else
  int64_t y_row_bytes = 0;      // from one row of y to the next, a multiple of 4
  int64_t y_panel = 0;          // the panel whose columns y begins with

  // Row i of y, from the columns of a panel on.
  float* Y(int64_t i, int64_t panel) const {
    return reinterpret_cast<float*>(reinterpret_cast<char*>(y) + i * y_row_bytes) + (panel - y_panel) * kPanelColumns;
  }
};

// The weight of the arguments: the kernel's table says of which kind.
template <typename Weight>
const Weight& WeightOf(const MatMulArgs& args) {
  return static_cast<const Weight&>(*args.w);
}

// The part of the work that rows first … first+most-1 are, or as many as there are of them. first is a multiple of the
// kernel's row_block.
inline MatMulArgs RowsOf(MatMulArgs args, int64_t first, int64_t most, int64_t packed_row_bytes) {
  args.m = args.m - first < most ? args.m - first : most;
  args.x = static_cast<const char*>(args.x) + first * packed_row_bytes;
  args.y = reinterpret_cast<float*>(reinterpret_cast<char*>(args.y) + first * args.y_row_bytes);
  return args;
}

// Bytes of a packed row.
using PackedRowBytesFn = int64_t(const MatMulWeight& w);

// Packs m rows of w.k floats, in an order that is the kernel's own but for this: row i, a multiple of row_block, begins
// at byte i x packed_row_bytes. Writes PackedBytes or less; packed is aligned to 4 bytes or more.
using PackRowsFn = void(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed);

// Computes y for the panels panel_begin … panel_end-1 and all m rows.
using MultiplyFn = void(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end);

struct HiddenLayerArgs;
// The same, for a layer whose outputs are the packed rows of the next one.
using MultiplyHiddenFn = void(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end);

// Fewer rows are few: memory is the limit, and kernels may multiply so many panels at once, whatever they do with more.
inline constexpr int64_t kManyRows = 4;
inline constexpr int64_t kPanelsOfFewRows = 4;

// What a target computes with a kind of weight: target_functions.h.
struct MatMulFunctions {
  int64_t row_block;
  int64_t most_inputs;  // k for which it works
  PackedRowBytesFn* packed_row_bytes;
  PackRowsFn* pack;
  MultiplyFn* multiply;
  MultiplyHiddenFn* multiply_hidden = nullptr;  // block-sparse weights have one
  int64_t panels_together = 1;                  // panels that it multiplies at once
  int64_t speed = 1;                            // multiply-adds in the time that vectors take for one

  // What a pack function may write for m rows: it may fill the last block.
  int64_t PackedBytes(const MatMulWeight& w, int64_t m) const {
    return (m + row_block - 1) / row_block * row_block * packed_row_bytes(w);
  }
};

struct MatMulKernel : MatMulFunctions {
  const char* name;
  Features needs;
  int64_t least_rows;  // from how many rows of x on it is the best of those that the CPU has
};

// No row_block is larger.
inline constexpr int64_t kMostRowBlock = 64;

// The rows of <kind>_kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const MatMulKernel> Bf16Kernels();
std::span<const MatMulKernel> Int8Kernels();
std::span<const MatMulKernel> Int4Kernels();
std::span<const MatMulKernel> GroupInt4Kernels();
std::span<const MatMulKernel> GroupInt8Kernels();
std::span<const MatMulKernel> BlockSparseKernels();

}  // namespace ortolan
