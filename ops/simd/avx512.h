// AVX-512: the vectors of floats (math.h says what each function does). Local to each file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/math.h"

namespace ortolan::simd {
namespace {

constexpr struct Places {
  constexpr Places() {
    for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(i);
  }
  alignas(64) uint8_t at[64] = {};
} kPlaces;

struct avx512 {
  using Float = __m512;
  static constexpr int64_t kLanes = 16;
  static constexpr int kRegisters = 32;

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
  static uint32_t NonZero(__m512 a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
  static bool HasNan(__m512 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
  static float SumOfLanes(__m512 a) { return _mm512_reduce_add_ps(a); }
  static __m512 ExponentFromLowBits(__m512 a) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23));
  }
  static __m512 SelectLess(__m512 a, __m512 b, __m512 x, __m512 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  static __m512 Exp2(__m512 a) {
    // 2^f for |f| <= 1/2, minimax with the constant fixed at 1: relative error 1.9 x 2^-24.
    constexpr float kExp2[] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
    const __m512 fraction = _mm512_reduce_ps(a, 0);  // a - round(a), and 0 of -Inf
    return _mm512_scalef_ps(VectorMath<avx512>::Polynomial(fraction, kExp2), _mm512_sub_ps(a, fraction));
  }
  static float MaxOfLanes(__m512 a) { return _mm512_reduce_max_ps(a); }
  static __m512 Rounded(__m512 a) {
    __asm__("" : "+v"(a));
    return a;
  }

  // Floats: between lanes.
  static void Transpose4(const float* from, int64_t row_bytes, float* to, int64_t to_row_bytes) {
    const auto row = [&](int64_t i) { return Load(AtByte(from, i * row_bytes)); };
    const auto pairs = [](__m512 a) { return _mm512_castps_pd(a); };
    const auto floats = [](__m512d a) { return _mm512_castpd_ps(a); };
    const __m512 a = row(0), b = row(1), c = row(2), d = row(3);
    const __m512d ab_low = pairs(_mm512_unpacklo_ps(a, b)), ab_high = pairs(_mm512_unpackhi_ps(a, b));
    const __m512d cd_low = pairs(_mm512_unpacklo_ps(c, d)), cd_high = pairs(_mm512_unpackhi_ps(c, d));
    // Lane l of columns[i] is column 4 l + i.
    const __m512 columns[] = {floats(_mm512_unpacklo_pd(ab_low, cd_low)), floats(_mm512_unpackhi_pd(ab_low, cd_low)),
                              floats(_mm512_unpacklo_pd(ab_high, cd_high)),
                              floats(_mm512_unpackhi_pd(ab_high, cd_high))};
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      _mm_storeu_ps(AtByte(to, i * to_row_bytes), _mm512_castps512_ps128(columns[i]));
      _mm_storeu_ps(AtByte(to, (4 + i) * to_row_bytes), _mm512_extractf32x4_ps(columns[i], 1));
      _mm_storeu_ps(AtByte(to, (8 + i) * to_row_bytes), _mm512_extractf32x4_ps(columns[i], 2));
      _mm_storeu_ps(AtByte(to, (12 + i) * to_row_bytes), _mm512_extractf32x4_ps(columns[i], 3));
    }
  }
  static void Transpose(__m512 (&a)[16]) {
    __m512 b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
      b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
      b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {  // quarters of lanes hold 4 x 4 blocks, transposed
      a[i] = _mm512_shuffle_ps(b[i], b[i + 2], 0x44);
      a[i + 1] = _mm512_shuffle_ps(b[i], b[i + 2], 0xEE);
      a[i + 2] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0x44);
      a[i + 3] = _mm512_shuffle_ps(b[i + 1], b[i + 3], 0xEE);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const __m512 low = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x44);
      const __m512 high = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xEE);
      const __m512 low2 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x44);
      const __m512 high2 = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xEE);
      b[i] = _mm512_shuffle_f32x4(low, low2, 0x88);
      b[i + 4] = _mm512_shuffle_f32x4(low, low2, 0xDD);
      b[i + 8] = _mm512_shuffle_f32x4(high, high2, 0x88);
      b[i + 12] = _mm512_shuffle_f32x4(high, high2, 0xDD);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) a[i] = b[i];
  }
  template <typename Op>
  static __m512 ReduceFour(const __m512 (&a)[4], const Op& op) {
    const __m512 pair = op(_mm512_unpacklo_ps(a[0], a[1]), _mm512_unpackhi_ps(a[0], a[1]));
    const __m512 other = op(_mm512_unpacklo_ps(a[2], a[3]), _mm512_unpackhi_ps(a[2], a[3]));
    const __m512 four = op(_mm512_shuffle_ps(pair, other, 0x44), _mm512_shuffle_ps(pair, other, 0xEE));
    const __m512 half = op(four, _mm512_shuffle_f32x4(four, four, 0x4E));
    return op(half, _mm512_shuffle_f32x4(half, half, 0xB1));
  }
  static __m512 LoadStrided(const float* from, int64_t stride) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    return _mm512_i32gather_ps(_mm512_mullo_epi32(lanes, _mm512_set1_epi32(static_cast<int>(stride))), from, 4);
  }
  static __m512 LoadTwice(const float* from) {
    const __m512i twice = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    return _mm512_permutexvar_ps(twice, _mm512_castps256_ps512(_mm256_loadu_ps(from)));
  }
  static __m512 SwapPairs(__m512 a) { return _mm512_permute_ps(a, 0xB1); }
  static __m512 SubtractAdd(__m512 a, __m512 b) { return _mm512_mask_sub_ps(_mm512_add_ps(a, b), 0x5555, a, b); }
  static __m512 Lookup16(const float* table, __m512i index) { return _mm512_permutexvar_ps(index, Load(table)); }

  // Floats from and to bytes.
  static __m512 LoadBf16(const uint8_t* from) {
    const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
  }
  static __m512 LoadInt8(const uint8_t* from) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from))));
  }
  static void StoreBytes(uint8_t* to, __m512 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(a)));
  }
  static void StoreInt8(uint8_t* to, __m512 a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(a)));
  }
  template <int kByte>
  static __m512 SignedByte(__m512i a) {
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(_mm512_slli_epi32(a, 24 - 8 * kByte), 24));
  }

  // Lists of bits: bits.h.
  static int64_t ListBits(uint64_t bits, uint8_t first, uint8_t* list) {
    const __m512i numbers = _mm512_add_epi8(Places(), _mm512_set1_epi8(static_cast<char>(first)));
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi8(bits, numbers));
    return __builtin_popcountll(bits);
  }
  static int64_t ListBits(uint64_t bits, uint16_t first, uint16_t* list) {
    const int64_t found = __builtin_popcountll(bits);
    const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(first));
    const __m512i numbers = _mm512_maskz_compress_epi8(bits, Places());
    const auto store = [base](uint16_t* to, __m256i half) {
      _mm512_storeu_si512(to, _mm512_add_epi16(base, _mm512_cvtepu8_epi16(half)));
    };
    store(list, _mm512_castsi512_si256(numbers));
    if (found > 32) store(list + 32, _mm512_extracti64x4_epi64(numbers, 1));
    return found;
  }
  static void CompressFloats(uint64_t bits, const float* from, float* to) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __mmask16 some = static_cast<__mmask16>(bits >> (16 * part));
      _mm512_storeu_ps(to, _mm512_maskz_compress_ps(some, _mm512_maskz_loadu_ps(some, from + 16 * part)));
      to += __builtin_popcount(some);
    }
  }

  // Units: 32 bits of a lane that are multiplied at once.
  static constexpr int64_t kUnit = 1;
  static __m512 PackUnits(__m512 a, __m512) { return a; }
  static void StoreUnits(float* to, __m512 a) { Store(to, a); }
  static __m512 MultiplyAddUnits(__m512 a, __m512 b, __m512 c) { return MultiplyAdd(a, b, c); }

  // Integers of 32 bits.
  using Int = __m512i;
  static __m512i SetInt(int32_t value) { return _mm512_set1_epi32(value); }
  static __m512i LoadInt(const void* from) { return _mm512_loadu_si512(from); }
  static __m512i LoadFirstInt(const void* from, int64_t count) {
    return _mm512_maskz_loadu_epi32(FirstLanes(count), from);
  }
  static __m512i ExpandBytes(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void StoreInt(void* to, __m512i a) { _mm512_storeu_si512(to, a); }
  static __m512i BitsOf(__m512 a) { return _mm512_castps_si512(a); }
  static __m512 FloatOf(__m512i a) { return _mm512_castsi512_ps(a); }
  static __m512 ToFloat(__m512i a) { return _mm512_cvtepi32_ps(a); }
  static __m512i OrInt(__m512i a, __m512i b) { return _mm512_or_si512(a, b); }
  static __m512i SelectBits(__m512i where, __m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(where, a, b, 0xCA);
  }
  template <int kBits>
  static __m512i ShiftLeftInt(__m512i a) {
    return _mm512_slli_epi32(a, kBits);
  }
  template <int kBits>
  static __m512i ShiftRightInt(__m512i a) {
    return _mm512_srli_epi32(a, kBits);
  }

 private:
  static __m512i Places() { return _mm512_load_si512(kPlaces.at); }
};

}  // namespace
}  // namespace ortolan::simd
