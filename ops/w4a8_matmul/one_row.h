// One row of x, the case of decoding, as fast as memory delivers the weights. Included by x86_*.cc only; local to each.
//
// Int8PanelLoop would do, but here instructions and misses count: groups have a fixed length, and scales, a stream of
// their own, are prefetched like the weights.
//
// A tier gives Int8PanelLoop's Simd and
//     GroupSums                 16 columns of sums of one group
//     GroupSums(Sums start)
//     void Add(const uint8_t* weights, const int8_t* q)    a span: 32 inputs, 256 bytes of weights
//     Sums Total() const
#pragma once

#include "matmul/panel_loop_int8.h"
#include "simd/prefetch.h"
#include "w4a8_matmul/group_int4_format.h"

namespace ortolan {
namespace {

constexpr int64_t kSpanBytes = kSpanInputs * kPanelColumns / 2;
// Ahead of the loads. Measured: README.md of this room.
constexpr int64_t kWeightsAhead = 8192;
constexpr int64_t kPanelsOfScalesAhead = 2;

// kGroupSpans: spans of a group.
template <typename Simd, int kGroupSpans>
class OneRow {
  using PanelScales = typename GroupInt4Format::PanelScales<Simd>;
  using Block = typename GroupInt4Format::Block<Simd, 1>;
  using Floats = typename Simd::Floats;

 public:
  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const Int4GroupView& w = GroupInt4Format::View(args);
    const int64_t groups = w.Groups();
    const int64_t spans = kInt4Bitmap.PaddedK(w.k) / kSpanInputs;
    // The last group may be shorter; behind it there may be a span of padding.
    const int64_t whole_groups = spans / kGroupSpans < groups ? spans / kGroupSpans : groups;
    const int64_t spans_left = spans - whole_groups * kGroupSpans;
    const int8_t* row = static_cast<const int8_t*>(args.x);
    const Block block(row + spans * kSpanInputs, groups);
    const uint8_t* weights = w.PanelWeights(panel_begin);
    PrefetchLines(weights, kWeightsAhead);
    for (int64_t ahead = 0; ahead < kPanelsOfScalesAhead; ++ahead) {
      PanelScales(args, panel_begin + ahead, groups).Prefetch(groups);
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      PanelScales(args, panel + kPanelsOfScalesAhead, groups).Prefetch(groups);
      const PanelScales scales(args, panel, groups);
      const int8_t* q = row;
      Floats total = Simd::Zero();
      for (int64_t group = 0; group < whole_groups; ++group) {
        typename Simd::GroupSums sums(block.Start(group, 0));
#pragma GCC unroll 4
        for (int span = 0; span < kGroupSpans; ++span) AddSpan(sums, weights, q);
        total = block.Add(total, sums.Total(), scales.Of(group), group, 0);
      }
      if (whole_groups < groups) {
        typename Simd::GroupSums sums(block.Start(whole_groups, 0));
        for (int64_t span = 0; span < spans_left; ++span) AddSpan(sums, weights, q);
        total = block.Add(total, sums.Total(), scales.Of(whole_groups), whole_groups, 0);
      } else {
        weights += spans_left * kSpanBytes;
      }
      PanelOutput(args, panel).template Store<Simd>(0, block.End(total, 0));
    }
  }

 private:
  // Moves on to the next span.
  static void AddSpan(typename Simd::GroupSums& sums, const uint8_t*& weights, const int8_t*& q) {
    PrefetchLines(weights + kWeightsAhead, kSpanBytes);
    sums.Add(weights, q);
    weights += kSpanBytes;
    q += kSpanInputs;
  }
};

template <typename Simd>
void MultiplyOneRow(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const int64_t group = GroupInt4Format::Group(args);
  if (group == 32) return OneRow<Simd, 1>::Run(args, panel_begin, panel_end);
  if (group == 64) return OneRow<Simd, 2>::Run(args, panel_begin, panel_end);
  OneRow<Simd, 4>::Run(args, panel_begin, panel_end);
}

}  // namespace
}  // namespace ortolan
