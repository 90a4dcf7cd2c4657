// Blocks of tokens: quantizing, multiplying and storing them with a target's vectors. A block of kVectors vectors is
// [k][kVectors kLanes] values, then its Ranges. The rows of four inputs are interleaved and multiplied with the four
// repeated weights of an output. Values are q as bytes or, on targets without an exact product of bytes, q - z as
// words: then sums need no correction for z. Included by *kernels.cc only; local to each.
#pragma once

#include "matmul/extremes.h"
#include "matmul/token_range.h"
#include "simd/at_byte.h"

namespace ortolan {
namespace {

template <typename Simd>
TokenRange RangeOfToken(const float* x, int64_t k) {
  const Extremes extremes = ExtremesOf<Simd>(x, k);
  return RangeOfToken(extremes.least, extremes.most, extremes.finite);
}

// clamp(round(x factor) + zero_point, 0, 255) of 4 kLanes inputs. Only `left` of them exist; the others get the zero
// point. NaN gives 255.
template <typename Simd>
[[gnu::always_inline]] inline typename Simd::Bytes QuantizeInputs(const float* x, int64_t left,
                                                                  const TokenRange& range) {
  const typename Simd::Float factor = Simd::Set(range.factor), most = Simd::Set(kMostBeforeRounding);
  typename Simd::Int q[4];
  for (int64_t i = 0; i < 4; ++i) {
    const typename Simd::Float v = left >= 4 * Simd::kLanes
                                       ? Simd::Load(x + i * Simd::kLanes)
                                       : Simd::LoadSome(x + i * Simd::kLanes, left - i * Simd::kLanes);
    q[i] = Simd::RoundToInt(Simd::Min(Simd::Multiply(v, factor), most));
  }
  return Simd::PackBytes(q, range.zero_point);
}

// clamp(round(x factor), -zero_point, 255 - zero_point) of 2 kLanes inputs, as words in the order of Simd::StoreInputs.
// Inputs past `left` give 0; NaN gives 255 - zero_point.
template <typename Simd>
[[gnu::always_inline]] inline typename Simd::Int QuantizeToWords(const float* x, int64_t left,
                                                                 const TokenRange& range) {
  const auto value = [&](int64_t lane) {
    const auto v = Simd::Multiply(Simd::LoadSome(x + lane, left - lane), Simd::Set(range.factor));
    return Simd::RoundToInt(Simd::Min(v, Simd::Set(kMostBeforeRounding)));
  };
  return Simd::PackWords(value(0), value(Simd::kLanes), -range.zero_point, 255 - range.zero_point);
}

// Scales and biases of kLanes outputs, from `output` on.
template <typename Simd>
struct OutputScales {
  int64_t left;  // outputs that exist
  typename Simd::Float scales, bias;

