// NEON with dot products of bytes (SDOT): the vectors of neon.h, and products of quads in one instruction. Local to
// each file that includes it.
#pragma once

#include "simd/neon.h"

namespace ortolan::simd {
namespace {

struct dotprod : neon {
  static int32x4_t DotInt8(int32x4_t sums, int32x4_t a, int32x4_t b) {
    return vdotq_s32(sums, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
  }
  static constexpr bool kDotsOfQuad = true;
  static int32x4_t DotInt8OfQuad(int32x4_t sums, int32x4_t a, int32x4_t b, int which) {
    const int8x16_t x = vreinterpretq_s8_s32(a), y = vreinterpretq_s8_s32(b);
    switch (which) {
      case 0:
        return vdotq_laneq_s32(sums, x, y, 0);
      case 1:
        return vdotq_laneq_s32(sums, x, y, 1);
      case 2:
        return vdotq_laneq_s32(sums, x, y, 2);
      default:
        return vdotq_laneq_s32(sums, x, y, 3);
    }
  }
  static int32x4_t DotNibblesOfQuad(int32x4_t sums, int32x4_t nibbles, int32x4_t b, int which) {
    return DotInt8OfQuad(sums, nibbles, b, which);
  }
  static constexpr bool kNarrowNibbleSums = false;
  static int32x4_t StartNibbleSums(int32x4_t sums) { return sums; }
  static int32x4_t DotNibbles(int32x4_t sums, int32x4_t nibbles, int32x4_t b) { return DotInt8(sums, nibbles, b); }
  static int32x4_t EndNibbleSums(int32x4_t, int32x4_t sums) { return sums; }
};

}  // namespace
}  // namespace ortolan::simd
