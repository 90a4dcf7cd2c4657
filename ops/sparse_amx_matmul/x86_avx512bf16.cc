// AVX-512 with BF16: vpexpandw, then vdpbf16ps with a broadcast pair of activations.
#include <immintrin.h>

#include "sparse_amx_matmul/avx512_bf16.h"
#include "sparse_amx_matmul/panel_loop.h"

namespace ortolan {
namespace {

struct Avx512Bf16Simd : Avx512FloatSums {
  using Activation = uint16_t;
  using Weights = __m512i;
  static constexpr int kStoredBytes = 64;

  static void Round(const float* x, int64_t left, uint16_t* to) { _mm512_store_si512(to, RoundToBf16(x, left)); }
  static __m512i Expand(uint32_t mask, const uint8_t* values) { return ExpandBf16(mask, values); }
  static __m512i Expand(const uint8_t* values) { return _mm512_loadu_si512(values); }
  static void Store(__m512i weights, uint8_t* to) { _mm512_store_si512(to, weights); }
  static __m512i Load(const uint8_t* from) { return _mm512_load_si512(from); }

  static __m512 MultiplyAdd(__m512 sums, __m512i weights, const uint16_t* pair) {
    int bits;
    __builtin_memcpy(&bits, pair, sizeof(bits));
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(bits));
  }

  static constexpr int kMostHeld = 4;
  using Held = __m512i;
  static __m512i Hold(const uint16_t* pairs) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pairs)));
  }
  static __m512 MultiplyAdd(__m512 sums, __m512i weights, __m512i held, int row) {
    return _mm512_dpbf16_ps(sums, (__m512bh)weights, (__m512bh)RepeatDword(held, row));
  }
};

}  // namespace

namespace avx512bf16 {

void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackPairs<Avx512Bf16Simd>(x, x_row_bytes, m, w.k, packed);
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Avx512Bf16Simd>(args, panel_begin, panel_end);
}

}  // namespace avx512bf16
}  // namespace ortolan
