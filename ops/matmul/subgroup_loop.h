// The loop for weights in subgroups and two or more rows of x, on targets without dot products of bytes. Included by
// panel_loop.h; local to each file.
//
// Some groups of a panel are expanded once for all blocks of rows of x, to q - z. Blocks of rows hold x + 128, so that
// pairs of unsigned and signed bytes are multiplied into 16-bit words, which hold the sums of 16, 8 or 4 inputs (4, 5
// or 6 bits: 8 x 255 x 15, 4 x 255 x 31 and 2 x 255 x 63 fit). A product with s ends them:
//
//     sum of x v = sum over words of s (sum of (x + 128) (q - z)) - 128 (sum of v)
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/one_row.h"
#include "matmul/panel.h"
#include "matmul/wide_groups.h"

namespace ortolan {
namespace {

// True for kinds of weight that use this loop.
template <typename Weights>
constexpr bool kHasSubgroupLoop = false;
template <typename Weights>
  requires requires { Weights::kQuadsOfWords; }
constexpr bool kHasSubgroupLoop<Weights> = Weights::kQuadsOfWords > 0;

// Weights: a kind (panel_loop.h) whose Stream has NextCentered(row), q - z, and Steps(), s of the row in 16-bit words.
template <typename Simd, typename Weights>
class SubgroupLoop {
  using Columns = simd::Columns<Simd>;
  using Sums = typename Weights::Sums;
  using Stream = typename Weights::Stream;
  using Layer = ortolan::Layer<Weights>;
  using Panel = ortolan::Panel<Simd, Weights>;
  static constexpr int kBlock = Weights::kRowBlock;
  static constexpr int kFourInputs = kFourRows * Weights::kRowInputs;
  static constexpr int kOffset = 128;
  static_assert(Weights::kInputsTogether == kFourInputs && Weights::kBias == 0);

