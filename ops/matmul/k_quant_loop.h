// The loop for K-quants (formats/k_quant.h). x is quantized to int8 per group, as in group_weight.h:
//
//     y[i, j] = sum over g of s_ig (scales[g, j] D_g + minimums[g, j] M_g)  + bias[j]
//     D_g     = sum over the subgroups h of g of s[h, j] (sum over the l of h of q_il (q[l, j] - zero_point))
//     M_g     = sum over the subgroups h of g of t[h, j] (sum over the l of h of q_il)
//
// D_g and M_g are exact in int32: |D_g| <= 256 x 127 x 32 x 128. They are rounded once, to float32. Error, with
// u = 2^-24:
//
//     |y - exact| <= (2 groups + 5) u sum over g of |s_ig| (|scales[g, j] D_g| + |minimums[g, j] M_g|)  + u |y|
//
// A step is 16 inputs, four rows of weights. Targets that multiply pairs of bytes sum a step in 16-bit words, which
// hold 8 x 127 x 31, or 8 x 127 x 32 around a zero point; 4 bits with minimums sum two steps, 16 x 127 x 15.
// Multiplying them with s takes the instruction that would only widen them. Included by k_quant_kernels.cc only; local
// to each.
#pragma once

#include <cstdint>
#include <utility>

#include "matmul/weights/few_bits.h"

namespace ortolan {
namespace {

constexpr int kStepInputs = 16;
constexpr int kStepRows = 4;
constexpr int kStepsOfSpan = 2;  // a span of kSpanInputs
static_assert(kStepInputs * kStepsOfSpan == kSpanInputs);

// A block of r packed rows of x is
//
//     q       i8           in the order of activations.h
//     scales  f32 [groups][r]
//     terms   i32 [steps][r]      without minimums: the initial sum of a step, -zero_point x (its sum of q); as two
//                                 words, for inputs 0 and 1 and inputs 2 and 3 of the quads, if steps are summed in
//                                 words
//             i32 [spans][r]      with minimums: the sums of q of the two steps of a span, as two words; if
//                                 PairsMinimums, i32 [spans / 2][r]: the sums of q of two spans
template <typename Simd>
struct KQuantRows {
  static constexpr bool kWords = Simd::kMultipliesPairs;
  static_assert(!kWords || Simd::kNarrowNibbleSums);  // or QuantizeInputs would not return `upper`

  static int64_t PackedRowBytes(const MatMulWeight& w) {
    const int64_t padded_k = kInt4Bitmap.PaddedK(w.k);
    const int64_t groups = ScaleRows(w.k, static_cast<const GroupWeight&>(w).view.group);
    return padded_k + (4 * (groups + padded_k / kStepInputs) + 63) / 64 * 64;
  }

  // Pack rows of x in blocks of row_block.
  static void PackBlocks(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m, int64_t row_block,
                         void* packed);

  // Return whether one product of pairs of words takes the minimums of two subgroups of 32.
  static bool PairsMinimums(const GroupWeight& w) {
    return w.view.subgroups.size == kSpanInputs && w.view.group > kSpanInputs;
  }

  static int32_t Words(int32_t low, int32_t high) {
    return static_cast<int32_t>((static_cast<uint32_t>(low) & 0xffff) | static_cast<uint32_t>(high) << 16);
  }
};

// The rows of weights of a panel, one span after another.
template <typename Simd, int kBits>
class KQuantStream {
  using Columns = simd::Columns<Simd>;
  using Ints = typename Columns::Ints;

 public:
  KQuantStream(const GroupWeight& w, int64_t panel, const PrefetchDistances& ahead)
      : rows_(w, panel, ahead.int4),
        scales_(OfPanel(w, w.view.subgroups.scales, panel)),
        minimums_(OfPanel(w, w.view.subgroups.minimums, panel)),
        // The second step of a span has its own subgroup, or continues the subgroup of the first.
        step_bytes_(w.view.subgroups.size == kStepInputs ? kPanelColumns : 0),
        span_bytes_(kPanelColumns * kSpanInputs / w.view.subgroups.size),
        second_minimums_(KQuantRows<Simd>::PairsMinimums(w) ? kPanelColumns : step_bytes_),
        ahead_(ahead.int4) {}

