// AVX-512: vectors of floats, integers and bytes (column.h says what each function does). Local to each file
// that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/vectors.h"

namespace ortolan::simd {
namespace {

// A byte for each of 64 places.
struct PlaceTable {
  template <typename At>
  constexpr explicit PlaceTable(const At& byte_at) {
    for (int i = 0; i < 64; ++i) at[i] = static_cast<uint8_t>(byte_at(i));
  }
  alignas(64) uint8_t at[64] = {};
};
constexpr PlaceTable kPlaces([](int i) { return i; });
// Of 64 words in two registers, the low bytes.
constexpr PlaceTable kLowBytes([](int i) { return 2 * i; });
// Of 16 quads, byte 16 r + i: byte r of quad i.
constexpr PlaceTable kRowsOfQuads([](int i) { return i % 16 * 4 + i / 16; });
// Of four rows of 16 bytes, one behind the other, byte 4 i + r: byte i of row r. Likewise of 32 bytes, in two halves.
constexpr PlaceTable kQuadsOfRows16([](int i) { return i % 4 * 16 + i / 4; });
constexpr PlaceTable kLowQuadsOfRows32([](int i) { return i % 4 * 32 + i / 4; });
constexpr PlaceTable kHighQuadsOfRows32([](int i) { return i % 4 * 32 + 16 + i / 4; });

struct avx512_types {
  using Float = __m512;
  using Int = __m512i;
  using Unsigned [[gnu::vector_size(64)]] = uint32_t;
  using Signed [[gnu::vector_size(64)]] = int32_t;
};

struct avx512 : Vectors<avx512, avx512_types> {
  using Vectors::RepeatQuad;  // and those below
  using Vectors::Transpose;
  static constexpr int kRegisters = 32;

  static __mmask16 FirstLanes(int64_t count) { return static_cast<__mmask16>((1u << count) - 1); }
  static __m512 Set(float value) { return _mm512_set1_ps(value); }
  static __m512 Load(const float* from) { return _mm512_loadu_ps(from); }
  static __m512 LoadFirst(const float* from, int64_t count) { return _mm512_maskz_loadu_ps(FirstLanes(count), from); }
  static void Store(float* to, __m512 a) { _mm512_storeu_ps(to, a); }
  static void StoreFirst(float* to, int64_t count, __m512 a) { _mm512_mask_storeu_ps(to, FirstLanes(count), a); }
  static __m512 LoadSome(const float* from, int64_t left) { return _mm512_maskz_loadu_ps(SomeLanes(left), from); }
  // By mask also where all lanes are stored: plain stores are 8 to 30 % slower on Zen 5 where a product writes y.
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
    // 2^f for |f| <= 1/2, minimax with the constant fixed at 1: relative error 1.9 x 2^-24.
    constexpr float kExp2[] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
    const __m512 fraction = _mm512_reduce_ps(a, 0);  // a - round(a), and 0 of -Inf
    return _mm512_scalef_ps(Polynomial(fraction, kExp2), _mm512_sub_ps(a, fraction));
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

