// The AVX-512 vectors of AttentionLoop. Included by x86_avx512*.cc only; local to each.
#pragma once

#include "nomad_attention/attention_loop.h"
#include "simd/avx512.h"

namespace ortolan {
namespace {

struct Avx512Attention : simd::avx512 {
  static constexpr int64_t kUnit = 1;
  static constexpr int kVectors = 4;
  static constexpr int kTileRows[] = {16, 8, 8, 4};
  static constexpr int kTileVectors = 4;
  static constexpr int kTileKeys[] = {8, 8, 4, 4};

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

  static __m512 SelectLess(__m512 a, __m512 b, __m512 x, __m512 y) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), y, x);
  }

  static __m512 Exp2(__m512 a) {
    // 2^f for |f| <= 1/2, minimax with the constant fixed at 1: relative error 1.9 x 2^-24.
    constexpr float kExp2[] = {1.0f, 0x1.62e42ap-1f, 0x1.ebf9bcp-3f, 0x1.c6b752p-5f, 0x1.3cea88p-7f, 0x1.5bba14p-10f};
    const __m512 fraction = _mm512_reduce_ps(a, 0);  // a - round(a), and 0 of -Inf
    return _mm512_scalef_ps(VectorMath<Avx512Attention>::Polynomial(fraction, kExp2), _mm512_sub_ps(a, fraction));
  }

  static __m512 Pack(__m512 a, __m512) { return a; }
  static void PackRow(const float* from, int64_t n, float* to) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) Store(to + i, Load(from + i));
    if (i < n) Store(to + i, LoadFirst(from + i, n - i));
  }
  static __m512 MultiplyAddUnits(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
};

}  // namespace
}  // namespace ortolan
