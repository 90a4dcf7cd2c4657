// Multiplies three panels at once with many rows of x, if a panel takes one register and rows of weights are quads: a
// repeated activation is used for three weights. Contains the loop over groups, and what it shares with the loop over
// whole columns (panel_loop.h). Included by panel_loop.h; local to each file.
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/panel.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

constexpr int kWidePanels = 3;

// Rows of x whose sums are kept on the stack: 64 bytes per row and panel, 48 KB for three panels.
constexpr int64_t kMostWaiting = 256;

template <typename Simd, typename Weights>
struct Panels {
  Panel<Simd, Weights> at[kWidePanels];
};

// Multiply four rows of weights of each panel, next(panel, row), with kRows rows of a block of x, and advance x.
template <typename Simd, typename Weights, int kRows, typename Next>
__attribute__((always_inline)) inline void WideFour(typename Weights::Sums (&sums)[kRows][kWidePanels],
                                                    const typename Weights::Activation*& x, const Next& next) {
#pragma GCC unroll 4
  for (int row = 0; row < kFourRows; ++row) {
    typename Weights::Row weights[kWidePanels];
#pragma GCC unroll 4
    for (int c = 0; c < kWidePanels; ++c) weights[c] = next(c, row);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const auto repeated = Simd::RepeatQuad(x + Weights::kRowInputs * (kFourRows * r + row));
#pragma GCC unroll 4
      for (int c = 0; c < kWidePanels; ++c) sums[r][c] = Weights::Dot(sums[r][c], weights[c], repeated);
    }
  }
  x += kFourRows * Weights::kRowInputs * Weights::kRowBlock;
}

// Expand the next rows of a stream.
template <typename Weights>
void ExpandSpans(typename Weights::Stream& stream, int64_t spans, uint8_t* out) {
  constexpr int kSpanRows = Layer<Weights>::kSpanRows;
  for (int64_t span = 0; span < spans; ++span) {
    stream.template StartSpan<Fetch::kExpand>();
#pragma GCC unroll 8
    for (int row = 0; row < kSpanRows; ++row, out += Weights::kStoredBytes) {
      Weights::StoreRow(Weights::FromBytes(stream.template Next<Fetch::kExpand, false>(row)), out);
    }
    stream.EndSpan();
  }
}

// Multiplies panels in groups with whole blocks of rows.
template <typename Simd, typename Weights>
class WideGroups {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  using Sums = typename Weights::Sums;
  using Stream = typename Weights::Stream;
  using Activation = typename Weights::Activation;
  using Layer = ortolan::Layer<Weights>;
  using Panel = ortolan::Panel<Simd, Weights>;
  using Panels = ortolan::Panels<Simd, Weights>;
  static constexpr int kBlock = Weights::kRowBlock;
  static constexpr int kSpanRows = Layer::kSpanRows;
  // Rows of x multiplied with groups at once: with totals in registers, and without.
  static constexpr int kShortRows = kBlock / 4;
  static constexpr int kLongRows = kBlock / 2;

 public:
  // Multiply rows 0 … m-1: whole blocks, at most kMostWaiting rows.
  static void Run(const Panels& panels, int64_t m) { m > kBlock ? Buffered(panels, m) : OneBlock(panels); }

 private:
  // The values that end a group of a panel.
  static typename Weights::Scales AnyScales();
  using Ends = decltype(AnyScales().Of(0));

  // The totals of a row of x. Panels are adjacent: if they were pages apart, stores to one would block loads from the
  // next.
  struct alignas(64) Totals {
    float at[kWidePanels][kPanelColumns];
  };

  // A few groups, ready to multiply: 24 KB of weights, half of the L1 cache of CPUs since Ice Lake. A group has 1, 2 or
  // 4 spans (IsGroupSize).
  static constexpr int64_t kMostSpans = 16;
  struct Groups {
    int64_t begin, end;  // of a panel
    // In the order of LoadRow.
    alignas(64) uint8_t weights[kWidePanels][kMostSpans * kSpanRows * Weights::kStoredBytes];
    Ends ends[kWidePanels][kMostSpans];
  };

