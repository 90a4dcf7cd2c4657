// The loop for targets with byte-matrix products (kRowPairs): an instruction multiplies two rows of x and two columns
// of W, eight bytes of each (eight inputs of one byte or four of bf16). Integer sums equal those of the other loops.
// Included by panel_loop.h; local to each file.
//
// Rows of weights are interleaved in pairs, so a register holds the inputs of one column, then those of the next. A
// block of rows of x uses each register twice. For a single block, weights are interleaved as they are read. For more
// blocks, interleaved weights are kept while all rows of x pass over them.
#pragma once

#include <cstdint>
#include <utility>

#include "matmul/activations.h"
#include "matmul/panel.h"

namespace ortolan {
namespace {

// Call each.operator()<0>(), <1>(), … below kCount. If loops are unrolled later than this, gcc leaves arrays of sums in
// memory.
template <typename Each, int... i>
__attribute__((always_inline)) inline void ForConstants(const Each& each, std::integer_sequence<int, i...>) {
  (each.template operator()<i>(), ...);
}
template <int kCount, typename Each>
__attribute__((always_inline)) inline void ForConstants(const Each& each) {
  ForConstants(each, std::make_integer_sequence<int, kCount>());
}

// Weights: a kind (panel_loop.h) with DotEights and x packed in the order of activations.h.
template <typename Simd, typename Weights>
class PairsLoop {
  using Columns = simd::Columns<Simd>;
  using Floats = typename Columns::Floats;
  using Bytes = typename Columns::Bytes;
  using Lanes = typename Weights::Sums;  // of 16 columns
  using Activation = typename Weights::Activation;
  using EightsOfRows = typename Simd::Bytes;
  using Stream = typename Weights::Stream;
  using Layer = ortolan::Layer<Weights>;
  using Panel = ortolan::Panel<Simd, Weights>;
  static constexpr bool kFloats = Weights::kRowInputs == 2;
  static constexpr int kBlock = Weights::kRowBlock;
  static constexpr int kSpanRows = Layer::kSpanRows;
  // Contiguous inputs of a row of x: those of two rows of weights.
  static constexpr int kInputs = Weights::kInputsTogether;
  static_assert(kInputs == 2 * Weights::kRowInputs);
  template <int kRows>
  static constexpr int kPairs = (kRows + 1) / 2;

 public:
  static void Run(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const Layer layer(args);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const MatMulArgs part = RowsOf(args, row, kMostRows, layer.row_bytes);
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        const Panel p(layer, part, panel);
        if (part.m > kBlock) {
          Buffered(p);
        } else {
          WithRowCount<kBlock>(part.m, [&]<int kRows>() { OneBlock<kRows>(p); });
        }
      }
    }
  }

 private:
  // Limit of rows of x: for more rows, the weights of a panel are interleaved again.
  static constexpr int64_t kMostRows = 256;
  // Interleaved rows in the buffer: 16 KB, half of a small L1 cache, and whole groups.
  static constexpr int64_t kBufferSpans = 256 / kSpanRows;
  static_assert(kMostRows % kBlock == 0);

  // Two rows of weights. Register i of part h holds the inputs of column 4 i + 2 h, then those of the next column.
  struct RowPair {
    Bytes of[2];
  };
  // Sums of two rows of x. Register i of part h holds columns 4 i + 2 h and the next one, each times both rows.
  struct Sums {
    Lanes of[2];
  };
  struct alignas(64) Waiting {
    uint8_t at[kMostRows][kPanelColumns * sizeof(float)];  // totals of groups by row or, without groups, sums by pair
  };

  template <Fetch kFetch>
  __attribute__((always_inline)) static RowPair NextPair(Stream& stream, int row) {
    const Bytes even = stream.template Next<kFetch, false>(row);
    const Bytes odd = stream.template Next<kFetch, false>(row + 1);
    const auto interleaved = [&]<int kHalf>() {
      return Columns::template Of<Bytes>(
          [&](int i) { return Simd::template InterleaveQuads<kHalf>(even.at[i], odd.at[i]); });
    };
    return {{interleaved.template operator()<0>(), interleaved.template operator()<1>()}};
  }

