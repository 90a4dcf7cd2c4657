// SparseAMXMatMul's int8 and int4 weights and their activations as Int8PanelLoop wants them. Included by x86_*.cc only;
// local to each.
#pragma once

#include "matmul/bitmap_weight.h"
#include "matmul/panel_loop_int8.h"

namespace ortolan {
namespace {

// Blocks of Simd::kRowBlock rows (the last one may have fewer), in a block of r rows
//     q            i8  [k-quad / 4][r][4][4]   in the order of activations.h
//     scales       f32 [r]
//     corrections  i32 [groups][r]      - (bias of the weights) x (sum of q over the group)
// A row that is not finite has a scale of NaN; its q are zero.
template <typename Simd>
void PackQuantizedRows(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const BitmapWeight& w = static_cast<const BitmapWeight&>(weight);
  const int64_t k = w.k;
  const int64_t group = w.group;
  const int64_t padded_k = kInt8Bitmap.PaddedK(k);
  const int64_t groups = ScaleRows(k, group);
  const uint32_t bias = group == kWholeColumn ? Simd::kInt8Bias : Simd::kInt4Bias;
  const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
    float* scales = reinterpret_cast<float*>(block + rows * padded_k);
    uint32_t* corrections = reinterpret_cast<uint32_t*>(scales + rows);
    const RowScale scale = ScaleOfRow(Simd::MaxAbsBits(row, k));
    scales[i] = scale.scale;
    for (int64_t g = 0; g < groups; ++g) {
      // The last group ends with the padding.
      const int64_t end = g + 1 == groups ? padded_k : (g + 1) * group;
      const int32_t sum = QuantizeInputs<Simd>(row, k, g * group, end, scale.factor, block, rows, i);
      corrections[g * rows + i] = 0 - bias * static_cast<uint32_t>(sum);
    }
  };
  PackRowBlocks<Simd::kRowBlock>(x, x_row_bytes, m, packed, w.QuantizedRowBytes(), pack);
}

// kBits: 8 or 4.
template <int kBits, Storage kStorage>
struct SparseInt8Format {
  using Args = MatMulArgs;
  static constexpr bool kInt4 = kBits == 4;
  static constexpr bool kDense = kStorage == Storage::kDense;
  static constexpr const BitmapLayout& kLayout = kInt4 ? kInt4Bitmap : kInt8Bitmap;

  static const BitmapWeight& W(const Args& a) { return WeightOf<BitmapWeight>(a); }
  static int64_t Group(const Args& a) { return W(a).group; }
  static int64_t PackedRowBytes(const Args& a) { return W(a).QuantizedRowBytes(); }
  static const uint8_t* Masks(const Args& a, int64_t panel) { return W(a).view.PanelMasks(kLayout, panel); }
  static const uint8_t* Values(const Args& a, int64_t panel) { return W(a).view.PanelValues(kLayout, panel); }
  static int64_t ValueBytes(const Args& a, int64_t panel) {
    return kDense ? 0 : W(a).view.offsets[panel + 1] - W(a).view.offsets[panel];
  }

  template <typename Simd>
  struct PanelScales {
    using Scales = typename Simd::Floats;

    PanelScales(const Args& a, int64_t panel, int64_t) : from(W(a).Scales(panel, 0)) {}

    Scales Of(int64_t group) const {
      return kInt4 ? Simd::LoadBf16Scales(from + group * kPanelColumns * 2) : Simd::LoadFloatScales(from);
    }

    const uint8_t* from;
  };

  // What PackQuantizedRows puts behind the q of a block of rows.
  template <typename Simd, int kRows>
  struct Block {
    using Sums = typename Simd::Sums;
    using Floats = typename Simd::Floats;

    Block(const int8_t* end, int64_t)
        : scales(reinterpret_cast<const float*>(end)), corrections(reinterpret_cast<const int32_t*>(scales + kRows)) {}

    Sums Start(int64_t group, int row) const { return Simd::Broadcast(corrections[group * kRows + row]); }
    Floats Add(Floats total, Sums sum, const Floats& weight_scales, int64_t, int row) const {
      if constexpr (kInt4) return Simd::MultiplyAdd(Simd::ToFloats(sum), weight_scales, total);
      return Simd::Multiply(Simd::ToFloats(sum), Simd::Multiply(weight_scales, Simd::BroadcastFloat(scales[row])));
    }
    Floats End(Floats total, int row) const {
      return kInt4 ? Simd::Multiply(total, Simd::BroadcastFloat(scales[row])) : total;
    }

    const float* scales;
    const int32_t* corrections;
  };
};

// Calls run.operator()<Format>() with that of the weight's storage. kBits: 8 or 4.
template <int kBits, typename Run>
void WithFormat(const MatMulArgs& args, const Run& run) {
  if (WeightOf<BitmapWeight>(args).view.IsDense()) {
    run.template operator()<SparseInt8Format<kBits, Storage::kDense>>();
  } else {
    run.template operator()<SparseInt8Format<kBits, Storage::kBitmap>>();
  }
}

}  // namespace
}  // namespace ortolan
