// AVX-512 with VNNI but without VBMI (Cascade Lake): the vectors of avx512bw.h with exact dot products of bytes. Local
// to each file that includes it.
#pragma once

#include "simd/avx512bw.h"

namespace ortolan::simd {
namespace {

struct avx512vnni : avx512bw {
  // Inline assembly: gcc 12 copies the sums around each intrinsic.
  static __m512i DotPair(__m512i sums, __m512i a, __m512i b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
  }
  static __m512i DotQuad(__m512i sums, __m512i a, __m512i b) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(a), "v"(b));
    return sums;
  }
  static constexpr uint32_t kInt8Bias = 128;
  static __m512i DotInt8(__m512i sums, __m512i a, __m512i b) { return DotQuad(sums, a, b); }
  static constexpr bool kNarrowNibbleSums = false;
  static constexpr bool kMultipliesPairs = false;
  static constexpr bool kNibblesTimes16 = true;
  static __m512i StartNibbleSums(__m512i sums) { return sums; }
  static __m512i DotNibbles(__m512i sums, __m512i a, __m512i b) { return DotQuad(sums, a, b); }
  static __m512i EndNibbleSums(__m512i, __m512i sums) { return sums; }

  // Four products in one assembly statement: gcc 12 copies sums between statements.
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
};

}  // namespace
}  // namespace ortolan::simd
