// AVX-VNNI: the vectors of avx2.h with exact dot products of bytes. Local to each file that includes it.
#pragma once

#include "simd/avx2.h"

// ORTOLAN_EVEX_VNNI builds the same products in EVEX encoding, to time them on a CPU with AVX-512 VL and VNNI.
#if defined(ORTOLAN_EVEX_VNNI)
#define ORTOLAN_VPDPBUSD "vpdpbusd"
#else
#define ORTOLAN_VPDPBUSD "%{vex%} vpdpbusd"
#endif

namespace ortolan::simd {
namespace {

struct avxvnni : avx2 {
  // Inline assembly: gcc 12 copies the sums around each intrinsic.
  static __m256i DotQuad(__m256i sums, __m256i a, __m256i b) {
    __asm__(ORTOLAN_VPDPBUSD " %2, %1, %0" : "+x"(sums) : "x"(a), "x"(b));
    return sums;
  }
  static constexpr uint32_t kInt8Bias = 128;
  static constexpr bool kConvertsInt8 = false;
  static __m256i DotInt8(__m256i sums, __m256i a, __m256i b) { return DotQuad(sums, a, b); }
  static constexpr bool kNarrowNibbleSums = false;
  static constexpr bool kMultipliesPairs = false;
  static constexpr bool kNibblesTimes16 = true;
  static __m256i StartNibbleSums(__m256i sums) { return sums; }
  static __m256i DotNibbles(__m256i sums, __m256i a, __m256i b) { return DotQuad(sums, a, b); }
  static __m256i EndNibbleSums(__m256i, __m256i sums) { return sums; }

  // Rows of bytes.
  using RowElement = uint8_t;
  static constexpr bool kDotsFewRows = false;
  using Quads = __m256i;
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], __m256i (&quads)[kVectors]) {
    if constexpr (kVectors == 2) {
      const __m128i a = Load128(rows[0]), b = Load128(rows[1]), c = Load128(rows[2]), d = Load128(rows[3]);
      const __m128i low_ab = _mm_unpacklo_epi8(a, b), high_ab = _mm_unpackhi_epi8(a, b);
      const __m128i low_cd = _mm_unpacklo_epi8(c, d), high_cd = _mm_unpackhi_epi8(c, d);
      quads[0] = _mm256_set_m128i(_mm_unpackhi_epi16(low_ab, low_cd), _mm_unpacklo_epi16(low_ab, low_cd));
      quads[1] = _mm256_set_m128i(_mm_unpackhi_epi16(high_ab, high_cd), _mm_unpacklo_epi16(high_ab, high_cd));
    } else {
      const __m128i ab = _mm_unpacklo_epi8(Load64(rows[0]), Load64(rows[1]));
      const __m128i cd = _mm_unpacklo_epi8(Load64(rows[2]), Load64(rows[3]));
      quads[0] = _mm256_set_m128i(_mm_unpackhi_epi16(ab, cd), _mm_unpacklo_epi16(ab, cd));
    }
  }
  template <int kVectors>
  static void DeinterleaveRows(const __m256i (&quads)[kVectors], __m256i (&rows)[kVectors]) {
    const __m256i bytes =
        _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    if constexpr (kVectors == 2) {
      const __m256i order = _mm256_setr_epi32(0, 4, 2, 6, 1, 5, 3, 7);
      const __m256i a = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(quads[0], bytes), order);
      const __m256i b = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(quads[1], bytes), order);
      rows[0] = _mm256_unpacklo_epi64(a, b);
      rows[1] = _mm256_unpackhi_epi64(a, b);
    } else {
      const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
      rows[0] = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(quads[0], bytes), order);
    }
  }
  template <int kVectors>
  static __m256i PackRows(const __m256i (&integers)[4], int32_t offset) {
    return PackBytes(integers, offset);
  }
  struct QuadWeights {
    const int8_t* of;
    explicit QuadWeights(const int8_t* values) : of(values) {}
  };
  template <int kVectors>
  static void DotQuadWeights(__m256i (&sums)[kVectors], const __m256i (&quads)[kVectors], const QuadWeights& weights,
                             int output) {
    const __m256i four = RepeatQuad(weights.of + 4 * output);
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) sums[v] = DotQuad(sums[v], quads[v], four);
  }
};

}  // namespace
}  // namespace ortolan::simd
