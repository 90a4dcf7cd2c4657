// The loop that the x86 kernels for int8 and int4 weights share: walk the rows of a panel, expand (dense storage: load)
// each to a register, multiply it with four activations of every row of x. Included by x86_*.cc only; everything is
// local to the including file (an inline function compiled for one ISA tier must never be linked in place of
// another's).
//
// A tier gives a struct Simd with
//     kRowBlock                     rows of x whose sums fit the registers
//     kStoredBytes, Weights         64 expanded weights, ready to multiply
//     kInt8Bias, kInt4Bias          what an expanded weight has been increased by (AVX-512: products need it unsigned)
//     Weights ExpandInt8(uint64_t mask, const uint8_t* values)              each may load 64 bytes from values
//     Weights ExpandLow, ExpandHigh(uint64_t mask, const uint8_t* values)   int4, from low or high nibbles
//     Weights ExpandHighTimes16(…)                                          ExpandHigh, all of it times 16
//     Bytes                         64 bytes as they are stored: all weights of a row, or of two of int4
//     Bytes LoadBytes(const uint8_t*), Weights Int8(Bytes), Low(Bytes), High(Bytes), HighTimes16(Bytes)
//     void Store(Weights, uint8_t*), Weights Load(const uint8_t*)
//     Sums                          16 columns of int32
//     Sums Broadcast(int32_t), Add(Sums, Sums), DivideBy16(Sums)
//     SpanSums                      what grows within a span: Sums, or sums of 16 bits that a span cannot overflow
//     SpanSums StartSpan(Sums), Sums EndSpan(Sums, SpanSums)
//     SpanSums MultiplyAdd(SpanSums, Weights, const int8_t* quad), kMostHeld, Held, …     see activations.h
//     kMostChains                   of sums that one row of x may be spread over
//     Sums LoadWaitingSums(const uint8_t*), void StoreWaitingSums(uint8_t*, Sums)    all 16, aligned
//     Floats                        16 columns of float
//     Floats Zero(), BroadcastFloat(float), ToFloats(Sums), Multiply(Floats, Floats)
//     Floats MultiplyAdd(Floats a, Floats b, Floats c)     a b + c, one rounding or two
//     Floats LoadWaiting(const uint8_t*), void StoreWaiting(uint8_t*, Floats)        likewise
//     Floats LoadFloatScales, LoadBf16Scales, LoadF16Scales(const uint8_t*)          all 16, at any address
//     Sums LoadWordsLess8(const uint8_t*)                  16 bytes less 8, as int16 in the low half of each
//     Sums MultiplyAddWords(Sums, Sums words, int32_t)     plus the low half of each word times the number, an int16
//     Floats LoadColumns(const float*, int columns), void StoreColumns(float*, int columns, Floats)
//     uint32_t MaxAbsBits(const float* x, int64_t k)       the largest |x| as bits: NaN > Inf > finite
//     __m256i Quantize32(const float* x, int64_t left, float factor, char* first, char* second)
//         16 q each, 0 behind `left`, which may be none; eight sums that add up to theirs
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/bitmap_int8.h"
#include "formats/scales.h"
#include "matmul/activations.h"
#include "matmul/panel_output.h"
#include "matmul/quantize_rows.h"
#include "simd/prefetch.h"

namespace ortolan {
namespace {

// Half a tile, 8 rows of 4 inputs: the shortest group.
constexpr int64_t kSpanInputs = 32;
constexpr int kSpanRows = 8;

// Format: how a room stores weights, scales and packed activations: SparseInt8Format (sparse_amx_matmul) and
// GroupInt4Format (w4a8_matmul).
template <typename Simd, typename Format>
class Int8PanelLoop {
  using Args = MatMulArgs;
  using Sums = typename Simd::Sums;
  using SpanSums = typename Simd::SpanSums;
  using Floats = typename Simd::Floats;
  using Weights = typename Simd::Weights;
  static constexpr bool kInt4 = Format::kInt4;
  static constexpr bool kDense = Format::kDense;
  template <int kRows>
  using Quads = Activations<Simd, int8_t, 4, kRows>;

