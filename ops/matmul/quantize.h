// Quantization of activations to int8. Included by *kernels.cc only; local to each.
#pragma once

#include <cstdint>
#include <cstring>

#include "matmul/extremes.h"

namespace ortolan {
namespace {

struct RowScale {
  float factor;  // of x before rounding; 0 if a value is not finite
  float scale;   // of q - zero_point
  int32_t zero_point;
};

template <typename Simd>
RowScale ScaleOf(const float* x, int64_t k) {
  // As integers, the bits of |x| are ordered: finite values, Inf, NaN.
  typename Simd::Int most = Simd::SetInt(0);
  for (int64_t l = 0; l < k; l += Simd::kLanes) {
    most = Simd::MaxInt(most, Simd::BitsOf(Simd::Abs(Simd::LoadSome(x + l, k - l))));
  }
  const int32_t bits = Simd::MaxOfIntLanes(most);
  constexpr int32_t kInfinity = 0x7f800000;
  if (bits >= kInfinity) return {0.0f, __builtin_nanf(""), 0};
  float largest;
  std::memcpy(&largest, &bits, sizeof(largest));
  if (largest < 0x1p-100f) largest = 0x1p-100f;
  return {127.0f / largest, largest / 127.0f, 0};
}

// Scale and zero point that map the minimum of a row (or 0) to -127 and the maximum to 127.
template <typename Simd>
RowScale ScaleWithZeroPoint(const float* x, int64_t k) {
  const Extremes extremes = ExtremesOf<Simd>(x, k);
  if (!extremes.finite) return {0.0f, __builtin_nanf(""), 0};
  float half = extremes.most * 0.5f - extremes.least * 0.5f;
  if (half < 0x1p-100f) half = 0x1p-100f;
  const float factor = 127.0f / half;
  return {factor, half / 127.0f, static_cast<int32_t>(__builtin_nearbyintf(-extremes.least * factor)) - 127};
}

// Call pack(row, block, rows, i) for each row of x: it is row i of a block of `rows` rows. Blocks have row_block rows;
// the last one may have fewer.
template <typename Pack>
void PackRowBlocks(const float* x, int64_t x_row_bytes, int64_t m, int64_t row_block, void* packed,
                   int64_t packed_row_bytes, const Pack& pack) {
  for (int64_t first = 0; first < m; first += row_block) {
    const int64_t rows = m - first < row_block ? m - first : row_block;
    for (int64_t i = 0; i < rows; ++i) {
      pack(reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + (first + i) * x_row_bytes),
           static_cast<char*>(packed) + first * packed_row_bytes, rows, i);
    }
  }
}

// The sum of all quantized inputs and, if a target needs it, the sum of inputs 2 and 3 of each quad.
struct InputSums {
  int32_t all;
  int32_t upper;
};

// Contiguous inputs of a row of x in a block of rows: the number that the target's loop reads at once.
template <typename Simd>
constexpr int kQuantizedTogether = Simd::kRowPairs ? 8 : 16;

// Quantize inputs begin … end-1 (multiples of 16) of row i of k inputs, and write them to a block of `rows` rows in the
// order of activations.h. Inputs from k on get the zero point, as all inputs do if the factor is 0. Return their sums.
template <typename Simd>
InputSums QuantizeInputs(const float* x, int64_t k, int64_t begin, int64_t end, const RowScale& scale, char* block,
                         int64_t rows, int64_t i) {
  constexpr int64_t kTogether = kQuantizedTogether<Simd>;
  const int64_t quantized = scale.factor != 0.0f ? k : 0;
  const auto factor = Simd::Set(scale.factor);
  const auto most = Simd::Set(static_cast<float>(127 - scale.zero_point));
  const auto zero_point = Simd::SetInt(scale.zero_point);
  typename Simd::Int sums = Simd::SetInt(0);
  int8_t* to = reinterpret_cast<int8_t*>(block) + begin * rows + kTogether * i;
  const auto quantize = [&](int64_t l, const auto& load) {
    for (int64_t lane = 0; lane < kTogether; lane += Simd::kLanes) {
      const auto steps = Simd::RoundToInt(Simd::Min(Simd::Multiply(load(l + lane), factor), most));
      const auto rounded = Simd::AddInt(steps, zero_point);
      Simd::StoreInt8(to + lane, rounded);
      sums = Simd::AddInt(sums, rounded);
    }
    to += kTogether * rows;
  };
  int64_t l = begin;
  for (; l < end && l + kTogether <= quantized; l += kTogether) {
    quantize(l, [&](int64_t at) { return Simd::Load(x + at); });
  }
  for (; l < end; l += kTogether) {
    quantize(l, [&](int64_t at) { return Simd::LoadSome(x + at, quantized - at); });
  }
  if constexpr (!Simd::kNarrowNibbleSums) {
    return {Simd::SumOfIntLanes(sums), 0};
  } else {
    alignas(64) static constexpr int32_t kUpper[] = {0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1, 0, 0, -1, -1};
    return {Simd::SumOfIntLanes(sums), Simd::SumOfIntLanes(Simd::AndInt(sums, Simd::LoadInt(kUpper)))};
  }
}

}  // namespace
}  // namespace ortolan
