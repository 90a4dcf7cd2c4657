// MaskedMatMul: y = A B, where both matrices are stored dense but are sparse at run time.
//
//     y[i, j] = sum over l of A'[i, l] B'[l, j]        A' = A where a_mask and not |A| <= a_threshold, else 0
//
// and B' with b_mask and b_threshold. The caller computes A' and B'; kernels see float matrices whose zeros may be
// skipped. An input is an index l: a column of A and a row of B.
//
// NaN and Inf propagate as in the dense product: 0 x Inf is NaN. So a zero may be skipped only if everything it is
// multiplied with is finite. Scan functions find the pattern of zeros and check that all values are finite in one pass;
// otherwise the caller uses the dense product. The rows kernels skip rows of B because of zeros in A alone, so their
// caller lists the rows of B that are not finite, and these are never skipped.
//
// Products and sums are float32. The order of the sums, and so the last bits of y, depends on the kernel and the
// pattern, but not on how tiles and panels are split among threads. A sum without terms is +0.
//
// There are four families of kernels:
//
//   - blocks (many rows): B is divided into panels of 16 columns. A block is a row of a panel, and is skipped if all
//     its 16 values are zero. Rows of A are packed in tiles, input by input, so that each stored block is used for all
//     rows of a tile. A sparse tile has fewer rows and also skips inputs at which all of them are zero.
//   - values (many rows, zeros of A anywhere): each nonzero value of A is multiplied with a row of a panel of 128
//     columns of B, which is treated as dense.
//   - rows (decode, few rows of A): only the rows of B whose input some row of A uses are read. B may be float32, bf16
//     or int8 with scales, in row-major order.
//   - panels (B of any type, nothing to skip): 64 inputs of a panel are unpacked and multiplied with all rows of A.
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

// A view of rows of a row-major matrix.
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

// Scans any number of rows of A: sets bit l of mask [MaskWords(columns)] if a row is nonzero at l. Returns whether all
// values are finite.
using ScanRowsFn = bool(const FloatRows& a, uint64_t* mask);

// Scans up to 64 rows of B: sets bit i of masks[panel x stride] if block i of the panel is nonzero. Returns whether all
// values are finite.
using ScanBlocksFn = bool(const FloatRows& b, uint64_t* masks, int64_t stride);

// Packs up to 64 rows of B: writes the blocks whose bit is set in masks[panel x stride] to values[16 x slot], with
// consecutive slots from slots[panel] on, which is advanced. Also writes the block's row, counted from `first_row`, to
// inputs[slot]; or, with ranks, the block's index in its panel (slot - starts[panel]) to ranks[panel x ranks_row +
// row].
struct PackBlocksArgs {
  FloatRows b;
  const uint64_t* masks = nullptr;
  int64_t stride = 0;
  uint32_t first_row = 0;
  const int64_t* starts = nullptr;  // [panels]: first slot of each panel
  int64_t* slots = nullptr;         // [panels]
  float* values = nullptr;
  uint32_t* inputs = nullptr;
  uint16_t* ranks = nullptr;
  int64_t ranks_row = 0;
};
using PackBlocksFn = void(const PackBlocksArgs& args);

// Packs up to tile_rows rows of A: tile[l][tile_rows], with zeros in missing rows and in an additional entry after the
// last input. Returns whether all values are finite.
using PackTileFn = bool(const FloatRows& a, float* tile);

// y = tile x blocks of one panel, added to y if `add`, for the first `rows` rows and `columns` columns.
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

// The product for the inputs in both masks; ranks locate their blocks. k is at most kMostListedInputs. The last rank is
// that of a block of zeros, which goes with the tile's zero input.
struct SparseTileArgs : TileArgs {
  const uint64_t* tile_mask = nullptr;   // [words]
  const uint64_t* panel_mask = nullptr;  // [words]
  const uint16_t* ranks = nullptr;       // [k + 1]
  int64_t k = 0;
  uint16_t* list = nullptr;  // scratch: [k + kListPadding]
};
inline constexpr int64_t kListPadding = 64;
using MultiplySparseTileFn = void(const SparseTileArgs& args);

// The nonzero values of up to kDensePanelRows rows of A and kMaskBits inputs. `rows` lists the rows that have any,
// grouped by their count of values, then ascending. values and inputs (relative) hold the values of one row after
// another, and have kMaskBits spare elements. Returns the number of listed rows.
inline constexpr int64_t kDensePanelRows = 512;
inline constexpr int64_t kDensePanelColumns = 128;
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
// row-major. scales: [n] for each group of `group` rows of B, or null. Inputs ascend.
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

// Unpacks up to kMaskBits listed inputs, from `first` on, and `columns` columns of B, from `column` on, to
// panel[kMaskBits][kDensePanelColumns], times their scales and zero-padded to a full block. Uses only the fields of
// args that describe B.
using PackInputsFn = void(const RowsArgs& args, int64_t first, int64_t column, int64_t columns, float* panel);

// sums[i] += a x panel for all rows of a, up to kMaskBits columns of a, and the first `blocks` blocks of the panel.
// sums as in ValuesArgs.
using MultiplyPanelFn = void(const FloatRows& a, const float* panel, int64_t blocks, float* sums);

// Lists the inputs that any row of A [m][k] uses or that `always` (a byte an input, or null) marks, ascending, and
// copies to[i][q] = A[i, inputs[q]]. inputs and rows of `to` have space for k + 16 elements. Returns the number of
// inputs.
using ListInputsFn = int64_t(const FloatRows& a, const uint8_t* always, int32_t* inputs, float* to, int64_t to_row);

enum class ElementType { kFloat, kBf16, kInt8 };
inline constexpr int kElementTypes = 3;

struct MaskedMatMulFunctions {
  bool dense_panels;         // multiply_panel is faster than unpacking a panel for ONNX Runtime's MatMul
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

// The kernels of this build, best first; the last one runs on any CPU.
std::span<const MaskedMatMulKernel> MaskedMatMulKernels();

}  // namespace ortolan
