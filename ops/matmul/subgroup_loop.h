// The loop for weights in subgroups and two or more rows of x, on targets without dot products of bytes. Included by
// panel_loop.h; local to each file.
//
// Some groups of a panel are expanded once for all rows of x, to q - z. Blocks of rows hold x + 128, so that pairs of
// unsigned and signed bytes are multiplied into 16-bit words, which hold the sums of 16, 8 or 4 inputs (4, 5 or 6 bits:
// 8 x 255 x 15, 4 x 255 x 31 and 2 x 255 x 63 fit). A product with s ends them:
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
  static constexpr int64_t kMostGroups = kBufferSpans * kSpanInputs / 64;

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
    Buffer buffer;
    Stream stream = p.stream;
    const int64_t spans = p.layer.spans;
    const int64_t m = p.args.m;
    for (int64_t begin = 0; begin < spans; begin += kBufferSpans) {
      const int64_t end = spans - begin < kBufferSpans ? spans : begin + kBufferSpans;
      Expand(stream, end - begin, p.layer.group_spans, buffer);
      int64_t i = 0;
      for (; i + kBlock <= m; i += kBlock) Block<kBlock>(p, buffer, begin, end, i);
      WithRowCount<kBlock - 1>(m - i, [&]<int kRows>() {
        if constexpr (kRows > 1) Block<kRows>(p, buffer, begin, end, i);
      });
    }
    // A block of one row holds x without 128.
    if (m % kBlock == 1) WithOneRow<Simd>(p.layer, [&]<typename OneRow>() { OneRow::Row(p, m - 1); });
  }

  static void Expand(Stream& stream, int64_t spans, int64_t group_spans, Buffer& buffer) {
    const auto ones = Simd::SetBytes(1);
    Four* four = buffer.fours;
    for (int64_t span = 0; span < spans;) {
      Sums sum = Columns::SetInt(0);
      const int64_t group = span / group_spans;
      const int64_t end = spans - span < group_spans ? spans : span + group_spans;
      for (; span < end; ++span) {
        stream.template StartSpan<Fetch::kExpand>();
#pragma GCC unroll 2
        for (int first = 0; first < Layer::kSpanRows; first += kFourRows, ++four) {
          Sums words = Columns::SetInt(0);
#pragma GCC unroll 4
          for (int row = 0; row < kFourRows; ++row) {
            const auto weights = stream.NextCentered(first + row);
            Columns::StoreBytes(four->rows[row], weights);
            words =
                Columns::template Of<Sums>([&](int j) { return Simd::DotNibbles(words.at[j], ones, weights.at[j]); });
          }
          const Sums steps = stream.Steps();
          Columns::StoreInt(four->steps, steps);
          sum = Columns::template Of<Sums>([&](int j) { return Simd::DotPair(sum.at[j], words.at[j], steps.at[j]); });
        }
        stream.EndSpan();
      }
      Columns::StoreInt(buffer.starts[group], Columns::template Of<Sums>([&](int j) {
                          return Simd::MultiplyInt(sum.at[j], Simd::SetInt(-kOffset));
                        }));
    }
  }

  // Multiply spans begin … end-1, which are in the buffer, with rows i … i+kRows-1.
  template <int kRows>
  __attribute__((noinline)) static void Block(const Panel& p, Buffer& buffer, int64_t begin, int64_t end, int64_t i) {
    const Layer& layer = p.layer;
    const auto terms = p.template RowTermsOf<kRows>(i);
    const int8_t* x = p.X(i) + begin * kSpanInputs * kRows;
    const Four* four = buffer.fours;
    int64_t group = begin / layer.group_spans;
    for (int64_t span = begin, start = 0; span < end; span += layer.group_spans, ++group, ++start) {
      const int64_t spans = end - span < layer.group_spans ? end - span : layer.group_spans;
      Sums sums[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) sums[r] = Columns::LoadInt(buffer.starts[start]);
      const Four* const group_end = four + spans * Layer::kSpanRows / kFourRows;
      for (; four < group_end; ++four, x += kFourInputs * kRows) AddFour(sums, *four, x);
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

  template <int kRows>
  __attribute__((always_inline)) static void AddFour(Sums (&sums)[kRows], const Four& four, const int8_t* x) {
    constexpr int kQuads = Weights::kQuadsOfWords;
#pragma GCC unroll 4
    for (int first = 0; first < kFourRows; first += kQuads) {
      Sums words[kRows];
#pragma GCC unroll 4
      for (int row = first; row < first + kQuads; ++row) {
        const auto weights = Columns::LoadBytes(four.rows[row]);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const auto repeated = Simd::RepeatQuad(x + kFourInputs * r + Weights::kRowInputs * row);
          words[r] = Columns::template Of<Sums>([&](int j) {
            return row == first ? Simd::MultiplyPairs(repeated, weights.at[j])
                                : Simd::DotNibbles(words[r].at[j], repeated, weights.at[j]);
          });
        }
      }
      const Sums steps = Columns::LoadInt(four.steps);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r] = Columns::template Of<Sums>(
            [&](int j) { return Simd::DotPair(sums[r].at[j], words[r].at[j], steps.at[j]); });
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
