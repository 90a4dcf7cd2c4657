// AVX-512: the vectors of floats (math.h says what each function does). Local to each file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ortolan::simd {
namespace {

struct avx512 {
  using Float = __m512;
  static constexpr int64_t kLanes = 16;

  static __mmask16 FirstLanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __m512 Set(float value) { return _mm512_set1_ps(value); }
  static __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 LoadFirst(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(FirstLanes(count), from); }
  static void Store(float* to, __m512 a) { _mm512_storeu_ps(to, a); }
  static void StoreFirst(float* to, int64_t count, __m512 a) { _mm512_mask_storeu_ps(to, FirstLanes(count), a); }

  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 Subtract(__m512 a, __m512 b) { return _mm512_sub_ps(a, b); }
  static __m512 Multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 Divide(__m512 a, __m512 b) { return _mm512_div_ps(a, b); }
  static __m512 MultiplyAdd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 Max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
  static __m512 Min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
  static __m512 Abs(__m512 a) { return _mm512_abs_ps(a); }
  static float SumOfLanes(__m512 a) { return _mm512_reduce_add_ps(a); }
  static __m512 ExponentFromLowBits(__m512 a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
  }
};

}  // namespace
}  // namespace ortolan::simd