  // Call row(index, q) for the rows 0 … 7 of the next span, q as bytes, and step(index) after each four.
  template <bool kPrefetch, typename Row, typename Step>
  __attribute__((always_inline)) void Span(const Row& row, const Step& step) {
    if (kPrefetch && scales_ != nullptr) __builtin_prefetch(scales_ + ahead_ / 8);
#pragma GCC unroll 8
    for (int r = 0; r < kStepsOfSpan * kStepRows; ++r) {
      row(r, rows_.template NextStored<kPrefetch>(r));
      if (r % kStepRows == kStepRows - 1) step(r / kStepRows);
    }
    if (scales_ != nullptr) scales_ += span_bytes_;
    if (minimums_ != nullptr) minimums_ += span_bytes_;
  }

  // Return whether the two steps of a span have factors of their own.
  bool HasTwoFactors() const { return step_bytes_ != 0; }
  // s of step 0 or 1 of the span, as the factor of the sums of a step.
  __attribute__((always_inline)) Ints Factors(int step) const { return StepScales<kTwice, kDotsPairs>(step); }
  // s of step 0 or 1 of the span, twice as words.
  __attribute__((always_inline)) Ints PairsOfScales(int step) const { return StepScales<true, true>(step); }
  // t of the two steps of the span, or of this span and the next, as two words.
  __attribute__((always_inline)) Ints Minimums() const {
    return Columns::template Of<Ints>([&](int i) {
      if (minimums_ == nullptr) return Simd::SetInt(0x00010001);
      const uint8_t* from = minimums_ + i * Simd::kLanes;
      return Simd::OrInt(Simd::LoadUint8(from),
                         Simd::template ShiftLeftInt<16>(Simd::LoadUint8(from + second_minimums_)));
    });
  }

  // Prefetch some of the next weights (FewBitsStream).
  __attribute__((always_inline)) void PrefetchNext(int64_t from, int64_t share) const {
    rows_.PrefetchNext(from, share);
    constexpr int64_t kSpanBytes = kPanelColumns * kSpanInputs / 2;
    const int64_t first = from * span_bytes_ / kSpanBytes, bytes = share * span_bytes_ / kSpanBytes;
    if (scales_ != nullptr) PrefetchForLater(scales_ + first, bytes);
    if (minimums_ != nullptr) PrefetchForLater(minimums_ + first, bytes);
  }

  // Factors are words: twice each for sums in words, or once and zero for sums that fit a word.
  static constexpr bool kTwice = KQuantRows<Simd>::kWords;
  static constexpr bool kDotsPairs = kTwice || kBits == 4;  // 16 x 127 x 15 fits

 private:
  // s of step 0 or 1: as int32, as a word and zero (kWord), or as two words (kPair).
  template <bool kPair, bool kWord>
  __attribute__((always_inline)) Ints StepScales(int step) const {
    return Columns::template Of<Ints>([&](int i) {
      if (scales_ == nullptr) return Simd::SetInt(kPair ? 0x00010001 : 1);
      const auto scales = Simd::LoadSignedBytes(scales_ + step * step_bytes_ + i * Simd::kLanes);
      if constexpr (!kPair && !kWord) return scales;
      const auto word = Simd::AndInt(scales, Simd::SetInt(0xffff));
      if constexpr (!kPair) return word;
      return Simd::OrInt(word, Simd::template ShiftLeftInt<16>(word));
    });
  }

  static const uint8_t* OfPanel(const GroupWeight& w, const uint8_t* rows, int64_t panel) {
    return rows == nullptr ? nullptr : rows + panel * w.view.subgroups.Rows(w.k) * kPanelColumns;
  }

