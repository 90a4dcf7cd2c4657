// NEON with dot products of bytes (SDOT): the vectors of neon.h with one-instruction products of quads, and rows of
// bytes. Local to each file that includes it.
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

  // Rows of bytes. Both operands of SDOT are signed, so quads hold bytes less 128, which flips the top bit.
  using RowElement = uint8_t;
  using Quads = int32x4_t;
  static constexpr int32_t kQuadBias = 128;
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], int32x4_t (&quads)[kVectors]) {
    UnsignedQuads(rows, quads);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) quads[v] = XorBytes(quads[v], SetBytes(kQuadBias));
  }
  template <int kVectors>
  static void DeinterleaveRows(const int32x4_t (&quads)[kVectors], int32x4_t (&rows)[kVectors]) {
    int32x4_t parts[kVectors];  // four bytes of each row
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) parts[v] = TransposeQuads(quads[v]);
    if constexpr (kVectors == 4) Transpose(parts);
    if constexpr (kVectors == 2) {
      rows[0] = vzip1q_s32(parts[0], parts[1]);
      rows[1] = vzip2q_s32(parts[0], parts[1]);
    } else {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) rows[v] = parts[v];
    }
  }
  template <int kVectors>
  static int32x4_t PackRows(const int32x4_t (&integers)[4], int32_t offset) {
    return PackBytes(integers, offset);
  }
  struct QuadWeights {
    int32x4_t of;
    explicit QuadWeights(const int8_t* values) : of(LoadInt(values)) {}
  };
  template <int kVectors>
  static void DotQuadWeights(int32x4_t (&sums)[kVectors], const int32x4_t (&quads)[kVectors],
                             const QuadWeights& weights, int output) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] = DotInt8OfQuad(sums[v], quads[v], weights.of, output);
  }

 protected:
  template <int kVectors>
  static void UnsignedQuads(const uint8_t* const (&rows)[4], int32x4_t (&quads)[kVectors]) {
    const auto interleave = [&](int v, uint8x16_t ab, uint8x16_t cd) {
      quads[v] = vreinterpretq_s32_u16(vzip1q_u16(vreinterpretq_u16_u8(ab), vreinterpretq_u16_u8(cd)));
      quads[v + 1] = vreinterpretq_s32_u16(vzip2q_u16(vreinterpretq_u16_u8(ab), vreinterpretq_u16_u8(cd)));
    };
    if constexpr (kVectors == 4) {
      const uint8x16_t a = vld1q_u8(rows[0]), b = vld1q_u8(rows[1]), c = vld1q_u8(rows[2]), d = vld1q_u8(rows[3]);
      interleave(0, vzip1q_u8(a, b), vzip1q_u8(c, d));
      interleave(2, vzip2q_u8(a, b), vzip2q_u8(c, d));
    } else if constexpr (kVectors == 2) {
      const auto row = [&](int i) { return vcombine_u8(vld1_u8(rows[i]), vdup_n_u8(0)); };
      interleave(0, vzip1q_u8(row(0), row(1)), vzip1q_u8(row(2), row(3)));
    } else {
      uint32_t four[4];
      for (int i = 0; i < 4; ++i) __builtin_memcpy(&four[i], rows[i], sizeof(four[i]));
      quads[0] = TransposeQuads(LoadInt(four));
    }
  }

 private:
  // Move byte i of quad j to position j of quad i.
  static int32x4_t TransposeQuads(int32x4_t quads) {
    constexpr uint8_t kOrder[] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    return IntOf(vqtbl1q_u8(BytesOf(quads), vld1q_u8(kOrder)));
  }
};

}  // namespace
}  // namespace ortolan::simd