  OutputScales(const MatMulArgs& args, int64_t output)
      : left(args.w->n - output),
        scales(Simd::LoadSome(WeightOf<BlockSparseWeight>(args).scales + output, left)),
        bias(args.bias == nullptr ? Simd::Set(-0.0f) : Simd::LoadSome(args.bias + output, left)) {}
  void Store(float* y, typename Simd::Int sums, float scale) const {
    const typename Simd::Float product_scales = Simd::Multiply(Simd::Set(scale), scales);
    Simd::StoreSome(y, left, Simd::MultiplyAdd(Simd::ToFloat(sums), product_scales, bias));
  }
};

// The sums of four outputs from rows of words, with kTokens tokens each. ahead: see TokenBlock::SumGroup.
template <typename Simd, int kTokens>
[[gnu::always_inline]] inline void SumRowsOfWords(const BlockSparseView& w, int64_t group, const int16_t* x,
                                                  int64_t ahead,
                                                  typename Simd::Int (&total)[Simd::template kRowSums<kTokens>]) {
  typename Simd::Int sums[Simd::template kRowSums<kTokens>];
  for (typename Simd::Int& sum : sums) sum = Simd::SetInt(0);
  const int64_t end = w.starts[group + 1];
  const int8_t* const values = w.Values(end);
  const uint8_t* const indices = w.Indices(end);
  // Counts bytes of indices up to zero, so the loop has a single counter.
  constexpr int64_t kIndexBytes = 2 * kQuadInputs;
  for (int64_t at = (w.starts[group] - end) * kIndexBytes; at != 0; at += kIndexBytes) {
    // For few tokens, weights are read faster than the hardware prefetches them.
    if constexpr (kTokens <= 4) __builtin_prefetch(values + kQuadBytes / kIndexBytes * at + ahead);
    const auto row = [&](int64_t i) {
      int64_t index;
      if constexpr (kTokens == 1) {  // loads are the limit: load two indices at once
        uint32_t two;
        __builtin_memcpy(&two, indices + at + i / 2 * 4, sizeof(two));
        index = i % 2 == 0 ? two & 0xffff : two >> 16;
      } else {
        uint16_t one;
        __builtin_memcpy(&one, indices + at + 2 * i, sizeof(one));
        index = one;
      }
      return x + index * Simd::template kRowWords<kTokens>;
    };
    Simd::template DotRows<kTokens>(sums, {row(0), row(1), row(2), row(3)}, values + kQuadBytes / kIndexBytes * at);
  }
#pragma GCC unroll 8
  for (int i = 0; i < Simd::template kRowSums<kTokens>; ++i) total[i] = sums[i];
}

// Functions are not inlined: gcc 12 would keep sums in memory.
template <typename Simd, int kVectors>
struct TokenBlock {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Bytes = typename Simd::Bytes;
  using Table = typename Simd::ByteTable;
  using Element = typename Simd::RowElement;
  static constexpr bool kWords = sizeof(Element) == 2;
  static constexpr int64_t kLanes = Simd::kLanes;
  static constexpr int64_t kWidth = kVectors * kLanes;
  static constexpr int64_t kRegisterBytes = 4 * kLanes;

  // Stored after the values of a block, whose memory may be aligned to 4 bytes only.
  struct Ranges {
    float scales[kWidth];
    int32_t sum_factors[kWidth];

    void Set(int64_t i, const TokenRange& range) {
      scales[i] = range.scale;
      sum_factors[i] = SumFactor(range.zero_point);
    }
  };
  // The factor of an output's sum of weights in the correction: quads are kQuadBias too small, values zero_point too
  // large.
  static int32_t SumFactor(int32_t zero_point) { return Simd::kQuadBias - zero_point; }
  static Element* RowAt(uint8_t* block, int64_t input) { return reinterpret_cast<Element*>(block) + input * kWidth; }
  static const Element* RowAt(const uint8_t* block, int64_t input) {
    return reinterpret_cast<const Element*>(block) + input * kWidth;
  }
  static Ranges* RangesOf(uint8_t* block, int64_t k) {
    return reinterpret_cast<Ranges*>(RowAt(block, PaddedInputs(k)));
  }
  static const Ranges* RangesOf(const uint8_t* block, int64_t k) {
    return reinterpret_cast<const Ranges*>(RowAt(block, PaddedInputs(k)));
  }
  static void SetRanges(uint8_t* block, int64_t k, const FixedRange& fixed) {
    for (int64_t i = 0; i < kWidth; ++i) RangesOf(block, k)->Set(i, RangeOfToken(fixed));
  }

  // Packs `count` of kWidth tokens. fixed: null if each token has its own range.
  [[gnu::noinline]] static void Pack(const float* x, int64_t x_row_bytes, int64_t count, int64_t k,
                                     const FixedRange* fixed, uint8_t* block) {
    TokenRange ranges[kWidth];
    for (int64_t i = 0; i < kWidth; ++i) {
      ranges[i] = fixed != nullptr ? RangeOfToken(*fixed)
                  : i < count      ? RangeOfToken<Simd>(AtByte(x, i * x_row_bytes), k)
                                   : TokenRange{0.0f, 0.0f, 0};
      RangesOf(block, k)->Set(i, ranges[i]);
    }
    if constexpr (kWords) {
      PackWords(x, x_row_bytes, count, k, ranges, block);
    } else {
      PackBytes(x, x_row_bytes, count, k, ranges, block);
    }
  }

