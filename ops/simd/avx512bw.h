// Baseline AVX-512 (F, BW, DQ, VL; Skylake-SP and later): vectors of floats, integers and bytes; target.h specifies
// each function. Local to each file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/avx2.h"
#include "simd/spread_control.h"
#include "simd/vectors.h"

namespace ortolan::simd {
namespace {

struct avx512_types {
  using Float = __m512;
  using Int = __m512i;
  using Unsigned [[gnu::vector_size(64)]] = uint32_t;
  using Signed [[gnu::vector_size(64)]] = int32_t;
};

struct avx512bw : Vectors<avx512bw, avx512_types> {
  using Vectors::Transpose;  // and those below
  static constexpr int kRegisters = 32;

  static __mmask16 FirstLanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __m512 Set(float value) { return _mm512_set1_ps(value); }
  static __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 LoadFirst(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(FirstLanes(count), from); }
  static void Store(float* to, __m512 a) { _mm512_storeu_ps(to, a); }
  static void StoreFirst(float* to, int64_t count, __m512 a) { _mm512_mask_storeu_ps(to, FirstLanes(count), a); }
  static __m512 LoadSome(const float* from, int64_t left) { return _mm512_maskz_loadu_ps(SomeLanes(left), from); }
  // Uses a mask even if all lanes are stored: plain stores made products up to 30 % slower on Zen 5.
  static void StoreSome(float* to, int64_t left, __m512 a) { _mm512_mask_storeu_ps(to, SomeLanes(left), a); }

  static __m512 MultiplyAdd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 Max(__m512 a, __m512 b) { return _mm512_max_ps(a, b); }
  static __m512 Min(__m512 a, __m512 b) { return _mm512_min_ps(a, b); }
  static __m512 Abs(__m512 a) { return _mm512_abs_ps(a); }
  static uint32_t NonZero(__m512 a) { return _mm512_cmp_ps_mask(a, _mm512_setzero_ps(), _CMP_NEQ_UQ); }
  static bool HasNan(__m512 a) { return _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q) != 0; }
  static float SumOfLanes(__m512 a) { return _mm512_reduce_add_ps(a); }
  static __m512 SelectLess(__m512 a, __m512 b, __m512 x, __m512 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }
  static __m512 Exp2(__m512 a) {
    // The algorithm of vectors.h with AVX-512 instructions. The coefficients are doubled, which is exact at each step.
    constexpr float kExp2[] = {2 * kHalfExp2[0], 2 * kHalfExp2[1], 2 * kHalfExp2[2],
                               2 * kHalfExp2[3], 2 * kHalfExp2[4], 2 * kHalfExp2[5]};
    const __m512 fraction = _mm512_reduce_ps(a, 0);  // a - round(a); 0 for -Inf
    return _mm512_scalef_ps(Polynomial(fraction, kExp2), _mm512_sub_ps(a, fraction));
  }
  static float MaxOfLanes(__m512 a) { return _mm512_reduce_max_ps(a); }
  static __m512 Rounded(__m512 a) {
    __asm__("" : "+v"(a));
    return a;
  }

  // Floats between lanes.
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
  static __m512 RepeatFour(const float* from) { return _mm512_broadcast_f32x4(_mm_loadu_ps(from)); }
  static __m512 PickFloats(__m512 four, __m512i index) { return _mm512_permutevar_ps(four, index); }

  // Conversions between floats and bytes.
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

  // Lists of bits.
  static void CompressFloats(uint64_t bits, const float* from, float* to) {
#pragma GCC unroll 4
    for (int part = 0; part < 4; ++part) {
      const __mmask16 some = static_cast<__mmask16>(bits >> (16 * part));
      _mm512_storeu_ps(to, _mm512_maskz_compress_ps(some, _mm512_maskz_loadu_ps(some, from + 16 * part)));
      to += __builtin_popcount(some);
    }
  }

