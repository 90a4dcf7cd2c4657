// AVX2: the vectors of floats (math.h says what each function does). Local to each file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace ortolan::simd {
namespace {

struct avx2 {
  using Float = __m256;
  static constexpr int64_t kLanes = 8;

  static __m256i FirstLanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 Set(float value) { return _mm256_set1_ps(value); }
  static __m256 Load(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 LoadFirst(const float* from, int64_t count) { return _mm256_maskload_ps(from, FirstLanes(count)); }
  static void Store(float* to, __m256 a) { _mm256_storeu_ps(to, a); }
  static void StoreFirst(float* to, int64_t count, __m256 a) { _mm256_maskstore_ps(to, FirstLanes(count), a); }

  static __m256 Add(__m256 a, __m256 b) { return _mm256_add_ps(a, b); }
  static __m256 Subtract(__m256 a, __m256 b) { return _mm256_sub_ps(a, b); }
  static __m256 Multiply(__m256 a, __m256 b) { return _mm256_mul_ps(a, b); }
  static __m256 Divide(__m256 a, __m256 b) { return _mm256_div_ps(a, b); }
  static __m256 MultiplyAdd(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
  static __m256 Max(__m256 a, __m256 b) { return _mm256_max_ps(a, b); }
  static __m256 Min(__m256 a, __m256 b) { return _mm256_min_ps(a, b); }
  static __m256 Abs(__m256 a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
  static float SumOfLanes(__m256 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static __m256 ExponentFromLowBits(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
  }
};

}  // namespace
}  // namespace ortolan::simd
