// AVX2 as Int8PanelLoop wants it, and the float sums of all AVX2 kernels. Included by x86_*.cc only; local to each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats/bitmap_int4.h"

namespace ortolan {
namespace {

// Two registers hold the 16 columns of a panel.
struct Avx2FloatSums {
  struct Accumulator {
    __m256 low, high;
  };
  static constexpr int kRowBlock = 4;

  // Lane i is on if i < count.
  static __m256i FirstLanes(int64_t count) {
    return _mm256_cmpgt_epi32(_mm256_set1_epi32(static_cast<int>(count < 8 ? count : 8)),
                              _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
  }

  static Accumulator Zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
  static Accumulator Add(Accumulator a, Accumulator b) {
    return {_mm256_add_ps(a.low, b.low), _mm256_add_ps(a.high, b.high)};
  }
  static Accumulator LoadColumns(const float* from, int columns) {
    return {_mm256_maskload_ps(from, FirstLanes(columns)), _mm256_maskload_ps(from + 8, FirstLanes(columns - 8))};
  }
  static void StoreColumns(float* to, int columns, Accumulator sums) {
    _mm256_maskstore_ps(to, FirstLanes(columns), sums.low);
    _mm256_maskstore_ps(to + 8, FirstLanes(columns - 8), sums.high);
  }
};

// For each byte of mask bits: pshufb control that moves the next stored value, of kBytes bytes, to every place whose
// bit is set, and zero elsewhere (a control byte with its top bit set gives zero).
template <int kBytes>
struct ExpandShuffles {
  constexpr ExpandShuffles() {
    for (int mask = 0; mask < 256; ++mask) {
      int next = 0;
      for (int place = 0; place < 8; ++place) {
        const bool stored = ((mask >> place) & 1) != 0;
        for (int i = 0; i < kBytes; ++i) {
          control[mask][place * kBytes + i] = static_cast<uint8_t>(stored ? next++ : 0x80);
        }
      }
    }
  }
  alignas(64) uint8_t control[256][8 * kBytes] = {};
};

constexpr ExpandShuffles<1> kExpandByteShuffles;

struct Avx2Int8Simd {
  struct Weights {
    __m256i low, high;
  };
  struct Sums {
    __m256i low, high;
  };
  using SpanSums = Sums;
  using Floats = Avx2FloatSums::Accumulator;
  static constexpr int kMostHeld = 0;
  struct Held {};
  static constexpr int kRowBlock = 4;
  static constexpr int kStoredBytes = 64;
  static constexpr uint32_t kInt8Bias = 0;
  static constexpr uint32_t kInt4Bias = 0;

  static __m128i EachByte(int value) { return _mm_set1_epi8(static_cast<char>(value)); }

