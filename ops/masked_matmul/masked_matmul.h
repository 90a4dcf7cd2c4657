// MaskedMatMul: y = A B, where both matrices are stored dense but are sparse at run time.
//
//     y[i, j] = sum over l of A'[i, l] B'[l, j]        A' = A where a_mask and not |A| <= a_threshold, else 0
//
// and B' with b_mask and b_threshold. The caller computes A' and B'; the kernels see float matrices whose zeros may be
// skipped.
//
// NaN and Inf propagate as in the dense product: 0 x Inf is NaN. So a zero may be skipped only if everything it is
// multiplied with is finite. Scan functions find the pattern of zeros and whether all values are finite in one pass; if
// not all are finite, the caller uses the dense product. The rows kernels skip rows of B because of zeros in A alone,
// so their caller must know B: it lists the rows of B that are not finite, and these are never skipped.
//
// Products and sums are float32. The order of the sums, and so the last bits of y, depend on the kernel and the
// pattern, but not on how tiles and panels are split among threads. A sum without terms is +0.
//
// There are four families of kernels:
//
//   blocks (many rows): B is divided into panels of 16 columns. A block is a row of a panel, 16 adjacent values, and is
//     skipped if all of them are zero. Rows of A are packed in tiles, input by input, so that each stored block is used
//     for all rows of a tile. A sparse tile also skips inputs at which all of its (fewer) rows are zero.
//   values (many rows, zeros of A anywhere): each nonzero value of A is multiplied with a row of a panel of 128 columns
//   of
//     B, which is treated as dense.
//   rows (decode, few rows of A): the inputs that any row of A uses are listed, and only their rows of B are read. B
//   may
//     be float32, bf16 or int8 with scales, in row-major order.
//   panels (B of any type, nothing to skip): a pass of a panel is unpacked and multiplied with all rows of A.
//
// Kernels neither allocate nor create threads. Matrices are aligned to their elements, packed data to 64 bytes. y
// overlaps no other argument.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

inline constexpr int64_t kFloatBytes = sizeof(float);
inline constexpr int64_t kBlockColumns = 16;
inline constexpr int64_t kMaskBits = 64;             // bits in a word of a mask
inline constexpr int64_t kMostListedInputs = 65535;  // largest k of a sparse tile

constexpr int64_t MaskWords(int64_t k) { return (k + kMaskBits - 1) / kMaskBits; }
constexpr int64_t BlockPanels(int64_t n) { return (n + kBlockColumns - 1) / kBlockColumns; }

// A view of a row-major matrix, or of some of its rows.
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

// Scans any number of rows of A: bit l of mask [MaskWords(columns)] is set if a row is nonzero at l. Returns whether
// all values are finite.
using ScanRowsFn = bool(const FloatRows& a, uint64_t* mask);

// Scans up to 64 rows of B: bit i of masks[panel x stride] is set if block i of the panel is nonzero. Returns whether
// all values are finite.
using ScanBlocksFn = bool(const FloatRows& b, uint64_t* masks, int64_t stride);

// Packs up to 64 rows of B. The blocks whose bit is set in masks[panel x stride] are written to values[16 x slot], with
// consecutive slots from slots[panel] on, which is advanced. The block's row, counted from `first_row`, is written to
// inputs[slot]; or, if there are ranks, its slot within the panel to ranks[panel x ranks_row + row].
struct PackBlocksArgs {
  FloatRows b;
  const uint64_t* masks = nullptr;
  int64_t stride = 0;
  uint32_t first_row = 0;
  const int64_t* starts = nullptr;  // [panels]: the slots of rank 0
  int64_t* slots = nullptr;         // [panels]
  float* values = nullptr;
  uint32_t* inputs = nullptr;
  uint16_t* ranks = nullptr;
  int64_t ranks_row = 0;
};
using PackBlocksFn = void(const PackBlocksArgs& args);

// Packs up to tile_rows rows of A: tile[l][tile_rows] for l up to columns, with zeros in missing rows and in the entry
// after the last input. Returns whether all values are finite.
using PackTileFn = bool(const FloatRows& a, float* tile);

// y = (add: y +) tile x the blocks of one panel, for the tile's first `rows` rows and the panel's first `columns`
// columns.
struct TileArgs {
  const float* tile = nullptr;
  const float* values = nullptr;     // blocks of the panel
  const uint32_t* inputs = nullptr;  // [count], padded to an even count with the index of the tile's zero input
  int64_t count = 0;
  float* y = nullptr;
  int64_t y_row_bytes = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  bool add = false;
};
using MultiplyTileFn = void(const TileArgs& args);

