// The loop of the kernels for packed panels: walk the rows of a panel, expand each (or load it, in dense storage) to
// registers, and multiply it with four or two activations of every row of x. Included by *kernels.cc only; local to
// each.
//
// A kind of weight (weights/*.h) provides
//
//     Weight, PaddedK, Group, PackedRowBytes
//                                the type and sizes of args.w; Group is kWholeColumn if there is one group
//     kDense, kHasGroups, kNibbles
//     kBuffered                  many rows of x pass over rows that were expanded once;
//                                otherwise each block of rows expands the stored rows again
//     Stream                     the stored rows of a panel, and `values`, its position:
//                                StartSpan<fetch>(), Next<fetch, odd times 16>(row of the span), EndSpan()
//     Row, FromBytes, StoreRow, LoadRow, kStoredBytes
//                                a row that is ready to multiply
//     Sums, Zero, LoadSums, StoreSums
//                                sums of 16 columns and one group
//     StartSpan, EndSpan         around the products of a span; empty if kFreeSpans. If kNarrowChunks, around those of
//                                a chunk, which is at most kChunkSpans spans of a group: sums start as
//                                RowTerms::StartChunk(chunk, row), and Widen(sums) or AddWide(wide, sums) ends them
//     kRowBlock                  rows of x that are multiplied at once
//     kParts, Part<p>(row), MultiplyAddPart<p>
//                                a row of weights, part by part: with few registers only one part is held
//     MultiplyAdd, kMostHeld, kInputsTogether, …
//                                all parts; see activations.h
//     kQuadsOfWords              optional: if above 0, two or more rows of x are multiplied by subgroup_loop.h
//     kFloatSums                 sums are floats, in one order for any number of rows: few rows are multiplied by
//                                few_float_rows.h, which lists its requirements
//     kOneRowChains, kMostChains, AddChains
//                                chains of sums, for one row and for two or three; not for floats
//     kFetchOneRow, OneRowAhead  see one_row.h; not for floats
//     TakesRow(x, padded k)      optional, in a kind for one row (FewRowsKindOf): whether it supports this packed row
//     Scales                     of a panel: Of(group), Prefetch(begin, end) of groups
//     RowTerms<rows>             of a block of rows of x: Start(group, row), the initial sums;
//                                Add(total, sums, scales, group, row), a total plus a group's sums; End(total, row)
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/bitmap_weight.h"
#include "matmul/converted_loop.h"
#include "matmul/few_float_rows.h"
#include "matmul/one_row.h"
#include "matmul/pairs_loop.h"
#include "matmul/panel.h"
#include "matmul/subgroup_loop.h"
#include "matmul/wide_groups.h"

namespace ortolan {
namespace {

template <typename Simd, typename Weights>
class PanelLoop {
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
  static constexpr int kTogether = kRowsTogether<Weights>;
  static constexpr bool kPairs = Simd::kRowPairs && kTogether == 2;
  static constexpr bool kConverts =
      Simd::kConvertsInt8 && Weights::kRowInputs == 4 && !Weights::kNibbles && !Weights::kHasGroups;

