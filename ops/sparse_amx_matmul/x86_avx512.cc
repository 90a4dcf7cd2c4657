// AVX-512. bf16 without BF16 instructions: expand as bf16, split into even and odd inputs as float32, two FMAs a pair.
// int8 and int4: vpexpandb, then vpdpbusd, whose weights are unsigned (increased by 128 or 8) and whose activations are
// signed: the excess is a sum of activations, known when they are packed.
#include <immintrin.h>

#include "matmul/avx512_int8.h"
#include "sparse_amx_matmul/avx512_bf16.h"
#include "sparse_amx_matmul/panel_loop.h"
#include "sparse_amx_matmul/sparse_int8_format.h"

namespace ortolan {
namespace {

struct Avx512Simd : Avx512FloatSums {
  using Activation = float;
  struct Weights {
    __m512 even, odd;
  };
  static constexpr int kMostHeld = 0;
  struct Held {};
  static constexpr int kStoredBytes = 128;

  static __m512i RoundToBf16(__m512 value) {
    const __m512i bits = _mm512_castps_si512(value);
    const __m512i lowest = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(lowest, _mm512_set1_epi32(0x7fff)));
    const __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
    const __m512i quiet = _mm512_mask_or_epi32(rounded, nan, bits, _mm512_set1_epi32(0x00400000));
    return _mm512_and_si512(quiet, _mm512_set1_epi32(static_cast<int>(0xffff0000u)));
  }
  static void Round(const float* x, int64_t left, float* to) {
    _mm512_store_si512(to, RoundToBf16(_mm512_maskz_loadu_ps(FirstLanes(left), x)));
    _mm512_store_si512(to + 16, RoundToBf16(_mm512_maskz_loadu_ps(FirstLanes(left - 16), x + 16)));
  }
  static Weights Expand(uint32_t mask, const uint8_t* values) { return Split(ExpandBf16(mask, values)); }
  static Weights Expand(const uint8_t* values) { return Split(_mm512_loadu_si512(values)); }
  static Weights Split(__m512i pairs) {
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static void Store(Weights weights, uint8_t* to) {
    _mm512_store_ps(to, weights.even);
    _mm512_store_ps(to + 64, weights.odd);
  }
  static Weights Load(const uint8_t* from) { return {_mm512_load_ps(from), _mm512_load_ps(from + 64)}; }

  static __m512 MultiplyAdd(__m512 sums, Weights weights, const float* pair) {
    sums = _mm512_fmadd_ps(_mm512_set1_ps(pair[0]), weights.even, sums);
    return _mm512_fmadd_ps(_mm512_set1_ps(pair[1]), weights.odd, sums);
  }
};

}  // namespace

namespace avx512 {

void PackInt8(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackQuantizedRows<Avx512Int8Simd>(w, x, x_row_bytes, m, packed);
}

void PackInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackInt8(w, x, x_row_bytes, m, packed);
}

void MultiplyInt8(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithFormat<8>(args,
                [&]<typename Format>() { Int8PanelLoop<Avx512Int8Simd, Format>::Run(args, panel_begin, panel_end); });
}

void MultiplyInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithFormat<4>(args,
                [&]<typename Format>() { Int8PanelLoop<Avx512Int8Simd, Format>::Run(args, panel_begin, panel_end); });
}

void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackPairs<Avx512Simd>(x, x_row_bytes, m, w.k, packed);
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Avx512Simd>(args, panel_begin, panel_end);
}

}  // namespace avx512
}  // namespace ortolan
