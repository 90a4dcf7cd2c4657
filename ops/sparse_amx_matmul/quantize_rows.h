// Packing of activations for int8 products, shared by the x86 kernels. Included by x86_*.cc only; local to each.
//
// A tier gives Simd::MaxAbsBits and Simd::Quantize32 (panel_loop_int8.h).
#pragma once

#include <cstdint>
#include <cstring>

#include "sparse_amx_matmul/sparse_amx_matmul_int8.h"

namespace ortolan {
namespace {

struct RowScale {
  float factor;  // of x, before rounding
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

// Blocks of Simd::kRowBlock rows (the last one may have fewer), in a block of r rows
//     q            i8  [k-quad / 4][r][4][4]   in the order of activations.h
//     scales       f32 [r]
//     corrections  i32 [groups][r]      - (bias of the weights) x (sum of q over the group)
// A row that is not finite has a scale of NaN; its q are zero.
template <typename Simd>
void PackQuantizedRows(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  constexpr int64_t kInputs = 32;
  constexpr int64_t kFourQuads = 16;
  const int64_t padded_k = kInt8Bitmap.PaddedK(k);
  const int64_t row_bytes = SparseInt8MatMulKernel::PackedRowBytes(k, group);
  const int64_t groups = ScaleRows(k, group);
  const uint32_t bias = group == kWholeColumn ? Simd::kInt8Bias : Simd::kInt4Bias;
  for (int64_t first = 0; first < m; first += Simd::kRowBlock) {
    const int64_t rows = m - first < Simd::kRowBlock ? m - first : Simd::kRowBlock;
    char* block = static_cast<char*>(packed) + first * row_bytes;
    float* scales = reinterpret_cast<float*>(block + rows * padded_k);
    uint32_t* corrections = reinterpret_cast<uint32_t*>(scales + rows);
    for (int64_t i = 0; i < rows; ++i) {
      const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + (first + i) * x_row_bytes);
      const RowScale scale = ScaleOfRow(Simd::MaxAbsBits(row, k));
      scales[i] = scale.scale;
      for (int64_t g = 0; g < groups; ++g) corrections[g * rows + i] = 0;
      char* out = block + kFourQuads * i;
      for (int64_t l = 0; l < padded_k; l += kInputs) {
        alignas(64) int8_t q[kInputs] = {};
        if (l < k && scale.factor != 0.0f) {
          const uint32_t sum = static_cast<uint32_t>(Simd::Quantize32(row + l, k - l, scale.factor, q));
          corrections[(group == kWholeColumn ? 0 : l / group) * rows + i] -= bias * sum;
        }
        for (int64_t four = 0; four < kInputs; four += kFourQuads, out += kFourQuads * rows) {
          std::memcpy(out, q + four, kFourQuads);
        }
      }
    }
  }
}

}  // namespace
}  // namespace ortolan
