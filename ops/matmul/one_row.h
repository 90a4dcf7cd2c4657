// The loop for one row of x (decoding) with integer sums, as fast as memory delivers the weights. Float sums:
// few_float_rows.h. Included by panel_loop.h; local to each file.
//
// Instructions and cache misses matter here, so the length of groups is a constant, and scales, a separate stream, are
// prefetched like the weights.
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/panel.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

// kGroupSpans: spans of a group; 0 if a group is a whole column.
template <typename Simd, typename Weights, int kGroupSpans>
class OneRow {
  using Sums = typename Weights::Sums;
  using Stream = typename Weights::Stream;
  using Activation = typename Weights::Activation;
  // One sum would be limited by the latency of additions, so several chains are summed at the end. For int4, chains of
  // odd rows hold 16 times their sums, which saves a shift per row of weights.
  static constexpr int kChains = Weights::kOneRowChains;
  static constexpr bool kOddTimes16 = Weights::kNibbles && kChains > 1;
  static constexpr bool kUnroll = simd::Columns<Simd>::kRegisters <= 4;
  // The hardware prefetcher is better if the weights are a single stream without gaps; for int4 it is not.
  static constexpr Fetch kFetch = Weights::kFetchOneRow;

 public:
  static void Run(const Layer<Weights>& layer, const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    if constexpr (Weights::kHasGroups) {
      if constexpr (Weights::kDense) {
        PrefetchLines(Stream(layer.weight, panel_begin, layer.ahead).values, Weights::OneRowAhead(layer.ahead));
      }
      for (int64_t ahead = 0; ahead < kPanelsOfScalesAhead; ++ahead) {
        typename Weights::Scales(layer.weight, panel_begin + ahead, layer.groups).Prefetch(0, layer.groups);
      }
    }
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      if constexpr (Weights::kHasGroups) {
        typename Weights::Scales(layer.weight, panel + kPanelsOfScalesAhead, layer.groups).Prefetch(0, layer.groups);
      }
      Row({layer, args, panel}, 0);
    }
  }

  // Row i of x, which is packed as its own block.
  static void Row(const Panel<Simd, Weights>& p, int64_t i) {
    const Layer<Weights>& layer = p.layer;
    // The last group may be shorter, and a span of padding may follow it.
    int64_t whole_groups = 0;
    if constexpr (kGroupSpans > 0) {
      whole_groups = layer.spans / kGroupSpans < layer.groups ? layer.spans / kGroupSpans : layer.groups;
    }
    const auto terms = p.template RowTermsOf<1>(i);
    const Activation* x = p.X(i);
    Stream stream = p.stream;
    auto total = simd::Columns<Simd>::Set(0.0f);
    for (int64_t group = 0; group < whole_groups; ++group) {
      Chains chains(terms.Start(group, 0));
      ForEach<(kUnroll && kGroupSpans <= 4)>(kGroupSpans, 1, [&](int) { chains.AddSpan(stream, x); });
      total = terms.Add(total, chains.Total(), p.scales.Of(group), group, 0);
    }
    if (whole_groups < layer.groups) {
      Chains chains(terms.Start(whole_groups, 0));
      for (int64_t span = whole_groups * kGroupSpans; span < layer.spans; ++span) chains.AddSpan(stream, x);
      total = terms.Add(total, chains.Total(), p.scales.Of(whole_groups), whole_groups, 0);
    }
    p.output.StoreWithBias(i, terms.End(total, 0));
  }

 private:
  static constexpr int64_t kPanelsOfScalesAhead = 2;

  class Chains {
   public:
    explicit Chains(const Sums& start) {
      sums_[0] = start;
      for (int c = 1; c < kChains; ++c) sums_[c] = Weights::Zero();
    }
    // Advances to the next span. Always inline: clang would make it a function with its sums in memory.
    __attribute__((always_inline)) void AddSpan(Stream& stream, const Activation*& x) {
      stream.template StartSpan<kFetch>();
      Sums sums[kChains];
      for (int c = 0; c < kChains; ++c) sums[c] = Weights::StartSpan(sums_[c]);
      ForEach<kUnroll>(Layer<Weights>::kSpanRows, kFourRows, [&](int four) {
        const auto held = HeldOf(x);
#pragma GCC unroll 4
        for (int row = 0; row < kFourRows; ++row, x += Weights::kRowInputs) {
          const auto weights = Weights::FromBytes(stream.template Next<kFetch, kOddTimes16>(four + row));
          Sums& sum = sums[row % kChains];
          if constexpr (kHoldsAllRows<Weights>) {
            sum = Weights::MultiplyAddHeld(sum, weights, held, row);
          } else {
            sum = Weights::MultiplyAdd(sum, weights, x);
          }
        }
      });
      for (int c = 0; c < kChains; ++c) sums_[c] = Weights::EndSpan(sums_[c], sums[c]);
      stream.EndSpan();
    }
    Sums Total() const {
      if constexpr (kOddTimes16) {
        const Sums odd = Weights::DivideBy16(Weights::AddChains(sums_[1], sums_[3]));
        return Weights::AddChains(Weights::AddChains(sums_[0], sums_[2]), odd);
      } else {
        Sums total = sums_[0];
        for (int c = 1; c < kChains; ++c) total = Weights::AddChains(total, sums_[c]);
        return total;
      }
    }

   private:
    static auto HeldOf([[maybe_unused]] const Activation* x) {
      if constexpr (kHoldsAllRows<Weights>) {
        return Weights::Hold(x);
      } else {
        return typename Weights::Held{};
      }
    }

    Sums sums_[kChains];
  };
};

// Call run.operator()<OneRow<…>>() with the OneRow for the weight's groups.
template <typename Simd, typename Weights, typename Run>
void WithOneRow(const Layer<Weights>& layer, const Run& run) {
  if constexpr (!Weights::kHasGroups) {
    run.template operator()<OneRow<Simd, Weights, 0>>();
  } else if (layer.group_spans == 1) {
    run.template operator()<OneRow<Simd, Weights, 1>>();
  } else if (layer.group_spans == 2) {
    run.template operator()<OneRow<Simd, Weights, 2>>();
  } else if (layer.group_spans == 4) {
    run.template operator()<OneRow<Simd, Weights, 4>>();
  } else {
    run.template operator()<OneRow<Simd, Weights, 8>>();
  }
}

}  // namespace
}  // namespace ortolan
