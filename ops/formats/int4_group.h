// 4-bit weights in groups with scales and zero points, every weight stored (EGEMV, "Memory Layout": each cache line is
// read once, in order).
//
// W is [k, n]: k inputs, n outputs, y = x W. Group g is inputs g G … g G + G - 1 of a column, the last one may be
// shorter; G is 32, 64 or 128.
//
//     W[l, j] = scales[g, j] (q[l, j] - zero_points[g, j])        q, zero_points 0 … 15;   g = l / G
//
//     weights      u8 [panels, tiles * 8, 64]   the dense storage of formats/bitmap_int4.h, whose nibble is q:
//                  panels of 16 columns; a row of a tile is 4 inputs of 16 columns;
//                  two rows share 64 bytes, low and high nibbles
//     scales       float32 or float16 [panels, groups, 16]
//     zero_points  u8 [panels, groups, 16], or none: 8 everywhere
//
//     panels = ceil(n / 16), tiles = ceil(k / 64), groups = ceil(k / G);   outside of the k x n matrix: 0
//     bytes  = 1/2 a weight + (2 or 4) / G + (0 or 1) / G
//
// Activations are broadcast against rows of 16 outputs, so the weights need no order of their own for AVX2, AVX-512 or
// AMX: the sequence of the activations follows from the rows of weights.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/bitmap_int4.h"
#include "formats/scales.h"

namespace ortolan {

inline constexpr int kLargestInt4 = 15;

enum class ScaleType { kFloat32, kFloat16 };

// A packed matrix that someone else owns, at any address.
struct Int4GroupView {
  int64_t k = 0;
  int64_t n = 0;
  int64_t group = 0;
  const uint8_t* weights = nullptr;
  const uint8_t* scales = nullptr;
  ScaleType scale_type = ScaleType::kFloat32;
  const uint8_t* zero_points = nullptr;  // null: 8 everywhere

  constexpr const uint8_t* PanelWeights(int64_t panel) const {
    return weights + panel * kInt4Bitmap.Tiles(k) * kInt4Bitmap.TileEntries();
  }
};

// Bytes of the weights tensor.
inline constexpr int64_t Int4GroupWeightBytes(int64_t k, int64_t n) {
  return BitmapPanels(n) * kInt4Bitmap.Tiles(k) * kInt4Bitmap.TileEntries();
}

// Packs q, row-major [k, n] with rows `row_stride` bytes apart, each 0 … 15 (higher bits are cut off). Needs
// 1 <= k <= 2^17 and 1 <= n <= kMaxDimension.
std::vector<uint8_t> PackInt4Group(const uint8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Writes q, row-major [k, n].
void UnpackInt4Group(const uint8_t* weights, int64_t k, int64_t n, uint8_t* q, int64_t row_stride);

// What an untrusted file says: the counts are those of the tensors found. zero_point_count is 0 if there are none.
struct Int4GroupClaim {
  int64_t k = 0;
  int64_t n = 0;
  int64_t group = 0;
  int64_t weight_bytes = 0;
  int64_t scale_count = 0;
  const uint8_t* zero_points = nullptr;
  int64_t zero_point_count = 0;
};

// Empty if kernels may run on it; otherwise one sentence that names the tensor, what was found and what was expected.
std::string ValidateInt4Group(const Int4GroupClaim& claim);

}  // namespace ortolan
