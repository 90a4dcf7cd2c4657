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
//             i32 [steps / 2][r]  with minimums: the sums of q of two steps, as two words
template <typename Simd>
struct KQuantRows {
  static constexpr bool kWords = Simd::kMultipliesPairs;
  static_assert(!kWords || Simd::kNarrowNibbleSums);  // or QuantizeInputs would not return `upper`

  static int64_t PackedRowBytes(const MatMulWeight& w) {
    const int64_t padded_k = kInt4Bitmap.PaddedK(w.k);
    const int64_t groups = ScaleRows(w.k, static_cast<const GroupWeight&>(w).view.group);
    return padded_k + (4 * (groups + padded_k / kStepInputs) + 63) / 64 * 64;
  }

  static void Pack(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m, void* packed);

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
        ahead_(ahead.int4) {}

  // Call row(index, q) for the rows 0 … 7 of the next span, q as bytes, and step(index) after each four.
  template <typename Row, typename Step>
  __attribute__((always_inline)) void Span(const Row& row, const Step& step) {
    if (scales_ != nullptr) __builtin_prefetch(scales_ + ahead_ / 8);
#pragma GCC unroll 8
    for (int r = 0; r < kStepsOfSpan * kStepRows; ++r) {
      row(r, rows_.template NextStored<true>(r));
      if (r % kStepRows == kStepRows - 1) step(r / kStepRows);
    }
    if (scales_ != nullptr) scales_ += span_bytes_;
    if (minimums_ != nullptr) minimums_ += span_bytes_;
  }

  // s of step 0 or 1 of the span, as the factor of the sums of a step.
  __attribute__((always_inline)) Ints Factors(int step) const {
    return Columns::template Of<Ints>([&](int i) {
      if (scales_ == nullptr) return Simd::SetInt(kTwice ? 0x00010001 : 1);
      const auto bytes = Simd::LoadUint8(scales_ + step * step_bytes_ + i * Simd::kLanes);
      const auto high = Simd::template ShiftLeftInt<24>(bytes);
      if constexpr (!kTwice && !kDotsPairs) return Simd::template ShiftRightSigned<24>(high);
      const auto word = Simd::AndInt(Simd::template ShiftRightSigned<24>(high), Simd::SetInt(0xffff));
      if constexpr (!kTwice) return word;
      return Simd::OrInt(word, Simd::template ShiftLeftInt<16>(word));
    });
  }
  // t of the two steps of the span, as two words.
  __attribute__((always_inline)) Ints Minimums() const {
    return Columns::template Of<Ints>([&](int i) {
      if (minimums_ == nullptr) return Simd::SetInt(0x00010001);
      const uint8_t* from = minimums_ + i * Simd::kLanes;
      return Simd::OrInt(Simd::LoadUint8(from), Simd::template ShiftLeftInt<16>(Simd::LoadUint8(from + step_bytes_)));
    });
  }

  // Factors are words: twice each for sums in words, or once and zero for sums that fit a word.
  static constexpr bool kTwice = KQuantRows<Simd>::kWords;
  static constexpr bool kDotsPairs = kTwice || kBits == 4;  // 16 x 127 x 15 fits

 private:
  static const uint8_t* OfPanel(const GroupWeight& w, const uint8_t* rows, int64_t panel) {
    return rows == nullptr ? nullptr : rows + panel * w.view.subgroups.Rows(w.k) * kPanelColumns;
  }

  FewBitsStream<Simd, kBits> rows_;
  const uint8_t* scales_;
  const uint8_t* minimums_;
  int64_t step_bytes_;
  int64_t span_bytes_;
  int64_t ahead_;
};

template <typename Simd>
class KQuantLoop {
  using Columns = simd::Columns<Simd>;
  using Ints = typename Columns::Ints;
  using Floats = typename Columns::Floats;
  static constexpr bool kWords = KQuantRows<Simd>::kWords;
  static constexpr int64_t kTogether = kQuantizedTogether<Simd>;

 public:
  static constexpr int kBlock = Simd::kRegisters == 32 ? 8 : 4;

