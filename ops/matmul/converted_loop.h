// The loop for targets where exact products of bytes are slow (kConvertsInt8): weights and x are converted before they
// are multiplied. Included by panel_loop.h; local to each file.
//
// Some rows of weights of two panels are converted once for all rows of x. x is converted one block at a time, for both
// panels. Sums equal those of the other loops. Products define the conversion:
//
//     WordProducts    words, even and odd bytes separately, so that a product of word pairs gives one sum per column:
//                     inputs 0 and 2 of a quad, then 1 and 3
//     PairProducts    x + 128, whose products with bytes are exact if sums of two neighbours fit
//                     (BitmapWeight::pairs_fit); sums start with -128 times the column sums
#pragma once

#include <cstdint>

#include "matmul/activations.h"
#include "matmul/panel.h"
#include "matmul/wide_groups.h"

namespace ortolan {
namespace {

template <typename Simd>
struct WordProducts {
  static constexpr int kSets = 2;  // converted sets of bytes
  using Bytes = typename Simd::Bytes;
  using Int = typename Simd::Int;
  template <int kSet>
  static Int Convert(Bytes a) {
    return kSet == 0 ? Simd::EvenBytes(a) : Simd::OddBytes(a);
  }
  template <int kSet>
  static Int ConvertWeights(Bytes a) {
    return Convert<kSet>(a);
  }
  static Int Dot(Int sums, Int weights, Int x) { return Simd::DotPair(sums, weights, x); }
  static Int Start(const int32_t*, int64_t) { return Simd::SetInt(0); }
};

template <typename Simd>
struct PairProducts {
  static constexpr int kSets = 1;
  using Bytes = typename Simd::Bytes;
  using Int = typename Simd::Int;
  static constexpr int kOffset = 128;
  template <int>
  static Int Convert(Bytes a) {
    return Simd::XorBytes(a, Simd::SetBytes(kOffset));
  }
  template <int>
  static Int ConvertWeights(Bytes a) {
    return a;
  }
  static Int Dot(Int sums, Int weights, Int x) { return Simd::DotPairs(sums, x, weights); }
  static Int Start(const int32_t* column_sums, int64_t lane) {
    return Simd::MultiplyInt(Simd::LoadInt(column_sums + lane), Simd::SetInt(-kOffset));
  }
};

// Weights: a kind (panel_loop.h) of int8 without groups and bias.
template <typename Simd, typename Weights, typename Products>
class ConvertedLoop {
  using Columns = simd::Columns<Simd>;
  using Sums = typename Weights::Sums;
  using Stream = typename Weights::Stream;
  using Layer = ortolan::Layer<Weights>;
  using Panel = ortolan::Panel<Simd, Weights>;
  static constexpr int kSets = Products::kSets;
  static constexpr int kBlock = Weights::kRowBlock;
  static constexpr int kQuadsTogether = Weights::kInputsTogether / Weights::kRowInputs;
  static_assert(Weights::kRowInputs == 4 && !Weights::kHasGroups && Weights::kBias == 0);

 public:
  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const Layer layer(args);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const MatMulArgs part = RowsOf(args, row, kMostRows, layer.row_bytes);
      int64_t panel = panel_begin;
      for (; panel + 2 <= panel_end; panel += 2) Multiply<2>({{layer, part, panel}, {layer, part, panel + 1}});
      if (panel < panel_end) Multiply<1>({{layer, part, panel}});
    }
  }

 private:
  // Limit of rows of x per conversion: for more rows, the weights are converted again.
  static constexpr int64_t kMostRows = kMostWaiting / kBlock * kBlock;
  // Spans of weights in the buffer: 8 KB per panel, so two panels leave room for x in a small L1 cache.
  static constexpr int64_t kBufferSpans = 16 / kSets;
  static constexpr int64_t kBufferQuads = kBufferSpans * Layer::kSpanRows;
  static_assert(kSpanInputs % (4 * Simd::kLanes) == 0);

  // A row of weights: for each set, a quad or part of a quad of 16 columns.
  struct alignas(64) Quad {
    int32_t of[kSets][kPanelColumns];
  };
  struct Buffer {
    Quad quads[kBufferQuads];
    alignas(64) int32_t waiting[kMostRows][kPanelColumns];  // sums
  };
  template <int kRows>
  struct Converted {
    alignas(64) int32_t of[kSets][kRows * kBufferQuads];
  };