  // Prepare some groups (weights and group ends) once for all rows of x, then continue with the next groups.
  static void Buffered(const Panels& panels, int64_t m) {
    Groups groups;
    Totals totals[kMostWaiting];
    const Layer& layer = panels.at[0].layer;
    Stream streams[] = {panels.at[0].stream, panels.at[1].stream, panels.at[2].stream};
    for (int64_t i = 0; i < m; ++i) {
      for (auto& total : totals[i].at) Columns::Store(total, Columns::Set(0.0f));
    }
    const bool is_short = layer.group_spans == 1;
    const int64_t rows = is_short ? kShortRows : kLongRows;
    const int64_t most = kMostSpans / layer.group_spans;
    for (groups.begin = 0; groups.begin < layer.groups; groups.begin = groups.end) {
      groups.end = layer.groups - groups.begin < most ? layer.groups : groups.begin + most;
      Fill(panels, streams, groups);
      // Prefetch the next weights, of these or the next panels, a share with each iteration.
      const int64_t panel_bytes = panels.at[1].stream.values - panels.at[0].stream.values;
      const int64_t left = layer.spans - (groups.end < layer.groups ? groups.end * layer.group_spans : 0);
      const int64_t share = panel_bytes / layer.spans * (left < kMostSpans ? left : kMostSpans) * rows / m;
      int64_t ahead = groups.end < layer.groups ? 0 : (kWidePanels - 1) * panel_bytes;
      for (int64_t row = 0; row < m; row += rows, ahead += share) {
        for (const Stream& stream : streams) PrefetchForLater(stream.values + ahead, share);
        const int64_t first = row % kBlock;
        (is_short ? ShortGroups : LongGroups)(panels, groups, row - first, first, totals + row);
        // Store at once: stores of many rows of y together would wait for their cache lines.
        if (groups.end == layer.groups) StoreTotals(panels, row - first, first, rows, totals + row);
      }
    }
  }
  static void Fill(const Panels& panels, Stream (&streams)[kWidePanels], Groups& groups) {
    const Layer& layer = panels.at[0].layer;
    const int64_t begin = groups.begin * layer.group_spans;
    // The panel may end within its last group, or continue after it with zero padding, which is not expanded.
    const int64_t end = groups.end * layer.group_spans < layer.spans ? groups.end * layer.group_spans : layer.spans;
    for (const Panel& p : panels.at) p.scales.Prefetch(groups.begin, groups.end);
    for (int c = 0; c < kWidePanels; ++c) ExpandSpans<Weights>(streams[c], end - begin, groups.weights[c]);
    for (int c = 0; c < kWidePanels; ++c) {
      for (int64_t g = groups.begin; g < groups.end; ++g) groups.ends[c][g - groups.begin] = panels.at[c].scales.Of(g);
    }
  }
  static void StoreTotals(const Panels& panels, int64_t i, int64_t first, int64_t rows, const Totals* totals) {
    const auto terms = panels.at[0].template RowTermsOf<kBlock>(i);
    for (int64_t r = 0; r < rows; ++r) {
      for (int c = 0; c < kWidePanels; ++c) {
        const Floats total = terms.End(Columns::Load(totals[r].at[c]), first + r);
        panels.at[c].output.StoreWithBias(i + first + r, total);
      }
    }
  }

  // The sums of kRows rows of x in a group: the rows from `first` on of the block that starts at row i.
  template <int kRows, bool kOneSpan>
  struct GroupSums {
    GroupSums(const Panels& panels, const Groups& groups, int64_t i, int64_t first_)
        : terms(panels.at[0].template RowTermsOf<kBlock>(i)),
          first(first_),
          spans(panels.at[0].layer.spans),
          group_spans(kOneSpan ? 1 : panels.at[0].layer.group_spans),
          span(groups.begin * group_spans),
          x(panels.at[0].X(i) + (span * kSpanInputs * kBlock + kFourRows * Weights::kRowInputs * first)),
          weights(groups.weights[0]) {}

