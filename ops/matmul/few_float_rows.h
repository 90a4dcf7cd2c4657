// The loop for one to three rows of x with float sums. These must be in the order of many rows, so a sum cannot be
// split into chains. Instead several panels are multiplied at once: their sums do not wait for each other, and several
// streams of weights use memory better than one. Included by the loops; local to each file.
//
// A kind of weight provides what one_row.h requires, except for chains, and
//
//     kRowsApart                 packed rows of x are contiguous; else interleaved, see activations.h
//     kHeldOfPanel               registers of a panel besides its sums, in units of 16 columns of floats
//     StartSums(output), EndSums(output, row, sums)
//                                around all spans: initial sums, and writing y
#pragma once

#include <cstdint>
#include <utility>

#include "matmul/activations.h"
#include "matmul/panel.h"
#include "simd/columns.h"

namespace ortolan {
namespace {

template <typename Simd, typename Weights, int kRows>
class FewFloatRows {
  using Columns = simd::Columns<Simd>;
  using Sums = typename Weights::Sums;
  using Stream = typename Weights::Stream;
  using Activation = typename Weights::Activation;
  using Layer = ortolan::Layer<Weights>;
  using Panel = ortolan::Panel<Simd, Weights>;
  static constexpr int kTogether = kRowsTogether<Weights>;

  // The number of panels, halved until a quarter of the registers is left for weights and activations.
  static constexpr int PanelsAtOnce() {
    constexpr int kSums = sizeof(Sums) / sizeof(typename Columns::Floats);
    constexpr int kRegisters = Columns::kRegisters * (kRows * kSums + Weights::kHeldOfPanel);
    int panels = kPanelsOfFewRows;
    while (panels > 1 && 4 * panels * kRegisters > 3 * Simd::kRegisters) panels /= 2;
    return panels;
  }

 public:
  static void Run(const Layer& layer, const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    RunParts<PanelsAtOnce()>(layer, args, panel_begin, panel_end);
  }

 private:
  // Each of kCount streams of weights walks through its part of the panels, so prefetches past the end of a panel fetch
  // what the stream reads next.
  template <int kCount>
  static void RunParts(const Layer& layer, const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const int64_t part = (panel_end - panel_begin) / kCount;
    if (part > 0) {
      for (int p = 0; p < kCount; ++p) Stream(layer.weight, panel_begin + p * part, layer.ahead).PrefetchFirst();
    }
    for (int64_t i = 0; i < part; ++i) Multiply<kCount>(layer, args, panel_begin + i, part);
    if constexpr (kCount > 1) RunParts<kCount / 2>(layer, args, panel_begin + kCount * part, panel_end);
  }

  template <int kCount>
  struct Panels {
    Panels(const Layer& layer, const MatMulArgs& args, int64_t first, int64_t step)
        : Panels(layer, args, first, step, std::make_integer_sequence<int, kCount>()) {}

    Panel at[kCount];

   private:
    template <int... p>
    Panels(const Layer& layer, const MatMulArgs& args, int64_t first, int64_t step, std::integer_sequence<int, p...>)
        : at{Panel(layer, args, first + p * step)...} {}
  };

  // Multiply panels first, first + step, … Not inlined, because the caller may treat denormals differently.
  template <int kCount>
  __attribute__((noinline)) static void Multiply(const Layer& layer, const MatMulArgs& args, int64_t first,
                                                 int64_t step) {
    Panels<kCount> panels(layer, args, first, step);
    Sums sums[kCount][kRows];
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[p][r] = Weights::StartSums(panels.at[p].output);
    }
    const Activation* x = panels.at[0].X(0);
    for (int64_t span = 0; span < layer.spans; ++span) MultiplySpan(panels, sums, x);
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) Weights::EndSums(panels.at[p].output, r, sums[p][r]);
    }
  }

  // Advances x to the next span.
  template <int kCount>
  __attribute__((always_inline)) static void MultiplySpan(Panels<kCount>& panels, Sums (&sums)[kCount][kRows],
                                                          const Activation*& x) {
    Sums span_sums[kCount][kRows];
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
      panels.at[p].stream.template StartSpan<Fetch::kMultiply>();
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) span_sums[p][r] = Weights::StartSpan(sums[p][r]);
    }
    ForEach<false>(Layer::kSpanRows, kTogether, [&](int four) { MultiplyFour(panels, span_sums, four, x); });
#pragma GCC unroll 4
    for (int p = 0; p < kCount; ++p) {
      panels.at[p].stream.EndSpan();
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[p][r] = Weights::EndSpan(sums[p][r], span_sums[p][r]);
    }
  }

  template <int kCount>
  __attribute__((always_inline)) static void MultiplyFour(Panels<kCount>& panels, Sums (&sums)[kCount][kRows], int four,
                                                          const Activation*& x) {
    const int64_t next_row = Weights::kRowsApart
                                 ? panels.at[0].layer.row_bytes / static_cast<int64_t>(sizeof(Activation))
                                 : Weights::kInputsTogether;
#pragma GCC unroll 4
    for (int row = 0; row < kTogether; ++row, x += Weights::kRowInputs) {
#pragma GCC unroll 4
      for (int p = 0; p < kCount; ++p) {
        const auto weights = Weights::FromBytes(panels.at[p].stream.template Next<Fetch::kMultiply, false>(four + row));
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          sums[p][r] = Weights::MultiplyAdd(sums[p][r], weights, x + r * next_row);
        }
      }
    }
    if constexpr (!Weights::kRowsApart) x += (kRows - 1) * Weights::kInputsTogether;
  }
};

// Requires 1 <= args.m < kManyRows.
template <typename Simd, typename Weights>
void MultiplyFewFloatRows(const Layer<Weights>& layer, const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  WithRowCount<kManyRows - 1>(
      args.m, [&]<int kRows>() { FewFloatRows<Simd, Weights, kRows>::Run(layer, args, panel_begin, panel_end); });
}

}  // namespace
}  // namespace ortolan