  static void PackWords(const float* x, int64_t x_row_bytes, int64_t count, int64_t k, const TokenRange* ranges,
                        uint8_t* block) {
    for (int64_t l = 0; l < k; l += 2 * kLanes) {
      Int words[kWidth];
      for (int64_t i = 0; i < kWidth; ++i) {
        words[i] =
            i < count ? QuantizeToWords<Simd>(AtByte(x, i * x_row_bytes) + l, k - l, ranges[i]) : Simd::SetInt(0);
      }
      Simd::template StoreInputs<kWidth>(words, RowAt(block, l));
    }
  }

  static void PackBytes(const float* x, int64_t x_row_bytes, int64_t count, int64_t k, const TokenRange* ranges,
                        uint8_t* block) {
    for (int64_t l = 0; l < k; l += kRegisterBytes) {
      Bytes quads[kLanes][kVectors];
      for (int v = 0; v < kVectors; ++v) {
        Bytes q[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const int64_t token = v * kLanes + i;
          q[i] = token < count ? QuantizeInputs<Simd>(AtByte(x, token * x_row_bytes) + l, k - l, ranges[token])
                               : Simd::SetBytes(0);
        }
        Simd::Transpose(q);
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) quads[i][v] = q[i];
      }
      uint8_t* to = block + l * kWidth;
      for (int64_t i = 0; i < kLanes; ++i) {
        Bytes rows[kVectors];
        Simd::DeinterleaveRows(quads[i], rows);
        for (int v = 0; v < kVectors; ++v, to += kRegisterBytes) Simd::StoreBytes(to, rows[v]);
      }
    }
  }

  // Add the products of four outputs. ahead: prefetch distance in bytes; weights come from memory, and the hardware
  // prefetches them too late.
  [[gnu::always_inline]] static inline void SumGroup(const BlockSparseView& w, int64_t group, const uint8_t* x,
                                                     int64_t ahead, Int (&total)[kGroupOutputs][kVectors]) {
    if constexpr (kWords) {
      Int sums[Simd::template kRowSums<kWidth>];
      SumRowsOfWords<Simd, kWidth>(w, group, RowAt(x, 0), ahead, sums);
      Simd::EndRowSums(sums, total);
    } else {
      const int8_t* values = w.Values(w.starts[group]);
      const int8_t* end = w.Values(w.starts[group + 1]);
      const uint8_t* indices = w.Indices(w.starts[group]);
      for (; values != end; values += kQuadBytes, indices += 2 * kQuadInputs) {
        __builtin_prefetch(values + ahead);
        __builtin_prefetch(indices + ahead / 2);
        uint64_t bits;
        __builtin_memcpy(&bits, indices, sizeof(bits));
        const uint8_t* const rows[4] = {
            x + (bits & 0xffff) * kWidth,
            x + (bits >> 16 & 0xffff) * kWidth,
            x + (bits >> 32 & 0xffff) * kWidth,
            x + (bits >> 48) * kWidth,
        };
        typename Simd::Quads tokens[kVectors];
        Simd::InterleaveRows(rows, tokens);
        const typename Simd::QuadWeights weights(values);
#pragma GCC unroll 4
        for (int o = 0; o < kGroupOutputs; ++o) Simd::DotQuadWeights(total[o], tokens, weights, o);
      }
    }
  }

  // The sums of a panel, by output and token.
  struct PanelSums {
    Int of[kPanelOutputs][kVectors];
  };

  // Writes sums of a panel to rows of y, kLanes tokens at a time.
  struct RowsOfY {
    const MatMulArgs& args;
    const Ranges& ranges;
    int64_t first, count;  // tokens

