// NEON with unsigned x signed dot products (USDOT) and products of byte matrices (SMMLA, USMMLA): the vectors of
// dotprod.h with pairs of rows. Local to each file that includes it.
#pragma once

#include "simd/dotprod.h"

namespace ortolan::simd {
namespace {

struct i8mm : dotprod {
  static int32x4_t DotQuad(int32x4_t sums, int32x4_t a, int32x4_t b) {
    return vusdotq_s32(sums, BytesOf(a), vreinterpretq_s8_s32(b));
  }
  static constexpr bool kNibblesTimes16 = true;
  static int32x4_t DotNibbles(int32x4_t sums, int32x4_t a, int32x4_t b) { return DotQuad(sums, a, b); }
  static int32x4_t DotNibblesOfQuad(int32x4_t sums, int32x4_t a, int32x4_t b, int which) {
    const uint8x16_t x = BytesOf(a);
    const int8x16_t y = vreinterpretq_s8_s32(b);
    switch (which) {
      case 0:
        return vusdotq_laneq_s32(sums, x, y, 0);
      case 1:
        return vusdotq_laneq_s32(sums, x, y, 1);
      case 2:
        return vusdotq_laneq_s32(sums, x, y, 2);
      default:
        return vusdotq_laneq_s32(sums, x, y, 3);
    }
  }

  // Pairs of rows.
  static constexpr bool kRowPairs = true;
  template <int kHalf>
  static int32x4_t InterleaveQuads(int32x4_t a, int32x4_t b) {
    return kHalf == 0 ? vzip1q_s32(a, b) : vzip2q_s32(a, b);
  }
  static int32x4_t EvenLanes(int32x4_t a, int32x4_t b) { return vuzp1q_s32(a, b); }
  static int32x4_t OddLanes(int32x4_t a, int32x4_t b) { return vuzp2q_s32(a, b); }
  static float32x4_t EvenLanes(float32x4_t a, float32x4_t b) { return vuzp1q_f32(a, b); }
  static float32x4_t OddLanes(float32x4_t a, float32x4_t b) { return vuzp2q_f32(a, b); }
  static int32x4_t DotEightsInt8(int32x4_t sums, int32x4_t a, int32x4_t b) {
    return vmmlaq_s32(sums, vreinterpretq_s8_s32(a), vreinterpretq_s8_s32(b));
  }
  static int32x4_t DotEightsNibbles(int32x4_t sums, int32x4_t a, int32x4_t b) {
    return vusmmlaq_s32(sums, BytesOf(a), vreinterpretq_s8_s32(b));
  }
  static float32x4_t DotEightsBf16(float32x4_t sums, int32x4_t a, int32x4_t b) {
    return vbfmmlaq_f32(sums, vreinterpretq_bf16_s32(a), vreinterpretq_bf16_s32(b));
  }
  static int32x4_t PackBf16(float32x4_t low, float32x4_t high) {
    const auto halves = [](float32x4_t a) { return vreinterpretq_u16_f32(RoundToBf16(a)); };
    return vreinterpretq_s32_u16(vuzp2q_u16(halves(low), halves(high)));
  }

  // Rows of bytes.
  static constexpr int32_t kQuadBias = 0;
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], int32x4_t (&quads)[kVectors]) {
    UnsignedQuads(rows, quads);
  }
  template <int kVectors>
  static void DotQuadWeights(int32x4_t (&sums)[kVectors], const int32x4_t (&quads)[kVectors],
                             const QuadWeights& weights, int output) {
    static_assert(kNibblesTimes16);  // nibbles may be any bytes
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] = DotNibblesOfQuad(sums[v], quads[v], weights.of, output);
  }
};

}  // namespace
}  // namespace ortolan::simd
