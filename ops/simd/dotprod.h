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
  static constexpr bool kNarrowNibbleSums = false;
  static int32x4_t StartNibbleSums(int32x4_t sums) { return sums; }
  static int32x4_t DotNibbles(int32x4_t sums, int32x4_t nibbles, int32x4_t b) { return DotInt8(sums, nibbles, b); }
  static int32x4_t EndNibbleSums(int32x4_t, int32x4_t sums) { return sums; }
};

}  // namespace
}  // namespace ortolan::simd