 public:
  static void Run(const Args& args, int64_t panel_begin, int64_t panel_end) {
    const int64_t row_bytes = Format::PackedRowBytes(args);
    for (int64_t row = 0; row < args.m; row += kMostRows) {
      const Args part = RowsOf(args, row, kMostRows, row_bytes);
      for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
        Panel p(part, panel);
        if (part.m == 1) {
          FusedOneRow(p);
        } else if constexpr (kDense) {
          // Stored weights are taken apart so quickly that each block of rows may do it anew.
          int64_t i = 0;
          for (; i + Simd::kRowBlock <= part.m; i += Simd::kRowBlock) Fused<Simd::kRowBlock>(p, i);
          WithRowCount<Simd::kRowBlock - 1>(part.m - i, [&]<int kRows>() { Fused<kRows>(p, i); });
        } else if (part.m <= Simd::kRowBlock) {
          WithRowCount<Simd::kRowBlock>(part.m, [&]<int kRows>() { Fused<kRows>(p, 0); });
        } else {
          Buffered(p);
        }
      }
    }
  }

 private:
  // Expanded tiles kept while all rows of x pass over them: half of a 32 KB L1 cache or less, and whole groups.
  static constexpr int64_t kBufferTiles = 16;
  // Rows of x that pass over a panel while their sums wait on the stack (16 KB). More rows expand the panel again.
  static constexpr int64_t kMostRows = 256;
  // How far ahead of the loads the streams are prefetched. Measured: sparse_amx_matmul/README.md.
  static constexpr int64_t kValuesAhead = !kInt4 ? 12288 : kDense ? 8192 : 6144;
  static constexpr int64_t kMasksAhead = kInt4 ? 3072 : 12288;
  // Of masks, from one span to the next.
  static constexpr int64_t kMaskStep = kDense ? 0 : kSpanRows * static_cast<int64_t>(sizeof(uint64_t));

  static uint64_t LoadMask(const uint8_t* masks, int row) {
    uint64_t mask;
    std::memcpy(&mask, masks + row * static_cast<int>(sizeof(mask)), sizeof(mask));
    return mask;
  }

  // The stored weights of a panel, row after row.
  struct Stream {
    // Row `row` of the span whose masks are given.
    template <bool kTimes16, bool kPrefetch>
    Weights Next([[maybe_unused]] const uint8_t* masks, int row) {
      if constexpr (kDense) {
        // int4: the same bytes hold an even and an odd row.
        if (!kInt4 || row % 2 == 0) {
          if (kPrefetch) __builtin_prefetch(even + kValuesAhead);
          bytes = Simd::LoadBytes(even);
          even += kLineBytes;
        }
        if constexpr (!kInt4) return Simd::Int8(bytes);
        if (row % 2 == 0) return Simd::Low(bytes);
        return kTimes16 ? Simd::HighTimes16(bytes) : Simd::High(bytes);
      } else {
        const uint64_t mask = LoadMask(masks, row);
        const uint8_t*& next = kInt4 && row % 2 == 1 ? odd : even;
        const uint8_t* values = next;
        next += __builtin_popcountll(mask);
        if constexpr (!kInt4) return Simd::ExpandInt8(mask, values);
        if (row % 2 == 0) return Simd::ExpandLow(mask, values);
        return kTimes16 ? Simd::ExpandHighTimes16(mask, values) : Simd::ExpandHigh(mask, values);
      }
    }

    const uint8_t* even;
    const uint8_t* odd;  // of a bitmap of int4; otherwise there is one stream
    typename Simd::Bytes bytes;
  };

  struct Panel {
    Panel(const Args& a, int64_t index_)
        : args(a),
          index(index_),
          spans(kInt8Bitmap.PaddedK(a.w->k) / kSpanInputs),
          groups(ScaleRows(a.w->k, Format::Group(a))),
          group_spans(Format::Group(a) == kWholeColumn ? spans : Format::Group(a) / kSpanInputs),
          padded_k(kInt8Bitmap.PaddedK(a.w->k)),
          row_bytes(Format::PackedRowBytes(a)),
          masks(Format::Masks(a, index)),
          stream{Format::Values(a, index), Format::Values(a, index), {}},
          output(a, index),
          span_bytes(Format::ValueBytes(a, index) / spans) {}

    // The block of kRows packed rows that begins at row i.
    const int8_t* X(int64_t i) const { return static_cast<const int8_t*>(args.x) + i * row_bytes; }
    // What stands behind its q.
    template <int kRows>
    typename Format::template Block<Simd, kRows> Block(int64_t i) const {
      return {X(i) + padded_k * kRows, groups};
    }

    typename Format::template PanelScales<Simd> Scales() const { return {args, index, groups}; }

