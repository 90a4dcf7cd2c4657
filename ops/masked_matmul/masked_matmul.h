// MaskedMatMul: y = A B where both sides lie dense in memory and are sparse only at run time.
//
//     y[i, j] = sum over l of A'[i, l] B'[l, j]        A' = A where a_mask and not |A| <= a_threshold, else 0
//
// and B' likewise. The caller makes A' and B'; the kernels see them as float matrices whose zeros may be skipped.
//
// NaN and Inf spread as in the dense product: 0 x Inf is NaN. So a zero may be skipped only where all that it meets on
// the other side is finite. A Scan function finds the pattern of zeros and whether all numbers are finite in the same
// pass; where they are not, the caller takes the dense product. The rows kernels skip rows of B by A's zeros alone, so
// their caller must know B: it lists the rows of B that are not finite, and these are never skipped.
//
// Products and sums are float32. The order of the sums, and so the last bits of y, depend on the kernel and on the
// pattern; they do not depend on how tiles and panels are divided among threads. A sum without terms is +0.
//
// Four families of kernels:
//
//   blocks (many rows): B is cut into panels of 16 columns. A block is a row of a panel: 16 numbers side by side, which
//     are skipped if all of them are zero. Rows of A are packed in tiles, input by input, so that a block that
//     is found serves all rows of a tile; a sparse tile also skips inputs where all of its (fewer) rows are zero.
//   numbers (many rows, zeros of A anywhere): each number of A that is not zero is multiplied with a row of a panel of
//     128 columns of B, which is dense.
//   rows (decode, few rows of A): the inputs that any row of A uses are listed, and only their rows of B are read. B
//     may be float32, bf16 or int8 with scales, row after row in memory.
//   panels (B of any type, nothing to skip): a pass of a panel is unpacked and multiplied with all rows of A.
//
// A kernel allocates nothing and knows no threads. Matrices are aligned to their elements, what Pack functions write to
// 64 bytes. y overlaps nothing else.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

inline constexpr int64_t kFloatBytes = sizeof(float);
inline constexpr int64_t kBlockColumns = 16;
inline constexpr int64_t kMaskBits = 64;             // of a word of a mask
inline constexpr int64_t kMostListedInputs = 65535;  // k of a sparse tile

constexpr int64_t MaskWords(int64_t k) { return (k + kMaskBits - 1) / kMaskBits; }
constexpr int64_t BlockPanels(int64_t n) { return (n + kBlockColumns - 1) / kBlockColumns; }

// A matrix in memory, or rows of one.
struct FloatRows {
  const float* data = nullptr;
  int64_t row_bytes = 0;
  int64_t rows = 0;
  int64_t columns = 0;

  const float* Row(int64_t i) const {
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(data) + i * row_bytes);
  }
  FloatRows Rows(int64_t first, int64_t most) const {
    return {Row(first), row_bytes, rows - first < most ? rows - first : most, columns};
  }
};

// Rows of A, any number: bit l of mask [MaskWords(columns)] is set if a row is not zero at l. Returns whether all
// numbers are finite.
using ScanRowsFn = bool(const FloatRows& a, uint64_t* mask);

// Up to 64 rows of B: bit i of masks[panel x stride] is set if block i of the panel is not zero. Returns whether all
// numbers are finite.
using ScanBlocksFn = bool(const FloatRows& b, uint64_t* masks, int64_t stride);

// Packs up to 64 rows of B: the blocks whose bit is set in masks[panel x stride] go to values[16 x place], one behind
// the other from places[panel] on, which this advances. The block's row, counted from `first_row`, goes to
// inputs[place], or, where there are ranks, its place in the panel to ranks[panel x ranks_row + row].
struct PackBlocksArgs {
  FloatRows b;
  const uint64_t* masks = nullptr;
  int64_t stride = 0;
  uint32_t first_row = 0;
  const int64_t* starts = nullptr;  // [panels]: the places of rank 0
  int64_t* slots = nullptr;         // [panels]
  float* values = nullptr;
  uint32_t* inputs = nullptr;
  uint16_t* ranks = nullptr;
  int64_t ranks_row = 0;
};
using PackBlocksFn = void(const PackBlocksArgs& args);

// Packs up to tile_rows rows of A: tile[l][tile_rows] for l up to columns, zeros in rows that are not there and in the
// row behind the last. Returns whether all numbers are finite.
using PackTileFn = bool(const FloatRows& a, float* tile);

// y = (add: y +) tile x the blocks of one panel, for the tile's first `rows` rows and the panel's first `columns`.
struct TileArgs {
  const float* tile = nullptr;
  const float* values = nullptr;     // of the panel
  const uint32_t* inputs = nullptr;  // [count], padded to an even number with one that is the tile's row of zeros
  int64_t count = 0;
  float* y = nullptr;
  int64_t y_row_bytes = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  bool add = false;
};
using MultiplyTileFn = void(const TileArgs& args);