    // If rows of y are a multiple of 4096 bytes apart and y is not aligned, panels share cache lines that are evicted
    // before their second half is written. So the rows of some panels are gathered here first.
    static constexpr int64_t kPanelsAtOnce = 4;
    alignas(64) float gathered[kWidth][kPanelsAtOnce * kPanelOutputs];
    bool gathers;

    RowsOfY(const MatMulArgs& of, const Ranges& of_tokens, int64_t first_token, int64_t tokens)
        : args(of),
          ranges(of_tokens),
          first(first_token),
          count(tokens),
          gathers(of.y_row_bytes % 4096 == 0 && reinterpret_cast<uintptr_t>(of.y) % 64 != 0) {}

    // Store outputs output … output+kLanes-1. of: their sums, which are transposed in place.
    [[gnu::always_inline]] void Store(Int (&of)[kLanes], int64_t output, int v, float* y, int64_t row_bytes) const {
      const OutputScales<Simd> scales(args, output);
      const Int weight_sums = Simd::LoadInt(WeightOf<BlockSparseWeight>(args).sums + output);
      Simd::Transpose(of);
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t token = v * kLanes + i;
        if (token >= count) break;
        Int sums = of[i];
        if constexpr (!kWords) {
          sums = Simd::AddInt(sums, Simd::MultiplyInt(Simd::SetInt(ranges.sum_factors[token]), weight_sums));
        }
        scales.Store(y, sums, ranges.scales[token]);
        y = reinterpret_cast<float*>(reinterpret_cast<char*>(y) + row_bytes);
      }
    }

    // begin, end: the range of panels.
    void Finish(const PanelSums& sums, int64_t panel, int v, int64_t begin, int64_t end) {
      const int64_t part = gathers ? (panel - begin) % kPanelsAtOnce : 0;
      const int64_t token = v * kLanes;
      float* y = gathers ? gathered[token] + part * kPanelOutputs : args.Y(first + token, panel);
      const int64_t row_bytes = gathers ? static_cast<int64_t>(sizeof(gathered[0])) : args.y_row_bytes;
      for (int64_t o = 0; o < kPanelOutputs; o += kLanes) {
        Int of[kLanes];
#pragma GCC unroll 16
        for (int64_t i = 0; i < kLanes; ++i) of[i] = sums.of[o + i][v];
        Store(of, panel * kPanelOutputs + o, v, y + o, row_bytes);
      }
      if (!gathers || (part + 1 < kPanelsAtOnce && panel + 1 < end)) return;
      const int64_t column = (panel - part) * kPanelOutputs;
      const int64_t left = args.w->n - column, whole = (part + 1) * kPanelOutputs;
      for (int64_t i = token; i < token + kLanes && i < count; ++i) {
        float* to = args.Y(first + i, panel - part);
        if (left >= whole) {
          for (int64_t j = 0; j < whole; j += kLanes) Simd::Store(to + j, Simd::Load(gathered[i] + j));
        } else {
          for (int64_t j = 0; j < whole; j += kLanes) Simd::StoreSome(to + j, left - j, Simd::Load(gathered[i] + j));
        }
      }
    }
  };

