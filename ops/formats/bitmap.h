// The bitmap format: a sparse weight matrix as one bit a weight plus the non-zero weights (SparAMX, section 4.2).
//
// W is [k, n]: k inputs, n outputs, y = x W. Columns are cut into panels of 16, the k inputs into tiles of 32:
//
//     panel p                      = columns 16p … 16p+15
//     tile t of panel p            = inputs 32t … 32t+31 of those columns: 16 rows of k-pairs x 16 columns
//     row r of a tile, 32 weights  = W[32t+2r][c0] W[32t+2r+1][c0] W[32t+2r][c1] W[32t+2r+1][c1] …  (c0 = 16p)
//
// This is the order of AMX's B tile ("VNNI" order), and one row is one operand of vdpbf16ps. Rows and columns outside
// of the k x n matrix are zero. Three tensors hold it:
//
//     masks    u8  [panels, tiles, 64]  16 little-endian u32 a tile, one a row; bit i is set where weight i is stored
//     values   bf16 [offsets[panels] + 32]
//                  the stored weights of panel 0, then panel 1, …, in the order of their mask bits; the padding, all
//                  zero, lets a kernel load 32 values at any position
//     offsets  i64 [panels + 1]  where in values each panel starts; offsets[0] = 0, the last is the number of values
//
//     panels = ceil(n / 16), tiles = ceil(k / 32)
//     bytes  = 64 panels tiles + 2 (values + 32) + 8 (panels + 1);   2 (1 - sparsity) + 1/8 a weight
//
// The offsets let any thread start at any panel: the number of threads is not part of the format.
//
// Dense storage is the case in which every weight is stored, zeros too and those outside of the matrix, and no mask is
// needed: masks and offsets are empty, values are what they would be if every mask bit were set, without padding
// behind.
//
//     masks    u8  [0]
//     values   bf16 [panels * tiles * 512]   tile after tile, panel after panel; a row of a tile is 64 bytes
//     offsets  i64 [0]
//     bytes    2 a weight; less than the bitmap's where fewer than one weight in 16 is zero
//
// two_four.h is a third storage, of matrices that are 2:4 sparse: masks without offsets.
//
// bitmap_int8.h and bitmap_int4.h are the same idea with smaller values: rows of k-quads, so tiles of 64 inputs.
// BitmapLayout says what differs.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ortolan {

enum class Storage { kBitmap, kDense, kTwoFour };

inline constexpr int64_t kPanelColumns = 16;
inline constexpr int64_t kTileRows = 16;
// Keeps every size computation below inside int64.
inline constexpr int64_t kMaxDimension = int64_t{1} << 28;

// Where the bitmap formats differ. Values are counted in entries: the elements of the values tensor.
struct BitmapLayout {
  int64_t row_inputs;  // inputs that a row of a tile holds of each column: as many as fit in 4 bytes of an AMX product
  int64_t value_bits;  // of a stored weight
  int64_t max_k;       // the most inputs

  constexpr int64_t RowBits() const { return kPanelColumns * row_inputs; }
  constexpr int64_t RowMaskBytes() const { return RowBits() / 8; }
  constexpr int64_t TileInputs() const { return kTileRows * row_inputs; }
  constexpr int64_t TileMaskBytes() const { return kTileRows * RowMaskBytes(); }
  constexpr int64_t Tiles(int64_t k) const { return (k + TileInputs() - 1) / TileInputs(); }
  constexpr int64_t PaddedK(int64_t k) const { return Tiles(k) * TileInputs(); }
  constexpr int64_t EntryBytes() const { return value_bits == 16 ? 2 : 1; }
  // Entries of a tile in dense storage.
  constexpr int64_t TileEntries() const { return kTileRows * RowBits() * value_bits / 8 / EntryBytes(); }
  // In 2:4 storage, which holds two of four.
  constexpr int64_t TwoFourTileEntries() const { return TileEntries() / 2; }
  // Entries behind the last one of a bitmap. They let a kernel load 64 bytes at any position.
  constexpr int64_t Padding() const { return 64 / EntryBytes(); }
};

