// bf16 in AVX-512 registers. Included by x86_avx512*.cc and x86_amx.cc only: local to each.
#pragma once

#include "matmul/avx512.h"

namespace ortolan {
namespace {

// Spreads the next stored values to the places whose mask bit is set, zero elsewhere. Loads 64 bytes.
// In place, by hand: see ExpandBytes.
inline __m512i ExpandBf16(uint32_t mask, const uint8_t* values) {
  __m512i row = _mm512_loadu_si512(values);
  __asm__("vpexpandw %0, %0%{%1%}%{z%}" : "+v"(row) : "Yk"(_cvtu32_mask32(mask)));
  return row;
}

#if defined(__AVX512BF16__)
// 32 activations, of which `left` or more are x's, as bf16; the others are zero.
inline __m512i RoundToBf16(const float* x, int64_t left) {
  const __m512 low = _mm512_maskz_loadu_ps(FirstLanes(left), x);
  const __m512 high = _mm512_maskz_loadu_ps(FirstLanes(left - 16), x + 16);
  return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}
#endif

}  // namespace
}  // namespace ortolan