    const Args& args;
    int64_t index;
    int64_t spans;
    int64_t groups;
    int64_t group_spans;
    int64_t padded_k;
    int64_t row_bytes;
    const uint8_t* masks;
    Stream stream;
    PanelOutput output;
    int64_t span_bytes;  // of a bitmap's values, on average
  };

  // Few rows of x, i … i+kRows-1: each row of weights is expanded into a register and used at once.
  template <int kRows>
  static void Fused(const Panel& p, int64_t i) {
    // With few rows, one sum a row would wait for itself: several chains, added at the end. In int4 the chains of odd
    // rows then hold 16 times their sums, which saves a shift of each row of weights.
    constexpr int kWantedChains = kRows == 1 && !kInt4 ? 4 : kRows <= 3 ? 2 : 1;
    constexpr int kChains = kWantedChains < Simd::kMostChains ? kWantedChains : Simd::kMostChains;
    constexpr bool kTimes16 = kInt4 && kChains == 2;
    // Where nothing but one stream without gaps is read, the hardware's own prefetch is better; not so for int4.
    constexpr bool kPrefetch = !kDense || kInt4 || kRows > 1;
    const auto block = p.template Block<kRows>(i);
    const auto panel_scales = p.Scales();
    Stream stream = p.stream;
    const uint8_t* masks = p.masks;
    const int8_t* x = p.X(i);
    // int8: all lines of a span at once, which keeps memory busier than one at a time, and enough of them that a span
    // with more values than others leaves no line out. int4: a line every two or four rows, as many as it takes.
    const int64_t burst_bytes = p.span_bytes + p.span_bytes / 4 + kLineBytes;
    const bool many_bytes = p.span_bytes > 5 * kLineBytes / 2;
    Floats totals[kRows];
    for (int r = 0; r < kRows; ++r) totals[r] = Simd::Zero();
    int64_t span = 0;
    for (int64_t group = 0; group < p.groups; ++group) {
      Sums sums[kRows][kChains];
      for (int r = 0; r < kRows; ++r) {
        sums[r][0] = block.Start(group, r);
        for (int c = 1; c < kChains; ++c) sums[r][c] = Simd::Broadcast(0);
      }
      const int64_t group_end = span + p.group_spans < p.spans ? span + p.group_spans : p.spans;
      for (; span < group_end; ++span, masks += kMaskStep, x += kSpanInputs * kRows) {
        if constexpr (!kDense) __builtin_prefetch(masks + kMasksAhead);
        if constexpr (!kDense && !kInt4) {
          PrefetchLines(stream.even + kValuesAhead, burst_bytes);
        }
        SpanSums span_sums[kRows][kChains];
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          for (int c = 0; c < kChains; ++c) span_sums[r][c] = Simd::StartSpan(sums[r][c]);
        }
#pragma GCC unroll 2
        for (int four = 0; four < kSpanRows; four += kFourRows) {
          const Quads<kRows> quads(x + kInt8Bitmap.row_inputs * four * kRows);
#pragma GCC unroll 4
          for (int row = four; row < four + kFourRows; ++row) {
            if (!kDense && kInt4 && (row % 4 == 0 || (row % 2 == 0 && many_bytes))) {
              __builtin_prefetch(stream.even + kValuesAhead);
            }
            const Weights weights = stream.template Next<kTimes16, kPrefetch>(masks, row);
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
              span_sums[r][row % kChains] = quads.MultiplyAdd(span_sums[r][row % kChains], weights, row - four, r);
            }
          }
        }
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          for (int c = 0; c < kChains; ++c) sums[r][c] = Simd::EndSpan(sums[r][c], span_sums[r][c]);
        }
      }
      const auto scales = panel_scales.Of(group);
      for (int r = 0; r < kRows; ++r) {
        if constexpr (kTimes16) sums[r][1] = Simd::DivideBy16(sums[r][1]);
        Sums sum = sums[r][0];
        for (int c = 1; c < kChains; ++c) sum = Simd::Add(sum, sums[r][c]);
        totals[r] = block.Add(totals[r], sum, scales, group, r);
      }
    }
    for (int r = 0; r < kRows; ++r) p.output.template Store<Simd>(i + r, block.End(totals[r], r));
  }

  // A function of its own: in the company of the others it would lack registers.
  __attribute__((noinline)) static void FusedOneRow(const Panel& p) { Fused<1>(p, 0); }

  struct alignas(64) WaitingSums {
    uint8_t bytes[kMostRows][kPanelColumns * sizeof(int32_t)];  // int32 (int8) or float (int4)
  };

  // Many rows of x: expand some tiles once, let all rows pass over them, go on with the next tiles. The sums of 16
  // columns wait on the stack: in y they might lie so far apart that all fall into the same few lines of the cache.
  static void Buffered(Panel& p) {
    constexpr int64_t kBufferSpans = kBufferTiles * kInt8Bitmap.TileInputs() / kSpanInputs;
    alignas(64) uint8_t buffer[kBufferSpans * kSpanRows * Simd::kStoredBytes];
    WaitingSums waiting;
    for (int64_t first = 0; first < p.spans; first += kBufferSpans) {
      const int64_t end = p.spans - first < kBufferSpans ? p.spans : first + kBufferSpans;
      uint8_t* out = buffer;
      for (int64_t span = first; span < end; ++span, p.masks += kMaskStep) {
        if constexpr (!kDense) __builtin_prefetch(p.masks + kMasksAhead);
#pragma GCC unroll 8
        for (int row = 0; row < kSpanRows; ++row, out += Simd::kStoredBytes) {
          if (!kDense && (!kInt4 || row % 2 == 0)) __builtin_prefetch(p.stream.even + kValuesAhead);
          Simd::Store(p.stream.template Next<false, true>(p.masks, row), out);
        }
      }
      int64_t i = 0;
      for (; i + Simd::kRowBlock <= p.args.m; i += Simd::kRowBlock) {
        ExpandedRows<Simd::kRowBlock>(p, buffer, first, end, i, waiting);
      }
      WithRowCount<Simd::kRowBlock - 1>(p.args.m - i,
                                        [&]<int kRows>() { ExpandedRows<kRows>(p, buffer, first, end, i, waiting); });
    }
  }

  // Spans first … end-1, which are in the buffer, times rows i … i+kRows-1.
  template <int kRows>
  static void ExpandedRows(const Panel& p, const uint8_t* buffer, int64_t first, int64_t end, int64_t i,
                           WaitingSums& waiting) {
    const auto block = p.template Block<kRows>(i);
    const auto panel_scales = p.Scales();
    const int8_t* x = p.X(i) + first * kSpanInputs * kRows;
    for (int64_t span = first; span < end;) {
      const int64_t group = kInt4 ? span / p.group_spans : 0;
      // Behind the last group nothing is stored.
      if (kInt4 && group == p.groups) break;
      const int64_t group_end = kInt4 && end - span > p.group_spans ? span + p.group_spans : end;
      Sums sums[kRows];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        sums[r] = kInt4 || first == 0 ? block.Start(group, r) : Simd::LoadWaitingSums(waiting.bytes[i + r]);
      }
      for (int64_t left = (group_end - span) * kSpanRows; left > 0; left -= kFourRows, x += Quads<kRows>::kElements) {
        const Quads<kRows> quads(x);
#pragma GCC unroll 4
        for (int row = 0; row < kFourRows; ++row, buffer += Simd::kStoredBytes) {
          const Weights weights = Simd::Load(buffer);
#pragma GCC unroll 16
          for (int r = 0; r < kRows; ++r) sums[r] = quads.MultiplyAdd(sums[r], weights, row, r);
        }
      }
      if constexpr (kInt4) {
        const auto scales = panel_scales.Of(group);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          const Floats total = group == 0 ? Simd::Zero() : Simd::LoadWaiting(waiting.bytes[i + r]);
          Simd::StoreWaiting(waiting.bytes[i + r], block.Add(total, sums[r], scales, group, r));
        }
      } else {
        for (int r = 0; r < kRows; ++r) Simd::StoreWaitingSums(waiting.bytes[i + r], sums[r]);
      }
      span = group_end;
    }
    if (end < p.spans) return;
    for (int r = 0; r < kRows; ++r) {
      if constexpr (kInt4) {
        p.output.template Store<Simd>(i + r, block.End(Simd::LoadWaiting(waiting.bytes[i + r]), r));
      } else {
        const auto scales = panel_scales.Of(0);
        const Sums sum = Simd::LoadWaitingSums(waiting.bytes[i + r]);
        p.output.template Store<Simd>(i + r, block.End(block.Add(Simd::Zero(), sum, scales, 0, r), r));
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