 public:
  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const Layer layer(args);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const MatMulArgs part = RowsOf(args, row, kMostRows, layer.row_bytes);
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) Multiply({layer, part, panel});
    }
  }

 private:
  // Limit of rows of x per expansion: for more rows, the weights are expanded again.
  static constexpr int64_t kMostRows = kMostWaiting / kBlock * kBlock;
  // Spans in the buffer: whole groups, 10 KB.
  static constexpr int64_t kBufferSpans = 16;
  static constexpr int64_t kBufferFours = kBufferSpans * Layer::kSpanRows / kFourRows;
  static constexpr int64_t kMostGroups = kBufferSpans * kSpanInputs / 64;  // a group has at least 64 inputs

  // Four rows of weights.
  struct alignas(64) Four {
    uint8_t rows[kFourRows][Weights::kStoredBytes];
    int32_t steps[kPanelColumns];
  };
  struct Buffer {
    Four fours[kBufferFours];
    alignas(64) int32_t starts[kMostGroups][kPanelColumns];
    alignas(64) float totals[kMostRows][kPanelColumns];
  };

  static void Multiply(const Panel& p) {
    const int64_t m = p.args.m;
    if (m <= kBlock) return WithRowCount<kBlock>(m, [&]<int kRows>() { OneBlock<kRows>(p); });
    Buffer buffer;
    Stream stream = p.stream;
    const int64_t spans = p.layer.spans;
    for (int64_t begin = 0; begin < spans; begin += kBufferSpans) {
      const int64_t end = spans - begin < kBufferSpans ? spans : begin + kBufferSpans;
      Expand(p.layer, stream, begin, end, buffer);
      int64_t i = 0;
      for (; i + kBlock <= m; i += kBlock) Block<kBlock>(p, buffer, stream.values, begin, end, i);
      WithRowCount<kBlock - 1>(m - i, [&]<int kRows>() {
        if constexpr (kRows > 1) Block<kRows>(p, buffer, stream.values, begin, end, i);
      });
    }
    if (m % kBlock == 1) LastRow(p);
  }

  // A block of one row holds x without 128.
  static void LastRow(const Panel& p) {
    WithOneRow<Simd>(p.layer, [&]<typename OneRow>() { OneRow::Row(p, p.args.m - 1); });
  }

  // The spans of a group that starts at span `begin`, or those before `end`.
  static int64_t SpansOfGroup(const Layer& layer, int64_t begin, int64_t end) {
    return end - begin < layer.group_spans ? end - begin : layer.group_spans;
  }

  // Multiply the only block of rows: each row of weights is used as soon as it is expanded.
  template <int kRows>
  __attribute__((noinline)) static void OneBlock(const Panel& p) {
    if constexpr (kRows == 1) {
      LastRow(p);
    } else {
      const Layer& layer = p.layer;
      const auto terms = p.template RowTermsOf<kRows>(0);
      const int8_t* x = p.X(0);
      Stream stream = p.stream;
      typename Columns::Floats totals[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) totals[r] = Columns::Set(0.0f);
      for (int64_t group = 0; group < layer.groups; ++group) {
        Sums sums[kRows + 1];
#pragma GCC unroll 16
        for (int r = 0; r <= kRows; ++r) sums[r] = Columns::SetInt(0);
        const int64_t spans = SpansOfGroup(layer, group * layer.group_spans, layer.spans);
        AddStored<kRows>(sums, stream, spans, x, [](int, const auto&) {}, [](const Sums&) {});
        const Sums start = StartOf(sums[kRows]);
        const auto scales = p.scales.Of(group);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          totals[r] = terms.Add(totals[r], Columns::AddInt(sums[r], start), scales, group, r);
        }
      }
      for (int r = 0; r < kRows; ++r) p.output.StoreWithBias(r, terms.End(totals[r], r));
    }
  }

  // The initial sums of a group whose v have this sum.
  static Sums StartOf(const Sums& sum) {
    return Columns::template Of<Sums>([&](int j) { return Simd::MultiplyInt(sum.at[j], Simd::SetInt(-kOffset)); });
  }

  static void Expand(const Layer& layer, Stream& stream, int64_t begin, int64_t end, Buffer& buffer) {
    Four* four = buffer.fours;
    int32_t (*start)[kPanelColumns] = buffer.starts;
    const int8_t* no_x = nullptr;
    for (int64_t span = begin; span < end; span += layer.group_spans, ++start) {
      Sums sum[] = {Columns::SetInt(0)};
      AddStored<0>(
          sum, stream, SpansOfGroup(layer, span, end), no_x,
          [&](int row, const auto& weights) { Columns::StoreBytes(four->rows[row], weights); },
          [&](const Sums& steps) { Columns::StoreInt((four++)->steps, steps); });
      Columns::StoreInt(*start, StartOf(sum[0]));
    }
  }

  // Multiply spans begin … end-1, which are in the buffer, with rows i … i+kRows-1. The first two blocks of rows also
  // prefetch the weights of the next spans, so that memory is not idle while a buffer is multiplied.
  template <int kRows>
  __attribute__((noinline)) static void Block(const Panel& p, Buffer& buffer, const uint8_t* next, int64_t begin,
                                              int64_t end, int64_t i) {
    const Layer& layer = p.layer;
    const auto terms = p.template RowTermsOf<kRows>(i);
    const int8_t* x = p.X(i) + begin * kSpanInputs * kRows;
    const Four* four = buffer.fours;
    const int32_t (*start)[kPanelColumns] = buffer.starts;
    int64_t group = begin / layer.group_spans;
    for (int64_t span = begin; span < end; span += layer.group_spans, ++group, ++start) {
      Sums sums[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[r] = Columns::LoadInt(*start);
      const Four* const group_end = four + SpansOfGroup(layer, span, end) * Layer::kSpanRows / kFourRows;
      for (; four < group_end; ++four, x += kFourInputs * kRows, next += 2 * kLineBytes) {
        if (i < 2 * kBlock) __builtin_prefetch(next + i / kBlock * kLineBytes);
        AddFour<kRows>(
            sums, x, [&](int row) { return Columns::LoadBytes(four->rows[row]); },
            [&] { return Columns::LoadInt(four->steps); });
      }
      const auto scales = p.scales.Of(group);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        float* const total = buffer.totals[i + r];
        const auto before = group == 0 ? Columns::Set(0.0f) : Columns::Load(total);
        Columns::Store(total, terms.Add(before, sums[r], scales, group, r));
      }
    }
    if (end < layer.spans) return;
    for (int r = 0; r < kRows; ++r) {
      p.output.StoreWithBias(i + r, terms.End(Columns::Load(buffer.totals[i + r]), r));
    }
  }

  // Add the products of the next spans of the stream with kRows rows of x, which advances, and with a row of ones.
  template <int kRows, typename EachRow, typename EachFour>
  __attribute__((always_inline)) static void AddStored(Sums (&sums)[kRows + 1], Stream& stream, int64_t spans,
                                                       const int8_t*& x, const EachRow& each_row,
                                                       const EachFour& each_four) {
    for (int64_t span = 0; span < spans; ++span) {
      stream.template StartSpan<kRows == 0 ? Fetch::kExpand : Fetch::kMultiply>();
#pragma GCC unroll 2
      for (int first = 0; first < Layer::kSpanRows; first += kFourRows, x += kFourInputs * kRows) {
        AddFour<kRows>(
            sums, x,
            [&](int row) {
              const auto weights = stream.template NextCentered<(kRows > 0)>(first + row);
              each_row(row, weights);
              return weights;
            },
            [&] { return stream.Steps(); });
        each_four(stream.Steps());
      }
      stream.EndSpan();
    }
  }

  // Add the products of four rows of weights, next(row), with kRows rows of x and, if there is one more sum, with ones.
  template <int kRows, int kSums, typename Next, typename Steps>
  __attribute__((always_inline)) static void AddFour(Sums (&sums)[kSums], const int8_t* x, const Next& next,
                                                     const Steps& steps_of) {
    constexpr int kQuads = Weights::kQuadsOfWords;
#pragma GCC unroll 4
    for (int first = 0; first < kFourRows; first += kQuads) {
      Sums words[kSums];
#pragma GCC unroll 4
      for (int row = first; row < first + kQuads; ++row) {
        const auto weights = next(row);
#pragma GCC unroll 16
        for (int r = 0; r < kSums; ++r) {
          const auto repeated =
              r == kRows ? Simd::SetBytes(1) : Simd::RepeatQuad(x + kFourInputs * r + Weights::kRowInputs * row);
          words[r] = Columns::template Of<Sums>([&](int j) {
            return row == first ? Simd::MultiplyPairs(repeated, weights.at[j])
                                : Simd::DotNibbles(words[r].at[j], repeated, weights.at[j]);
          });
        }
      }
      const Sums steps = steps_of();
#pragma GCC unroll 16
      for (int r = 0; r < kSums; ++r) {
        sums[r] = Columns::template Of<Sums>(
            [&](int j) { return Simd::DotPair(sums[r].at[j], words[r].at[j], steps.at[j]); });
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