 public:
  // Panels multiplied at once with half a block of rows, if rows of weights are quads in one register: a repeated
  // activation is then used for several weights. With one panel, the loads that repeat activations limit the speed.
  static constexpr bool kIsWide = Weights::kRowInputs == 4 && Columns::kRegisters == 1 && Simd::kRegisters == 32 &&
                                  Weights::kFreeSpans && !(Weights::kHasGroups && Weights::kBuffered);
  static constexpr int kPanelsTogether = kIsWide ? kWidePanels : 1;

  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    using FewRows = FewRowsKindOf<Weights>;
    if constexpr (FewRows::kMostRows > 1) {
      if (args.m <= FewRows::kMostRows) {
        return PanelLoop<Simd, typename FewRows::Type>::Run(args, panel_begin, panel_end);
      }
    }
    if constexpr (kConverts) {
      if (args.m >= kManyRows) {
        if (WeightOf<BitmapWeight>(args).pairs_fit) {
          return ConvertedLoop<Simd, Weights, PairProducts<Simd>>::Run(args, panel_begin, panel_end);
        }
        return ConvertedLoop<Simd, Weights, WordProducts<Simd>>::Run(args, panel_begin, panel_end);
      }
    }
    if constexpr (kHasSubgroupLoop<Weights>) {
      if (args.m == 1 && RunOneRow<Weights>(args, panel_begin, panel_end)) return;
      SubgroupLoop<Simd, Weights>::Run(args, panel_begin, panel_end);
    } else if constexpr (kPairs && Weights::kRowInputs == 2) {
      PairsLoop<Simd, Weights>::Run(args, panel_begin, panel_end);
    } else if constexpr (FewRows::kMostRows < kAnyRows) {
      if (args.m == 1 && RunOneRow<typename FewRows::Type>(args, panel_begin, panel_end)) return;
      if constexpr (kPairs) {
        PairsLoop<Simd, Weights>::Run(args, panel_begin, panel_end);
      } else {
        const Layer layer(args);
        // Groups of one span need no loop.
        if constexpr (Weights::kNarrowChunks) {
          if (layer.group_spans == 1) return RunRows<true>(layer, args, panel_begin, panel_end);
        }
        RunRows<false>(layer, args, panel_begin, panel_end);
      }
    }
  }

 private:
  // Return whether the row was multiplied: a kind may refuse a row.
  template <typename Kind>
  static bool RunOneRow(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const ortolan::Layer<Kind> layer(args);
    if constexpr (requires { Kind::TakesRow(args.x, layer.padded_k); }) {
      if (!Kind::TakesRow(args.x, layer.padded_k)) return false;
    }
    if constexpr (Kind::kFloatSums) {
      FewFloatRows<Simd, Kind, 1>::Run(layer, args, panel_begin, panel_end);
    } else {
      WithOneRow<Simd>(layer, [&]<typename OneRow>() { OneRow::Run(layer, args, panel_begin, panel_end); });
    }
    return true;
  }

  // Expanded rows in the buffer while all rows of x pass over them: at most half of a 32 KB L1 cache, and whole groups.
  static constexpr int64_t kBufferRows = Weights::kRowInputs <= 4 ? 256 : 128;
  static constexpr int64_t kBufferSpans = kBufferRows / kSpanRows;
  // Limit of rows of x: for more rows, the panel is expanded again.
  static constexpr int64_t kMostRows = kMostWaiting / kBlock * kBlock;

  // Few rows of floats use FewFloatRows instead.
  template <int kRows>
  static constexpr bool kIsFused = kRows >= kManyRows || !Weights::kFloatSums;

  template <bool kOneSpan>
  static void RunRows(const Layer& layer, const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const MatMulArgs part = RowsOf(args, row, kMostRows, layer.row_bytes);
      if constexpr (Weights::kFloatSums) {
        if (part.m < kManyRows) {
          MultiplyFewFloatRows<Simd>(layer, part, panel_begin, panel_end);
          continue;
        }
      }
      for (int64_t panel = panel_begin; panel < panel_end;) {
        if constexpr (kPanelsTogether > 1) {
          // Weights expanded for a single block are best used from registers.
          const bool wide = Weights::kBuffered ? part.m > kBlock : part.m >= kBlock;
          if (wide && panel_end - panel >= kPanelsTogether) {
            Wide({Panel(layer, part, panel), Panel(layer, part, panel + 1), Panel(layer, part, panel + 2)});
            panel += kPanelsTogether;
            continue;
          }
        }
        const Panel p(layer, part, panel++);
        if (Weights::kBuffered && part.m > kBlock) {
          if constexpr (Weights::kBuffered) Buffered<kOneSpan>(p);
          continue;
        }
        int64_t i = 0;
        if constexpr (kIsFused<kBlock>) {
          for (; i + kBlock <= part.m; i += kBlock) Fused<kOneSpan, kBlock>(p, i);
        }
        LastRows<kOneSpan>(p, i);
      }
    }
  }