  // Call each.operator()<set>() for all sets.
  template <typename Each>
  __attribute__((always_inline)) static void ForSets(const Each& each) {
    each.template operator()<0>();
    if constexpr (kSets == 2) each.template operator()<1>();
  }

  template <int kPanels>
  static void Multiply(const Panel (&panels)[kPanels]) {
    Buffer buffers[kPanels];
    Stream streams[] = {panels[0].stream, panels[kPanels - 1].stream};
    const int64_t spans = panels[0].layer.spans;
    const int64_t m = panels[0].args.m;
    for (int64_t begin = 0; begin < spans; begin += kBufferSpans) {
      const int64_t end = spans - begin < kBufferSpans ? spans : begin + kBufferSpans;
      for (int c = 0; c < kPanels; ++c) Convert(streams[c], end - begin, buffers[c].quads);
      int64_t i = 0;
      for (; i + kBlock <= m; i += kBlock) Block<kBlock>(panels, buffers, begin, end, i);
      WithRowCount<kBlock - 1>(m - i, [&]<int kRows>() { Block<kRows>(panels, buffers, begin, end, i); });
    }
  }

  static void Convert(Stream& stream, int64_t spans, Quad* to) {
    for (int64_t span = 0; span < spans; ++span) {
      stream.template StartSpan<Fetch::kExpand>();
#pragma GCC unroll 8
      for (int row = 0; row < Layer::kSpanRows; ++row, ++to) {
        const auto weights = stream.template Next<Fetch::kExpand, false>(row);
        ForSets([&]<int kSet>() {
          for (int j = 0; j < Columns::kRegisters; ++j) {
            Simd::StoreInt(to->of[kSet] + j * Simd::kLanes, Products::template ConvertWeights<kSet>(weights.at[j]));
          }
        });
      }
      stream.EndSpan();
    }
  }

  // Multiply spans begin … end-1, which are in the buffers, with rows i … i+kRows-1.
  template <int kRows, int kPanels>
  __attribute__((noinline)) static void Block(const Panel (&panels)[kPanels], Buffer (&buffers)[kPanels], int64_t begin,
                                              int64_t end, int64_t i) {
    Converted<kRows> x;
    const int64_t quads = (end - begin) * Layer::kSpanRows;
    const int8_t* bytes = panels[0].X(i) + begin * kSpanInputs * kRows;
    for (int64_t q = 0; q < kRows * quads; q += Simd::kLanes, bytes += 4 * Simd::kLanes) {
      const auto some = Simd::LoadBytes(reinterpret_cast<const uint8_t*>(bytes));
      ForSets([&]<int kSet>() { Simd::StoreInt(x.of[kSet] + q, Products::template Convert<kSet>(some)); });
    }
    const auto terms = panels[0].template RowTermsOf<kRows>(i);
    for (int c = 0; c < kPanels; ++c) {
      int32_t (*const waiting)[kPanelColumns] = buffers[c].waiting + i;
      const auto scales = panels[c].scales.Of(0);
      Sums sums[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r] = Columns::template Of<Sums>([&](int j) {
          const int64_t lane = j * Simd::kLanes;
          return begin == 0 ? Products::Start(scales.column_sums, lane) : Simd::LoadInt(waiting[r] + lane);
        });
      }
      AddProducts(sums, buffers[c].quads, quads, x);
      if (end < panels[c].layer.spans) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) Weights::StoreSums(waiting[r], sums[r]);
        continue;
      }
      const auto output = panels[c].output;
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        output.StoreWithBias(i + r, terms.End(terms.Add(Columns::Set(0.0f), sums[r], scales, 0, r), r));
      }
    }
  }

  template <int kRows>
  __attribute__((always_inline)) static void AddProducts(Sums (&sums)[kRows], const Quad* weights, int64_t quads,
                                                         const Converted<kRows>& x) {
    for (int64_t q = 0; q < quads; q += kQuadsTogether) {
#pragma GCC unroll 4
      for (int row = 0; row < kQuadsTogether; ++row, ++weights) {
        ForSets([&]<int kSet>() __attribute__((always_inline)) {
          const auto columns = Columns::LoadInt(weights->of[kSet]);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) {
            const auto repeated = Simd::SetInt(x.of[kSet][kRows * q + kQuadsTogether * r + row]);
            sums[r] = Columns::template Of<Sums>(
                [&](int j) { return Products::Dot(sums[r].at[j], columns.at[j], repeated); });
          }
        });
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
