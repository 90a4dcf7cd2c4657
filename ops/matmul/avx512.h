// What the AVX-512 and AMX kernels share. Included by x86_avx512*.cc and x86_amx.cc only: local to each.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "formats/bitmap_int4.h"

namespace ortolan {
namespace {

// Spreads the next stored bytes to the places whose mask bit is set, zero elsewhere. Loads 64 bytes.
//
// In place, by hand: on Zen 5 vpexpand waits for the old value of its destination even with {z} (1.11 against 0.22 ns
// when every expansion names one register, as gcc's do), and on Zen 4 its memory form is slow. Expanding the register
// just loaded has neither fault.
inline __m512i ExpandBytes(uint64_t mask, const uint8_t* values) {
  __m512i row = _mm512_loadu_si512(values);
  __asm__("vpexpandb %0, %0%{%1%}%{z%}" : "+v"(row) : "Yk"(_cvtu64_mask64(mask)));
  return row;
}

// The dword `which` of each 128 bits, repeated in them. `which` is a constant where this is unrolled.
inline __m512i RepeatDword(__m512i dwords, int which) {
  switch (which) {
    case 0:
      return _mm512_shuffle_epi32(dwords, _MM_PERM_AAAA);
    case 1:
      return _mm512_shuffle_epi32(dwords, _MM_PERM_BBBB);
    case 2:
      return _mm512_shuffle_epi32(dwords, _MM_PERM_CCCC);
    default:
      return _mm512_shuffle_epi32(dwords, _MM_PERM_DDDD);
  }
}

inline __m512i EachByte(int value) { return _mm512_set1_epi8(static_cast<char>(value)); }

// 64 int4 weights (formats/bitmap_int4.h), increased by 8: 0 … 15.
inline __m512i LowNibbles(__m512i bytes) { return _mm512_and_si512(bytes, EachByte(0x0f)); }
inline __m512i HighNibbles(__m512i bytes) { return LowNibbles(_mm512_srli_epi16(bytes, 4)); }

// Spreads the next of them to the places whose mask bit is set, 8 elsewhere. Not in place: the register expanded into
// is where the 8 come from, so the dependency is real, and harmless.
inline __m512i ExpandLowNibbles(uint64_t mask, const uint8_t* values) {
  return _mm512_mask_expand_epi8(EachByte(kInt4Bias), _cvtu64_mask64(mask), LowNibbles(_mm512_loadu_si512(values)));
}
inline __m512i ExpandHighNibbles(uint64_t mask, const uint8_t* values) {
  return _mm512_mask_expand_epi8(EachByte(kInt4Bias), _cvtu64_mask64(mask), HighNibbles(_mm512_loadu_si512(values)));
}

// The mask of lanes 0 … count-1; none for a negative count, all from 16 on.
inline __mmask16 FirstLanes(int64_t count) {
  if (count >= 16) return 0xffff;
  return count <= 0 ? 0 : static_cast<__mmask16>((1u << count) - 1);
}

// 16 scales, as float or as bf16, at any address.
inline __m512 LoadFloatScales(const uint8_t* from) { return _mm512_loadu_ps(from); }
inline __m512 LoadBf16Scales(const uint8_t* from) {
  const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
}

// The sums of PanelLoop's Simd: one register holds the 16 columns of a panel.
struct Avx512FloatSums {
  using Accumulator = __m512;
  static constexpr int kRowBlock = 16;

  static __m512 Zero() { return _mm512_setzero_ps(); }
  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __m512 LoadColumns(const float* from, int columns) { return _mm512_maskz_loadu_ps(FirstLanes(columns), from); }
  static void StoreColumns(float* to, int columns, __m512 sums) {
    _mm512_mask_storeu_ps(to, FirstLanes(columns), sums);
  }
};

}  // namespace
}  // namespace ortolan
