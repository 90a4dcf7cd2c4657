// The bitmap format: a sparse weight matrix as one bit a weight plus the nonzero weights. Reference: SparAMX, section
// 4.2.
//
// W is [k, n]: k inputs, n outputs, y = x W. Columns are divided into panels of 16, the k inputs into tiles of 32:
//
//     panel p                      = columns 16p … 16p+15
//     tile t of panel p            = inputs 32t … 32t+31 of these columns: 16 rows of k-pairs x 16 columns
//     row r of a tile, 32 weights  = W[32t+2r][c0] W[32t+2r+1][c0] W[32t+2r][c1] W[32t+2r+1][c1] …  (c0 = 16p)
//
// This is the order of an AMX B tile ("VNNI" order); one row is one operand of vdpbf16ps. Rows and columns outside the
// matrix are zero.
//
//     masks    u8  [panels, tiles, 64]  16 little-endian u32 a tile, one a row; bit i is set if weight i is stored
//     values   bf16 [offsets[panels] + 32]
//                  the stored weights panel by panel, in the order of their mask bits; then 32 zeros, so that a kernel
//                  can load 32 values at any position
//     offsets  i64 [panels + 1]  index in values of each panel's first value; the last is the number of values. Threads
//                  may start at any panel
//
//     panels = ceil(n / 16), tiles = ceil(k / 32)
//     bytes  = 64 panels tiles + 2 (values + 32) + 8 (panels + 1);   2 (1 - sparsity) + 1/8 a weight
//
// Dense storage holds every weight, including zeros and positions outside the matrix, without padding:
//
//     masks    u8  [0]
//     values   bf16 [panels * tiles * 512]   tile after tile, panel after panel; a row of a tile is 64 bytes
//     offsets  i64 [0]
//     bytes    2 a weight; smaller than the bitmap if fewer than one weight in 16 is zero
//
// two_four.h adds a third storage for 2:4 sparse matrices: masks without offsets. bitmap_int8.h and bitmap_int4.h
// define the format for smaller values: rows of k-quads (4 inputs), so tiles of 64 inputs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ortolan {

enum class Storage { kBitmap, kDense, kTwoFour };

inline constexpr int64_t kPanelColumns = 16;
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kMaxDimension = int64_t{1} << 28;

// Parameters of a bitmap format. Values are counted in entries: the elements of the values tensor.
struct BitmapLayout {
  int64_t row_inputs;  // inputs of each column in a row of a tile: 4 bytes in an AMX product
  int64_t value_bits;  // of one stored weight
  int64_t max_k;       // largest k

  constexpr int64_t RowBits() const { return kPanelColumns * row_inputs; }
  constexpr int64_t RowMaskBytes() const { return RowBits() / 8; }
  constexpr int64_t TileInputs() const { return kTileRows * row_inputs; }
  constexpr int64_t TileMaskBytes() const { return kTileRows * RowMaskBytes(); }
  constexpr int64_t Tiles(int64_t k) const { return (k + TileInputs() - 1) / TileInputs(); }
  constexpr int64_t PaddedK(int64_t k) const { return Tiles(k) * TileInputs(); }
  constexpr int64_t EntryBytes() const { return value_bits == 16 ? 2 : 1; }
  constexpr int64_t TileEntries() const { return kTileRows * RowBits() * value_bits / 8 / EntryBytes(); }
  // Entries of a tile in 2:4 storage, which holds two of four weights.
  constexpr int64_t TwoFourTileEntries() const { return TileEntries() / 2; }
  // Padding entries after the last value of a bitmap: a kernel can load 64 bytes at any position.
  constexpr int64_t Padding() const { return 64 / EntryBytes(); }
};

inline constexpr BitmapLayout kBf16Bitmap{2, 16, kMaxDimension};

inline constexpr int64_t kTileInputs = kBf16Bitmap.TileInputs();
inline constexpr int64_t kValueBytes = kBf16Bitmap.EntryBytes();

inline constexpr int64_t BitmapPanels(int64_t n) { return (n + kPanelColumns - 1) / kPanelColumns; }
inline constexpr int64_t BitmapTiles(int64_t k) { return kBf16Bitmap.Tiles(k); }
inline constexpr int64_t BitmapPaddedK(int64_t k) { return kBf16Bitmap.PaddedK(k); }

