// What weights in groups have in common, of 4 bits (formats/int4_group.h) and of 8 (formats/int8_group.h): a scale for
// each column and each group of inputs, and what validates them.
//
// W is [k, n]: k inputs, n outputs, y = x W. Group g is inputs g G … g G + G - 1 of a column, the last one may be
// shorter; G is 32, 64 or 128.
//
//     scales       float32 or float16 [panels, groups, 16]
//     zero_points  u8 [panels, groups, 16], 0 … 15, or none; with 16 steps a whole number 0 … 255, sixteenths
//     minimums     [panels, groups, 16] of the type of scales, or none; any float, NaN and Inf too
//
//     panels = ceil(n / 16), groups = ceil(k / G);   columns beyond n: 0
//
// The rows of a panel lie one after another, so that a kernel reads them from front to back:
//
//                  16 columns   16 columns          16 columns
//     panel 0      group 0      group 1      …      group groups-1
//     panel 1      group 0      group 1      …
#pragma once

#include <cstdint>
#include <string>

#include "formats/bitmap.h"
#include "formats/scales.h"

namespace ortolan {

enum class ScaleType { kFloat32, kFloat16 };

inline constexpr int kLargestZeroPoint = 15;
// Of zero points that are fractions: a zero point of 8 is stored as 128.
inline constexpr int64_t kFractionSteps = 16;

// A packed matrix that someone else owns, at any address.
struct GroupView {
  int64_t k = 0;
  int64_t n = 0;
  int64_t group = 0;
  const uint8_t* weights = nullptr;
  const uint8_t* scales = nullptr;
  ScaleType scale_type = ScaleType::kFloat32;
  // At most one of them.
  const uint8_t* zero_points = nullptr;
  const uint8_t* minimums = nullptr;
  int64_t zero_point_steps = 1;  // or kFractionSteps

  bool HasFractions() const { return zero_points != nullptr && zero_point_steps != 1; }
};

// What an untrusted file says: the counts are those of the tensors found, 0 where there is none.
struct GroupClaim {
  int64_t k = 0;
  int64_t n = 0;
  int64_t group = 0;
  int64_t weight_bytes = 0;
  int64_t scale_count = 0;
  const uint8_t* zero_points = nullptr;
  int64_t zero_point_count = 0;
  int64_t minimum_count = 0;
  int64_t zero_point_steps = 1;
};

// Bytes of the weights tensor, all of it stored: int4 kInt4Bitmap, int8 kInt8Bitmap.
inline constexpr int64_t GroupWeightBytes(const BitmapLayout& layout, int64_t k, int64_t n) {
  return BitmapPanels(n) * layout.Tiles(k) * layout.TileEntries();
}

// Empty if kernels may run on it; otherwise one sentence that names the tensor, what was found and what was expected.
std::string ValidateGroups(const BitmapLayout& layout, const GroupClaim& claim);

}  // namespace ortolan
