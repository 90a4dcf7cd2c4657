// The common part of the 4-bit (formats/int4_group.h) and 8-bit (formats/int8_group.h) formats: scales for each column
// and group of inputs, and the validation.
//
// W is [k, n]: k inputs, n outputs, y = x W. Group g is inputs g G … g G + G - 1 of a column; the last one may be
// shorter. G is 32, 64 or 128; with subgroups (formats/subgroup.h), it is 64, 128 or 256 and zero points and minimums
// are missing. formats/k_quant.h has subgroups of another kind.
//
//     scales       float32 or float16 [panels, groups, 16]
//     zero_points  u8 [panels, groups, 16], optional: integers 0 … 15, or with zero_point_steps 16 sixteenths, 0 … 255
//     minimums     [panels, groups, 16] of the type of scales, optional: any float, including NaN and Inf
//
//     panels = ceil(n / 16), groups = ceil(k / G);   columns beyond n: 0
#pragma once

#include <cstdint>
#include <string>

#include "formats/bitmap.h"
#include "formats/scales.h"
#include "formats/subgroup.h"

namespace ortolan {

enum class ScaleType { kFloat32, kFloat16 };

inline constexpr int kLargestZeroPoint = 15;
// Steps per unit of fractional zero points: a zero point of 8 is stored as 128.
inline constexpr int64_t kFractionSteps = 16;

// A non-owning view of a packed matrix, possibly unaligned.
struct GroupView {
  int64_t k = 0;
  int64_t n = 0;
  int64_t group = 0;
  const uint8_t* weights = nullptr;
  const uint8_t* scales = nullptr;
  ScaleType scale_type = ScaleType::kFloat32;
  // At most one is set.
  const uint8_t* zero_points = nullptr;
  const uint8_t* minimums = nullptr;
  int64_t zero_point_steps = 1;  // 1 or kFractionSteps
  SubgroupView subgroups{};

  bool HasSubgroups() const { return subgroups.size != 0; }
  bool IsKQuant() const { return subgroups.scale_bits != 0; }
  bool HasFractions() const { return zero_points != nullptr && zero_point_steps != 1; }
};

// The tensors of an untrusted file, with the counts of the tensors found, 0 for a missing one.
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
  SubgroupClaim subgroups{};
};

// Bytes of the weights tensor, which is dense. layout: kInt4Bitmap or kInt8Bitmap.
inline constexpr int64_t GroupWeightBytes(const BitmapLayout& layout, int64_t k, int64_t n) {
  return BitmapPanels(n) * layout.Tiles(k) * layout.TileEntries();
}

// Returns an empty string if kernels may run on the tensors; otherwise one sentence that names the tensor, the value
// found and the value expected.
std::string ValidateGroups(const BitmapLayout& layout, const GroupClaim& claim);

}  // namespace ortolan