// The product for the inputs in both masks; ranks locate their blocks. k is at most kMostListedInputs. The rank after
// the last input is that of a block of zeros, like the tile's zero input there.
struct SparseTileArgs : TileArgs {
  const uint64_t* tile_mask = nullptr;   // [words]
  const uint64_t* panel_mask = nullptr;  // [words]
  const uint16_t* ranks = nullptr;       // [k + 1]
  int64_t k = 0;
  uint16_t* list = nullptr;  // scratch: [k + kListPadding]
};
inline constexpr int64_t kListPadding = 64;
using MultiplySparseTileFn = void(const SparseTileArgs& args);

// The nonzero values of up to kDensePanelRows rows of A, for one pass of up to kMaskBits inputs. `rows` lists the rows
// that have any, ascending and grouped by their count of values; values and inputs hold each row's values and their
// inputs, relative to the pass, row after row. values and inputs have kMaskBits spare elements. Returns the number of
// listed rows.
inline constexpr int64_t kDensePanelRows = 512;
inline constexpr int64_t kDensePanelColumns = 128;  // of a panel
struct ValueList {
  float* values = nullptr;
  uint8_t* inputs = nullptr;
  uint16_t* rows = nullptr;   // [listed]
  uint8_t* counts = nullptr;  // [listed]
};
using ListValuesFn = int64_t(const FloatRows& a, const ValueList& list);

// sums[i] += value x panel[its input], for each listed value of row i and the first `blocks` blocks of the panel.
struct ValuesArgs {
  ValueList list;
  int64_t listed = 0;
  const float* panel = nullptr;  // [kMaskBits][kDensePanelColumns]
  int64_t blocks = 0;            // blocks of kBlockColumns columns, at most 8
  float* sums = nullptr;         // [rows][kDensePanelColumns]
};
using MultiplyValuesFn = void(const ValuesArgs& args);

// y[i, j] = sum over q of a[i, q] B[inputs[q], j] for columns j of B from column_begin to column_end. a is [m][count],
// in row-major order. scales: [n] for each group of `group` rows of B, or null. Inputs ascend.
struct RowsArgs {
  int64_t m = 0;
  const float* a = nullptr;
  int64_t a_row = 0;                // row stride of a in floats
  const int32_t* inputs = nullptr;  // [count], or null: 0, 1, …
  int64_t count = 0;
  const void* b = nullptr;  // [k][n]
  int64_t n = 0;
  const float* scales = nullptr;
  int64_t group = 0;
  float* sums = nullptr;  // scratch if there are scales: one float for each element of y in the column range
  float* y = nullptr;     // [m][n]

  int64_t Input(int64_t q) const { return inputs == nullptr ? q : inputs[q]; }
};
using MultiplyRowsFn = void(const RowsArgs& args, int64_t column_begin, int64_t column_end);

// Unpacks up to kMaskBits inputs of the list from `first` on, for `columns` columns of B from `column` on: multiplied
// with their scales, to panel[kMaskBits][kDensePanelColumns], zero-padded to a whole block. Uses only the fields of
// args that describe B.
using PackInputsFn = void(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel);

// sums[i] += a x panel for all rows of a, up to kMaskBits columns of a, and the first `blocks` blocks of the panel.
// sums as in ValuesArgs.
using MultiplyPanelFn = void(const FloatRows& a, const float* panel, int64_t blocks, float* sums);

// Lists the inputs that any row of A [m][k] uses or that `always` (a byte an input, or null) marks, in ascending order,
// and copies a[i][q] = A[i, inputs[q]] with a_row floats a row. inputs and rows of a have room for k + 16 elements.
// Returns the number of listed inputs.
using ListInputsFn = int64_t(const FloatRows& a, const uint8_t* always, int32_t* inputs, float* to, int64_t to_row);

// The element type of B.
enum class ElementType { kFloat, kBf16, kInt8 };
inline constexpr int kElementTypes = 3;

struct MaskedMatMulFunctions {
  bool dense_panels;         // MultiplyPanel is faster than unpacking a panel and calling ONNX Runtime's MatMul
  int64_t tile_rows;         // rows of pack_tile and multiply_tile
  int64_t sparse_tile_rows;  // rows of pack_sparse_tile and multiply_sparse_tile
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

// The kernels of kernels.inc in this build, best first; the last one runs on any CPU.
std::span<const MaskedMatMulKernel> MaskedMatMulKernels();

}  // namespace ortolan
