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
//     values   bf16 [offsets[panels] + kBitmapPadding]
//                  the stored weights of panel 0, then panel 1, …, in the order of their mask bits; the padding, all
//                  zero, lets a kernel load 32 values at any position
//     offsets  i64 [panels + 1]  where in values each panel starts; offsets[0] = 0, the last is the number of values
//
//     panels = ceil(n / 16), tiles = ceil(k / 32)
//     bytes  = 64 panels tiles + 2 (values + 32) + 8 (panels + 1);   2 (1 - sparsity) + 1/8 a weight
//
// The offsets let any thread start at any panel: the number of threads is not part of the format.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace ortolan {

inline constexpr int64_t kPanelColumns = 16;
inline constexpr int64_t kTileInputs = 32;
inline constexpr int64_t kTileRows = 16;
inline constexpr int64_t kRowValues = 32;
inline constexpr int64_t kTileMaskBytes = 64;
inline constexpr int64_t kValueBytes = 2;
inline constexpr int64_t kBitmapPadding = 32;  // values behind the last one
// Keeps every size computation below inside int64.
inline constexpr int64_t kMaxDimension = int64_t{1} << 28;

inline constexpr int64_t BitmapPanels(int64_t n) { return (n + kPanelColumns - 1) / kPanelColumns; }
inline constexpr int64_t BitmapTiles(int64_t k) { return (k + kTileInputs - 1) / kTileInputs; }
inline constexpr int64_t BitmapPaddedK(int64_t k) { return BitmapTiles(k) * kTileInputs; }

// A packed matrix that someone else owns. masks and values may lie at any address: a model saved by another tool is
// mapped into memory where that tool put them.
struct BitmapView {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* masks = nullptr;    // u32 [panels][tiles][16]
  const uint8_t* values = nullptr;   // bf16 [offsets[panels] + kBitmapPadding]
  const int64_t* offsets = nullptr;  // [panels + 1]
};

struct BitmapMatrix {
  int64_t k = 0;
  int64_t n = 0;
  std::vector<uint32_t> masks;
  std::vector<uint16_t> values;
  std::vector<int64_t> offsets;
};

// Rounds w, row-major [k, n] floats with rows `row_stride` floats apart, to bf16 and packs what is not zero after
// rounding. Needs 1 <= k, n <= kMaxDimension.
BitmapMatrix PackBitmap(const float* w, int64_t row_stride, int64_t k, int64_t n);

// Writes the dense matrix, row-major [k, n], rows `row_stride` floats apart. The view must have passed ValidateBitmap.
void UnpackBitmap(const BitmapView& view, float* w, int64_t row_stride);

// What an untrusted file says, before anything is read through a pointer: the counts are those of the tensors found.
struct BitmapClaim {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* masks = nullptr;
  int64_t mask_bytes = 0;
  int64_t value_count = 0;
  const int64_t* offsets = nullptr;
  int64_t offset_count = 0;
};

// Empty if kernels may run on it; otherwise one sentence that names the tensor, what was found and what was expected.
// Checks sizes, offsets (start at 0, never fall, stay inside), the popcount of each panel's masks against its offsets,
// and that no bit stands outside of the k x n matrix. Never reads past the given counts.
std::string ValidateBitmap(const BitmapClaim& claim);

}  // namespace ortolan