inline constexpr BitmapLayout kBf16Bitmap{2, 16, kMaxDimension};

inline constexpr int64_t kTileInputs = kBf16Bitmap.TileInputs();
inline constexpr int64_t kValueBytes = kBf16Bitmap.EntryBytes();

inline constexpr int64_t BitmapPanels(int64_t n) { return (n + kPanelColumns - 1) / kPanelColumns; }
inline constexpr int64_t BitmapTiles(int64_t k) { return kBf16Bitmap.Tiles(k); }
inline constexpr int64_t BitmapPaddedK(int64_t k) { return kBf16Bitmap.PaddedK(k); }

// A packed matrix that someone else owns. masks and values may lie at any address: a model saved by another tool is
// mapped into memory where that tool put them.
struct BitmapView {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* masks = nullptr;    // [panels][tiles][16] masks: u32 for bf16, u64 for int8 and int4; null: dense;
                                     // 2:4: [panels][tiles][TileMaskBytes()], places
  const uint8_t* values = nullptr;   // [offsets[panels] + padding] entries; dense and 2:4: [panels][tiles][entries]
  const int64_t* offsets = nullptr;  // [panels + 1], in entries; null: dense or 2:4

  constexpr bool IsDense() const { return masks == nullptr; }
  constexpr Storage StoredAs() const {
    return IsDense() ? Storage::kDense : offsets == nullptr ? Storage::kTwoFour : Storage::kBitmap;
  }
  // Where the masks of a panel begin; null if the storage is dense.
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

// masks and offsets are empty if the storage is dense, offsets if it is 2:4.
template <typename MaskType, typename Value>
struct PackedBitmap {
  using Mask = MaskType;

  std::vector<Mask> masks;
  std::vector<Value> values;
  std::vector<int64_t> offsets;
};
using BitmapMatrix = PackedBitmap<uint32_t, uint16_t>;

// Rounds w, row-major [k, n] floats with rows `row_stride` floats apart, to bf16 and packs what is not zero after
// rounding (dense: all; zeros are +0). Needs 1 <= k, n <= kMaxDimension, and another storage than 2:4.
BitmapMatrix PackBitmap(const float* w, int64_t row_stride, int64_t k, int64_t n, Storage storage = Storage::kBitmap);

// Writes the dense matrix [k, n], rows `row_stride` and columns `column_stride` floats apart. The view must have passed
// ValidateBitmap, or be some of the panels of one that has; it is not 2:4.
void UnpackBitmap(const BitmapView& view, float* w, int64_t row_stride, int64_t column_stride = 1);

// What an untrusted file says, before anything is read through a pointer: the counts are those of the tensors found.
struct BitmapClaim {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* masks = nullptr;
  int64_t mask_bytes = 0;
  int64_t value_count = 0;
  const int64_t* offsets = nullptr;
  int64_t offset_count = 0;

  // Neither masks nor offsets.
  bool IsDense() const { return mask_bytes == 0 && offset_count == 0; }
  // Masks, no offsets.
  bool IsTwoFour() const { return mask_bytes != 0 && offset_count == 0; }
  // Of a claim that has been validated. (Where a tensor is empty, its address says nothing.)
  BitmapView View(const uint8_t* values) const {
    return {k, n, mask_bytes == 0 ? nullptr : masks, values, offset_count == 0 ? nullptr : offsets};
  }
};

// Empty if kernels may run on it; otherwise one sentence that names the tensor, what was found and what was expected.
// Checks sizes, offsets (start at 0, never fall, stay inside), the entries that each panel's masks need against its
// offsets, and that no bit stands outside of the k x n matrix; of dense storage the number of values. Never reads past
// the given counts. What dense storage holds outside of the matrix is not looked at: in a file that breaks the format
// it may spoil results (an Inf there makes NaN), and nothing else. 2:4 storage is refused: ValidateStored of two_four.h
// takes all three.
std::string ValidateBitmap(const BitmapClaim& claim, const BitmapLayout& layout = kBf16Bitmap);

}  // namespace ortolan