  // Lists of bits.
  static int64_t ListBits(uint64_t bits, uint8_t first, uint8_t* list) {
    const __m512i numbers = _mm512_add_epi8(_mm512_load_si512(kPlaces.at), _mm512_set1_epi8(static_cast<char>(first)));
    _mm512_storeu_si512(list, _mm512_maskz_compress_epi8(bits, numbers));
    return __builtin_popcountll(bits);
  }
  static int64_t ListBits(uint64_t bits, uint16_t first, uint16_t* list) {
    const int64_t found = __builtin_popcountll(bits);
    const __m512i base = _mm512_set1_epi16(static_cast<int16_t>(first));
    const __m512i numbers = _mm512_maskz_compress_epi8(bits, _mm512_load_si512(kPlaces.at));
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

  // Integers of 32 bits.
  static __m512i SetInt(int32_t value) { return _mm512_set1_epi32(value); }
  static __m512i LoadInt(const void* from) { return _mm512_loadu_si512(from); }
  static __m512i LoadFirstInt(const void* from, int64_t count) {
    return _mm512_maskz_loadu_epi32(FirstLanes(count), from);
  }
  static __m512i LoadUint8(const uint8_t* from) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
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
  static __m512i DotPair(__m512i sums, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
  }

  // Bytes.
  static void StoreBytes(uint8_t* to, __m512i a) { _mm512_storeu_si512(to, a); }
  static __m512i SetBytes(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }
  static __m512i SubtractBytes(__m512i a, __m512i b) { return _mm512_sub_epi8(a, b); }
  // In place, by hand: on Zen 5 vpexpand waits for the old value of its destination even with {z} (1.11 against 0.22 ns
  // when every expansion names one register, as gcc's do), and on Zen 4 its memory form is slow. Expanding the register
  // just loaded has neither fault.
  static __m512i ExpandBytes(uint64_t mask, const uint8_t* stored, int) {
    __m512i row = _mm512_loadu_si512(stored);
    __asm__("vpexpandb %0, %0%{%1%}%{z%}" : "+v"(row) : "Yk"(_cvtu64_mask64(mask)));
    return row;
  }
  static __m512i ExpandWords(uint64_t mask, const uint8_t* stored, int) {
    __m512i row = _mm512_loadu_si512(stored);
    __asm__("vpexpandw %0, %0%{%1%}%{z%}" : "+v"(row) : "Yk"(_cvtu32_mask32(static_cast<uint32_t>(mask))));
    return row;
  }
  // Not in place: the register expanded into is where the fill comes from, so the dependency is real, and harmless.
  static __m512i ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int) {
    __m512i row = SetBytes(fill);
    __asm__("vpexpandb %2, %0%{%1%}" : "+v"(row) : "Yk"(_cvtu64_mask64(mask)), "v"(_mm512_loadu_si512(stored)));
    return row;
  }
  // The 16 bytes repeated; of each 16, quad `which` (a constant where this is unrolled) repeated.
  static __m512i Repeat16(const void* from) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(static_cast<const __m128i*>(from)));
  }
  static __m512i RepeatQuad(__m512i a, int which) {
    switch (which) {
      case 0:
        return _mm512_shuffle_epi32(a, _MM_PERM_AAAA);
      case 1:
        return _mm512_shuffle_epi32(a, _MM_PERM_BBBB);
      case 2:
        return _mm512_shuffle_epi32(a, _MM_PERM_CCCC);
      default:
        return _mm512_shuffle_epi32(a, _MM_PERM_DDDD);
    }
  }

  // Dot products of bytes. By hand: gcc 12 copies the sums around each of its own.
  static __m512i DotQuad(__m512i sums, __m512i a, __m512i b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
  }
  static constexpr uint32_t kInt8Bias = 128;
  static __m512i DotInt8(__m512i sums, __m512i a, __m512i b) { return DotQuad(sums, a, b); }

