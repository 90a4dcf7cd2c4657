// Quantization of activations to int8, shared by the x86 kernels. Included by x86_*.cc only; local to each.
//
// A tier gives Simd::MaxAbsBits and Simd::Quantize32 (panel_loop_int8.h).
#pragma once

#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace ortolan {
namespace {

inline int32_t SumOfLanes(__m256i lanes) {
  __m128i sums = _mm_add_epi32(_mm256_castsi256_si128(lanes), _mm256_extracti128_si256(lanes, 1));
  sums = _mm_add_epi32(sums, _mm_unpackhi_epi64(sums, sums));
  return _mm_cvtsi128_si32(sums) + _mm_extract_epi32(sums, 1);
}

struct RowScale {
  float factor;  // of x, before rounding; 0 if one of them is not finite
  float scale;   // of q
};

inline RowScale ScaleOfRow(uint32_t max_abs_bits) {
  constexpr uint32_t kInfinity = 0x7f800000u;
  if (max_abs_bits >= kInfinity) return {0.0f, __builtin_nanf("")};
  float largest;
  std::memcpy(&largest, &max_abs_bits, sizeof(largest));
  if (largest < 0x1p-100f) largest = 0x1p-100f;
  return {127.0f / largest, largest / 127.0f};
}

// Packed rows are blocks of kRowBlock rows, the last of which may have fewer. Calls pack(row, block, rows, i) for each
// row of x: it is row i of a block of `rows` rows.
template <int kRowBlock, typename Pack>
void PackRowBlocks(const float* x, int64_t x_row_bytes, int64_t m, void* packed, int64_t packed_row_bytes,
                   const Pack& pack) {
  for (int64_t first = 0; first < m; first += kRowBlock) {
    const int64_t rows = m - first < kRowBlock ? m - first : kRowBlock;
    for (int64_t i = 0; i < rows; ++i) {
      pack(reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + (first + i) * x_row_bytes),
           static_cast<char*>(packed) + first * packed_row_bytes, rows, i);
    }
  }
}

// Quantizes inputs begin … end-1, multiples of 32, of row i of k inputs: zero from k on, and all if the factor is 0.
// They go to their places in a block of `rows` rows in the order of activations.h. Returns their sum.
template <typename Simd>
int32_t QuantizeInputs(const float* x, int64_t k, int64_t begin, int64_t end, float factor, char* block, int64_t rows,
                       int64_t i) {
  constexpr int64_t kInputs = 32;
  constexpr int64_t kFourQuads = 16;
  const int64_t quantized = factor != 0.0f ? k : 0;
  __m256i sums = _mm256_setzero_si256();
  char* to = block + begin * rows + kFourQuads * i;
  for (int64_t l = begin; l < end; l += kInputs, to += kInputs * rows) {
    sums = _mm256_add_epi32(sums, Simd::Quantize32(x + l, quantized - l, factor, to, to + kFourQuads * rows));
  }
  return SumOfLanes(sums);
}

}  // namespace
}  // namespace ortolan
