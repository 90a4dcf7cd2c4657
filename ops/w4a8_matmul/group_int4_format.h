// W4A8MatMul's weights and activations as Int8PanelLoop wants them. Included by x86_*.cc only; local to each.
#pragma once

#include "matmul/group_int4_weight.h"
#include "matmul/panel_loop_int8.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

// What stands behind the q of r packed rows: three numbers for each group of each row.
//     scales      f32 [groups][r]
//     starts      i32 [groups][r]   - kInt4Bias (sum of q): where sums begin, to end as those of q (w - 8)
//     minus_sums  i32 [groups][r]   - (sum of q), for zero points other than 8: at most 128 x 127, an int16
// A group that is not finite has a scale of NaN; its q are zero.
struct GroupNumbers {
  GroupNumbers(const void* end_of_q, int64_t groups, int64_t rows)
      : scales(static_cast<const float*>(end_of_q)),
        starts(reinterpret_cast<const int32_t*>(scales + groups * rows)),
        minus_sums(starts + groups * rows) {}

  const float* scales;
  const int32_t* starts;
  const int32_t* minus_sums;
};

// Blocks of Simd::kRowBlock rows (the last one may have fewer), in a block of r rows
//     q  i8 [k-quad / 4][r][4][4]   in the order of activations.h
//     GroupNumbers
template <typename Simd>
void PackGroupQuantizedRows(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const GroupInt4Weight& w = static_cast<const GroupInt4Weight&>(weight);
  const int64_t k = w.k;
  const int64_t group = w.view.group;
  const int64_t padded_k = kInt4Bitmap.PaddedK(k);
  const int64_t groups = ScaleRows(k, group);
  const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
    float* scales = reinterpret_cast<float*>(block + rows * padded_k);
    int32_t* starts = reinterpret_cast<int32_t*>(scales + groups * rows);
    int32_t* minus_sums = starts + groups * rows;
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group;
      const int64_t length = k - begin < group ? k - begin : group;
      const RowScale scale = ScaleOfRow(Simd::MaxAbsBits(row + begin, length));
      // The last group ends with the padding.
      const int64_t end = g + 1 == groups ? padded_k : begin + group;
      const int32_t sum = QuantizeInputs<Simd>(row, k, begin, end, scale.factor, block, rows, i);
      scales[g * rows + i] = scale.scale;
      starts[g * rows + i] = -static_cast<int32_t>(Simd::kInt4Bias) * sum;
      minus_sums[g * rows + i] = -sum;
    }
  };
  PackRowBlocks<Simd::kRowBlock>(x, x_row_bytes, m, packed, w.PackedRowBytes(), pack);
}

struct GroupInt4Format {
  using Args = MatMulArgs;
  static constexpr bool kInt4 = true;
  static constexpr bool kDense = true;

  static const Int4GroupView& View(const Args& a) { return WeightOf<GroupInt4Weight>(a).view; }
  static int64_t Group(const Args& a) { return View(a).group; }
  static int64_t PackedRowBytes(const Args& a) { return WeightOf<GroupInt4Weight>(a).PackedRowBytes(); }
  static const uint8_t* Masks(const Args&, int64_t) { return nullptr; }
  static const uint8_t* Values(const Args& a, int64_t panel) { return View(a).PanelWeights(panel); }
  static int64_t ValueBytes(const Args&, int64_t) { return 0; }

  template <typename Simd>
  struct PanelScales {
    struct Scales {
      typename Simd::Floats scales;
      bool has_zero_points;
      typename Simd::Sums zero_points;  // zero point - 8 in the low half of each, zero in the high one
    };

    PanelScales(const Args& a, int64_t panel, int64_t groups)
        : is_f16(View(a).scale_type == ScaleType::kFloat16),
          scales(View(a).scales + panel * groups * kPanelColumns * (is_f16 ? 2 : 4)),
          zero_points(View(a).zero_points == nullptr ? nullptr : View(a).zero_points + panel * groups * kPanelColumns) {
    }

    // Always inline: gcc makes a function of what many copies of a loop call for each group.
    __attribute__((always_inline)) Scales Of(int64_t group) const {
      const int64_t first = group * kPanelColumns;
      return {is_f16 ? Simd::LoadF16Scales(scales + 2 * first) : Simd::LoadFloatScales(scales + 4 * first),
              zero_points != nullptr,
              zero_points == nullptr ? Simd::Broadcast(0) : Simd::LoadWordsLess8(zero_points + first)};
    }

    // Always inline: see PrefetchLines.
    __attribute__((always_inline)) void Prefetch(int64_t groups) const {
      PrefetchLines(scales, groups * kPanelColumns * (is_f16 ? 2 : 4));
      if (zero_points != nullptr) PrefetchLines(zero_points, groups * kPanelColumns);
    }

    bool is_f16;
    const uint8_t* scales;
    const uint8_t* zero_points;
  };

  template <typename Simd, int kRows>
  struct Block : GroupNumbers {
    using Sums = typename Simd::Sums;
    using Floats = typename Simd::Floats;

    Block(const int8_t* end, int64_t groups) : GroupNumbers(end, groups, kRows) {}

    Sums Start(int64_t group, int row) const { return Simd::Broadcast(starts[group * kRows + row]); }
    Floats Add(Floats total, Sums sum, const typename PanelScales<Simd>::Scales& of, int64_t group, int row) const {
      const int64_t at = group * kRows + row;
      if (of.has_zero_points) sum = Simd::MultiplyAddWords(sum, of.zero_points, minus_sums[at]);
      const Floats scale = Simd::Multiply(of.scales, Simd::BroadcastFloat(scales[at]));
      return Simd::MultiplyAdd(Simd::ToFloats(sum), scale, total);
    }
    Floats End(Floats total, int) const { return total; }
  };
};

}  // namespace
}  // namespace ortolan
