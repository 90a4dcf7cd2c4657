// AVX-512 without BF16: expand as bf16, split into even and odd inputs as float32, two FMAs a pair.
#include <immintrin.h>

#include "sparse_amx_matmul/avx512_expand.h"
#include "sparse_amx_matmul/panel_loop.h"

namespace ortolan {
namespace {

struct Avx512Simd {
  using Activation = float;
  using Accumulator = __m512;
  struct Weights {
    __m512 even, odd;
  };
  static constexpr int kMaxRows = 16;
  static constexpr int kStoredBytes = 128;

  static Weights Expand(uint32_t mask, const uint8_t* values) {
    const __m512i pairs = ExpandBf16(mask, values);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static void Store(Weights weights, uint8_t* to) {
    _mm512_store_ps(to, weights.even);
    _mm512_store_ps(to + 64, weights.odd);
  }
  static Weights Load(const uint8_t* from) { return {_mm512_load_ps(from), _mm512_load_ps(from + 64)}; }

  static __m512 Zero() { return _mm512_setzero_ps(); }
  static __m512 Add(__m512 a, __m512 b) { return _mm512_add_ps(a, b); }
  static __mmask16 Columns(int columns) { return static_cast<__mmask16>((1u << columns) - 1); }
  static __m512 LoadColumns(const float* from, int columns) { return _mm512_maskz_loadu_ps(Columns(columns), from); }
  static void StoreColumns(float* to, int columns, __m512 sums) { _mm512_mask_storeu_ps(to, Columns(columns), sums); }
  static __m512 MultiplyAdd(__m512 sums, Weights weights, const float* pair) {
    sums = _mm512_fmadd_ps(_mm512_set1_ps(pair[0]), weights.even, sums);
    return _mm512_fmadd_ps(_mm512_set1_ps(pair[1]), weights.odd, sums);
  }
};

}  // namespace

void PackAvx512(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed) {
  float* out = static_cast<float*>(packed);
  const int64_t padded_k = BitmapPaddedK(k);
  for (int64_t i = 0; i < m; ++i) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    for (int64_t l = 0; l < padded_k; l += 16, out += 16) {
      const int64_t left = k - l;
      const __mmask16 inside = left >= 16 ? 0xffff : left <= 0 ? 0 : static_cast<__mmask16>((1u << left) - 1);
      const __m512 value = _mm512_maskz_loadu_ps(inside, row + l);
      const __m512i bits = _mm512_castps_si512(value);
      const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      const __m512i to_even = _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff));
      __m512i rounded = _mm512_add_epi32(bits, to_even);
      const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
      rounded = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
      _mm512_storeu_si512(out, _mm512_and_si512(rounded, _mm512_set1_epi32(static_cast<int>(0xffff0000u))));
    }
  }
}

void MultiplyAvx512(const SparseMatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  PanelLoop<Avx512Simd>::Run(args, panel_begin, panel_end);
}

}  // namespace ortolan
