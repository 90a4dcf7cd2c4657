// AVX-512 with BF16: the vectors of avx512.h with products of pairs of bf16.
#pragma once

#include "simd/avx512.h"

namespace ortolan::simd {
namespace {

struct avx512bf16 : avx512 {
  // --- units: pairs of bf16
  static __m512 PackUnits(__m512 a, __m512 b) {
    // Convert a to the lower half and b to the upper half, then interleave them.
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(b, a);
    alignas(64) static constexpr uint16_t kOrder[] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                      8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    return _mm512_castsi512_ps(_mm512_permutexvar_epi16(_mm512_load_si512(kOrder), halves));
  }
  static void StoreUnits(float* to, __m512 a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh(a));
  }
  static __m512 MultiplyAddUnits(__m512 a, __m512 b, __m512 c) {
    return _mm512_dpbf16_ps(c, (__m512bh)_mm512_castps_si512(a), (__m512bh)_mm512_castps_si512(b));
  }
  static constexpr bool kDotBf16 = true;
  static __m512i PickWords(__m512i eight, __m512i positions) { return _mm512_permutexvar_epi16(positions, eight); }
  static __m512i LowPositions(__m512i words, __m512i positions) {
    return _mm512_maskz_mov_epi16(_mm512_testn_epi16_mask(positions, _mm512_set1_epi16(2)), words);
  }
  static __m512i PackBf16(__m512 low, __m512 high) { return (__m512i)_mm512_cvtne2ps_pbh(high, low); }
  static __m512 DotBf16(__m512 sums, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }
};

}  // namespace
}  // namespace ortolan::simd
