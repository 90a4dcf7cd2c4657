// AVX-512 VNNI as Int8PanelLoop wants it. Included by x86_*.cc only; local to each.
//
// vpdpbusd multiplies unsigned weights (increased by 128 or 8) with signed activations: the excess is a sum of
// activations, known when they are packed.
#pragma once

#include <immintrin.h>

#include "matmul/avx512.h"

namespace ortolan {
namespace {

struct Avx512Int8Simd {
  using Weights = __m512i;
  using Sums = __m512i;
  using SpanSums = __m512i;
  using Floats = __m512;
  static constexpr int kRowBlock = 16;
  static constexpr int kStoredBytes = 64;
  static constexpr uint32_t kInt8Bias = 128;
  static constexpr uint32_t kInt4Bias = ortolan::kInt4Bias;

  static __m512i ExpandInt8(uint64_t mask, const uint8_t* values) {
    return _mm512_xor_si512(ExpandBytes(mask, values), EachByte(0x80));
  }
  static __m512i ExpandLow(uint64_t mask, const uint8_t* values) { return ExpandLowNibbles(mask, values); }
  static __m512i ExpandHigh(uint64_t mask, const uint8_t* values) { return ExpandHighNibbles(mask, values); }
  static __m512i ExpandHighTimes16(uint64_t mask, const uint8_t* values) {
    return _mm512_mask_expand_epi8(EachByte(kInt4Bias << 4), _cvtu64_mask64(mask), HighTimes16(LoadBytes(values)));
  }
  using Bytes = __m512i;
  static __m512i LoadBytes(const uint8_t* values) { return _mm512_loadu_si512(values); }
  static __m512i Int8(__m512i bytes) { return _mm512_xor_si512(bytes, EachByte(0x80)); }
  static __m512i Low(__m512i bytes) { return LowNibbles(bytes); }
  static __m512i High(__m512i bytes) { return HighNibbles(bytes); }
  static __m512i HighTimes16(__m512i bytes) { return _mm512_and_si512(bytes, EachByte(0xf0)); }
  static void Store(__m512i weights, uint8_t* to) { _mm512_store_si512(to, weights); }
  static __m512i Load(const uint8_t* from) { return _mm512_load_si512(from); }

  static constexpr int kMostChains = 4;
  static __m512i StartSpan(__m512i sums) { return sums; }
  static __m512i EndSpan(__m512i, __m512i span_sums) { return span_sums; }
  static __m512i Broadcast(int32_t value) { return _mm512_set1_epi32(value); }
  static __m512i Add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i DivideBy16(__m512i sums) { return _mm512_srai_epi32(sums, 4); }
  static __m512i MultiplyAdd(__m512i sums, __m512i weights, const int8_t* quad) {
    int32_t bits;
    __builtin_memcpy(&bits, quad, sizeof(bits));
    // By hand: gcc 12 copies the sums around each of its own.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(_mm512_set1_epi32(bits)));
    return sums;
  }
  static constexpr int kMostHeld = 4;
  using Held = __m512i;
  static __m512i Hold(const int8_t* quads) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quads)));
  }
  static __m512i MultiplyAdd(__m512i sums, __m512i weights, __m512i held, int row) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(RepeatDword(held, row)));
    return sums;
  }
  static __m512i LoadWaitingSums(const uint8_t* from) { return _mm512_load_si512(from); }
  static void StoreWaitingSums(uint8_t* to, __m512i sums) { _mm512_store_si512(to, sums); }
  static __m512 LoadWaiting(const uint8_t* from) { return _mm512_load_ps(from); }
  static void StoreWaiting(uint8_t* to, __m512 sums) { _mm512_store_ps(to, sums); }

  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 Zero() { return _mm512_setzero_ps(); }
  static __m512 BroadcastFloat(float value) { return _mm512_set1_ps(value); }
  static __m512 ToFloats(__m512i sums) { return _mm512_cvtepi32_ps(sums); }
  static __m512 Multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 MultiplyAdd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 LoadFloatScales(const uint8_t* from) { return ortolan::LoadFloatScales(from); }
  static __m512 LoadBf16Scales(const uint8_t* from) { return ortolan::LoadBf16Scales(from); }
  static __m512 LoadF16Scales(const uint8_t* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static __m512i LoadWordsLess8(const uint8_t* from) {
    const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    return _mm512_and_si512(_mm512_sub_epi32(bytes, _mm512_set1_epi32(8)), _mm512_set1_epi32(0xffff));
  }
  static __m512i MultiplyAddWords(__m512i sums, __m512i words, int32_t word) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(words), "v"(_mm512_set1_epi32(word)));
    return sums;
  }
  static __m512 LoadColumns(const float* from, int columns) { return Avx512FloatSums::LoadColumns(from, columns); }
  static void StoreColumns(float* to, int columns, __m512 sums) { Avx512FloatSums::StoreColumns(to, columns, sums); }

  static uint32_t MaxAbsBits(const float* x, int64_t k) {
    __m512i largest = _mm512_setzero_si512();
    for (int64_t l = 0; l < k; l += 16) {
      const __m512i bits = _mm512_maskz_loadu_epi32(FirstLanes(k - l), x + l);
      largest = _mm512_max_epu32(largest, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    return _mm512_reduce_max_epu32(largest);
  }
  static __m256i Quantize32(const float* x, int64_t left, float factor, char* first, char* second) {
    const __m512i low = Quantize16(x, left, factor, first);
    const __m512i sums = _mm512_add_epi32(low, Quantize16(x + 16, left - 16, factor, second));
    return _mm256_add_epi32(_mm512_castsi512_si256(sums), _mm512_extracti64x4_epi64(sums, 1));
  }
  static __m512i Quantize16(const float* x, int64_t left, float factor, char* to) {
    const __m512 value = _mm512_maskz_loadu_ps(FirstLanes(left), x);
    const __m512i rounded = _mm512_cvtps_epi32(_mm512_mul_ps(value, _mm512_set1_ps(factor)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_cvtsepi32_epi8(rounded));
    return rounded;
  }
};

}  // namespace
}  // namespace ortolan