  FewBitsStream<Simd, kBits> rows_;
  const uint8_t* scales_;
  const uint8_t* minimums_;
  int64_t step_bytes_;
  int64_t span_bytes_;
  int64_t second_minimums_;
  int64_t ahead_;
};

template <typename Simd>
class KQuantLoop {
  using Columns = simd::Columns<Simd>;
  using Ints = typename Columns::Ints;
  using Floats = typename Columns::Floats;
  static constexpr bool kWords = KQuantRows<Simd>::kWords;
  static_assert(kQuantizedTogether<Simd> == kStepInputs);
  static constexpr bool kWide = Columns::kRegisters == 1;

 public:
  // If a panel takes one register, three panels share each repeated quad of x.
  static constexpr int kPanelsTogether = kWide ? 3 : 1;
  static constexpr int kBlock = Simd::kRegisters == 32 && !kWide ? 8 : 4;
  static constexpr int64_t kRowBlock = kBlock;
  static constexpr int64_t kSpeed = 1;

  struct Shape {
    explicit Shape(const GroupWeight& w)
        : weight(w),
          row_bytes(KQuantRows<Simd>::PackedRowBytes(w)),
          padded_k(kInt4Bitmap.PaddedK(w.k)),
          groups(ScaleRows(w.k, w.view.group)),
          group_spans(w.view.group / kSpanInputs),
          // The last tile may end with spans that have no group; their x is zero.
          spans(padded_k / kSpanInputs < groups * group_spans ? padded_k / kSpanInputs : groups * group_spans),
          minimums(w.view.minimums != nullptr),
          minimum_shift(KQuantRows<Simd>::PairsMinimums(w) ? 1 : 0) {}

    // Return the index of the minimums of a span.
    int64_t MinimumOf(int64_t span) const { return span >> minimum_shift; }
    // Return whether the span is the first one with its minimums.
    bool StartsMinimum(int64_t span) const { return minimums && MinimumOf(span) << minimum_shift == span; }

    const GroupWeight& weight;
    int64_t row_bytes;
    int64_t padded_k;
    int64_t groups;
    int64_t group_spans;
    int64_t spans;
    bool minimums;
    int minimum_shift;  // log2 of the spans whose minimums are multiplied at once
  };

  // The rows of x in a block, from its first row.
  struct Block {
    Block(const Shape& shape, const void* packed, int64_t count)
        : x(static_cast<const int8_t*>(packed)),
          scales(reinterpret_cast<const float*>(x + shape.padded_k * count)),
          terms(reinterpret_cast<const int32_t*>(scales + shape.groups * count)) {}

    const int8_t* x;
    const float* scales;
    const int32_t* terms;
  };

  struct Panel {
    Panel(const Shape& of, const MatMulArgs& args_, int64_t index)
        : shape(of), args(args_), scales(of.weight, index, of.groups), minimums(scales), output(args_, index) {
      if (!of.minimums) return;
      minimums.scales = of.weight.view.minimums + index * of.groups * kPanelColumns * scales.Bytes();
    }
    Block BlockAt(int64_t i, int64_t count) const {
      return Block(shape, static_cast<const char*>(args.x) + i * shape.row_bytes, count);
    }

    const Shape& shape;
    const MatMulArgs& args;
    GroupScales<Simd> scales;
    GroupScales<Simd> minimums;
    PanelOutput<Simd> output;
  };

  static void Pack(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
    KQuantRows<Simd>::PackBlocks(w, x, x_row_bytes, m, kBlock, packed);
  }

  static void Multiply(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const GroupWeight& w = WeightOf<GroupWeight>(args);
    const auto run = [&]<int kBits>() {
      const Shape shape(w);
      for (int64_t row = 0; row < args.m; row += kMostRows) {
        const MatMulArgs part = RowsOf(args, row, kMostRows, shape.row_bytes);
        int64_t panel = panel_begin;
        if (part.m > kFewRows) {
          for (; panel < panel_end; panel += kPanelsTogether) Rows<kBits>(shape, part, panel, panel_end);
        }
        for (; panel < panel_end; ++panel) {
          const Panel p(shape, part, panel);
          const KQuantStream<Simd, kBits> stream(w, panel, ActiveTuning().ahead);
          WithRowCount<kFewRows>(part.m, [&]<int kRows>() { FewRows<kBits, kRows>(p, stream); });
        }
      }
    };
    if (w.view.subgroups.bits == 4) return run.template operator()<4>();
    if (w.view.subgroups.bits == 5) return run.template operator()<5>();
    run.template operator()<6>();
  }

