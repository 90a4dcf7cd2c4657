// The quantization range of a token, the same on every target. Local to each file that includes it.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul/block_sparse_weight.h"

namespace ortolan {
namespace {

inline constexpr int64_t kPanelOutputs = 16;
inline constexpr int64_t kPanelGroups = kPanelOutputs / kGroupOutputs;

struct TokenRange {
  float factor;  // of x before rounding
  float scale;   // of q - zero_point
  int32_t zero_point;
};

// Requires least <= 0 <= most; their values are ignored if the row is not finite.
inline TokenRange RangeOfToken(float least, float most, bool finite) {
  if (!finite) return {0.0f, __builtin_nanf(""), 0};
  float half = most * 0.5f - least * 0.5f;
  if (half < 0x1p-100f) half = 0x1p-100f;
  const float factor = 127.5f / half;
  return {factor, half / 127.5f, static_cast<int32_t>(__builtin_nearbyintf(-least * factor))};
}

inline TokenRange RangeOfToken(const FixedRange& fixed) { return {1.0f / fixed.scale, fixed.scale, fixed.zero_point}; }

// The clamp for values beyond a fixed range, and the replacement for NaN, before rounding: an integer that exceeds 255
// after adding any zero point.
inline constexpr float kMostBeforeRounding = 1024.0f;

// round(value) + zero_point, clamped to 0 … 255.
inline uint8_t ToByte(float value, int32_t zero_point) {
  if (!(value < kMostBeforeRounding)) return 255;
  const float rounded = __builtin_nearbyintf(value > -kMostBeforeRounding ? value : -kMostBeforeRounding);
  const int32_t q = static_cast<int32_t>(rounded) + zero_point;
  return static_cast<uint8_t>(q < 0 ? 0 : q > 255 ? 255 : q);
}

// For kernels with contiguous rows: the range follows the values.
inline void StoreRowRange(uint8_t* row, int64_t k, const TokenRange& range) {
  std::memcpy(row + PaddedInputs(k), &range, sizeof(range));
}

inline TokenRange LoadRowRange(const uint8_t* row, int64_t k) {
  TokenRange range;
  std::memcpy(&range, row + PaddedInputs(k), sizeof(range));
  return range;
}

}  // namespace
}  // namespace ortolan