  template <int kRows>
  static constexpr int ChainsOf() {
    if constexpr (Weights::kFloatSums || kRows > 3) {
      return 1;
    } else {
      return Weights::kMostChains;
    }
  }

  // Few rows of x, i … i+kRows-1: each row of weights is expanded to registers and used at once. One function per
  // number of rows: together they would run out of registers and compile for minutes.
  template <bool kOneSpan, int kRows>
  __attribute__((noinline)) static void Fused(const Panel& p, int64_t i) {
    if constexpr (kRows == 1) {
      return WithOneRow<Simd>(p.layer, [&]<typename OneRow>() { OneRow::Row(p, i); });
    } else {
      // With few rows, one sum per row would be limited by the latency of additions, as in OneRow.
      constexpr int kChains = ChainsOf<kRows>();
      constexpr bool kOddTimes16 = Weights::kNibbles && kChains == 2;
      const Layer& layer = p.layer;
      const auto terms = p.template RowTermsOf<kRows>(i);
      Stream stream = p.stream;
      const Activation* x = p.X(i);
      Floats totals[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) totals[r] = Columns::Set(0.0f);
      int64_t span = 0;
      Chunks chunks(layer, 0);
      for (int64_t group = 0; group < layer.groups; ++group) {
        Sums sums[kRows][kChains];
        if constexpr (!Weights::kNarrowChunks) {
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            sums[r][0] = terms.Start(group, r);
            for (int c = 1; c < kChains; ++c) sums[r][c] = Weights::Zero();
          }
        }
        const int64_t end = span + layer.group_spans < layer.spans ? span + layer.group_spans : layer.spans;
        SumSpans<kOneSpan, kRows, kChains>(terms, sums, span, end, chunks, [&](Sums(&span_sums)[kRows][kChains]) {
          stream.template StartSpan<Fetch::kMultiply>();
          MultiplySpan<kRows, kChains>(span_sums, x, [&](int row) {
            return Weights::FromBytes(stream.template Next<Fetch::kMultiply, kOddTimes16>(row));
          });
          stream.EndSpan();
        });
        const auto scales = p.scales.Of(group);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          Sums sum = sums[r][0];
          if constexpr (kOddTimes16) sums[r][1] = Weights::DivideBy16(sums[r][1]);
          if constexpr (kChains > 1) {
            for (int c = 1; c < kChains; ++c) sum = Weights::AddChains(sum, sums[r][c]);
          }
          totals[r] = terms.Add(totals[r], sum, scales, group, r);
        }
      }
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) p.output.StoreWithBias(i + r, terms.End(totals[r], r));
    }
  }

  // Counts the chunks of a panel, starting at the chunk of a given span. A counter avoids a division, which costs half
  // as much as a span.
  struct Chunks {
    Chunks(const Layer& layer, int64_t span)
        : spans(layer.group_spans < kChunkSpans ? layer.group_spans : kChunkSpans),
          next(Weights::kNarrowChunks ? span / spans : 0) {}
    int64_t spans;  // limit for the spans of a chunk
    int64_t next;
  };

  // Add the products of spans `span` … end-1 of a group to sums; multiply(sums) adds those of one span. With chunks,
  // sums start here.
  template <bool kOneSpan, int kRows, int kChains, typename RowTerms, typename Multiply>
  __attribute__((always_inline)) static void SumSpans(const RowTerms& terms, Sums (&sums)[kRows][kChains],
                                                      int64_t& span, int64_t end, Chunks& chunks,
                                                      const Multiply& multiply) {
    Sums part[kRows][kChains];
    if constexpr (kOneSpan) {
      for (int r = 0; r < kRows; ++r) part[r][0] = terms.StartChunk(span, r);
      multiply(part);
      for (int r = 0; r < kRows; ++r) sums[r][0] = Weights::Widen(part[r][0]);
      ++span;
    } else if constexpr (Weights::kNarrowChunks) {
      for (bool first = true; span < end; first = false, ++chunks.next) {
        for (int r = 0; r < kRows; ++r) part[r][0] = terms.StartChunk(chunks.next, r);
        const int64_t chunk_end = end - span < chunks.spans ? end : span + chunks.spans;
        for (; span < chunk_end; ++span) multiply(part);
        for (int r = 0; r < kRows; ++r) {
          sums[r][0] = first ? Weights::Widen(part[r][0]) : Weights::AddWide(sums[r][0], part[r][0]);
        }
      }
    } else {
      for (; span < end; ++span) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int c = 0; c < kChains; ++c) part[r][c] = Weights::StartSpan(sums[r][c]);
        }
        multiply(part);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
          for (int c = 0; c < kChains; ++c) sums[r][c] = Weights::EndSpan(sums[r][c], part[r][c]);
        }
      }
    }
  }

  // Multiply a span of weights, next(row), with kRows rows of x, and advance x. For few rows, the whole span is
  // unrolled.
  template <int kRows, int kChains, typename Next>
  __attribute__((always_inline)) static void MultiplySpan(Sums (&sums)[kRows][kChains], const Activation*& x,
                                                          const Next& next) {
    ForEach<(kRows <= 4 && Columns::kRegisters <= 4)>(
        kSpanRows, kTogether, [&](int four) { MultiplyFour<kRows, kChains>(sums, four, x, next); });
  }
  template <int kRows, int kChains, typename Next>
  __attribute__((always_inline)) static void MultiplyFour(Sums (&sums)[kRows][kChains], int four, const Activation*& x,
                                                          const Next& next) {
    const Activations<Weights, kRows> activations(x);
#pragma GCC unroll 4
    for (int row = 0; row < kTogether; ++row) {
      const auto weights = next(four + row);
      MultiplyPart<0, kRows>(sums, activations, weights, row);
      if constexpr (Weights::kParts == 2) MultiplyPart<1, kRows>(sums, activations, weights, row);
    }
    x += Activations<Weights, kRows>::kElements;
  }

  template <int kPart, int kRows, int kChains>
  __attribute__((always_inline)) static void MultiplyPart(Sums (&sums)[kRows][kChains],
                                                          const Activations<Weights, kRows>& activations,
                                                          const typename Weights::Row& weights, int row) {
    const auto part = Weights::template Part<kPart>(weights);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      Sums& sum = sums[r][row % kChains];
      sum = activations.template MultiplyAdd<kPart>(sum, part, row, r);
    }
  }

  // Multiply the rows from i on, fewer than a block.
  template <bool kOneSpan>
  static void LastRows(const Panel& p, int64_t i) {
    WithRowCount<kBlock - 1>(p.args.m - i, [&]<int kRows>() {
      if constexpr (kIsFused<kRows>) Fused<kOneSpan, kRows>(p, i);
    });
  }

  struct alignas(64) Waiting {
    uint8_t at[kMostRows][kPanelColumns * sizeof(float)];  // totals of groups, or the sums of a single group
  };

  // Multiply at least one block of rows.
  static void Wide(const Panels& panels) {
    if constexpr (Weights::kBuffered) return WideBuffered(panels);
    const int64_t m = panels.at[0].args.m;
    int64_t i = 0;
    if constexpr (Weights::kHasGroups) {
      i = m / kBlock * kBlock;
      ortolan::WideGroups<Simd, Weights>::Run(panels, i);
    } else {
      const int64_t spans = panels.at[0].layer.spans;
      for (; i + kBlock <= m; i += kBlock) {
        for (int first = 0; first < kBlock; first += kBlock / 2) {
          Stream streams[] = {panels.at[0].stream, panels.at[1].stream, panels.at[2].stream};
          WideRows(panels, 0, spans, i, first, nullptr, [streams](int c, int64_t, int row) mutable {
            return Weights::FromBytes(streams[c].template Next<Fetch::kMultiply, false>(row));
          });
        }
      }
    }
    for (const Panel& p : panels.at) LastRows<false>(p, i);
  }
  // Like Buffered, but for several panels.
  static void WideBuffered(const Panels& panels) {
    alignas(64) uint8_t buffer[kPanelsTogether][kBufferRows * Weights::kStoredBytes];
    Waiting waiting[kPanelsTogether];
    Stream streams[] = {panels.at[0].stream, panels.at[1].stream, panels.at[2].stream};
    const int64_t spans = panels.at[0].layer.spans;
    const int64_t m = panels.at[0].args.m;
    for (int64_t begin = 0; begin < spans; begin += kBufferSpans) {
      const int64_t end = spans - begin < kBufferSpans ? spans : begin + kBufferSpans;
      for (int c = 0; c < kPanelsTogether; ++c) ExpandSpans<Weights>(streams[c], end - begin, buffer[c]);
      const auto next = [&](int c, int64_t four, int row) {
        return Weights::LoadRow(buffer[c] + (four + row) * Weights::kStoredBytes);
      };
      int64_t i = 0;
      for (; i + kBlock <= m; i += kBlock) {
        WideRows(panels, begin, end, i, 0, waiting, next);
        WideRows(panels, begin, end, i, kBlock / 2, waiting, next);
      }
      for (int c = 0; c < kPanelsTogether; ++c) {
        LastExpandedRows<false>(panels.at[c], buffer[c], begin, end, i, waiting[c]);
      }
    }
  }
  // Multiply spans begin … end-1 with half of the block that starts at row i: its rows from `first` on. next(panel, row
  // of weights since begin, row) reads the next row of a panel. Sums of unfinished columns are saved.
  template <typename Next>
  __attribute__((noinline)) static void WideRows(const Panels& panels, int64_t begin, int64_t end, int64_t i, int first,
                                                 Waiting* waiting, const Next& next_row) {
    constexpr int kRows = kBlock / 2;
    // A copy in registers: next to stores to streams, clang would load all activations first and run out of registers.
    Next next = next_row;
    const Panel& front = panels.at[0];
    const auto terms = front.template RowTermsOf<kBlock>(i);
    const Activation* x = front.X(i) + begin * kSpanInputs * kBlock + kFourRows * Weights::kRowInputs * first;
    Sums sums[kRows][kPanelsTogether];
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kPanelsTogether; ++c) {
        sums[r][c] = begin == 0 ? terms.Start(0, first + r) : Weights::LoadSums(waiting[c].at[i + first + r]);
      }
    }
    for (int64_t four = 0; four < (end - begin) * kSpanRows; four += kFourRows) {
      WideFour<Simd, Weights>(sums, x, [&](int c, int row) { return next(c, four, row); });
    }
    if (end < front.layer.spans) {
#pragma GCC unroll 4
      for (int c = 0; c < kPanelsTogether; ++c) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) Weights::StoreSums(waiting[c].at[i + first + r], sums[r][c]);
      }
      return;
    }