  static void Multiply(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
    const GroupWeight& w = WeightOf<GroupWeight>(args);
    const auto run = [&]<int kBits>() {
      const Shape shape(w);
      for (int64_t row = 0; row < args.m; row += kMostRows) {
        const MatMulArgs part = RowsOf(args, row, kMostRows, shape.row_bytes);
        for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
          const Panel p(shape, part, panel);
          const KQuantStream<Simd, kBits> stream(w, panel, ActiveTuning().ahead);
          if (part.m > kFewRows) {
            Rows<kBits>(p, stream);
          } else {
            WithRowCount<kFewRows>(part.m, [&]<int kRows>() { FewRows<kBits, kRows>(p, stream); });
          }
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

  struct Shape {
    explicit Shape(const GroupWeight& w)
        : weight(w),
          row_bytes(KQuantRows<Simd>::PackedRowBytes(w)),
          padded_k(kInt4Bitmap.PaddedK(w.k)),
          groups(ScaleRows(w.k, w.view.group)),
          group_spans(w.view.group / kSpanInputs),
          // The last tile may end with spans that have no group; their x is zero.
          spans(padded_k / kSpanInputs < groups * group_spans ? padded_k / kSpanInputs : groups * group_spans),
          minimums(w.view.minimums != nullptr) {}

    const GroupWeight& weight;
    int64_t row_bytes;
    int64_t padded_k;
    int64_t groups;
    int64_t group_spans;
    int64_t spans;
    bool minimums;
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

  // The quad of row r of a block of kRows rows that belongs to row `row` of the weights of a step.
  template <int kRows>
  static const int8_t* Quad(const int8_t* step_x, int row, int r) {
    const int64_t first = 4 * row;
    return step_x + first / kTogether * kTogether * kRows + kTogether * r + first % kTogether;
  }

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
        if (shape.minimums) {
          const Ints t = stream.Minimums();
#pragma GCC unroll 4
          for (int r = 0; r < kRows; ++r) {
            const auto of_x = Simd::SetInt(block.terms[span * kRows + r]);
            minimums[r] =
                Columns::template Of<Ints>([&](int i) { return Simd::DotPair(minimums[r].at[i], t.at[i], of_x); });
          }
        }
        stream.Span(
            [&](int row, const auto& q) {
              const int64_t step = span * kStepsOfSpan + row / kStepRows;
#pragma GCC unroll 4
              for (int r = 0; r < kRows; ++r) {
                if (row % kStepRows == 0) {
                  step_sums[r] = Columns::SetInt(shape.minimums ? 0 : block.terms[step * kRows + r]);
                }
                const int8_t* const step_x = x + row / kStepRows * kStepInputs * kRows;
                const auto quad = Simd::RepeatQuad(Quad<kRows>(step_x, row % kStepRows, r));
                step_sums[r] =
                    Columns::template Of<Ints>([&](int i) { return AddProducts(step_sums[r].at[i], q.at[i], quad); });
              }
            },
            [&](int step) {
              const Ints factors = stream.Factors(step);
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
  };

  template <int kBits>
  __attribute__((always_inline)) static void Expand(const Shape& shape, KQuantStream<Simd, kBits>& stream,
                                                    int64_t spans, Window& window) {
    for (int64_t span = 0; span < spans; ++span) {
      if (shape.minimums) Columns::StoreInt(window.minimums[span], stream.Minimums());
      stream.Span(
          [&](int row, const auto& q) { Columns::StoreBytes(window.rows[span * kStepsOfSpan * kStepRows + row], q); },
          [&](int step) { Columns::StoreInt(window.factors[span * kStepsOfSpan + step], stream.Factors(step)); });
    }
  }

  template <int kBits>
  static void Rows(const Panel& p, KQuantStream<Simd, kBits> stream) {
    Window window;
    alignas(64) float totals[kMostRows][kPanelColumns];
    for (int64_t i = 0; i < p.args.m; ++i) Columns::Store(totals[i], Columns::Set(0.0f));
    const int64_t window_groups = kWindowSpans / p.shape.group_spans;
    int64_t group = 0;  // of the window's first span
    for (int64_t begin = 0; begin < p.shape.spans; begin += kWindowSpans, group += window_groups) {
      const int64_t end = p.shape.spans - begin < kWindowSpans ? p.shape.spans : begin + kWindowSpans;
      Expand<kBits>(p.shape, stream, end - begin, window);
      const auto add = [&]<int kSteps, bool kMinimums>() {
        constexpr bool kPairs = KQuantStream<Simd, kBits>::kDotsPairs;
        int64_t i = 0;
        for (; i + kBlock <= p.args.m; i += kBlock) {
          AddWindow<kPairs, kBlock, kSteps, kMinimums>(p, window, begin, end, group, i, totals[i]);
        }
        WithRowCount<kBlock - 1>(p.args.m - i, [&]<int kRows>() {
          AddWindow<kPairs, kRows, kSteps, kMinimums>(p, window, begin, end, group, i, totals[i]);
        });
      };
      if constexpr (kWords && kBits == 4) {
        if (p.shape.minimums && p.shape.weight.view.subgroups.size == kSpanInputs) {
          add.template operator()<kStepsOfSpan, true>();
          continue;
        }
      }
      p.shape.minimums ? add.template operator()<1, true>() : add.template operator()<1, false>();
    }
    for (int64_t i = 0; i < p.args.m; ++i) p.output.StoreWithBias(i, Columns::Load(totals[i]));
  }

  // Registers of columns whose sums are computed together. On targets with 16 registers, sums of steps stay in them;
  // two registers of words share each repeated quad of x.
  static constexpr int kTogetherColumns = kWords && Columns::kRegisters == 2 ? 2 : 1;
  template <int kRows>
  using RowSums = typename Simd::Int[kRows][kTogetherColumns];

  // Call each(r, c) for all rows and registers of columns.
  template <int kRows, typename Each>
  __attribute__((always_inline)) static void ForSums(const Each& each) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int c = 0; c < kTogetherColumns; ++c) each(r, c);
    }
  }

  // Add the products of spans begin … end-1 with rows i … i+kRows-1 to their totals. kSteps: steps with the same s that
  // are summed before they are multiplied with it.
  template <bool kPairs, int kRows, int kSteps, bool kMinimums>
  __attribute__((noinline)) static void AddWindow(const Panel& p, const Window& window, int64_t begin, int64_t end,
                                                  int64_t first_group, int64_t i, float* totals) {
    const Shape& shape = p.shape;
    const Block block = p.BlockAt(i, kRows);
    for (int j = 0; j < Columns::kRegisters; j += kTogetherColumns) {
      const int64_t column = j * Simd::kLanes;
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
            AddSteps<kPairs, kRows, kSteps, kMinimums>(sums, window, block, x + step * kStepInputs * kRows,
                                                       (span - begin) * kStepsOfSpan + step, span * kStepsOfSpan + step,
                                                       column);
          }
        }
        if constexpr (kMinimums) {
          for (int64_t at = first; at < group_end; ++at) {
            ForSums<kRows>([&](int r, int c) {
              const auto t = Simd::LoadInt(window.minimums[at - begin] + column + c * Simd::kLanes);
              minimums[r][c] = Simd::DotPair(minimums[r][c], t, Simd::SetInt(block.terms[at * kRows + r]));
            });
          }
        }
        EndGroup<kRows, kMinimums>(p, block, sums, minimums, group, j, totals + column);
      }
    }
  }

  template <bool kPairs, int kRows, int kSteps, bool kMinimums>
  __attribute__((always_inline)) static void AddSteps(RowSums<kRows>& sums, const Window& window, const Block& block,
                                                      const int8_t* x, int64_t window_step, int64_t step,
                                                      int64_t column) {
    RowSums<kRows> step_sums;
    if constexpr (!kMinimums) {
      ForSums<kRows>([&](int r, int c) { step_sums[r][c] = Simd::SetInt(block.terms[step * kRows + r]); });
    }
#pragma GCC unroll 8
    for (int row = 0; row < kSteps * kStepRows; ++row) {
      const int8_t* const step_x = x + row / kStepRows * kStepInputs * kRows;
      typename Simd::Bytes q[kTogetherColumns];
#pragma GCC unroll 2
      for (int c = 0; c < kTogetherColumns; ++c) {
        q[c] = Simd::LoadBytes(window.rows[window_step * kStepRows + row] + 4 * (column + c * Simd::kLanes));
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const auto quad = Simd::RepeatQuad(Quad<kRows>(step_x, row % kStepRows, r));
#pragma GCC unroll 2
        for (int c = 0; c < kTogetherColumns; ++c) {
          step_sums[r][c] = kMinimums && row == 0 ? Products(q[c], quad) : AddProducts(step_sums[r][c], q[c], quad);
        }
      }
    }
    ForSums<kRows>([&](int r, int c) {
      const auto factors = Simd::LoadInt(window.factors[window_step] + column + c * Simd::kLanes);
      sums[r][c] = AddStep<kPairs>(sums[r][c], step_sums[r][c], factors);
    });
  }

  template <int kRows, bool kMinimums>
  __attribute__((always_inline)) static void EndGroup(const Panel& p, const Block& block, const RowSums<kRows>& sums,
                                                      const RowSums<kRows>& minimums, int64_t group, int j,
                                                      float* totals) {
    const auto add = [&](const GroupScales<Simd>& scales, const RowSums<kRows>& of) {
      ForSums<kRows>([&](int r, int c) {
        float* const total = totals + r * kPanelColumns + c * Simd::kLanes;
        const auto scale =
            Simd::Multiply(scales.Load(scales.scales, group, j + c), Simd::Set(block.scales[group * kRows + r]));
        Simd::Store(total, Simd::MultiplyAdd(Simd::ToFloat(of[r][c]), scale, Simd::Load(total)));
      });
    };
    add(p.scales, sums);
    if constexpr (kMinimums) add(p.minimums, minimums);
  }
};

