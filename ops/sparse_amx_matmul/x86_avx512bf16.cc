// AVX-512 with BF16: vpexpandw, then vdpbf16ps with a broadcast pair of activations.
#include <immintrin.h>

#include "sparse_amx_matmul/avx512_expand.h"
#include "sparse_amx_matmul/panel_loop.h"

namespace ortolan {
namespace {

struct Avx512Bf16Simd {
  using Activation = uint16_t;
  using Weights = __m512i;
  using Accumulator = __m512;
  static constexpr int kMaxRows = 16;
  static constexpr int kStoredBytes = 64;

  static __m512i Expand(uint32_t mask, const uint8_t* values) { return ExpandBf16(mask, values); }
  static void Store(__m512i weights, uint8_t* to) { _mm512_store_si512(to, weights); }
  static __m512i Load(const uint8_t* from) { return _mm512_load_si512(from); }

  static __m512 Zero() { return _mm512_setzero_ps(); }
  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __mmask16 Columns(int columns) { return static_cast<__mmask16>((1u << columns) - 1); }
  static __m512 LoadColumns(const float* from, int columns) { return _mm512_maskz_loadu_ps(Columns(columns), from); }
  static void StoreColumns(float* to, int columns, __m512 sums) { _mm512_mask_storeu_ps(to, Columns(columns), sums); }
  static __m512 MultiplyAdd(__m512 sums, __m512i weights, const uint16_t* pair) {
    int bits;
    __builtin_memcpy(&bits, pair, sizeof(bits));
    return _mm512_dpbf16_ps(sums, (__m512bh)_mm512_set1_epi32(bits), (__m512bh)weights);
  }
};

}  // namespace

void PackAvx512Bf16(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed) {
  uint8_t* out = static_cast<uint8_t*>(packed);
  const int64_t padded_k = BitmapPaddedK(k);
  for (int64_t i = 0; i < m; ++i) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    for (int64_t l = 0; l < padded_k; l += 16, out += 32) {
      const int64_t left = k - l;
      const __mmask16 inside = left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
      const __m256bh rounded = _mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(inside, row + l));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), (__m256i)rounded);
    }
  }
}

void MultiplyAvx512Bf16(const SparseMatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  PanelLoop<Avx512Bf16Simd>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan
