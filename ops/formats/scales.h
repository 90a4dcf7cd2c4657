// Scales of quantized weights in the bitmap formats: W = scale times integer weight.
//
// There is one scale for each column and group of inputs. Group g is inputs g G … g G + G - 1 (the last one may be
// shorter). int8 has one group of all inputs, int4 groups of G = 32, 64 or 128.
//
//     int8   float32 [panels, 1, 16]
//     int4   bf16    [panels, groups, 16]
//
//     panels = ceil(n / 16), groups = ceil(k / G);   columns beyond n are zero
//
// A panel's scales are contiguous, so that a kernel reads them sequentially.
#pragma once

#include <cstdint>

#include "formats/bitmap.h"

namespace ortolan {

// The group size of int8: one group a column.
inline constexpr int64_t kWholeColumn = 0;

inline constexpr bool IsGroupSize(int64_t group) { return group == 32 || group == 64 || group == 128; }

// The number of groups of k inputs.
inline constexpr int64_t ScaleRows(int64_t k, int64_t group) {
  return group == kWholeColumn ? 1 : (k + group - 1) / group;
}

// Bytes of one scale.
inline constexpr int64_t ScaleBytes(int64_t group) { return group == kWholeColumn ? 4 : 2; }

// Writes rows, row-major [groups, n], as [panels, groups, 16]; columns beyond n are zero. Copies bits exactly: for zero
// points, and scales that must not be rounded.
template <typename T>
void PackGroupRows(const T* rows, int64_t groups, int64_t n, T* packed) {
  for (int64_t panel = 0; panel < BitmapPanels(n); ++panel) {
    for (int64_t group = 0; group < groups; ++group) {
      for (int64_t j = panel * kPanelColumns; j < (panel + 1) * kPanelColumns; ++j) {
        *packed++ = j < n ? rows[group * n + j] : T{0};
      }
    }
  }
}

// Writes scales, row-major [groups, n] floats, as [panels, groups, 16] floats or bf16 (rounded to nearest even).
void PackScales(const float* scales, int64_t groups, int64_t n, float* packed);
void PackScales(const float* scales, int64_t groups, int64_t n, uint16_t* packed);

}  // namespace ortolan