  // Initialize the sums of pairs.
  template <int kRows, typename RowTerms>
  __attribute__((always_inline)) static void Start(const RowTerms& terms, int64_t group, Sums (&sums)[kPairs<kRows>]) {
    ForConstants<kPairs<kRows>>([&]<int p>() __attribute__((always_inline)) {
      const Lanes first = terms.Start(group, 2 * p);
      if constexpr (kFloats) {
        sums[p] = {{first, first}};  // zeros
      } else {
        const Lanes second = terms.Start(group, 2 * p + 1 < kRows ? 2 * p + 1 : 2 * p);
        const Lanes both = Columns::template Of<Lanes>(
            [&](int i) { return Simd::template InterleaveQuads<0>(first.at[i], second.at[i]); });
        sums[p] = {{both, both}};
      }
    });
  }
  // Return the sums of row r of a block, by column.
  template <int r, int kPairCount>
  __attribute__((always_inline)) static Lanes OfRow(const Sums (&sums)[kPairCount]) {
    const Sums& pair = sums[r / 2];
    return Columns::template Of<Lanes>([&](int i) {
      return r % 2 == 0 ? Simd::EvenLanes(pair.of[0].at[i], pair.of[1].at[i])
                        : Simd::OddLanes(pair.of[0].at[i], pair.of[1].at[i]);
    });
  }

  // Add the products of two rows of weights with kRows rows of x. With an odd number of rows, the second half of the
  // last pair is unused.
  template <int kRows>
  __attribute__((always_inline)) static void AddPair(Sums (&sums)[kPairs<kRows>], const Activation* x,
                                                     const RowPair& weights) {
    EightsOfRows eights[kPairs<kRows>];
    ForConstants<kPairs<kRows>>(
        [&]<int p>() __attribute__((always_inline)) { eights[p] = Simd::Repeat16(x + 2 * kInputs * p); });
    ForConstants<2 * Columns::kRegisters>([&]<int register_of>() __attribute__((always_inline)) {
      constexpr int h = register_of % 2, i = register_of / 2;
      ForConstants<kPairs<kRows>>([&]<int p>() __attribute__((always_inline)) {
        auto& sum = sums[p].of[h].at[i];
        sum = Weights::DotEights(sum, weights.of[h].at[i], eights[p]);
      });
    });
    // gcc must not move loads up here: it would run out of registers.
    __asm__ volatile("" : : : "memory");
  }

  // Add the sums of a group to the totals of kRows rows.
  template <int kRows, typename RowTerms>
  __attribute__((always_inline)) static void AddGroup(const Panel& p, const RowTerms& terms, int64_t group,
                                                      const Sums (&sums)[kPairs<kRows>], uint8_t (*totals)[64]) {
    const auto scales = p.scales.Of(group);
    ForConstants<kRows>([&]<int r>() __attribute__((always_inline)) {
      float* const total = reinterpret_cast<float*>(totals[r]);
      Columns::Store(total, terms.Add(Columns::Load(total), OfRow<r>(sums), scales, group, r));
    });
    // Without this, gcc keeps totals in registers and spills them among the products.
    __asm__ volatile("" : : : "memory");
  }
  template <int kRows>
  static void ClearTotals(uint8_t (*totals)[64]) {
    for (int r = 0; r < kRows; ++r) Columns::Store(reinterpret_cast<float*>(totals[r]), Columns::Set(0.0f));
  }
  // Store rows i … i+kRows-1 of y.
  template <int kRows, typename RowTerms>
  __attribute__((always_inline)) static void End(const Panel& p, const RowTerms& terms, int64_t i,
                                                 const Sums (&sums)[kPairs<kRows>], const uint8_t (*totals)[64]) {
    ForConstants<kRows>([&]<int r>() __attribute__((always_inline)) {
      Floats total;
      if constexpr (Weights::kHasGroups) {
        total = Columns::Load(reinterpret_cast<const float*>(totals[r]));
      } else {
        total = terms.Add(Columns::Set(0.0f), OfRow<r>(sums), p.scales.Of(0), 0, r);
      }
      p.output.StoreWithBias(i + r, terms.End(total, r));
    });
  }

  // Multiply all rows of x, at most one block.
  template <int kRows>
  __attribute__((noinline)) static void OneBlock(const Panel& p) {
    const Layer& layer = p.layer;
    const auto terms = p.template RowTermsOf<kRows>(0);
    const Activation* x = p.X(0);
    Stream stream = p.stream;
    alignas(64) uint8_t totals[kRows][64];
    Sums sums[kPairs<kRows>];
    if constexpr (Weights::kHasGroups) ClearTotals<kRows>(totals);
    int64_t span = 0;
    for (int64_t group = 0; group < layer.groups; ++group) {
      Start<kRows>(terms, group, sums);
      const int64_t end = span + layer.group_spans < layer.spans ? span + layer.group_spans : layer.spans;
      for (; span < end; ++span) {
        stream.template StartSpan<Fetch::kMultiply>();
#pragma GCC unroll 4
        for (int row = 0; row < kSpanRows; row += 2, x += kInputs * kRows) {
          AddPair<kRows>(sums, x, NextPair<Fetch::kMultiply>(stream, row));
        }
        stream.EndSpan();
      }
      if constexpr (Weights::kHasGroups) AddGroup<kRows>(p, terms, group, sums, totals);
    }
    End<kRows>(p, terms, 0, sums, totals);
  }