template <typename Simd>
void KQuantRows<Simd>::Pack(const MatMulWeight& weight, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const GroupWeight& w = static_cast<const GroupWeight&>(weight);
  const int64_t padded_k = kInt4Bitmap.PaddedK(w.k);
  const int64_t group = w.view.group;
  const int64_t groups = ScaleRows(w.k, group);
  const int32_t zero_point = static_cast<int32_t>(w.view.subgroups.zero_point);
  const bool minimums = w.view.minimums != nullptr;
  const auto pack = [&](const float* row, char* block, int64_t rows, int64_t i) {
    float* scales = reinterpret_cast<float*>(block + rows * padded_k);
    int32_t* terms = reinterpret_cast<int32_t*>(scales + groups * rows);
    for (int64_t g = 0; g < groups; ++g) {
      const int64_t begin = g * group;
      const RowScale scale = ScaleOf<Simd>(row + begin, w.k - begin < group ? w.k - begin : group);
      scales[g * rows + i] = scale.scale;
      // The last group includes the padding.
      const int64_t end = g + 1 == groups ? padded_k : begin + group;
      int32_t before = 0;
      for (int64_t from = begin; from < end; from += kStepInputs) {
        const InputSums sums = QuantizeInputs<Simd>(row, w.k, from, from + kStepInputs, scale, block, rows, i);
        const int64_t step = from / kStepInputs;
        if (!minimums) {
          const int32_t start = -zero_point * sums.all;
          const int32_t upper = -zero_point * sums.upper;
          terms[step * rows + i] = kWords ? Words(start - upper, upper) : start;
        } else if (step % 2 == 0) {
          before = sums.all;
        } else {
          terms[step / 2 * rows + i] = Words(before, sums.all);
        }
      }
    }
  };
  PackRowBlocks(x, x_row_bytes, m, KQuantLoop<Simd>::kBlock, packed, PackedRowBytes(w), pack);
}

}  // namespace
}  // namespace ortolan