  // Multiply `count` tokens from `first` on, to floats. The sums of a panel are stored between the groups of the next
  // panel, so shuffles and stores overlap with products.
  [[gnu::noinline]] static void Multiply(const MatMulArgs& args, const uint8_t* x, int64_t first, int64_t count,
                                         int64_t ahead, int64_t panel_begin, int64_t panel_end) {
    const BlockSparseView w = WeightOf<BlockSparseWeight>(args).view;
    PanelSums sums[2];
    RowsOfY rows(args, *RangesOf(x, w.k), first, count);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      for (int g = 0; g < kPanelGroups; ++g) {
        const int64_t group = panel * kPanelGroups + g;
        if (group < w.Groups()) {
          Int total[kGroupOutputs][kVectors] = {};
          SumGroup(w, group, x, ahead, total);
          Int(*to)[kVectors] = sums[panel % 2].of + g * kGroupOutputs;
#pragma GCC unroll 4
          for (int o = 0; o < kGroupOutputs; ++o) {
#pragma GCC unroll 4
            for (int v = 0; v < kVectors; ++v) to[o][v] = total[o][v];
          }
        }
        if (panel > panel_begin && g < kVectors)
          rows.Finish(sums[(panel - 1) % 2], panel - 1, g, panel_begin, panel_end);
      }
    }
    if (panel_begin == panel_end) return;
    for (int v = 0; v < kVectors; ++v) {
      rows.Finish(sums[(panel_end - 1) % 2], panel_end - 1, v, panel_begin, panel_end);
    }
  }

  // Multiply to a block of the next layer.
  [[gnu::noinline]] static void MultiplyHidden(const HiddenLayerArgs& args, const uint8_t* x, const Table& table,
                                               uint8_t* next, int64_t ahead, int64_t panel_begin, int64_t panel_end) {
    // Copies, because the compiler must assume that stores change the originals.
    const HiddenLayerWeight layer = WeightOf<HiddenLayerWeight>(args);
    const BlockSparseView w = layer.view;
    const int32_t* const weight_sums = layer.sums;
    const float *const scales = layer.scales, *const biases = args.bias;
    const int32_t x_zero_point = layer.x_range.zero_point, zero_point = layer.table_x.zero_point;
    const int32_t next_zero_point = layer.table_y.zero_point;
    const float factor = 1.0f / layer.table_x.scale;
    const float x_factor = layer.x_range.scale * factor;
    const int64_t group_end = panel_end * kPanelGroups < w.Groups() ? panel_end * kPanelGroups : w.Groups();
    for (int64_t group = panel_begin * kPanelGroups; group < group_end; ++group) {
      const int64_t output = group * kGroupOutputs;
      Int total[kGroupOutputs][kVectors];
#pragma GCC unroll 4
      for (int o = 0; o < kGroupOutputs; ++o) {
        const Int zero = Simd::SetInt(kWords ? 0 : SumFactor(x_zero_point) * weight_sums[output + o]);
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) total[o][v] = zero;
      }
      SumGroup(w, group, x, ahead, total);
      // A register holds rows of one or several outputs; those past the last output are written to the padding.
      constexpr int kOutputs = 4 / kVectors;
#pragma GCC unroll 4
      for (int o = 0; o < kGroupOutputs; o += kOutputs) {
        Int integers[4];
#pragma GCC unroll 4
        for (int i = 0; i < kOutputs; ++i) {
          const int64_t j = output + o + i < w.n ? output + o + i : w.n - 1;
          const float bias = biases == nullptr ? 0.0f : biases[j] * factor;
          Round(total[o + i], scales[j] * x_factor, bias, integers + i * kVectors);
        }
        if constexpr (kWords) {
          const Bytes bytes = Simd::Lookup256(table, Simd::PackBytes(integers, zero_point));
          Simd::template StoreRows<kVectors>(RowAt(next, output + o), bytes, next_zero_point);
        } else {
          const Bytes bytes = Simd::template PackRows<kVectors>(integers, zero_point);
          Simd::StoreBytes(RowAt(next, output + o), Simd::Lookup256(table, bytes));
        }
      }
    }
  }

  // round(total scale + bias), or a value that exceeds 255 after adding any zero point.
  [[gnu::always_inline]] static inline void Round(const Int (&total)[kVectors], float scale, float bias, Int* rounded) {
    const Float scales = Simd::Set(scale), biases = Simd::Set(bias);
    // Values beyond int32 must be clamped before they are converted. (NaN takes this path too.)
    const bool fits = __builtin_fabsf(scale) <= 0.5f && __builtin_fabsf(bias) <= 0x1p29f;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) {
      Float value = Simd::MultiplyAdd(Simd::ToFloat(total[v]), scales, biases);
      if (!fits) value = Simd::Min(value, Simd::Set(kMostBeforeRounding));
      rounded[v] = Simd::RoundToInt(value);
    }
  }
};

}  // namespace
}  // namespace ortolan
