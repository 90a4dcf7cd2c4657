// W4A8MatMul's weights and activations as Int8PanelLoop wants them. Included by x86_*.cc only; local to each.
#pragma once

#include "panels/panel_loop_int8.h"
#include "w4a8_matmul/w4a8_matmul.h"

namespace ortolan {
namespace {

// Blocks of Simd::kRowBlock rows (the last one may have fewer), in a block of r rows
//     q       i8  [k-quad / 4][r][4][4]   in the order of activations.h
//     scales  f32 [groups][r]
//     sums    f32 [groups][r]             of q over the group
// A group that is not finite has a scale of NaN; its q are zero.
template <typename Simd>
void PackGroupQuantizedRows(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, int64_t group, void* packed) {
  const int64_t padded_k = kInt4Bitmap.PaddedK(k);
  const int64_t groups = ScaleRows(k, group);
  const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
    float* scales = reinterpret_cast<float*>(block + rows * padded_k);
    float* sums = scales + groups * rows;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group;
      const int64_t length = k - begin < group ? k - begin : group;
      const RowScale scale = ScaleOfRow(Simd::MaxAbsBits(row + begin, length));
      // The last group ends with the padding.
      const int64_t end = g + 1 == groups ? padded_k : begin + group;
      const int32_t sum = QuantizeInputs<Simd>(row, k, begin, end, scale.factor, block, rows, i);
      scales[g * rows + i] = scale.scale;
      sums[g * rows + i] = static_cast<float>(sum);
    }
  };
  PackRowBlocks<Simd::kRowBlock>(x, x_row_bytes, m, packed, W4A8MatMulKernel::PackedRowBytes(k, group), pack);
}

struct GroupInt4Format {
  using Args = W4A8MatMulArgs;
  static constexpr bool kInt4 = true;
  static constexpr bool kDense = true;

  static int64_t Group(const Args& a) { return a.w.group; }
  static int64_t PackedRowBytes(const Args& a) { return W4A8MatMulKernel::PackedRowBytes(a.w.k, a.w.group); }
  static const uint8_t* Masks(const Args&, int64_t) { return nullptr; }
  static const uint8_t* Values(const Args& a, int64_t panel) { return a.w.PanelWeights(panel); }
  static int64_t ValueBytes(const Args&, int64_t) { return 0; }

  // Of a group of a panel.
  template <typename Simd>
  struct Scales {
    Scales(const Args& a, int64_t panel, int64_t group)
        : floats(a.w.scale_type == ScaleType::kFloat32 ? Simd::LoadFloatScales(a.w.Scales(panel, group))
                                                       : Simd::LoadF16Scales(a.w.Scales(panel, group))),
          minus_zero_points(a.w.zero_points == nullptr ? Simd::BroadcastFloat(-static_cast<float>(Simd::kInt4Bias))
                                                       : MinusZeroPoints(a.w.ZeroPoints(panel, group))) {}
    // Expanded weights are q - 8 + kInt4Bias.
    static typename Simd::Floats MinusZeroPoints(const uint8_t* from) {
      const typename Simd::Floats minus = Simd::LoadMinusBytes(from);
      constexpr int kExcess = kMiddleZeroPoint - static_cast<int>(Simd::kInt4Bias);
      return kExcess == 0 ? minus : Simd::Add(minus, Simd::BroadcastFloat(kExcess));
    }
    typename Simd::Floats floats;
    typename Simd::Floats minus_zero_points;
  };

  template <typename Simd, int kRows>
  struct Block {
    using Sums = typename Simd::Sums;
    using Floats = typename Simd::Floats;

    Block(const int8_t* end, int64_t groups)
        : scales(reinterpret_cast<const float*>(end)), sums(scales + groups * kRows) {}

    Sums Start(int64_t, int) const { return Simd::Broadcast(0); }
    Floats Add(Floats total, Sums sum, const Scales<Simd>& of, int64_t group, int row) const {
      const Floats sum_of_q = Simd::BroadcastFloat(sums[group * kRows + row]);
      const Floats x_scale = Simd::BroadcastFloat(scales[group * kRows + row]);
      // Exact: integers below 2^24.
      const Floats product = Simd::MultiplyAdd(of.minus_zero_points, sum_of_q, Simd::ToFloats(sum));
      return Simd::MultiplyAdd(product, Simd::Multiply(of.floats, x_scale), total);
    }
    Floats End(Floats total, int) const { return total; }

    const float* scales;
    const float* sums;
  };
};

}  // namespace
}  // namespace ortolan