// The same for the inputs in both masks, whose blocks are found by their ranks; k is at most kMostListedInputs. The
// rank behind the last input is that of a block of zeros, as the tile has a row of zeros there.
struct SparseTileArgs : TileArgs {
  const uint64_t* tile_mask = nullptr;   // [words]
  const uint64_t* panel_mask = nullptr;  // [words]
  const uint16_t* ranks = nullptr;       // [k + 1]
  int64_t k = 0;
  uint16_t* list = nullptr;  // scratch: [k + kListPadding]
};
inline constexpr int64_t kListPadding = 64;
using MultiplySparseTileFn = void(const SparseTileArgs& args);

// The numbers of up to kNumberRows rows of A that are not zero, for one pass of up to kMaskBits inputs: rows that have
// any, with how many, and row behind row their numbers and their inputs, counted from the pass's first. Rows of as many
// numbers stand together, ascending. values and inputs have space for kMaskBits more. Returns how many rows have any.
inline constexpr int64_t kDensePanelRows = 512;
inline constexpr int64_t kDensePanelColumns = 128;  // of a panel
struct ValueList {
  float* values = nullptr;
  uint8_t* inputs = nullptr;
  uint16_t* rows = nullptr;   // [listed]
  uint8_t* counts = nullptr;  // [listed]
};
using ListValuesFn = int64_t(const FloatRows& a, const ValueList& list);

// sums[i] += for each number of row i: the number x panel[its input], for the first `blocks` of the panel.
struct ValuesArgs {
  ValueList list;
  int64_t listed = 0;
  const float* panel = nullptr;  // [kMaskBits][kNumberColumns]
  int64_t blocks = 0;            // of kBlockColumns, up to 8
  float* sums = nullptr;         // [rows][kNumberColumns]
};
using MultiplyValuesFn = void(const ValuesArgs& args);

// y[i, j] = sum over q of a[i, q] B[inputs[q], j] for columns j of B from column_begin to column_end. a is [m][count],
// row after row. scales: [n] of each group of `group` rows of B, or null. Inputs ascend.
struct RowsArgs {
  int64_t m = 0;
  const float* a = nullptr;
  int64_t a_row = 0;                // floats from one row of a to the next
  const int32_t* inputs = nullptr;  // [count], or null: 0, 1, …
  int64_t count = 0;
  const void* b = nullptr;  // [k][n]
  int64_t n = 0;
  const float* scales = nullptr;
  int64_t group = 0;
  float* sums = nullptr;  // scratch where there are scales: as many floats as y has here
  float* y = nullptr;     // [m][n]

  int64_t Input(int64_t q) const { return inputs == nullptr ? q : inputs[q]; }
};
using MultiplyRowsFn = void(const RowsArgs& args, int64_t column_begin, int64_t column_end);

// Inputs first … first+kMaskBits-1 of the list, as far as there are, of `columns` columns of B from `column` on: times
// their scales to panel[kMaskBits][kNumberColumns], zeros up to a whole block. Reads of args what is said of B.
using PackInputsFn = void(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel);

// sums[i] += a x panel for all rows of a, of up to kMaskBits columns, and the first `blocks` of the panel; sums as in
// NumbersArgs.
using MultiplyPanelFn = void(const FloatRows& a, const float* panel, int64_t blocks, float* sums);

// The inputs that any of the rows of A, [m][k], uses, or that `always` (a byte an input, or null) names, in ascending
// order, and a[i][q] = A[i, inputs[q]] with a_row floats a row. inputs and rows of a have space for k numbers and 16
// more. Returns how many.
using ListInputsFn = int64_t(const FloatRows& a, const uint8_t* always, int32_t* inputs, float* to, int64_t to_row);

// What an element of B is.
enum class ElementType { kFloat, kBf16, kInt8 };
inline constexpr int kElementTypes = 3;

struct MaskedMatMulFunctions {
  bool dense_panels;         // MultiplyPanel is worth its while against ONNX Runtime's MatMul on an unpacked panel
  int64_t tile_rows;         // of pack_tile and multiply_tile
  int64_t sparse_tile_rows;  // of pack_sparse_tile and multiply_sparse_tile
  ScanRowsFn* scan_rows;
  ScanBlocksFn* scan_blocks;
  PackBlocksFn* pack_blocks;
  PackTileFn* pack_tile;
  PackTileFn* pack_sparse_tile;
  MultiplyTileFn* multiply_tile;
  MultiplySparseTileFn* multiply_sparse_tile;
  ListValuesFn* list_values;
  MultiplyValuesFn* multiply_values;
  ListInputsFn* list_inputs;
  MultiplyRowsFn* multiply_rows[kElementTypes];
  PackInputsFn* pack_inputs[kElementTypes];
  MultiplyPanelFn* multiply_panel;
};

struct MaskedMatMulKernel : MaskedMatMulFunctions {
  const char* name;
  Features needs;
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const MaskedMatMulKernel> MaskedMatMulKernels();

}  // namespace ortolan