  // Operations on 32-bit integers.
  static __m512i SetInt(int32_t value) { return _mm512_set1_epi32(value); }
  static __m512i LoadInt(const void* from) { return _mm512_loadu_si512(from); }
  static __m512i LoadFirstInt(const void* from, int64_t count) {
    return _mm512_maskz_loadu_epi32(FirstLanes(count), from);
  }
  static __m512i LoadUint8(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static __m512i LoadSignedBytes(const uint8_t* from) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void StoreInt(void* to, __m512i a) { _mm512_storeu_si512(to, a); }
  static __m512i RoundToInt(__m512 a) { return _mm512_cvtps_epi32(a); }
  static __m512 ToFloat(__m512i a) { return _mm512_cvtepi32_ps(a); }
  static __m512i SelectBits(__m512i where, __m512i a, __m512i b) {
    return _mm512_ternarylogic_epi32(where, a, b, 0xCA);
  }
  static __m512 LoadF16(const uint8_t* from) { return _mm512_cvtph_ps(Load256(from)); }

  // Integers: arithmetic.
  static void StoreInt8(void* to, __m512i a) { _mm_storeu_si128(static_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(a)); }
  static int32_t SumOfIntLanes(__m512i a) { return _mm512_reduce_add_epi32(a); }
  static int32_t MaxOfIntLanes(__m512i a) { return _mm512_reduce_max_epi32(a); }
  static __m512i MaxInt(__m512i a, __m512i b) { return _mm512_max_epi32(a, b); }
  static __m512i DotPair(__m512i sums, __m512i a, __m512i b) { return _mm512_add_epi32(sums, _mm512_madd_epi16(a, b)); }

  // Bytes.
  static void StoreBytes(uint8_t* to, __m512i a) { _mm512_storeu_si512(to, a); }
  static __m512i SetBytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static __m512i SubtractBytes(__m512i a, __m512i b) { return _mm512_sub_epi8(a, b); }
  // A product below 256 does not carry into the odd byte.
  static __m512i MultiplyBytes(__m512i a, __m512i b) {
    return _mm512_mullo_epi16(a, _mm512_and_si512(b, _mm512_set1_epi16(0x00ff)));
  }
  static __m512i EvenBytes(__m512i a) { return _mm512_srai_epi16(_mm512_slli_epi16(a, 8), 8); }
  static __m512i OddBytes(__m512i a) { return _mm512_srai_epi16(a, 8); }
  static __m512i MultiplyWords(__m512i a, __m512i b) { return _mm512_mullo_epi16(a, b); }
  static __m512i RepeatEachByte(const uint8_t* from) {
    return _mm512_shuffle_epi8(Repeat16(from), LoadBytes(kRepeatControl.at));
  }
  // Each half uses the shuffles of AVX2.
  static __m512i ExpandBytes(uint64_t mask, const uint8_t* stored, int) {
    return Halves(avx2::ExpandBytes(mask, stored, 0), avx2::ExpandBytes(mask, stored, 32));
  }
  static __m512i ExpandWords(uint64_t mask, const uint8_t* stored, int) {
    return Halves(avx2::ExpandWords(mask, stored, 0), avx2::ExpandWords(mask, stored, 16));
  }
  static __m512i ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int) {
    return Halves(avx2::ExpandBytesElse(fill, mask, stored, 0), avx2::ExpandBytesElse(fill, mask, stored, 32));
  }
  // RepeatQuad(p), Repeat16(p) and RepeatQuad(a, which). clang gets the instructions by name: it would choose float
  // instructions, whose results integer products wait for on Zen 4, and would reload each quad of 16 bytes.
#ifdef __clang__
  static __m512i RepeatQuad(const void* from) {
    __m512i quads;
    __asm__("vpbroadcastd %1, %0" : "=v"(quads) : "m"(*static_cast<const uint8_t (*)[4]>(from)));
    return quads;
  }
#else
  using Vectors::RepeatQuad;
#endif
  static __m512i Repeat16(const void* from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static __m512i RepeatQuad(__m512i a, int which) {
    switch (which) {
      case 0:
        return ShuffleQuads<0x00>(a);
      case 1:
        return ShuffleQuads<0x55>(a);
      case 2:
        return ShuffleQuads<0xaa>(a);
      default:
        return ShuffleQuads<0xff>(a);
    }
  }
  static __m512i RepeatEight(const void* from) {
    return _mm512_broadcastq_epi64(_mm_loadl_epi64(static_cast<const __m128i*>(from)));
  }
  static __m512i PickBytes(__m512i eight, __m512i positions) { return _mm512_shuffle_epi8(eight, positions); }
  template <int kHalf>
  static __m512i SpreadBytes(__m512i a, __m512i positions) {
    const __m512i indices = _mm512_maddubs_epi16(positions, _mm512_set1_epi16(0x0102));
    const __m512i index = kHalf == 0 ? indices : _mm512_srli_epi32(indices, 16);  // the index is in the lowest bits
    const __m512i table = LoadBytes(kSpreadControl.control[0]);
    const __m512i quad = _mm512_add_epi8(LoadBytes(kSpreadControl.quad), SetBytes(2 * kHalf));
    return _mm512_shuffle_epi8(a, _mm512_add_epi8(_mm512_permutexvar_epi32(index, table), quad));
  }
  // Positions ascend, so each word goes to one position of each half: its own or, after the swap, the other one.
  template <int kHalf>
  static __m512i SpreadWords(__m512i a, __m512i positions) {
    const __m512i here = _mm512_set1_epi32((2 * kHalf + 1) << 16 | 2 * kHalf);
    const __mmask32 own = _mm512_cmpeq_epi16_mask(positions, here);
    const __mmask32 other = _mm512_cmpeq_epi16_mask(_mm512_rol_epi32(positions, 16), here);
    return _mm512_mask_mov_epi16(_mm512_maskz_mov_epi16(own, a), other, _mm512_rol_epi32(a, 16));
  }

  // Dot products of bytes, as in avx2.h: |a| times b with the sign of a.
  static constexpr uint32_t kInt8Bias = 0;
  static __m512i DotInt8(__m512i sums, __m512i a, __m512i b) {
    const __m512i with_sign = _mm512_mask_sub_epi8(b, _mm512_movepi8_mask(a), _mm512_setzero_si512(), b);
    return AddPairs(sums, _mm512_maddubs_epi16(_mm512_abs_epi8(a), with_sign));
  }
  // Multiply the low 7 bits, then the top bit, so that no sum of two products saturates.
  static __m512i DotQuad(__m512i sums, __m512i a, __m512i b) {
    sums = AddPairs(sums, _mm512_maddubs_epi16(AndBytes(a, SetBytes(0x7f)), b));
    return AddPairs(sums, _mm512_maddubs_epi16(AndBytes(a, SetBytes(0x80)), b));
  }
  // Eight products of nibbles fit 16 bits, as in avx2.h.
  static constexpr bool kNarrowNibbleSums = true;
  static constexpr bool kMultipliesPairs = true;
  static __m512i StartNibbleSums(__m512i) { return _mm512_setzero_si512(); }
  static __m512i DotNibbles(__m512i sums, __m512i nibbles, __m512i b) {
    __asm__("vpaddw %1, %0, %0" : "+v"(sums) : "v"(_mm512_maddubs_epi16(nibbles, b)));
    return sums;
  }
  static __m512i MultiplyPairs(__m512i a, __m512i b) { return _mm512_maddubs_epi16(a, b); }
  static __m512i EndNibbleSums(__m512i sums, __m512i narrow) { return AddPairs(sums, narrow); }

  // Rows of bytes.
  using RowElement = uint8_t;
  using Quads = __m512i;
  // Unpack instructions work within 128 bits, so rows of 64 bytes are interleaved in this target's own order.
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], __m512i (&quads)[kVectors]) {
    if constexpr (kVectors == 4) {
      InterleaveBytes({LoadBytes(rows[0]), LoadBytes(rows[1]), LoadBytes(rows[2]), LoadBytes(rows[3])}, quads);
    } else if constexpr (kVectors == 2) {
      const __m256i a = Load256(rows[0]), b = Load256(rows[1]), c = Load256(rows[2]), d = Load256(rows[3]);
      const __m256i low_ab = _mm256_unpacklo_epi8(a, b), high_ab = _mm256_unpackhi_epi8(a, b);
      const __m256i low_cd = _mm256_unpacklo_epi8(c, d), high_cd = _mm256_unpackhi_epi8(c, d);
      // Each register holds four quads of the first half of the rows and four of the second half.
      const __m512i low = Halves(_mm256_unpacklo_epi16(low_ab, low_cd), _mm256_unpackhi_epi16(low_ab, low_cd));
      const __m512i high = Halves(_mm256_unpacklo_epi16(high_ab, high_cd), _mm256_unpackhi_epi16(high_ab, high_cd));
      quads[0] = _mm512_shuffle_i32x4(low, high, 0x88);
      quads[1] = _mm512_shuffle_i32x4(low, high, 0xdd);
    } else {
      const __m128i a = Load128(rows[0]), b = Load128(rows[1]), c = Load128(rows[2]), d = Load128(rows[3]);
      const __m128i low_ab = _mm_unpacklo_epi8(a, b), high_ab = _mm_unpackhi_epi8(a, b);
      const __m128i low_cd = _mm_unpacklo_epi8(c, d), high_cd = _mm_unpackhi_epi8(c, d);
      quads[0] = Halves(_mm256_set_m128i(_mm_unpackhi_epi16(low_ab, low_cd), _mm_unpacklo_epi16(low_ab, low_cd)),
                        _mm256_set_m128i(_mm_unpackhi_epi16(high_ab, high_cd), _mm_unpacklo_epi16(high_ab, high_cd)));
    }
  }
  template <int kVectors>
  static void DeinterleaveRows(const __m512i (&quads)[kVectors], __m512i (&rows)[kVectors]) {
    const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
    __m512i v[kVectors];
#pragma GCC unroll 4
    for (int i = 0; i < kVectors; ++i) v[i] = _mm512_shuffle_epi8(quads[i], order);
    if constexpr (kVectors == 4) {
      const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
      const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
      rows[0] = _mm512_unpacklo_epi64(a, c);
      rows[1] = _mm512_unpackhi_epi64(a, c);
      rows[2] = _mm512_unpacklo_epi64(b, d);
      rows[3] = _mm512_unpackhi_epi64(b, d);
    } else {
      const __m512i by_row = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#pragma GCC unroll 2
      for (int i = 0; i < kVectors; ++i) v[i] = _mm512_permutexvar_epi32(by_row, v[i]);
      if constexpr (kVectors == 1) {
        rows[0] = v[0];
      } else {
        rows[0] = _mm512_permutex2var_epi64(v[0], _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), v[1]);
        rows[1] = _mm512_permutex2var_epi64(v[0], _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), v[1]);
      }
    }
  }
  static __m512i PackBytes(const __m512i (&integers)[4], int32_t offset) {
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(in_order, PackRows<4>(integers, offset));
  }
  template <int kVectors>
  static __m512i PackRows(const __m512i (&integers)[4], int32_t offset) {
    if constexpr (kVectors != 4) return PackBytes(integers, offset);
    const __m512i words = _mm512_set1_epi16(static_cast<int16_t>(offset));
    const __m512i low = _mm512_adds_epi16(_mm512_packs_epi32(integers[0], integers[1]), words);
    const __m512i high = _mm512_adds_epi16(_mm512_packs_epi32(integers[2], integers[3]), words);
    return _mm512_packus_epi16(low, high);
  }

  struct QuadWeights {
    const int8_t* of;
    explicit QuadWeights(const int8_t* values) : of(values) {}
  };
  template <int kVectors>
  static void DotQuadWeights(__m512i (&sums)[kVectors], const __m512i (&quads)[kVectors], const QuadWeights& weights,
                             int output) {
    const __m512i four = RepeatQuad(weights.of + 4 * output);
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums[v] = DotQuad(sums[v], quads[v], four);
  }

  // Tables: 16 rows of 16 entries. The low four bits of a byte look up an entry of each row, the high four select the
  // row.
  struct ByteTable {
    __m512i rows[16];
    explicit ByteTable(const uint8_t* entries) {
      for (int r = 0; r < 16; ++r) rows[r] = _mm512_broadcast_i32x4(Load128(entries + 16 * r));
    }
  };
  static __m512i Lookup256(const ByteTable& table, __m512i bytes) {
    const __m512i low = LowNibbles(bytes);
    __m512i found[16];
#pragma GCC unroll 16
    for (int r = 0; r < 16; ++r) found[r] = _mm512_shuffle_epi8(table.rows[r], low);
    const __mmask64 bits[] = {_mm512_test_epi8_mask(bytes, SetBytes(0x10)),
                              _mm512_test_epi8_mask(bytes, SetBytes(0x20)),
                              _mm512_test_epi8_mask(bytes, SetBytes(0x40)), _mm512_movepi8_mask(bytes)};
    for (int bit = 0; bit < 4; ++bit) {
      for (int r = 0; r < 8 >> bit; ++r) found[r] = _mm512_mask_blend_epi8(bits[bit], found[2 * r], found[2 * r + 1]);
    }
    return found[0];
  }
  // Unpack instructions interleave within 128 bits, so bytes are dealt in runs of eight or four first.
  template <int kParts>
  static __m512i DealBytes(__m512i a) {
    if constexpr (kParts == 2) return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), a);
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), a);
  }
  static void InterleaveBytes(const __m512i (&parts)[2], __m512i (&to)[2]) {
    to[0] = _mm512_unpacklo_epi8(parts[0], parts[1]);
    to[1] = _mm512_unpackhi_epi8(parts[0], parts[1]);
  }
  static void InterleaveBytes(const __m512i (&parts)[4], __m512i (&to)[4]) {
    const __m512i low01 = _mm512_unpacklo_epi8(parts[0], parts[1]), high01 = _mm512_unpackhi_epi8(parts[0], parts[1]);
    const __m512i low23 = _mm512_unpacklo_epi8(parts[2], parts[3]), high23 = _mm512_unpackhi_epi8(parts[2], parts[3]);
    to[0] = _mm512_unpacklo_epi16(low01, low23);
    to[1] = _mm512_unpackhi_epi16(low01, low23);
    to[2] = _mm512_unpacklo_epi16(high01, high23);
    to[3] = _mm512_unpackhi_epi16(high01, high23);
  }
  static constexpr bool kGathersBytes = false;

 protected:
  static __mmask16 SomeLanes(int64_t left) {
    return static_cast<__mmask16>(_bzhi_u32(0xffff, left < 0 ? 0 : left > 16 ? 16 : static_cast<uint32_t>(left)));
  }
  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m256i Load256(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static __m512i Halves(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }
  template <int kOrder>
  static __m512i ShuffleQuads(__m512i a) {
#ifdef __clang__
    __m512i shuffled;
    __asm__("vpshufd %2, %1, %0" : "=v"(shuffled) : "v"(a), "i"(kOrder));
    return shuffled;
#else
    return _mm512_shuffle_epi32(a, static_cast<_MM_PERM_ENUM>(kOrder));
#endif
  }
  // Inline assembly for the reason given at AddPairs in avx2.h.
  static __m512i AddPairs(__m512i sums, __m512i words) {
    __asm__("vpaddd %1, %0, %0" : "+v"(sums) : "v"(_mm512_madd_epi16(words, _mm512_set1_epi16(1))));
    return sums;
  }
};

}  // namespace
}  // namespace ortolan::simd