// A non-owning view of a packed matrix. masks and values may be unaligned, since a model saved by another tool may be
// memory-mapped.
struct BitmapView {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* masks = nullptr;    // [panels][tiles][16] masks: u32 for bf16, u64 for int8 and int4; null: dense;
  const uint8_t* values = nullptr;   // [offsets[panels] + padding] entries; dense and 2:4: [panels][tiles][entries]
  const int64_t* offsets = nullptr;  // [panels + 1], in entries; null: dense or 2:4

  constexpr bool IsDense() const { return masks == nullptr; }
  constexpr Storage StoredAs() const {
    return IsDense() ? Storage::kDense : offsets == nullptr ? Storage::kTwoFour : Storage::kBitmap;
  }
  constexpr const uint8_t* PanelMasks(const BitmapLayout& layout, int64_t panel) const {
    return IsDense() ? nullptr : masks + panel * layout.Tiles(k) * layout.TileMaskBytes();
  }
  constexpr const uint8_t* PanelValues(const BitmapLayout& layout, int64_t panel) const {
    return values + FirstEntry(layout, panel) * layout.EntryBytes();
  }

 private:
  constexpr int64_t FirstEntry(const BitmapLayout& layout, int64_t panel) const {
    const Storage storage = StoredAs();
    if (storage == Storage::kBitmap) return offsets[panel];
    const int64_t tiles = panel * layout.Tiles(k);
    return tiles * (storage == Storage::kDense ? layout.TileEntries() : layout.TwoFourTileEntries());
  }
};

// Owned tensors. masks and offsets are empty in dense storage, offsets in 2:4 storage.
template <typename MaskType, typename Value>
struct PackedBitmap {
  using Mask = MaskType;

  std::vector<Mask> masks;
  std::vector<Value> values;
  std::vector<int64_t> offsets;
};
using BitmapMatrix = PackedBitmap<uint32_t, uint16_t>;

// Rounds w, row-major [k, n] floats with rows `row_stride` floats apart, to bf16 and packs the weights that are nonzero
// after rounding (dense: all; zeros become +0). Requires 1 <= k, n <= kMaxDimension. Not for 2:4 storage.
BitmapMatrix PackBitmap(const float* w, int64_t row_stride, int64_t k, int64_t n, Storage storage = Storage::kBitmap);

// Writes the dense matrix [k, n], rows `row_stride` and columns `column_stride` floats apart. The view must be, or be
// panels of, a view that passed ValidateBitmap, and not be 2:4.
void UnpackBitmap(const BitmapView& view, float* w, int64_t row_stride, int64_t column_stride = 1);

// The tensors of an untrusted file, with the counts of the tensors found, before anything is read through a pointer.
struct BitmapClaim {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* masks = nullptr;
  int64_t mask_bytes = 0;
  int64_t value_count = 0;
  const int64_t* offsets = nullptr;
  int64_t offset_count = 0;

  bool IsDense() const { return mask_bytes == 0 && offset_count == 0; }
  bool IsTwoFour() const { return mask_bytes != 0 && offset_count == 0; }
  // The view of a validated claim. (The address of an empty tensor is meaningless.)
  BitmapView View(const uint8_t* values) const {
    return {k, n, mask_bytes == 0 ? nullptr : masks, values, offset_count == 0 ? nullptr : offsets};
  }
};

// Returns an empty string if kernels may run on the tensors; otherwise one sentence that names the tensor, the value
// found and the value expected.
//
// Checks the sizes; that offsets start at 0, never decrease and stay in range; that each panel's masks need the number
// of entries that its offsets give; and that no bit is set outside the matrix. Never reads beyond the given counts.
// Dense values outside the matrix are not checked: an Inf there can only turn results into NaN. Rejects 2:4 storage,
// for which there is ValidateStored of two_four.h.
std::string ValidateBitmap(const BitmapClaim& claim, const BitmapLayout& layout = kBf16Bitmap);

}  // namespace ortolan