 private:
  // Rows of x whose totals are kept on the stack; for more rows, the weights are expanded again.
  static constexpr int64_t kMostRows = 256;
  static_assert(kMostRows % kBlock == 0);
  // Rows of x for which expanded weights stay in registers.
  static constexpr int kFewRows = 4;
  static_assert(kFewRows <= kBlock);
  // Spans that are expanded at once: whole groups.
  static constexpr int kWindowSpans = 256 / kSpanInputs;

  // The quad of row r that belongs to row `row` of the weights of a step.
  static const int8_t* Quad(const int8_t* step_x, int row, int r) { return step_x + kStepInputs * r + 4 * row; }

  // Products of a row of weights, the initial sums of a step.
  static typename Simd::Int Products(typename Simd::Bytes weights, typename Simd::Bytes quad) {
    if constexpr (kWords) return Simd::MultiplyPairs(weights, quad);
    return Simd::DotInt8(Simd::SetInt(0), weights, quad);
  }
  // Sums of a step plus the products of a row of weights.
  static typename Simd::Int AddProducts(typename Simd::Int sums, typename Simd::Bytes weights,
                                        typename Simd::Bytes quad) {
    if constexpr (kWords) return Simd::DotNibbles(sums, weights, quad);
    return Simd::DotInt8(sums, weights, quad);
  }
  // Sums of a group plus the sums of a step times s. kPairs: see KQuantStream::kDotsPairs.
  template <bool kPairs>
  static typename Simd::Int AddStep(typename Simd::Int sums, typename Simd::Int step, typename Simd::Int factors) {
    if constexpr (kPairs) return Simd::DotPair(sums, step, factors);
    return Simd::AddInt(sums, Simd::MultiplyInt(step, factors));
  }

