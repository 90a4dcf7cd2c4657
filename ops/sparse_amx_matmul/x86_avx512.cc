// AVX-512. bf16 without BF16 instructions: expand as bf16, split into even and odd inputs as float32, two FMAs a pair.
// int8 and int4: vpexpandb, then vpdpbusd, whose weights are unsigned (increased by 128 or 8) and whose activations are
// signed: the excess is a sum of activations, known when they are packed.
#include <immintrin.h>

#include "sparse_amx_matmul/avx512_expand.h"
#include "sparse_amx_matmul/panel_loop.h"
#include "sparse_amx_matmul/panel_loop_int8.h"

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

struct Avx512Int8Simd {
  using Weights = __m512i;
  using Sums = __m512i;
  using Floats = __m512;
  static constexpr int kRowBlock = 16;
  static constexpr int kStoredBytes = 64;
  static constexpr uint32_t kInt8Bias = 128;
  static constexpr uint32_t kInt4Bias = ortolan::kInt4Bias;

  static __m512i ExpandInt8(uint64_t mask, const uint8_t* values) {
    return _mm512_xor_si512(ExpandBytes(mask, values), EachByte(0x80));
  }
  static __m512i ExpandLow(uint64_t mask, const uint8_t* values) { return ExpandLowNibbles(mask, values); }
  static __m512i ExpandHigh(uint64_t mask, const uint8_t* values) { return ExpandHighNibbles(mask, values); }
  static __m512i ExpandHighTimes16(uint64_t mask, const uint8_t* values) {
    return _mm512_mask_expand_epi8(EachByte(kInt4Bias << 4), _cvtu64_mask64(mask), ExpandHighTimes16(values));
  }
  static __m512i ExpandInt8(const uint8_t* values) {
    return _mm512_xor_si512(_mm512_loadu_si512(values), EachByte(0x80));
  }
  static __m512i ExpandLow(const uint8_t* values) { return LowNibbles(values); }
  static __m512i ExpandHigh(const uint8_t* values) { return HighNibbles(values); }
  static __m512i ExpandHighTimes16(const uint8_t* values) {
    return _mm512_and_si512(_mm512_loadu_si512(values), EachByte(0xf0));
  }
  static void Store(__m512i weights, uint8_t* to) { _mm512_store_si512(to, weights); }
  static __m512i Load(const uint8_t* from) { return _mm512_load_si512(from); }

  static __m512i Broadcast(int32_t value) { return _mm512_set1_epi32(value); }
  static __m512i Add(__m512i a, __m512i b) { return _mm512_add_epi32(a, b); }
  static __m512i DivideBy16(__m512i sums) { return _mm512_srai_epi32(sums, 4); }
  static __m512i MultiplyAdd(__m512i sums, __m512i weights, const int8_t* quad) {
    int32_t bits;
    __builtin_memcpy(&bits, quad, sizeof(bits));
    // By hand: gcc 12 copies the sums around each of its own.
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(_mm512_set1_epi32(bits)));
    return sums;
  }
  static constexpr int kMostHeld = 4;
  using Held = __m512i;
  static __m512i Hold(const int8_t* quads) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(quads)));
  }
  static __m512i MultiplyAdd(__m512i sums, __m512i weights, __m512i held, int row) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sums) : "v"(weights), "v"(RepeatDword(held, row)));
    return sums;
  }
  static __m512i LoadWaitingSums(const uint8_t* from) { return _mm512_load_si512(from); }
  static void StoreWaitingSums(uint8_t* to, __m512i sums) { _mm512_store_si512(to, sums); }
  static __m512 LoadWaiting(const uint8_t* from) { return _mm512_load_ps(from); }
  static void StoreWaiting(uint8_t* to, __m512 sums) { _mm512_store_ps(to, sums); }

  static __m512 Zero() { return _mm512_setzero_ps(); }
  static __m512 BroadcastFloat(float value) { return _mm512_set1_ps(value); }
  static __m512 ToFloats(__m512i sums) { return _mm512_cvtepi32_ps(sums); }
  static __m512 Multiply(__m512 a, __m512 b) { return _mm512_mul_ps(a, b); }
  static __m512 MultiplyAdd(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
  static __m512 LoadFloatScales(const uint8_t* from) { return ortolan::LoadFloatScales(from); }
  static __m512 LoadBf16Scales(const uint8_t* from) { return ortolan::LoadBf16Scales(from); }
  static __m512 LoadColumns(const float* from, int columns) { return Avx512Simd::LoadColumns(from, columns); }
  static void StoreColumns(float* to, int columns, __m512 sums) { Avx512Simd::StoreColumns(to, columns, sums); }

  static uint32_t MaxAbsBits(const float* x, int64_t k) { return Avx512MaxAbsBits(x, k); }
  static int32_t Quantize32(const float* x, int64_t left, float factor, int8_t* q) {
    return Avx512Quantize32(x, left, factor, q);
  }
};

}  // namespace

void PackInt8Avx512(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  PackQuantizedRows<Avx512Int8Simd>(x, x_row_bytes, m, k, group, packed);
}

void MultiplyInt8Avx512(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunInt8PanelLoop<Avx512Int8Simd, 8>(args, panel_begin, panel_end);
}

void MultiplyInt4Avx512(const SparseInt8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunInt8PanelLoop<Avx512Int8Simd, 4>(args, panel_begin, panel_end);
}

void PackAvx512(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed) {
  PackPairs<Avx512Simd>(x, x_row_bytes, m, k, packed);
}

void MultiplyAvx512(const SparseMatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  RunPanelLoop<Avx512Simd>(args, panel_begin, panel_end);
}

}  // namespace ortolan