  // For more rows of x: interleave some rows of weights once, multiply them with all rows of x, then continue with the
  // next.
  static void Buffered(const Panel& p) {
    alignas(64) uint8_t buffer[kBufferSpans * kSpanRows][64];
    Waiting waiting;
    Stream stream = p.stream;
    for (int64_t first = 0; first < p.layer.spans; first += kBufferSpans) {
      const int64_t end = p.layer.spans - first < kBufferSpans ? p.layer.spans : first + kBufferSpans;
      for (int64_t span = 0; span < end - first; ++span) {
        stream.template StartSpan<Fetch::kExpand>();
#pragma GCC unroll 4
        for (int row = 0; row < kSpanRows; row += 2) {
          const RowPair pair = NextPair<Fetch::kExpand>(stream, row);
          Columns::StoreBytes(buffer[span * kSpanRows + row], pair.of[0]);
          Columns::StoreBytes(buffer[span * kSpanRows + row + 1], pair.of[1]);
        }
        stream.EndSpan();
      }
      int64_t i = 0;
      for (; i + kBlock <= p.args.m; i += kBlock) Block<kBlock>(p, buffer, first, end, i, waiting);
      WithRowCount<kBlock - 1>(p.args.m - i, [&]<int kRows>() { Block<kRows>(p, buffer, first, end, i, waiting); });
    }
  }

  // Multiply spans first … end-1, which are in the buffer, with rows i … i+kRows-1.
  template <int kRows>
  __attribute__((noinline)) static void Block(const Panel& p, const uint8_t (*buffer)[64], int64_t first, int64_t end,
                                              int64_t i, Waiting& waiting) {
    const Layer& layer = p.layer;
    const auto terms = p.template RowTermsOf<kRows>(i);
    const Activation* x = p.X(i) + first * kSpanInputs * kRows;
    uint8_t (*const at)[64] = waiting.at + i;
    Sums sums[kPairs<kRows>];
    const auto add_spans = [&](int64_t count) __attribute__((always_inline)) {
#pragma GCC unroll 2
      for (int64_t pairs = count * (kSpanRows / 2); pairs > 0; --pairs, buffer += 2, x += kInputs * kRows) {
        AddPair<kRows>(sums, x, {{Columns::LoadBytes(buffer[0]), Columns::LoadBytes(buffer[1])}});
      }
    };
    if constexpr (Weights::kHasGroups) {
      if (first == 0) ClearTotals<kRows>(at);
      int64_t span = first;
      // Padding follows the last group.
      for (int64_t group = first / layer.group_spans; span < end && group < layer.groups; ++group) {
        Start<kRows>(terms, group, sums);
        const int64_t spans = end - span < layer.group_spans ? end - span : layer.group_spans;
        add_spans(spans);
        span += spans;
        AddGroup<kRows>(p, terms, group, sums, at);
      }
    } else {
      if (first == 0) {
        Start<kRows>(terms, 0, sums);
      } else {
        LoadSums(at, sums);
      }
      add_spans(end - first);
      if (end < layer.spans) return StoreSums(at, sums);
    }
    if (end == layer.spans) End<kRows>(p, terms, i, sums, at);
  }
  // Register by register, for the reason given at ForConstants.
  template <int kPairCount, typename Sums, typename Each>
  __attribute__((always_inline)) static void ForRegisters(Sums (&sums)[kPairCount], const Each& each) {
    ForConstants<kPairCount>([&]<int p>() __attribute__((always_inline)) {
      ForConstants<2 * Columns::kRegisters>([&]<int i>() __attribute__((always_inline)) {
        constexpr int h = i / Columns::kRegisters, at = i % Columns::kRegisters;
        each(sums[p].of[h].at[at], 2 * p + h, at * Columns::kRegisterBytes);
      });
    });
  }
  template <int kPairCount>
  __attribute__((always_inline)) static void LoadSums(const uint8_t (*from)[64], Sums (&sums)[kPairCount]) {
    ForRegisters(sums, [&](auto& sum, int row, int64_t byte) {
      if constexpr (kFloats) {
        sum = Simd::Load(reinterpret_cast<const float*>(from[row] + byte));
      } else {
        sum = Simd::LoadInt(from[row] + byte);
      }
    });
  }
  template <int kPairCount>
  __attribute__((always_inline)) static void StoreSums(uint8_t (*to)[64], const Sums (&sums)[kPairCount]) {
    ForRegisters(sums, [&](const auto& sum, int row, int64_t byte) {
      if constexpr (kFloats) {
        Simd::Store(reinterpret_cast<float*>(to[row] + byte), sum);
      } else {
        Simd::StoreInt(to[row] + byte, sum);
      }
    });
  }
};

}  // namespace
}  // namespace ortolan