  // Multiply few rows of x, all in one block: each row of weights is used from registers.
  template <int kBits, int kRows>
  __attribute__((noinline)) static void FewRows(const Panel& p, KQuantStream<Simd, kBits> stream) {
    constexpr bool kPairs = KQuantStream<Simd, kBits>::kDotsPairs;
    const Shape& shape = p.shape;
    const Block block = p.BlockAt(0, kRows);
    const int8_t* x = block.x;
    const bool two_factors = stream.HasTwoFactors();
    Floats totals[kRows];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) totals[r] = Columns::Set(0.0f);
    int64_t span = 0;
    for (int64_t group = 0; group < shape.groups; ++group) {
      Ints sums[kRows], minimums[kRows], step_sums[kRows];
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) sums[r] = minimums[r] = Columns::SetInt(0);
      const int64_t end = span + shape.group_spans < shape.spans ? span + shape.group_spans : shape.spans;
      for (; span < end; ++span, x += kSpanInputs * kRows) {
        if (shape.StartsMinimum(span)) {
          const Ints t = stream.Minimums();
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const auto of_x = Simd::SetInt(block.terms[shape.MinimumOf(span) * kRows + r]);
            minimums[r] =
                Columns::template Of<Ints>([&](int i) { return Simd::DotPair(minimums[r].at[i], t.at[i], of_x); });
          }
        }
        Ints factors = stream.Factors(0);
        stream.template Span<true>(
            [&](int row, const auto& q) {
              const int64_t step = span * kStepsOfSpan + row / kStepRows;
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                if (row % kStepRows == 0) {
                  step_sums[r] = Columns::SetInt(shape.minimums ? 0 : block.terms[step * kRows + r]);
                }
                const int8_t* const step_x = x + row / kStepRows * kStepInputs * kRows;
                const auto quad = Simd::RepeatQuad(Quad(step_x, row % kStepRows, r));
                step_sums[r] =
                    Columns::template Of<Ints>([&](int i) { return AddProducts(step_sums[r].at[i], q.at[i], quad); });
              }
            },
            [&](int step) {
              if (step > 0 && two_factors) factors = stream.Factors(step);
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                sums[r] = Columns::template Of<Ints>(
                    [&](int i) { return AddStep<kPairs>(sums[r].at[i], step_sums[r].at[i], factors.at[i]); });
              }
            });
      }
      const Floats scales = p.scales.Of(group).scales;
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto scale = Columns::Set(block.scales[group * kRows + r]);
        totals[r] = Columns::MultiplyAdd(Columns::ToFloat(sums[r]), Columns::Multiply(scales, scale), totals[r]);
        if (shape.minimums) {
          totals[r] = Columns::MultiplyAdd(Columns::ToFloat(minimums[r]),
                                           Columns::Multiply(p.minimums.Of(group).scales, scale), totals[r]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) p.output.StoreWithBias(r, totals[r]);
  }

  // Some spans, expanded: whole groups.
  struct alignas(64) Window {
    uint8_t rows[kWindowSpans * kStepsOfSpan * kStepRows][64];
    int32_t factors[kWindowSpans * kStepsOfSpan][kPanelColumns];
    int32_t minimums[kWindowSpans][kPanelColumns];
    // [group][0]: scales; [group][1]: minimums.
    float scales[kWindowSpans][2][kPanelColumns];
  };

  template <int kBits>
  static void Expand(const Panel& p, KQuantStream<Simd, kBits>& position, int64_t spans, int64_t first_group,
                     Window& window) {
    const Shape& shape = p.shape;
    KQuantStream<Simd, kBits> stream = position;  // in registers: stores to the window cannot change it
    for (int64_t group = 0; group * shape.group_spans < spans; ++group) {
      Columns::Store(window.scales[group][0], p.scales.Of(first_group + group).scales);
      if (shape.minimums) Columns::Store(window.scales[group][1], p.minimums.Of(first_group + group).scales);
    }
    for (int64_t span = 0; span < spans; ++span) {
      if (shape.StartsMinimum(span)) {
        Columns::StoreInt(window.minimums[shape.MinimumOf(span)], stream.Minimums());
      }
      stream.template Span<!kWide>(
          [&](int row, const auto& q) { Columns::StoreBytes(window.rows[span * kStepsOfSpan * kStepRows + row], q); },
          [&](int step) { Columns::StoreInt(window.factors[span * kStepsOfSpan + step], stream.Factors(step)); });
    }
    position = stream;
  }

  // The panels from `first` on, their weights, and the totals of the rows of x. If fewer are left, the last one is
  // computed several times and stored once.
  template <int kBits>
  struct Panels {
    Panels(const Shape& shape, const MatMulArgs& args, int64_t first, int64_t end)
        : Panels(shape, args, first, end, std::make_integer_sequence<int, kPanelsTogether>()) {}

    int64_t count;  // distinct panels, 1 … kPanelsTogether
    Panel at[kPanelsTogether];
    KQuantStream<Simd, kBits> streams[kPanelsTogether];
    Window windows[kPanelsTogether];
    alignas(64) float totals[kMostRows][kPanelsTogether][kPanelColumns];

    void StoreRows(int64_t first_row, int64_t rows) const {
      for (int64_t i = first_row; i < first_row + rows; ++i) {
        for (int64_t c = 0; c < count; ++c) at[c].output.StoreWithBias(i, Columns::Load(totals[i][c]));
      }
    }

   private:
    template <int... kIndex>
    Panels(const Shape& shape, const MatMulArgs& args, int64_t first, int64_t end,
           std::integer_sequence<int, kIndex...>)
        : count(end - first < kPanelsTogether ? end - first : kPanelsTogether),
          at{Panel(shape, args, first + (kIndex < count ? kIndex : count - 1))...},
          streams{KQuantStream<Simd, kBits>(shape.weight, first + (kIndex < count ? kIndex : count - 1),
                                            ActiveTuning().ahead)...} {}
  };

  template <int kBits>
  static void Rows(const Shape& shape, const MatMulArgs& args, int64_t first_panel, int64_t panel_end) {
    Panels<kBits> panels(shape, args, first_panel, panel_end);
    for (int64_t i = 0; i < args.m; ++i) {
      for (auto& total : panels.totals[i]) Columns::Store(total, Columns::Set(0.0f));
    }
    // Prefetch the scales of the next panels.
    for (const Panel& p : panels.at) {
      p.scales.Prefetch(kPanelsTogether * shape.groups, (kPanelsTogether + 1) * shape.groups);
      if (shape.minimums) p.minimums.Prefetch(kPanelsTogether * shape.groups, (kPanelsTogether + 1) * shape.groups);
    }
    const int64_t window_groups = kWindowSpans / shape.group_spans;
    int64_t group = 0;  // of the window's first span
    for (int64_t begin = 0; begin < shape.spans; begin += kWindowSpans, group += window_groups) {
      const int64_t end = shape.spans - begin < kWindowSpans ? shape.spans : begin + kWindowSpans;
      for (int c = 0; c < kPanelsTogether; ++c) {
        Expand<kBits>(panels.at[c], panels.streams[c], end - begin, group, panels.windows[c]);
      }
      const auto add = [&]<int kSteps, bool kMinimums>() {
        for (int64_t i = 0; i < args.m; i += kBlock) {
          const int64_t rows = args.m - i < kBlock ? args.m - i : kBlock;
          if constexpr (kWide) PrefetchNextWindow(panels, end, i, rows);
          WithRowCount<kBlock>(
              rows, [&]<int kRows>() { AddWindow<kBits, kRows, kSteps, kMinimums>(panels, begin, end, group, i); });
          // Store at once: stores of many rows of y together would wait for their cache lines.
          if (end == shape.spans) panels.StoreRows(i, rows);
        }
      };
      // Sum both steps of a subgroup of 32 before multiplying with s, if the sums fit: words hold those of 4 bits with
      // minimums, 32 bits hold all, unless they are multiplied as words (kDotsPairs).
      if constexpr (kWords ? kBits == 4 : !KQuantStream<Simd, kBits>::kDotsPairs) {
        if (shape.weight.view.subgroups.size == kSpanInputs && (shape.minimums || !kWords)) {
          shape.minimums ? add.template operator()<kStepsOfSpan, true>()
                         : add.template operator()<kStepsOfSpan, kWords>();
          continue;
        }
      }
      shape.minimums ? add.template operator()<1, true>() : add.template operator()<1, false>();
    }
  }

  // Prefetch a share of the next weights while a block of rows is multiplied: of the window at span `begin`, or after
  // the last window of the first window of the next panels.
  template <int kBits>
  __attribute__((always_inline)) static void PrefetchNextWindow(const Panels<kBits>& panels, int64_t begin, int64_t i,
                                                                int64_t rows) {
    // Bytes of a window's low nibbles.
    constexpr int64_t kWindowBytes = kWindowSpans * kSpanInputs * kPanelColumns / 2;
    const Shape& shape = panels.at[0].shape;
    const int64_t m = panels.at[0].args.m;
    const int64_t from = kWindowBytes * i / m / kLineBytes * kLineBytes;
    const int64_t until = kWindowBytes * (i + rows) / m / kLineBytes * kLineBytes;
    const int64_t ahead = begin < shape.spans ? 0 : (kPanelsTogether - 1) * shape.padded_k * kPanelColumns / 2;
    for (const auto& stream : panels.streams) stream.PrefetchNext(ahead + from, until - from);
  }

  // Registers of columns that share each repeated quad of x: one of each panel, two of words, or one. With 16
  // registers, more sums of 32 bits would be spilled.
  static constexpr int kColumns = kWide ? kPanelsTogether : kWords && Columns::kRegisters == 2 ? 2 : 1;
  template <int kRows>
  using RowSums = typename Simd::Int[kRows][kColumns];

  // Call each(r, c) for all rows and registers of columns.
  template <int kRows, typename Each>
  __attribute__((always_inline)) static void ForSums(const Each& each) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) each(r, c);
    }
  }

  // The panel and the first column of register c of the kColumns registers from register j on.
  struct Register {
    Register(int j, int c) : panel(kWide ? c : 0), column(kWide ? 0 : (j + c) * Simd::kLanes) {}
    int panel;
    int64_t column;
  };

  // Add the products of spans begin … end-1 with rows i … i+kRows-1 to their totals. kSteps: steps with the same s that
  // are summed before they are multiplied with it.
  template <int kBits, int kRows, int kSteps, bool kMinimums>
  __attribute__((noinline)) static void AddWindow(Panels<kBits>& panels, int64_t begin, int64_t end,
                                                  int64_t first_group, int64_t i) {
    const Shape& shape = panels.at[0].shape;
    const Block block = panels.at[0].BlockAt(i, kRows);
    for (int j = 0; j < Columns::kRegisters; j += kColumns) {
      const int8_t* x = block.x + begin * kSpanInputs * kRows;
      int64_t group = first_group;
      for (int64_t span = begin; span < end; ++group) {
        RowSums<kRows> sums, minimums;
        ForSums<kRows>([&](int r, int c) { sums[r][c] = minimums[r][c] = Simd::SetInt(0); });
        const int64_t first = span;
        const int64_t group_end = end - span < shape.group_spans ? end : span + shape.group_spans;
        for (; span < group_end; ++span, x += kSpanInputs * kRows) {
#pragma GCC unroll 2
          for (int step = 0; step < kStepsOfSpan; step += kSteps) {
            AddSteps<kRows, kSteps, kMinimums>(panels, sums, block, x + step * kStepInputs * kRows,
                                               (span - begin) * kStepsOfSpan + step, span * kStepsOfSpan + step, j);
          }
        }
        if constexpr (kMinimums) {
          const int64_t window_first = shape.MinimumOf(begin);
          for (int64_t at = shape.MinimumOf(first); at < shape.MinimumOf(group_end); ++at) {
            ForSums<kRows>([&](int r, int c) {
              const Register of(j, c);
              const auto t = Simd::LoadInt(panels.windows[of.panel].minimums[at - window_first] + of.column);
              minimums[r][c] = Simd::DotPair(minimums[r][c], t, Simd::SetInt(block.terms[at * kRows + r]));
            });
          }
        }
        EndGroup<kRows, kMinimums>(panels, block, sums, minimums, group, first_group, j, i);
      }
    }
  }

  template <int kRows, int kSteps, bool kMinimums, int kBits>
  __attribute__((always_inline)) static void AddSteps(const Panels<kBits>& panels, RowSums<kRows>& sums,
                                                      const Block& block, const int8_t* x, int64_t window_step,
                                                      int64_t step, int j) {
    constexpr bool kPairs = KQuantStream<Simd, kBits>::kDotsPairs;
    RowSums<kRows> step_sums;
    if constexpr (!kMinimums) {
      ForSums<kRows>([&](int r, int c) {
        const int32_t* const terms = block.terms + step * kRows + r;
        step_sums[r][c] = Simd::SetInt(terms[0]);
        if constexpr (kSteps > 1) step_sums[r][c] = Simd::AddInt(step_sums[r][c], Simd::SetInt(terms[kRows]));
      });
    }
#pragma GCC unroll 8
    for (int row = 0; row < kSteps * kStepRows; ++row) {
      const int8_t* const step_x = x + row / kStepRows * kStepInputs * kRows;
      typename Simd::Bytes q[kColumns];
#pragma GCC unroll 4
      for (int c = 0; c < kColumns; ++c) {
        const Register of(j, c);
        q[c] = Simd::LoadBytes(panels.windows[of.panel].rows[window_step * kStepRows + row] + 4 * of.column);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto quad = Simd::RepeatQuad(Quad(step_x, row % kStepRows, r));
#pragma GCC unroll 4
        for (int c = 0; c < kColumns; ++c) {
          step_sums[r][c] = kMinimums && row == 0 ? Products(q[c], quad) : AddProducts(step_sums[r][c], q[c], quad);
        }
      }
    }
#pragma GCC unroll 4
    for (int c = 0; c < kColumns; ++c) {
      const Register of(j, c);
      const auto factors = Simd::LoadInt(panels.windows[of.panel].factors[window_step] + of.column);
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) sums[r][c] = AddStep<kPairs>(sums[r][c], step_sums[r][c], factors);
    }
  }

  template <int kRows, bool kMinimums, int kBits>
  __attribute__((always_inline)) static void EndGroup(Panels<kBits>& panels, const Block& block,
                                                      const RowSums<kRows>& sums, const RowSums<kRows>& minimums,
                                                      int64_t group, int64_t first_group, int j, int64_t i) {
    ForSums<kRows>([&](int r, int c) {
      const Register to(j, c);
      const auto& scales = panels.windows[to.panel].scales[group - first_group];
      const auto of_x = Simd::Set(block.scales[group * kRows + r]);
      float* const total = panels.totals[i + r][to.panel] + to.column;
      auto sum = Simd::MultiplyAdd(Simd::ToFloat(sums[r][c]), Simd::Multiply(Simd::Load(scales[0] + to.column), of_x),
                                   Simd::Load(total));
      if constexpr (kMinimums) {
        sum = Simd::MultiplyAdd(Simd::ToFloat(minimums[r][c]), Simd::Multiply(Simd::Load(scales[1] + to.column), of_x),
                                sum);
      }
      Simd::Store(total, sum);
    });
  }
};

