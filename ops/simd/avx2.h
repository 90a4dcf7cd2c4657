// AVX2: vectors of floats, integers and bytes; target.h specifies each function. Local to each file that includes it.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "simd/at_byte.h"
#include "simd/expand_controls.h"
#include "simd/spread_control.h"
#include "simd/vectors.h"

namespace ortolan::simd {
namespace {

struct avx2_types {
  using Float = __m256;
  using Int = __m256i;
  using Unsigned [[gnu::vector_size(32)]] = uint32_t;
  using Signed [[gnu::vector_size(32)]] = int32_t;
};

struct avx2 : Vectors<avx2, avx2_types> {
  using Vectors::Transpose;  // and those below
  static constexpr int kRegisters = 16;

  static __m256i FirstLanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count)), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }
  static __m256 Set(float value) { return _mm256_set1_ps(value); }
  static __m256 Load(const float* from) { return _mm256_loadu_ps(from); }
  static __m256 LoadFirst(const float* from, int64_t count) { return _mm256_maskload_ps(from, FirstLanes(count)); }
  static void Store(float* to, __m256 a) { _mm256_storeu_ps(to, a); }
  static void StoreFirst(float* to, int64_t count, __m256 a) { _mm256_maskstore_ps(to, FirstLanes(count), a); }

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
  static __m256 SelectLess(__m256 a, __m256 b, __m256 x, __m256 y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static float MaxOfLanes(__m256 a) {
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
  }
  static __m256 Rounded(__m256 a) {
    __asm__("" : "+x"(a));
    return a;
  }

  // Floats between lanes.
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

  static __m256 RepeatFour(const float* from) { return _mm256_broadcast_ps(reinterpret_cast<const __m128*>(from)); }
  static __m256 PickFloats(__m256 four, __m256i index) { return _mm256_permutevar_ps(four, index); }

  // Conversions between floats and bytes.
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

  // Operations on 32-bit integers.
  static __m256i SetInt(int32_t value) { return _mm256_set1_epi32(value); }
  static __m256i LoadInt(const void* from) { return _mm256_loadu_si256(static_cast<const __m256i*>(from)); }
  static __m256i LoadFirstInt(const void* from, int64_t count) {
    return _mm256_maskload_epi32(static_cast<const int*>(from), FirstLanes(count));
  }
  static __m256i LoadUint8(const uint8_t* from) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static __m256i LoadSignedBytes(const uint8_t* from) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
  }
  static void StoreInt(void* to, __m256i a) { _mm256_storeu_si256(static_cast<__m256i*>(to), a); }
  static __m256i DotPair(__m256i sums, __m256i a, __m256i b) {
    AddProducts(sums, a, b);
    return sums;
  }
  static __m256i RoundToInt(__m256 a) { return _mm256_cvtps_epi32(a); }
  static __m256 ToFloat(__m256i a) { return _mm256_cvtepi32_ps(a); }
  static __m256i SelectBits(__m256i where, __m256i a, __m256i b) {
    return _mm256_or_si256(_mm256_and_si256(where, a), _mm256_andnot_si256(where, b));
  }
  static __m256 LoadF16(const uint8_t* from) { return _mm256_cvtph_ps(Load128(from)); }

  // Integers: arithmetic.
  static void StoreInt8(void* to, __m256i a) {
    const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    _mm_storel_epi64(static_cast<__m128i*>(to), _mm_packs_epi16(words, words));
  }
  static int32_t SumOfIntLanes(__m256i a) {
    __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
    return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 1);
  }
  static int32_t MaxOfIntLanes(__m256i a) {
    __m128i most = _mm_max_epi32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    most = _mm_max_epi32(most, _mm_unpackhi_epi64(most, most));
    const int32_t even = _mm_cvtsi128_si32(most);
    const int32_t odd = _mm_extract_epi32(most, 1);
    return even > odd ? even : odd;
  }
  static __m256i MaxInt(__m256i a, __m256i b) { return _mm256_max_epi32(a, b); }

  // Bytes.
  static void StoreBytes(uint8_t* to, __m256i a) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), a); }
  static __m256i SetBytes(int value) { return _mm256_set1_epi8(static_cast<char>(value)); }
  static __m256i SubtractBytes(__m256i a, __m256i b) { return _mm256_sub_epi8(a, b); }
  // A product below 256 does not carry into the odd byte.
  static __m256i MultiplyBytes(__m256i a, __m256i b) {
    return _mm256_mullo_epi16(a, _mm256_and_si256(b, _mm256_set1_epi16(0x00ff)));
  }
  static __m256i MultiplyWords(__m256i a, __m256i b) { return _mm256_mullo_epi16(a, b); }
  static __m256i RepeatEachByte(const uint8_t* from) {
    return _mm256_shuffle_epi8(RepeatEight(from), LoadBytes(kRepeatControl.at));
  }
  static __m256i ExpandBytes(uint64_t mask, const uint8_t* stored, int first) {
    return ExpandEach(mask, first, [&](int64_t position) { return Load64(stored + position); });
  }
  // XOR the stored bytes with the fill, expand with zeros, and XOR the result with the fill.
  static __m256i ExpandBytesElse(int fill, uint64_t mask, const uint8_t* stored, int first) {
    const __m128i each = _mm_set1_epi8(static_cast<char>(fill));
    const auto load = [&](int64_t position) { return _mm_xor_si128(Load128(stored + position), each); };
    return _mm256_xor_si256(ExpandEach(mask, first, load), SetBytes(fill));
  }
  static __m256i ExpandWords(uint64_t mask, const uint8_t* stored, int first) {
    const auto eight = [&](int position) {
      const uint64_t before = (uint64_t{1} << position) - 1;
      const uint8_t* control = kExpandWordControls.control[(mask >> position) & 0xff];
      return _mm_shuffle_epi8(Load128(stored + 2 * __builtin_popcountll(mask & before)), Load128(control));
    };
    return _mm256_set_m128i(eight(first + 8), eight(first));
  }
  static __m256i RepeatEight(const void* from) {
    return _mm256_broadcastq_epi64(Load64(static_cast<const uint8_t*>(from)));
  }
  static __m256i PickBytes(__m256i eight, __m256i positions) { return _mm256_shuffle_epi8(eight, positions); }
  template <int kHalf>
  static __m256i SpreadBytes(__m256i a, __m256i positions) {
    const __m256i indices = _mm256_maddubs_epi16(positions, _mm256_set1_epi16(0x0102));
    const __m256i index = kHalf == 0 ? indices : _mm256_srli_epi32(indices, 16);  // the index is in the lowest bits
    const __m256i table = LoadBytes(kSpreadControl.control[0]);
    const __m256i quad = _mm256_add_epi8(LoadBytes(kSpreadControl.quad), SetBytes(2 * kHalf));
    return _mm256_shuffle_epi8(a, _mm256_add_epi8(_mm256_permutevar8x32_epi32(table, index), quad));
  }
  // Positions ascend, so each word goes to one position of each half: its own or, after the swap, the other one.
  template <int kHalf>
  static __m256i SpreadWords(__m256i a, __m256i positions) {
    const __m256i here = _mm256_set1_epi32((2 * kHalf + 1) << 16 | 2 * kHalf);
    const auto swap = [](__m256i b) { return _mm256_or_si256(_mm256_slli_epi32(b, 16), _mm256_srli_epi32(b, 16)); };
    return _mm256_or_si256(_mm256_and_si256(a, _mm256_cmpeq_epi16(positions, here)),
                           _mm256_and_si256(swap(a), _mm256_cmpeq_epi16(swap(positions), here)));
  }

  // Dot products of bytes. vpmaddubsw saturates sums of two unsigned x signed products. With |a| as the unsigned
  // operand and b with the sign of a they fit: 2 x 128 x 127, and -128 equals its own |a| as an unsigned byte.
  static constexpr uint32_t kInt8Bias = 0;
  static __m256i DotInt8(__m256i sums, __m256i a, __m256i b) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(a), _mm256_sign_epi8(b, a));
    return AddPairs(sums, pairs);
  }
  // For many rows, loops that convert bytes first are faster: they need no vpsignb.
  static constexpr bool kConvertsInt8 = true;
  static __m256i DotPairs(__m256i sums, __m256i a, __m256i b) { return AddPairs(sums, _mm256_maddubs_epi16(a, b)); }
  static __m256i EvenBytes(__m256i a) { return _mm256_srai_epi16(_mm256_slli_epi16(a, 8), 8); }
  static __m256i OddBytes(__m256i a) { return _mm256_srai_epi16(a, 8); }
  // Eight products of nibbles fit 16 bits (8 x 2 x 15 x 127 = 30480) and are widened together.
  static constexpr bool kNarrowNibbleSums = true;
  static constexpr bool kMultipliesPairs = true;
  static __m256i StartNibbleSums(__m256i) { return _mm256_setzero_si256(); }
  // Inline assembly for the reason given at AddPairs.
  static __m256i DotNibbles(__m256i sums, __m256i nibbles, __m256i b) {
    __asm__("vpaddw %1, %0, %0" : "+x"(sums) : "x"(_mm256_maddubs_epi16(nibbles, b)));
    return sums;
  }
  static __m256i MultiplyPairs(__m256i a, __m256i b) { return _mm256_maddubs_epi16(a, b); }
  static __m256i EndNibbleSums(__m256i sums, __m256i narrow) { return AddPairs(sums, narrow); }

  // Rows of words: vpmaddubsw saturates sums of u8 x int8 products, while vpmaddwd is exact.
  using RowElement = int16_t;
  static constexpr bool kDotsFewRows = true;
  template <int kTokens>
  static constexpr int kRowWords = kTokens == 1 ? 2 : kTokens;
  // With 16 tokens, each half of an interleaved row holds tokens 0 … 3 and 8 … 11, so the middle quarters of rows are
  // swapped.
  template <int kTokens>
  static constexpr int TokenAt(int position) {
    return kTokens == 16 ? (position & 3) | (position & 4) << 1 | (position & 8) >> 1 : position;
  }
  static __m256i PackWords(__m256i a, __m256i b, int32_t least, int32_t most) {
    const __m256i words = _mm256_max_epi16(_mm256_packs_epi32(a, b), _mm256_set1_epi16(static_cast<int16_t>(least)));
    return _mm256_min_epi16(words, _mm256_set1_epi16(static_cast<int16_t>(most)));
  }
  template <int kTokens>
  static void StoreInputs(const __m256i (&tokens)[kTokens], int16_t* to) {
    if constexpr (kTokens == 1) {
      StoreInt(to, _mm256_unpacklo_epi16(tokens[0], tokens[0]));
      StoreInt(to + 16, _mm256_unpackhi_epi16(tokens[0], tokens[0]));
    } else if constexpr (kTokens == 2) {
      StoreInt(to, _mm256_unpacklo_epi16(tokens[0], tokens[1]));
      StoreInt(to + 16, _mm256_unpackhi_epi16(tokens[0], tokens[1]));
    } else if constexpr (kTokens == 4) {
      StoreFourTokens(to, _mm256_unpacklo_epi16(tokens[0], tokens[1]), _mm256_unpacklo_epi16(tokens[2], tokens[3]));
      StoreFourTokens(to + 32, _mm256_unpackhi_epi16(tokens[0], tokens[1]),
                      _mm256_unpackhi_epi16(tokens[2], tokens[3]));
    } else {
      for (int position = 0; position < kTokens; position += 8) StoreEightTokens<kTokens>(tokens, position, to);
    }
  }

  // Registers of sums, by number of tokens. 16: two registers per output. 8: products of inputs 0 and 1 in the lower
  // halves and of inputs 2 and 3 in the upper halves, of tokens 0 … 3, then 4 … 7. 4: outputs 0 and 2, then 1 and 3. 2:
  // all outputs. 1: all outputs, products of inputs 0 and 1, then of 2 and 3.
  template <int kTokens>
  static constexpr int kRowSums = kTokens >= 8   ? 8
                                  : kTokens == 4 ? 2
                                                 : 1;
  template <int kTokens>
  [[gnu::always_inline]] static void DotRows(__m256i (&sums)[kRowSums<kTokens>], const int16_t* const (&rows)[4],
                                             const int8_t* weights) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(weights));
    if constexpr (kTokens == 16) {
      alignas(32) int32_t pairs[8];  // of words
      _mm256_store_si256(reinterpret_cast<__m256i*>(pairs), _mm256_cvtepi8_epi16(bytes));
#pragma GCC unroll 2
      for (int p = 0; p < 2; ++p) {
        const __m256i a = LoadInt(rows[2 * p]), b = LoadInt(rows[2 * p + 1]);
        const __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
#pragma GCC unroll 4
        for (int o = 0; o < 4; ++o) {
          const __m256i weight = RepeatStored(pairs[2 * o + p]);
          AddProducts(sums[2 * o], low, weight);
          AddProducts(sums[2 * o + 1], high, weight);
        }
      }
    } else if constexpr (kTokens == 8) {
      const __m128i by_pair = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
      const __m256i words = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, by_pair));
      const __m256i even = Halves(rows[0], rows[2]), odd = Halves(rows[1], rows[3]);
      const __m256i low = _mm256_unpacklo_epi16(even, odd), high = _mm256_unpackhi_epi16(even, odd);
      AddEightTokens<0>(sums, low, high, words);
      AddEightTokens<1>(sums, low, high, words);
      AddEightTokens<2>(sums, low, high, words);
      AddEightTokens<3>(sums, low, high, words);
    } else {
      const __m256i words = _mm256_cvtepi8_epi16(bytes);
      const auto row = [&](int i) {
        int64_t tokens = 0;
        __builtin_memcpy(&tokens, rows[i], 2 * kRowWords<kTokens>);
        return kTokens == 4 ? _mm256_set1_epi64x(tokens) : _mm256_set1_epi32(static_cast<int>(tokens));
      };
      const __m256i first = _mm256_unpacklo_epi16(row(0), row(1)), second = _mm256_unpacklo_epi16(row(2), row(3));
      if constexpr (kTokens == 4) {
        AddProducts(sums[0], first, _mm256_shuffle_epi32(words, 0x00));
        AddProducts(sums[1], first, _mm256_shuffle_epi32(words, 0xAA));
        AddProducts(sums[0], second, _mm256_shuffle_epi32(words, 0x55));
        AddProducts(sums[1], second, _mm256_shuffle_epi32(words, 0xFF));
      } else if constexpr (kTokens == 2) {
        AddProducts(sums[0], first, _mm256_shuffle_epi32(words, 0xA0));
        AddProducts(sums[0], second, _mm256_shuffle_epi32(words, 0xF5));
      } else {
        AddProducts(sums[0], _mm256_blend_epi32(first, second, 0xAA), words);
      }
    }
  }
  template <int kVectors>
  static void EndRowSums(const __m256i (&sums)[8], __m256i (&of)[4][kVectors]) {
#pragma GCC unroll 4
    for (int o = 0; o < 4; ++o) {
      const __m256i a = sums[2 * o], b = sums[2 * o + 1];
      if constexpr (kVectors == 2) {
        of[o][0] = a, of[o][1] = b;
      } else {
        of[o][0] = AddInt(_mm256_permute2x128_si256(a, b, 0x20), _mm256_permute2x128_si256(a, b, 0x31));
      }
    }
  }
  template <int kTokens>
  static void EndFewSums(const __m256i (&a)[kRowSums<kTokens>], const __m256i (&b)[kRowSums<kTokens>],
                         __m256i (&of)[kTokens]) {
    const auto in_order = [](__m256i sums) { return _mm256_permute4x64_epi64(sums, 0xD8); };
    if constexpr (kTokens == 1) {
      of[0] = in_order(_mm256_hadd_epi32(a[0], b[0]));
    } else if constexpr (kTokens == 2) {
      of[0] = in_order(BitsOf(_mm256_shuffle_ps(FloatOf(a[0]), FloatOf(b[0]), 0x88)));
      of[1] = in_order(BitsOf(_mm256_shuffle_ps(FloatOf(a[0]), FloatOf(b[0]), 0xDD)));
    } else {
      const __m256i a_low = _mm256_unpacklo_epi32(a[0], a[1]), a_high = _mm256_unpackhi_epi32(a[0], a[1]);
      const __m256i b_low = _mm256_unpacklo_epi32(b[0], b[1]), b_high = _mm256_unpackhi_epi32(b[0], b[1]);
      of[0] = in_order(_mm256_unpacklo_epi64(a_low, b_low));
      of[1] = in_order(_mm256_unpackhi_epi64(a_low, b_low));
      of[2] = in_order(_mm256_unpacklo_epi64(a_high, b_high));
      of[3] = in_order(_mm256_unpackhi_epi64(a_high, b_high));
    }
  }

  static __m256i PackBytes(const __m256i (&integers)[4], int32_t offset) {
    const __m256i words = _mm256_set1_epi16(static_cast<int16_t>(offset));
    const __m256i low = _mm256_adds_epi16(_mm256_packs_epi32(integers[0], integers[1]), words);
    const __m256i high = _mm256_adds_epi16(_mm256_packs_epi32(integers[2], integers[3]), words);
    const __m256i in_order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    return _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), in_order);
  }
  template <int kVectors>
  static void StoreRows(int16_t* to, __m256i bytes, int32_t zero) {
    if constexpr (kVectors == 2) bytes = _mm256_shuffle_epi32(bytes, 0xD8);  // see TokenAt
    const __m256i zeros = _mm256_set1_epi16(static_cast<int16_t>(zero));
    const auto words = [&](__m128i half) { return _mm256_sub_epi16(_mm256_cvtepu8_epi16(half), zeros); };
    StoreInt(to, words(_mm256_castsi256_si128(bytes)));
    StoreInt(to + 16, words(_mm256_extracti128_si256(bytes, 1)));
  }

  // Tables: 16 rows of 16 entries. The low four bits of a byte look up an entry of each row, the high four select the
  // row.
  struct ByteTable {
    __m256i rows[16];
    explicit ByteTable(const uint8_t* entries) {
      for (int r = 0; r < 16; ++r) rows[r] = _mm256_broadcastsi128_si256(Load128(entries + 16 * r));
    }
  };
  static __m256i Lookup256(const ByteTable& table, __m256i bytes) {
    const __m256i low = _mm256_and_si256(bytes, SetBytes(0x0f));
    // vpblendvb tests bit 7 of each byte, so bits 4, 5 and 6 are shifted there.
    __m256i found[8];
    const __m256i bit4 = _mm256_slli_epi16(bytes, 3);
    for (int r = 0; r < 8; ++r) {
      found[r] = _mm256_blendv_epi8(_mm256_shuffle_epi8(table.rows[2 * r], low),
                                    _mm256_shuffle_epi8(table.rows[2 * r + 1], low), bit4);
    }
    const __m256i bit5 = _mm256_slli_epi16(bytes, 2);
    for (int r = 0; r < 4; ++r) found[r] = _mm256_blendv_epi8(found[2 * r], found[2 * r + 1], bit5);
    const __m256i bit6 = _mm256_slli_epi16(bytes, 1);
    for (int r = 0; r < 2; ++r) found[r] = _mm256_blendv_epi8(found[2 * r], found[2 * r + 1], bit6);
    return _mm256_blendv_epi8(found[0], found[1], bytes);
  }
  static constexpr bool kGathersBytes = false;

 protected:
  static __m128i Load128(const uint8_t* from) { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from)); }
  static __m128i Load64(const uint8_t* from) { return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)); }
  // Eight words from each of two addresses.
  static __m256i Halves(const int16_t* low, const int16_t* high) {
    const __m128i both[] = {_mm_loadu_si128(reinterpret_cast<const __m128i*>(low)),
                            _mm_loadu_si128(reinterpret_cast<const __m128i*>(high))};
    return _mm256_inserti128_si256(_mm256_castsi128_si256(both[0]), both[1], 1);
  }
  // Loaded from memory by inline assembly: gcc 12 would forward the stored value through registers with shuffles.
  static __m256i RepeatStored(const int32_t& pair) {
    __m256i repeated;
    __asm__("vpbroadcastd %1, %0" : "=x"(repeated) : "m"(pair));
    return repeated;
  }
  // Inline assembly for the reason given at AddPairs.
  static void AddProducts(__m256i& sums, __m256i words, __m256i weights) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(words, weights)));
  }
  template <int kOutput>
  static void AddEightTokens(__m256i (&sums)[8], __m256i low, __m256i high, __m256i words) {
    const __m256i weight = _mm256_shuffle_epi32(words, 0x55 * kOutput);
    AddProducts(sums[2 * kOutput], low, weight);
    AddProducts(sums[2 * kOutput + 1], high, weight);
  }
  // Store pairs of words of tokens 0 and 1, then 2 and 3: inputs 0 … 3 and, in the upper half, 4 … 7.
  static void StoreFourTokens(int16_t* to, __m256i first, __m256i second) {
    const __m256i low = _mm256_unpacklo_epi32(first, second), high = _mm256_unpackhi_epi32(first, second);
    StoreInt(to, _mm256_permute2x128_si256(low, high, 0x20));
    StoreInt(to + 16, _mm256_permute2x128_si256(low, high, 0x31));
  }
  // Store eight consecutive tokens of the interleaved rows, for 16 inputs.
  template <int kTokens>
  static void StoreEightTokens(const __m256i (&tokens)[kTokens], int position, int16_t* to) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
      const __m256i one = tokens[TokenAt<kTokens>(position + i)], next = tokens[TokenAt<kTokens>(position + i + 1)];
      a[i] = _mm256_unpacklo_epi16(one, next);
      a[i + 1] = _mm256_unpackhi_epi16(one, next);
    }
    // a[i] and a[i + 2] hold inputs 0 … 3 (and 4 … 7) of four tokens, a[i + 1] and a[i + 3] inputs 8 … 11.
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 4) {
#pragma GCC unroll 2
      for (int j = 0; j < 2; ++j) {
        b[i + 2 * j] = _mm256_unpacklo_epi32(a[i + j], a[i + j + 2]);
        b[i + 2 * j + 1] = _mm256_unpackhi_epi32(a[i + j], a[i + j + 2]);
      }
    }
    // b[i]: two inputs of four tokens.
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      const int input = i < 2 ? 2 * i : 8 + 2 * (i - 2);
      StoreHalves(to + input * kTokens + position, 4 * kTokens, _mm256_unpacklo_epi64(b[i], b[i + 4]));
      StoreHalves(to + (input + 1) * kTokens + position, 4 * kTokens, _mm256_unpackhi_epi64(b[i], b[i + 4]));
    }
  }
  static void StoreHalves(int16_t* to, int64_t apart, __m256i a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(a));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + apart), _mm256_extracti128_si256(a, 1));
  }
  // Add the sums of pairs of words to sums. Inline assembly: gcc 12 would sum as a tree and spill the products.
  static __m256i AddPairs(__m256i sums, __m256i words) {
    __asm__("vpaddd %1, %0, %0" : "+x"(sums) : "x"(_mm256_madd_epi16(words, _mm256_set1_epi16(1))));
    return sums;
  }
  // AVX2 has no expand instruction. Each byte of the mask selects a shuffle that moves up to eight bytes, from
  // load(position), to their positions.
  template <typename LoadStored>
  static __m256i ExpandEach(uint64_t mask, int first, const LoadStored& load) {
    const auto eight = [&](int position) {
      const uint64_t before = (uint64_t{1} << position) - 1;
      const uint8_t* control = kExpandByteControls.control[(mask >> position) & 0xff];
      return _mm_shuffle_epi8(load(__builtin_popcountll(mask & before)), Load64(control));
    };
    return _mm256_set_m128i(_mm_unpacklo_epi64(eight(first + 16), eight(first + 24)),
                            _mm_unpacklo_epi64(eight(first), eight(first + 8)));
  }
};

}  // namespace
}  // namespace ortolan::simd
