// The AVX2 vectors of AttentionLoop. Included by x86_avx2.cc only.
#pragma once

#include "nomad_attention/attention_loop.h"
#include "simd/avx2.h"

namespace ortolan {
namespace {

struct Avx2Attention : simd::avx2 {
  static constexpr int64_t kUnit = 1;
  static constexpr int kVectors = 2;
  static constexpr int kTileRows[] = {8, 4};
  static constexpr int kTileVectors = 2;
  static constexpr int kTileKeys[] = {8, 4};

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

  static __m256 SelectLess(__m256 a, __m256 b, __m256 x, __m256 y) {
    return _mm256_blendv_ps(y, x, _mm256_cmp_ps(a, b, _CMP_LT_OQ));
  }
  static __m256 Exp2(__m256 a) { return VectorMath<Avx2Attention>::Exp2(Max(Set(-127.0f), a), Set(1.0f)); }

  static __m256 Pack(__m256 a, __m256) { return a; }
  static void PackRow(const float* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) Store(to + i, Load(from + i));
    if (i < n) Store(to + i, LoadFirst(from + i, n - i));
  }
  static __m256 MultiplyAddUnits(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace ortolan