template <typename Simd>
void KQuantRows<Simd>::PackBlocks(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m,
                                  int64_t row_block, void* packed) {
  const GroupWeight& w = static_cast<const GroupWeight&>(weight);
  const int64_t padded_k = kInt4Bitmap.PaddedK(w.k);
  const int64_t group = w.view.group;
  const int64_t groups = ScaleRows(w.k, group);
  const int32_t zero_point = static_cast<int32_t>(w.view.subgroups.zero_point);
  const bool minimums = w.view.minimums != nullptr;
  const int64_t sum_steps = PairsMinimums(w) ? kStepsOfSpan : 1;  // steps whose q are summed in a word of a term
  const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
    float* scales = reinterpret_cast<float*>(block + rows * padded_k);
    int32_t* terms = reinterpret_cast<int32_t*>(scales + groups * rows);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group;
      const RowScale scale = ScaleOf<Simd>(row + begin, w.k - begin < group ? w.k - begin : group);
      scales[g * rows + i] = scale.scale;
      // The last group includes the padding.
      const int64_t end = g + 1 == groups ? padded_k : begin + group;
      int32_t sum = 0, before = 0;
      for (int64_t from = begin; from < end; from += kStepInputs) {
        const InputSums sums = QuantizeInputs<Simd>(row, w.k, from, from + kStepInputs, scale, block, rows, i);
        const int64_t step = from / kStepInputs;
        if (!minimums) {
          const int32_t start = -zero_point * sums.all;
          const int32_t upper = -zero_point * sums.upper;
          terms[step * rows + i] = kWords ? Words(start - upper, upper) : start;
        } else {
          // The sum of this step or, if PairsMinimums, of this span so far.
          sum = sum_steps == 1 || step % sum_steps == 0 ? sums.all : sum + sums.all;
          if ((step + 1) % sum_steps != 0) continue;
          const int64_t index = step / sum_steps;
          if (index % 2 == 0) {
            before = sum;
          } else {
            terms[index / 2 * rows + i] = Words(before, sum);
          }
        }
      }
    }
  };
  PackRowBlocks(x, x_row_bytes, m, row_block, packed, PackedRowBytes(w), pack);
}

}  // namespace
}  // namespace ortolan