  // Rows of bytes
  using RowNumber = uint8_t;
  using Quads = __m512i;
  // Unpacks deal with 128 bits at a time: alone they interleave rows of 64 bytes, in an order of their own.
  template <int kVectors>
  static void InterleaveRows(const uint8_t* const (&rows)[4], __m512i (&quads)[kVectors]) {
    if constexpr (kVectors == 4) {
      InterleaveBytes({LoadBytes(rows[0]), LoadBytes(rows[1]), LoadBytes(rows[2]), LoadBytes(rows[3])}, quads);
    } else if constexpr (kVectors == 2) {
      const auto two = [&](int i) {
        return _mm512_inserti64x4(_mm512_castsi256_si512(Load256(rows[i])), Load256(rows[i + 1]), 1);
      };
      const __m512i a = two(0), b = two(2);
      quads[0] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kLowQuadsOfRows32.at), b);
      quads[1] = _mm512_permutex2var_epi8(a, _mm512_load_si512(kHighQuadsOfRows32.at), b);
    } else {
      const auto two = [&](int i) {
        return _mm256_inserti128_si256(_mm256_castsi128_si256(Load128(rows[i])), Load128(rows[i + 1]), 1);
      };
      const __m512i all = _mm512_inserti64x4(_mm512_castsi256_si512(two(0)), two(2), 1);
      quads[0] = _mm512_permutexvar_epi8(_mm512_load_si512(kQuadsOfRows16.at), all);
    }
  }
  template <int kVectors>
  static void DeinterleaveRows(const __m512i (&quads)[kVectors], __m512i (&rows)[kVectors]) {
    if constexpr (kVectors == 4) {
      const __m512i order = _mm512_broadcast_i32x4(_mm_setr_epi8(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15));
      __m512i v[4];
      for (int i = 0; i < 4; ++i) v[i] = _mm512_shuffle_epi8(quads[i], order);
      const __m512i a = _mm512_unpacklo_epi32(v[0], v[1]), b = _mm512_unpackhi_epi32(v[0], v[1]);
      const __m512i c = _mm512_unpacklo_epi32(v[2], v[3]), d = _mm512_unpackhi_epi32(v[2], v[3]);
      rows[0] = _mm512_unpacklo_epi64(a, c);
      rows[1] = _mm512_unpackhi_epi64(a, c);
      rows[2] = _mm512_unpacklo_epi64(b, d);
      rows[3] = _mm512_unpackhi_epi64(b, d);
    } else {
      const __m512i order = _mm512_load_si512(kRowsOfQuads.at);
      const __m512i a = _mm512_permutexvar_epi8(order, quads[0]);
      if constexpr (kVectors == 1) {
        rows[0] = a;
      } else {
        const __m512i b = _mm512_permutexvar_epi8(order, quads[1]);
        rows[0] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), b);
        rows[1] = _mm512_permutex2var_epi64(a, _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15), b);
      }
    }
  }
  static __m512i PackBytes(const __m512i (&numbers)[4], int32_t offset) {
    const __m512i in_order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    return _mm512_permutexvar_epi32(in_order, PackRows<4>(numbers, offset));
  }
  template <int kVectors>
  static __m512i PackRows(const __m512i (&numbers)[4], int32_t offset) {
    if constexpr (kVectors != 4) return PackBytes(numbers, offset);
    const __m512i words = _mm512_set1_epi16(static_cast<int16_t>(offset));
    const __m512i low = _mm512_adds_epi16(_mm512_packs_epi32(numbers[0], numbers[1]), words);
    const __m512i high = _mm512_adds_epi16(_mm512_packs_epi32(numbers[2], numbers[3]), words);
    return _mm512_packus_epi16(low, high);
  }

  struct QuadWeights {
    const int8_t* of;
    explicit QuadWeights(const int8_t* values) : of(values) {}
  };
  // By hand, four in one piece: between pieces gcc 12 copies sums.
  template <int kVectors>
  static void DotQuadWeights(__m512i (&sums)[kVectors], const __m512i (&quads)[kVectors], const QuadWeights& weights,
                             int output) {
    const int8_t (&four)[4] = *reinterpret_cast<const int8_t (*)[4]>(weights.of + 4 * output);
    if constexpr (kVectors == 4) {
      __m512i repeated;
      __asm__(
          "vpbroadcastd %9, %4\n\t"
          "vpdpbusd %4, %5, %0\n\t"
          "vpdpbusd %4, %6, %1\n\t"
          "vpdpbusd %4, %7, %2\n\t"
          "vpdpbusd %4, %8, %3"
          : "+&v"(sums[0]), "+&v"(sums[1]), "+&v"(sums[2]), "+&v"(sums[3]), "=&v"(repeated)
          : "v"(quads[0]), "v"(quads[1]), "v"(quads[2]), "v"(quads[3]), "m"(four));
    } else {
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(sums[v]) : "v"(quads[v]), "m"(four));
      }
    }
  }

  // Quads of registers
  static __m512i LoadSomeQuads(const int8_t* from, int64_t left) {
    return left >= 16 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi32(SomeLanes(left), from);
  }
  static __m512i PermuteQuads(__m512i quads, __m512i order) { return _mm512_permutexvar_epi32(order, quads); }
  static __m512i SumsOfQuarters(__m512i a, __m512i b, __m512i c, __m512i d) {
    const auto halves = [](__m512i one, __m512i other) {
      return _mm512_add_epi32(_mm512_shuffle_i32x4(one, other, 0x44), _mm512_shuffle_i32x4(one, other, 0xee));
    };
    const __m512i ab = halves(a, b), cd = halves(c, d);
    return _mm512_add_epi32(_mm512_shuffle_i32x4(ab, cd, 0x88), _mm512_shuffle_i32x4(ab, cd, 0xdd));
  }

  // Tables
  struct ByteTable {
    __m512i parts[4];
    explicit ByteTable(const uint8_t* entries) {
      for (int i = 0; i < 4; ++i) parts[i] = _mm512_loadu_si512(entries + 64 * i);
    }
  };
  static __m512i Lookup256(const ByteTable& table, __m512i bytes) {
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(bytes),
                                  _mm512_permutex2var_epi8(table.parts[0], bytes, table.parts[1]),
                                  _mm512_permutex2var_epi8(table.parts[2], bytes, table.parts[3]));
  }
  // Unpacks interleave within 128 bits: bytes are dealt to these eight or four at a time before.
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
  // In registers of 128 bytes, one after the other from the first index to the last.
  static constexpr bool kGathersBytes = true;
  template <int kRows>
  [[gnu::always_inline]] static void GatherBytes(const uint8_t* x, int64_t row_bytes, const uint8_t* indices,
                                                 int64_t quads, __m512i (&found)[kRows]) {
    __m512i words[2];
    if (quads == 16) {
      words[0] = _mm512_loadu_si512(indices);
      words[1] = _mm512_loadu_si512(indices + 64);
    } else {
      const uint64_t some = (uint64_t{1} << (4 * quads)) - 1;
      words[0] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some), indices);
      words[1] = _mm512_maskz_loadu_epi16(static_cast<__mmask32>(some >> 32), indices + 64);
    }
    const __m512i low_bytes = _mm512_load_si512(kLowBytes.at);
    const __m512i index = _mm512_permutex2var_epi8(words[0], low_bytes, words[1]);  // its lowest 7 bits count
    const __m512i register_of =                                                     // its lowest 8 bits
        _mm512_permutex2var_epi8(_mm512_srli_epi16(words[0], 7), low_bytes, _mm512_srli_epi16(words[1], 7));
    for (int i = 0; i < kRows; ++i) found[i] = index;
    const auto register_at = [&](int64_t i) {
      uint16_t at;
      __builtin_memcpy(&at, indices + 2 * i, sizeof(at));
      return static_cast<int64_t>(at) >> 7;
    };
    int64_t at = register_at(0);
    const int64_t last = register_at(4 * quads - 1);
    __m512i here_of = _mm512_set1_epi8(static_cast<char>(at));
    const auto look_up = [&](int64_t end, __mmask64 among) __attribute__((always_inline)) {
      for (; at <= end; ++at, here_of = _mm512_add_epi8(here_of, _mm512_set1_epi8(1))) {
        const __mmask64 here = _mm512_mask_cmpeq_epi8_mask(among, register_of, here_of);
#pragma GCC unroll 4
        for (int i = 0; i < kRows; ++i) {
          const uint8_t* from = x + i * row_bytes + at * 128;
          found[i] = _mm512_mask2_permutex2var_epi8(LoadBytes(from), found[i], here, LoadBytes(from + 64));
        }
      }
    };
    if (__builtin_expect(last < 256, 1)) return look_up(last, ~__mmask64{0});
    const __mmask64 upper = _mm512_kunpackd(_mm512_movepi16_mask(words[1]), _mm512_movepi16_mask(words[0]));
    look_up(255, ~upper);
    look_up(last, upper);
  }

 private:
  static __mmask16 SomeLanes(int64_t left) {
    return static_cast<__mmask16>(_bzhi_u32(0xffff, left < 0 ? 0 : left > 16 ? 16 : static_cast<uint32_t>(left)));
  }
  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m256i Load256(const uint8_t* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
};

}  // namespace
}  // namespace ortolan::simd