#pragma GCC unroll 4
    for (int c = 0; c < kPanelsTogether; ++c) {
      // Copies, because the compiler must assume that stores to y change the originals.
      const auto scales = panels.at[c].scales.Of(0);
      const auto output = panels.at[c].output.RowsFrom(i + first);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Floats total = terms.Add(Columns::Set(0.0f), sums[r][c], scales, 0, first + r);
        output.StoreWithBias(r, terms.End(total, first + r));
      }
    }
  }

  // Many rows of x: expand some rows of weights once, multiply them with all rows of x, then continue with the next.
  // The sums of 16 columns are kept on the stack: in y, rows could be so far apart that all map to the same few cache
  // lines.
  template <bool kOneSpan>
  static void Buffered(const Panel& p) {
    alignas(64) uint8_t buffer[kBufferRows * Weights::kStoredBytes];
    Waiting waiting;
    Stream stream = p.stream;
    for (int64_t first = 0; first < p.layer.spans; first += kBufferSpans) {
      const int64_t end = p.layer.spans - first < kBufferSpans ? p.layer.spans : first + kBufferSpans;
      ExpandSpans<Weights>(stream, end - first, buffer);
      int64_t i = 0;
      for (; i + kBlock <= p.args.m; i += kBlock) ExpandedRows<kOneSpan, kBlock>(p, buffer, first, end, i, waiting);
      LastExpandedRows<kOneSpan>(p, buffer, first, end, i, waiting);
    }
  }

  // Multiply the rows from i on, fewer than a block.
  template <bool kOneSpan>
  static void LastExpandedRows(const Panel& p, const uint8_t* buffer, int64_t first, int64_t end, int64_t i,
                               Waiting& waiting) {
    WithRowCount<kBlock - 1>(p.args.m - i,
                             [&]<int kRows>() { ExpandedRows<kOneSpan, kRows>(p, buffer, first, end, i, waiting); });
  }

  // Multiply spans first … end-1, which are in the buffer, with rows i … i+kRows-1.
  template <bool kOneSpan, int kRows>
  __attribute__((noinline)) static void ExpandedRows(const Panel& p, const uint8_t* buffer, int64_t first, int64_t end,
                                                     int64_t i, Waiting& waiting) {
    const Layer& layer = p.layer;
    const auto terms = p.template RowTermsOf<kRows>(i);
    const Activation* x = p.X(i) + first * kSpanInputs * kRows;
    const auto next = [&](int row) { return Weights::LoadRow(buffer + row * Weights::kStoredBytes); };
    if (Weights::kHasGroups && first == 0) {
      for (int r = 0; r < kRows; ++r) {
        Columns::Store(reinterpret_cast<float*>(waiting.at[i + r]), Columns::Set(0.0f));
      }
    }
    Chunks chunks(layer, first);
    int64_t group = Weights::kHasGroups ? first / layer.group_spans : 0;
    for (int64_t span = first; span < end; ++group) {
      // Padding follows the last group.
      if (Weights::kHasGroups && group == layer.groups) break;
      const int64_t group_end = Weights::kHasGroups && end - span > layer.group_spans ? span + layer.group_spans : end;
      Sums sums[kRows][1];
      if constexpr (!Weights::kNarrowChunks) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const bool start = Weights::kHasGroups || first == 0;
          sums[r][0] = start ? terms.Start(group, r) : Weights::LoadSums(waiting.at[i + r]);
        }
      }
      SumSpans<kOneSpan, kRows, 1>(terms, sums, span, group_end, chunks, [&](Sums(&span_sums)[kRows][1]) {
        MultiplySpan<kRows, 1>(span_sums, x, next);
        buffer += kSpanRows * Weights::kStoredBytes;
      });
      if constexpr (Weights::kHasGroups) {
        const auto scales = p.scales.Of(group);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          float* total = reinterpret_cast<float*>(waiting.at[i + r]);
          Columns::Store(total, terms.Add(Columns::Load(total), sums[r][0], scales, group, r));
        }
      } else {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) Weights::StoreSums(waiting.at[i + r], sums[r][0]);
      }
    }
    if (end < layer.spans) return;
    for (int r = 0; r < kRows; ++r) {
      Floats total;
      if constexpr (Weights::kHasGroups) {
        total = Columns::Load(reinterpret_cast<const float*>(waiting.at[i + r]));
      } else {
        total = terms.Add(Columns::Set(0.0f), Weights::LoadSums(waiting.at[i + r]), p.scales.Of(0), 0, r);
      }
      p.output.StoreWithBias(i + r, terms.End(total, r));
    }
  }
};

}  // namespace
}  // namespace ortolan
