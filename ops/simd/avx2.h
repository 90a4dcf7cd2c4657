// AVX2: the vectors of floats (math.h says what each function does). Local to each file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/math.h"

namespace ortolan::simd {
namespace {

struct avx2 {
  using Float = __m256;
  static constexpr int64_t kLanes = 8;
  static constexpr int kRegisters = 16;

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
  static uint32_t NonZero(__m256 a) {
    return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, _mm256_setzero_ps(), _CMP_NEQ_UQ)));
  }
  static bool HasNan(__m256 a) { return _mm256_movemask_ps(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)) != 0; }
  static float SumOfLanes(__m256 a) {
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
  }
  static __m256 ExponentFromLowBits(__m256 a) {
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23));
  }
  static __m256 SelectLess(__m256 a, __m256 b, __m256 x, __m256 y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static __m256 Exp2(__m256 a) { return VectorMath<avx2>::Exp2(Max(Set(-127.0f), a), Set(1.0f)); }
  static float MaxOfLanes(__m256 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static __m256 Rounded(__m256 a) {
    __asm__("" : "+x"(a));
    return a;
  }

  // Floats: between lanes.
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes) {
    for (int l = 0; l < kLanes; l += 4) {
      __m128 a = _mm_loadu_ps(from + l), b = _mm_loadu_ps(AtByte(from, row_bytes) + l);
      __m128 c = _mm_loadu_ps(AtByte(from, 2 * row_bytes) + l), d = _mm_loadu_ps(AtByte(from, 3 * row_bytes) + l);
      _MM_TRANSPOSE4_PS(a, b, c, d);
      _mm_storeu_ps(AtByte(to, l * to_row_bytes), a);
      _mm_storeu_ps(AtByte(to, (l + 1) * to_row_bytes), b);
      _mm_storeu_ps(AtByte(to, (l + 2) * to_row_bytes), c);
      _mm_storeu_ps(AtByte(to, (l + 3) * to_row_bytes), d);
    }
  }
  static void Transpose(__m256 (&a)[8]) {
    __m256 b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {  // halves of lanes hold 4 x 4 blocks, transposed
      a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xEE);
      a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m256 low = a[i];
      a[i] = _mm256_permute2f128_ps(low, a[i + 4], 0x20);
      a[i + 4] = _mm256_permute2f128_ps(low, a[i + 4], 0x31);
    }
  }
  template <typename Op>
  static __m256 ReduceFour(const __m256 (&a)[4], const Op& op) {
    const __m256 pair = op(_mm256_unpacklo_ps(a[0], a[1]), _mm256_unpackhi_ps(a[0], a[1]));
    const __m256 other = op(_mm256_unpacklo_ps(a[2], a[3]), _mm256_unpackhi_ps(a[2], a[3]));
    const __m256 four = op(_mm256_shuffle_ps(pair, other, 0x44), _mm256_shuffle_ps(pair, other, 0xEE));
    return op(four, _mm256_permute2f128_ps(four, four, 0x01));
  }
  static __m256 LoadStrided(const float* from, int64_t stride) {
    const __m256i lanes = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_i32gather_ps(from, _mm256_mullo_epi32(lanes, _mm256_set1_epi32(static_cast<int>(stride))), 4);
  }
  static __m256 LoadTwice(const float* from) {
    const __m256i twice = _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3);
    return _mm256_permutevar8x32_ps(_mm256_castps128_ps256(_mm_loadu_ps(from)), twice);
  }
  static __m256 SwapPairs(__m256 a) { return _mm256_permute_ps(a, 0xB1); }
  static __m256 SubtractAdd(__m256 a, __m256 b) { return _mm256_addsub_ps(a, b); }
  static __m256 Lookup16(const float* table, __m256i index) {
    const __m256 low = _mm256_permutevar8x32_ps(Load(table), index);
    const __m256 high = _mm256_permutevar8x32_ps(Load(table + 8), index);
    return _mm256_blendv_ps(low, high, _mm256_castsi256_ps(_mm256_slli_epi32(index, 28)));
  }

  // Floats from and to bytes.
  static __m256 LoadBf16(const uint8_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static __m256 LoadInt8(const uint8_t* from) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
  }
  static void StoreBytes(uint8_t* to, __m256 a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_setzero_si256());
    const __m128i halves = _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packus_epi16(halves, halves));
  }
  static void StoreInt8(uint8_t* to, __m256 a) {
    const __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_setzero_si256());
    const __m128i halves = _mm_unpacklo_epi64(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storel_epi64(reinterpret_cast<__m128i*>(to), _mm_packs_epi16(halves, halves));
  }
  template <int kByte>
  static __m256 SignedByte(__m256i a) {
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(_mm256_slli_epi32(a, 24 - 8 * kByte), 24));
  }

  // Units: 32 bits of a lane that are multiplied at once.
  static constexpr int64_t kUnit = 1;
  static __m256 PackUnits(__m256 a, __m256) { return a; }
  static void StoreUnits(float* to, __m256 a) { Store(to, a); }
  static __m256 MultiplyAddUnits(__m256 a, __m256 b, __m256 c) { return MultiplyAdd(a, b, c); }

  // Integers of 32 bits.
  using Int = __m256i;
  static __m256i SetInt(int32_t value) { return _mm256_set1_epi32(value); }
  static __m256i LoadInt(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static __m256i LoadFirstInt(const void* from, int64_t count) {
    return _mm256_maskload_epi32(static_cast<const int*>(from), FirstLanes(count));
  }
  static __m256i ExpandBytes(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void StoreInt(void* to, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
  static __m256i BitsOf(__m256 a) { return _mm256_castps_si256(a); }
  static __m256 FloatOf(__m256i a) { return _mm256_castsi256_ps(a); }
  static __m256 ToFloat(__m256i a) { return _mm256_cvtepi32_ps(a); }
  static __m256i OrInt(__m256i a, __m256i b) { return _mm256_or_si256(a, b); }
  static __m256i SelectBits(__m256i where, __m256i a, __m256i b) {
    return _mm256_or_si256(_mm256_and_si256(where, a), _mm256_andnot_si256(where, b));
  }
  template <int kBits>
  static __m256i ShiftLeftInt(__m256i a) {
    return _mm256_slli_epi32(a, kBits);
  }
  template <int kBits>
  static __m256i ShiftRightInt(__m256i a) {
    return _mm256_srli_epi32(a, kBits);
  }
};

}  // namespace
}  // namespace ortolan::simd
