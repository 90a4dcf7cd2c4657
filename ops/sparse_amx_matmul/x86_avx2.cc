// AVX2 has no expand: each byte of the mask picks a shuffle that spreads up to eight values to their places.
#include <immintrin.h>

#include "matmul/avx2_int8.h"
#include "sparse_amx_matmul/panel_loop.h"
#include "sparse_amx_matmul/sparse_int8_format.h"

namespace ortolan {
namespace {

constexpr ExpandShuffles<2> kExpandPairShuffles;

struct Avx2Simd : Avx2FloatSums {
  using Activation = float;
  struct Weights {
    __m256 even_low, odd_low, even_high, odd_high;
  };
  static constexpr int kMostHeld = 0;
  struct Held {};
  static constexpr int kStoredBytes = 128;

  static __m256i RoundToBf16(__m256 value) {
    const __m256i bits = _mm256_castps_si256(value);
    const __m256i lowest = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(lowest, _mm256_set1_epi32(0x7fff)));
    const __m256i quiet = _mm256_or_si256(bits, _mm256_set1_epi32(0x00400000));
    const __m256 nan = _mm256_cmp_ps(value, value, _CMP_UNORD_Q);
    const __m256 chosen = _mm256_blendv_ps(_mm256_castsi256_ps(rounded), _mm256_castsi256_ps(quiet), nan);
    return _mm256_and_si256(_mm256_castps_si256(chosen), _mm256_set1_epi32(static_cast<int>(0xffff0000u)));
  }
  static void Round(const float* x, int64_t left, float* to) {
    for (int i = 0; i < 32; i += 8) {
      const __m256 value = _mm256_maskload_ps(x + i, FirstLanes(left - i));
      _mm256_store_si256(reinterpret_cast<__m256i*>(to + i), RoundToBf16(value));
    }
  }

  static __m128i Expand8(uint32_t mask, const uint8_t* values) {
    const __m128i stored = _mm_loadu_si128(reinterpret_cast<const __m128i*>(values));
    const __m128i control = _mm_load_si128(reinterpret_cast<const __m128i*>(kExpandPairShuffles.control[mask & 0xff]));
    return _mm_shuffle_epi8(stored, control);
  }
  static __m256 Even(__m256i pairs) { return _mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)); }
  static __m256 Odd(__m256i pairs) {
    return _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))));
  }
  static Weights Expand(uint32_t mask, const uint8_t* values) {
    const uint8_t* second = values + __builtin_popcount(mask & 0xffu) * kValueBytes;
    const uint8_t* third = values + __builtin_popcount(mask & 0xffffu) * kValueBytes;
    const uint8_t* fourth = values + __builtin_popcount(mask & 0xffffffu) * kValueBytes;
    return Split(_mm256_set_m128i(Expand8(mask >> 8, second), Expand8(mask, values)),
                 _mm256_set_m128i(Expand8(mask >> 24, fourth), Expand8(mask >> 16, third)));
  }
  static Weights Expand(const uint8_t* values) {
    const __m256i* in = reinterpret_cast<const __m256i*>(values);
    return Split(_mm256_loadu_si256(in), _mm256_loadu_si256(in + 1));
  }
  static Weights Split(__m256i low, __m256i high) { return {Even(low), Odd(low), Even(high), Odd(high)}; }
  static void Store(const Weights& weights, uint8_t* to) {
    float* out = reinterpret_cast<float*>(to);
    _mm256_store_ps(out, weights.even_low);
    _mm256_store_ps(out + 8, weights.odd_low);
    _mm256_store_ps(out + 16, weights.even_high);
    _mm256_store_ps(out + 24, weights.odd_high);
  }
  static Weights Load(const uint8_t* from) {
    const float* in = reinterpret_cast<const float*>(from);
    return {_mm256_load_ps(in), _mm256_load_ps(in + 8), _mm256_load_ps(in + 16), _mm256_load_ps(in + 24)};
  }

  static Accumulator MultiplyAdd(Accumulator sums, const Weights& weights, const float* pair) {
    const __m256 even = _mm256_broadcast_ss(pair);
    const __m256 odd = _mm256_broadcast_ss(pair + 1);
    return {_mm256_fmadd_ps(odd, weights.odd_low, _mm256_fmadd_ps(even, weights.even_low, sums.low)),
            _mm256_fmadd_ps(odd, weights.odd_high, _mm256_fmadd_ps(even, weights.even_high, sums.high))};
  }
};

}  // namespace

namespace avx2 {

void PackInt8(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackQuantizedRows<Avx2Int8Simd>(w, x, x_row_bytes, m, packed);
}

void PackInt4(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackInt8(w, x, x_row_bytes, m, packed);
}

void MultiplyInt8(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithFormat<8>(args,
                [&]<typename Format>() { Int8PanelLoop<Avx2Int8Simd, Format>::Run(args, panel_begin, panel_end); });
}

void MultiplyInt4(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithFormat<4>(args,
                [&]<typename Format>() { Int8PanelLoop<Avx2Int8Simd, Format>::Run(args, panel_begin, panel_end); });
}

void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  PackPairs<Avx2Simd>(x, x_row_bytes, m, w.k, packed);
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Avx2Simd>(args, panel_begin, panel_end);
}

}  // namespace avx2
}  // namespace ortolan