    // Add the products of the next group.
    __attribute__((always_inline)) void Add(int64_t group) {
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kWidePanels; ++c) at[r][c] = terms.Start(group, first + r);
      }
      const int64_t end = kOneSpan || span + group_spans < spans ? span + group_spans : spans;
      do {
#pragma GCC unroll 2
        for (int four = 0; four < kSpanRows; four += kFourRows) {
          WideFour<Simd, Weights>(at, x, [&](int c, int row) {
            return Weights::LoadRow(weights + (c * kMostSpans * kSpanRows + four + row) * Weights::kStoredBytes);
          });
        }
        weights += kSpanRows * Weights::kStoredBytes;
      } while (++span < end && !kOneSpan);
    }
    // Return a total plus the group's sum.
    __attribute__((always_inline)) Floats AddTo(const Floats& total, const Ends& ends, int64_t group, int r, int c) {
      return terms.Add(total, at[r][c], ends, group, first + r);
    }

    typename Panel::template RowTerms<kBlock> terms;
    int64_t first;
    int64_t spans;
    int64_t group_spans;
    int64_t span;
    const Activation* x;
    const uint8_t* weights;
    Sums at[kRows][kWidePanels];
  };

  // Groups of one span end so often that totals must stay in registers, which limits the number of rows.
  __attribute__((noinline)) static void ShortGroups(const Panels& panels, const Groups& groups, int64_t i,
                                                    int64_t first, Totals* totals) {
    GroupSums<kShortRows, true> sums(panels, groups, i, first);
    Floats kept[kShortRows][kWidePanels];
    for (int r = 0; r < kShortRows; ++r) {
      for (int c = 0; c < kWidePanels; ++c) kept[r][c] = Columns::Load(totals[r].at[c]);
    }
    const Ends* ends = groups.ends[0];
    for (int64_t group = groups.begin; group < groups.end; ++group, ++ends) {
      sums.Add(group);
#pragma GCC unroll 4
      for (int c = 0; c < kWidePanels; ++c) {
        const Ends of_panel = ends[c * kMostSpans];
#pragma GCC unroll 16
        for (int r = 0; r < kShortRows; ++r) kept[r][c] = sums.AddTo(kept[r][c], of_panel, group, r, c);
      }
    }
    for (int r = 0; r < kShortRows; ++r) {
      for (int c = 0; c < kWidePanels; ++c) Columns::Store(totals[r].at[c], kept[r][c]);
    }
  }
  // Longer groups gain more from twice the rows, with totals in the cache.
  __attribute__((noinline)) static void LongGroups(const Panels& panels, const Groups& groups, int64_t i, int64_t first,
                                                   Totals* totals) {
    GroupSums<kLongRows, false> sums(panels, groups, i, first);
    const int64_t groups_end = groups.end;
    const Ends* ends = groups.ends[0];
    for (int64_t group = groups.begin; group < groups_end; ++group, ++ends) {
      sums.Add(group);
#pragma GCC unroll 4
      for (int c = 0; c < kWidePanels; ++c) {
        const Ends of_panel = ends[c * kMostSpans];
#pragma GCC unroll 16
        for (int r = 0; r < kLongRows; ++r) {
          float* const total = totals[r].at[c];
          Columns::Store(total, sums.AddTo(Columns::Load(total), of_panel, group, r, c));
        }
      }
      // Without this, gcc keeps totals in registers and spills them among the products.
      __asm__ volatile("" : : : "memory");
    }
  }
  // Weights expanded for a single block are best used from registers.
  static void OneBlock(const Panels& panels) {
    for (int64_t first = 0; first < kBlock; first += kLongRows) OneBlock(panels, first);
  }
  __attribute__((noinline)) static void OneBlock(const Panels& panels, int64_t first) {
    const Layer& layer = panels.at[0].layer;
    const auto terms = panels.at[0].template RowTermsOf<kBlock>(0);
    const Activation* x = panels.at[0].X(0) + kFourRows * Weights::kRowInputs * first;
    Stream streams[] = {panels.at[0].stream, panels.at[1].stream, panels.at[2].stream};
    // Each half of the block prefetches half of the next panels, a share with each group.
    const int64_t panel_bytes = panels.at[1].stream.values - panels.at[0].stream.values;
    const int64_t share = panel_bytes / (2 * layer.groups);
    int64_t ahead = kWidePanels * panel_bytes + (first == 0 ? 0 : panel_bytes / 2);
    if (first == 0) {
      for (const Panel& p : panels.at) p.scales.Prefetch(kWidePanels * layer.groups, (kWidePanels + 1) * layer.groups);
    }
    alignas(64) float totals[kWidePanels][kLongRows][kPanelColumns];
    for (auto& of_panel : totals) {
      for (auto& total : of_panel) Columns::Store(total, Columns::Set(0.0f));
    }
    int64_t span = 0;
    for (int64_t group = 0; group < layer.groups; ++group, ahead += share) {
      for (const Panel& p : panels.at) PrefetchLines(p.stream.values + ahead, share);
      Sums sums[kLongRows][kWidePanels];
#pragma GCC unroll 16
      for (int r = 0; r < kLongRows; ++r) {
#pragma GCC unroll 4
        for (int c = 0; c < kWidePanels; ++c) sums[r][c] = terms.Start(group, first + r);
      }
      const int64_t end = span + layer.group_spans < layer.spans ? span + layer.group_spans : layer.spans;
      for (; span < end; ++span) {
#pragma GCC unroll 2
        for (int four = 0; four < kSpanRows; four += kFourRows) {
          WideFour<Simd, Weights>(sums, x, [&](int c, int row) {
            return Weights::FromBytes(streams[c].template Next<Fetch::kMultiply, false>(four + row));
          });
        }
      }
#pragma GCC unroll 4
      for (int c = 0; c < kWidePanels; ++c) {
        const auto scales = panels.at[c].scales.Of(group);
#pragma GCC unroll 16
        for (int r = 0; r < kLongRows; ++r) {
          float* const total = totals[c][r];
          Columns::Store(total, terms.Add(Columns::Load(total), sums[r][c], scales, group, first + r));
        }
      }
      // As in LongGroups. Local totals only count as memory if their address escapes.
      __asm__ volatile("" : : "r"(totals) : "memory");
    }
    for (int c = 0; c < kWidePanels; ++c) {
      for (int r = 0; r < kLongRows; ++r) {
        const Floats total = terms.End(Columns::Load(totals[c][r]), first + r);
        panels.at[c].output.StoreWithBias(first + r, total);
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
