// One row of x, the case of decoding: as fast as memory delivers the weights. Included by x86_*.cc only; local to each.
//
// Int8PanelLoop would do, but here every instruction and every miss counts: groups have a fixed length, and scales,
// which are a stream of their own, are prefetched like the weights.
//
// A tier gives Int8PanelLoop's Simd and
//     SpanPairSums                                  16 columns of sums of one group
//     SpanPairSums(Sums start)
//     void Add(const uint8_t* weights, const int8_t* q)    32 inputs: 256 bytes of weights
//     Sums Total()
#pragma once

#include "panels/panel_output.h"
#include "w4a8_matmul/group_int4_format.h"

namespace ortolan {
namespace {

template <typename Simd, int kSpans, bool kF16, bool kZeroPoints>
class OneRow {
  static constexpr int64_t kLineBytes = 64;
  static constexpr int64_t kSpanBytes = kSpanInputs * kPanelColumns / 2;
  static constexpr int64_t kGroupScaleBytes = kPanelColumns * (kF16 ? 2 : 4);
  // Ahead of the loads. Measured: README.md of this room.
  static constexpr int64_t kWeightsAhead = 8192;
  static constexpr int64_t kPanelsAhead = 2;

  static void Prefetch(const uint8_t* from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += kLineBytes) __builtin_prefetch(from + i);
  }

 public:
  static void Run(const W4A8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const Int4GroupView& w = args.w;
    const int64_t groups = w.Groups();
    const int64_t spans = kInt4Bitmap.PaddedK(w.k) / kSpanInputs;
    // The last group may be shorter, or end with the padding.
    const int64_t whole_groups = spans / kSpans < groups ? spans / kSpans : groups;
    const int64_t spans_left = groups > whole_groups ? spans - whole_groups * kSpans : 0;
    const int64_t spans_behind = spans - whole_groups * kSpans - spans_left;
    const int8_t* q = static_cast<const int8_t*>(args.x);
    const GroupNumbers numbers(q + spans * kSpanInputs, groups, 1);
    const uint8_t* weights = w.PanelWeights(panel_begin);
    const uint8_t* scales = w.Scales(panel_begin, 0);
    const uint8_t* zero_points = w.ZeroPoints(panel_begin, 0);
    const int64_t scale_bytes = groups * kGroupScaleBytes;
    Prefetch(weights, kWeightsAhead);
    Prefetch(scales, kPanelsAhead * scale_bytes);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      Prefetch(scales + kPanelsAhead * scale_bytes, scale_bytes);
      if (kZeroPoints) Prefetch(zero_points + kPanelsAhead * groups * kPanelColumns, groups * kPanelColumns);
      auto total = Simd::Zero();
      const int8_t* x = q;
      for (int64_t group = 0; group < whole_groups; ++group) {
        typename Simd::GroupSums sums(Simd::Broadcast(numbers.starts[group]));
#pragma GCC unroll 4
        for (int span = 0; span < kSpans; ++span, weights += kSpanBytes, x += kSpanInputs) {
          Prefetch4(weights + kWeightsAhead);
          sums.Add(weights, x);
        }
        total = Scale(total, sums.Total(), numbers, group, scales, zero_points);
      }
      if (spans_left > 0) {
        typename Simd::GroupSums sums(Simd::Broadcast(numbers.starts[whole_groups]));
        for (int64_t span = 0; span < spans_left; ++span, weights += kSpanBytes, x += kSpanInputs) {
          Prefetch4(weights + kWeightsAhead);
          sums.Add(weights, x);
        }
        total = Scale(total, sums.Total(), numbers, whole_groups, scales, zero_points);
      }
      weights += spans_behind * kSpanBytes;
      PanelOutput(args, w.n, panel).template Store<Simd>(0, total);
    }
  }

 private:
  static void Prefetch4(const uint8_t* from) {
    for (int line = 0; line < 4; ++line) __builtin_prefetch(from + kLineBytes * line);
  }
  template <typename Floats, typename Sums>
  static __attribute__((always_inline)) Floats Scale(Floats total, Sums sums, const GroupNumbers& numbers,
                                                     int64_t group, const uint8_t*& scales,
                                                     const uint8_t*& zero_points) {
    if constexpr (kZeroPoints) {
      sums = Simd::MultiplyAddWords(sums, Simd::LoadWordsLess8(zero_points), numbers.minus_sums[group]);
      zero_points += kPanelColumns;
    }
    const Floats scale = kF16 ? Simd::LoadF16Scales(scales) : Simd::LoadFloatScales(scales);
    scales += kGroupScaleBytes;
    return Simd::MultiplyAdd(Simd::ToFloats(sums), Simd::Multiply(scale, Simd::BroadcastFloat(numbers.scales[group])),
                             total);
  }
};

template <typename Simd>
void RunOneRow(const W4A8MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const auto with_group = [&]<int kSpans>() {
    const bool f16 = args.w.scale_type == ScaleType::kFloat16;
    if (args.w.zero_points == nullptr) {
      return (f16 ? &OneRow<Simd, kSpans, true, false>::Run : &OneRow<Simd, kSpans, false, false>::Run)(
          args, panel_begin, panel_end);
    }
    (f16 ? &OneRow<Simd, kSpans, true, true>::Run : &OneRow<Simd, kSpans, false, true>::Run)(args, panel_begin,
                                                                                             panel_end);
  };
  if (args.w.group == 32) return with_group.template operator()<1>();
  if (args.w.group == 64) return with_group.template operator()<2>();
  with_group.template operator()<4>();
}

}  // namespace
}  // namespace ortolan