  // The next weights of up to eight places, from 8 bytes.
  template <typename Decode>
  static __m128i Expand8(uint64_t mask, int byte, const uint8_t* values, Decode decode) {
    const uint64_t before = (uint64_t{1} << (8 * byte)) - 1;
    const __m128i stored =
        _mm_loadl_epi64(reinterpret_cast<const __m128i*>(values + __builtin_popcountll(mask & before)));
    const uint8_t* control = kExpandByteShuffles.control[(mask >> (8 * byte)) & 0xff];
    return _mm_shuffle_epi8(decode(stored), _mm_loadl_epi64(reinterpret_cast<const __m128i*>(control)));
  }
  template <typename Decode>
  static Weights Expand(uint64_t mask, const uint8_t* values, Decode decode) {
    __m128i parts[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      parts[i] = _mm_unpacklo_epi64(Expand8(mask, 2 * i, values, decode), Expand8(mask, 2 * i + 1, values, decode));
    }
    return {_mm256_set_m128i(parts[1], parts[0]), _mm256_set_m128i(parts[3], parts[2])};
  }
  static Weights ExpandInt8(uint64_t mask, const uint8_t* values) {
    return Expand(mask, values, [](__m128i stored) { return stored; });
  }
  static Weights ExpandLow(uint64_t mask, const uint8_t* values) {
    return Expand(mask, values, [](__m128i stored) {
      return _mm_sub_epi8(_mm_and_si128(stored, EachByte(0x0f)), EachByte(ortolan::kInt4Bias));
    });
  }
  static Weights ExpandHigh(uint64_t mask, const uint8_t* values) {
    return Expand(mask, values, [](__m128i stored) {
      const __m128i nibbles = _mm_and_si128(_mm_srli_epi16(stored, 4), EachByte(0x0f));
      return _mm_sub_epi8(nibbles, EachByte(ortolan::kInt4Bias));
    });
  }
  static Weights ExpandHighTimes16(uint64_t mask, const uint8_t* values) {
    return Expand(mask, values, [](__m128i stored) {
      return _mm_sub_epi8(_mm_and_si128(stored, EachByte(0xf0)), EachByte(ortolan::kInt4Bias << 4));
    });
  }
  using Bytes = Weights;
  static Bytes LoadBytes(const uint8_t* values) {
    const __m256i* in = reinterpret_cast<const __m256i*>(values);
    return {_mm256_loadu_si256(in), _mm256_loadu_si256(in + 1)};
  }
  static Weights Int8(const Bytes& bytes) { return bytes; }
  // Each byte's bits of `nibble` less those of 8.
  static __m256i Nibbles(__m256i bytes, int nibble, int bias) {
    return _mm256_sub_epi8(_mm256_and_si256(bytes, _mm256_set1_epi8(static_cast<char>(nibble))),
                           _mm256_set1_epi8(static_cast<char>(bias)));
  }
  static Weights Low(const Bytes& bytes) {
    return {Nibbles(bytes.low, 0x0f, ortolan::kInt4Bias), Nibbles(bytes.high, 0x0f, ortolan::kInt4Bias)};
  }
  static Weights High(const Bytes& bytes) {
    return {Nibbles(_mm256_srli_epi16(bytes.low, 4), 0x0f, ortolan::kInt4Bias),
            Nibbles(_mm256_srli_epi16(bytes.high, 4), 0x0f, ortolan::kInt4Bias)};
  }
  static Weights HighTimes16(const Bytes& bytes) {
    return {Nibbles(bytes.low, 0xf0, ortolan::kInt4Bias << 4), Nibbles(bytes.high, 0xf0, ortolan::kInt4Bias << 4)};
  }
  static void Store(const Weights& weights, uint8_t* to) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), weights.low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to) + 1, weights.high);
  }
  static Weights Load(const uint8_t* from) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + 1)};
  }

  static constexpr int kMostChains = 4;
  static SpanSums StartSpan(const Sums& sums) { return sums; }
  static Sums EndSpan(const Sums&, const SpanSums& span_sums) { return span_sums; }
  static Sums Broadcast(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
  static Sums Add(Sums a, Sums b) { return {_mm256_add_epi32(a.low, b.low), _mm256_add_epi32(a.high, b.high)}; }
  static Sums DivideBy16(Sums sums) { return {_mm256_srai_epi32(sums.low, 4), _mm256_srai_epi32(sums.high, 4)}; }
  // |w| is the unsigned operand and x takes the sign of w: 2 * 128 * 127 does not saturate, and -128 is its own |w|.
  static __m256i MultiplyAdd(__m256i sums, __m256i weights, __m256i x) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(weights), _mm256_sign_epi8(x, weights));
    return _mm256_add_epi32(sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
  }
  static Sums MultiplyAdd(Sums sums, const Weights& weights, const int8_t* quad) {
    int32_t bits;
    __builtin_memcpy(&bits, quad, sizeof(bits));
    const __m256i x = _mm256_set1_epi32(bits);
    return {MultiplyAdd(sums.low, weights.low, x), MultiplyAdd(sums.high, weights.high, x)};
  }
  static Sums LoadWaitingSums(const uint8_t* from) {
    return {_mm256_load_si256(reinterpret_cast<const __m256i*>(from)),
            _mm256_load_si256(reinterpret_cast<const __m256i*>(from) + 1)};
  }
  static void StoreWaitingSums(uint8_t* to, Sums sums) {
    _mm256_store_si256(reinterpret_cast<__m256i*>(to), sums.low);
    _mm256_store_si256(reinterpret_cast<__m256i*>(to) + 1, sums.high);
  }

  static Floats Add(Floats a, Floats b) { return Avx2FloatSums::Add(a, b); }
  static Floats Zero() { return Avx2FloatSums::Zero(); }
  static Floats BroadcastFloat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
  static Floats ToFloats(Sums sums) { return {_mm256_cvtepi32_ps(sums.low), _mm256_cvtepi32_ps(sums.high)}; }
  static Floats Multiply(Floats a, Floats b) { return {_mm256_mul_ps(a.low, b.low), _mm256_mul_ps(a.high, b.high)}; }
  static Floats MultiplyAdd(Floats a, Floats b, Floats c) {
    return {_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high)};
  }
  static Floats LoadWaiting(const uint8_t* from) {
    const float* in = reinterpret_cast<const float*>(from);
    return {_mm256_load_ps(in), _mm256_load_ps(in + 8)};
  }
  static void StoreWaiting(uint8_t* to, Floats sums) {
    float* out = reinterpret_cast<float*>(to);
    _mm256_store_ps(out, sums.low);
    _mm256_store_ps(out + 8, sums.high);
  }
  static Floats LoadFloatScales(const uint8_t* from) {
    const float* in = reinterpret_cast<const float*>(from);
    return {_mm256_loadu_ps(in), _mm256_loadu_ps(in + 8)};
  }
  static __m256 Bf16ToFloats(const uint8_t* from) {
    const __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
  }
  static Floats LoadBf16Scales(const uint8_t* from) { return {Bf16ToFloats(from), Bf16ToFloats(from + 16)}; }
  static Floats LoadF16Scales(const uint8_t* from) {
    const __m128i* in = reinterpret_cast<const __m128i*>(from);
    return {_mm256_cvtph_ps(_mm_loadu_si128(in)), _mm256_cvtph_ps(_mm_loadu_si128(in + 1))};
  }
  static __m256i Load8WordsLess8(const uint8_t* from) {
    const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
    return _mm256_and_si256(_mm256_sub_epi32(bytes, _mm256_set1_epi32(8)), _mm256_set1_epi32(0xffff));
  }
  static Sums LoadWordsLess8(const uint8_t* from) { return {Load8WordsLess8(from), Load8WordsLess8(from + 8)}; }
  static Sums MultiplyAddWords(Sums sums, Sums words, int32_t word) {
    const __m256i each = _mm256_set1_epi32(word);
    return Add(sums, {_mm256_madd_epi16(words.low, each), _mm256_madd_epi16(words.high, each)});
  }
  static Floats LoadColumns(const float* from, int columns) { return Avx2FloatSums::LoadColumns(from, columns); }
  static void StoreColumns(float* to, int columns, Floats sums) { Avx2FloatSums::StoreColumns(to, columns, sums); }

  static uint32_t MaxAbsBits(const float* x, int64_t k) {
    __m256i largest = _mm256_setzero_si256();
    for (int64_t l = 0; l < k; l += 8) {
      const __m256i bits = _mm256_castps_si256(_mm256_maskload_ps(x + l, Avx2FloatSums::FirstLanes(k - l)));
      largest = _mm256_max_epu32(largest, _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)));
    }
    alignas(32) uint32_t lanes[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), largest);
    uint32_t result = 0;
    for (const uint32_t lane : lanes) result = lane > result ? lane : result;
    return result;
  }
  static __m256i Quantize32(const float* x, int64_t left, float factor, char* first, char* second) {
    __m256i rounded[4];
    for (int i = 0; i < 4; ++i) {
      const __m256 value = _mm256_maskload_ps(x + 8 * i, Avx2FloatSums::FirstLanes(left - 8 * i));
      rounded[i] = _mm256_cvtps_epi32(_mm256_mul_ps(value, _mm256_set1_ps(factor)));
    }
    const __m256i words[2] = {_mm256_packs_epi32(rounded[0], rounded[1]), _mm256_packs_epi32(rounded[2], rounded[3])};
    // The packs work in each half by itself; this puts the groups of four back in order.
    const __m256i bytes =
        _mm256_permutevar8x32_epi32(_mm256_packs_epi16(words[0], words[1]), _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(first), _mm256_castsi256_si128(bytes));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(second), _mm256_extracti128_si256(bytes, 1));
    return _mm256_add_epi32(_mm256_add_epi32(rounded[0], rounded[1]), _mm256_add_epi32(rounded[2], rounded[3]));
  }
};

}  // namespace
}  // namespace ortolan
