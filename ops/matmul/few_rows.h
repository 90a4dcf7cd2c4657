// The loop for up to four tokens on targets that repeat one input in all lanes. Packed tokens are rows [k] of q - z as
// words, then their TokenRanges. Four rows are multiplied with a quad of weights in place; sums end up in lanes by
// token and output. Included by *kernels.cc only; local to each.
#pragma once

#include "matmul/token_blocks.h"

namespace ortolan {
namespace {

// kTokens tokens, some of them possibly missing.
template <typename Simd, int kTokens>
struct FewRows {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Bytes = typename Simd::Bytes;
  using Table = typename Simd::ByteTable;
  static constexpr int64_t kLanes = Simd::kLanes;
  static constexpr int64_t kWidth = kTokens;
  static constexpr int64_t kRowWords = Simd::template kRowWords<kTokens>;
  static constexpr int64_t kPanelParts = kPanelOutputs / kLanes;
  static_assert(kLanes == 2 * kGroupOutputs);

  static const int16_t* RowAt(const uint8_t* x, int64_t input) {
    return reinterpret_cast<const int16_t*>(x) + input * kRowWords;
  }
  static int16_t* RowAt(uint8_t* x, int64_t input) { return reinterpret_cast<int16_t*>(x) + input * kRowWords; }
  static const TokenRange* RangesOf(const uint8_t* x, int64_t k) {
    return reinterpret_cast<const TokenRange*>(RowAt(x, PaddedInputs(k)));
  }
  static TokenRange* RangesOf(uint8_t* x, int64_t k) {
    return reinterpret_cast<TokenRange*>(RowAt(x, PaddedInputs(k)));
  }
  static void SetRanges(uint8_t* x, int64_t k, const FixedRange& fixed) {
    for (int t = 0; t < kTokens; ++t) RangesOf(x, k)[t] = RangeOfToken(fixed);
  }

  [[gnu::noinline]] static void Pack(const float* x, int64_t x_row_bytes, int64_t count, int64_t k,
                                     const FixedRange* fixed, uint8_t* to) {
    TokenRange ranges[kTokens] = {};
    for (int64_t t = 0; t < count; ++t) {
      ranges[t] = fixed != nullptr ? RangeOfToken(*fixed) : RangeOfToken<Simd>(AtByte(x, t * x_row_bytes), k);
    }
    for (int64_t l = 0; l < k; l += 2 * kLanes) {
      Int words[kTokens];
      for (int64_t t = 0; t < kTokens; ++t) {
        words[t] =
            t < count ? QuantizeToWords<Simd>(AtByte(x, t * x_row_bytes) + l, k - l, ranges[t]) : Simd::SetInt(0);
      }
      Simd::template StoreInputs<kTokens>(words, RowAt(to, l));
    }
    for (int t = 0; t < kTokens; ++t) RangesOf(to, k)[t] = ranges[t];
  }

  // The sums of a panel by token, kLanes outputs at a time.
  struct PanelSums {
    Int of[kPanelParts][kTokens];
  };
  [[gnu::always_inline]] static inline PanelSums SumPanel(const BlockSparseView& w, const uint8_t* x, int64_t ahead,
                                                          int64_t panel) {
    Int groups[kPanelGroups][Simd::template kRowSums<kTokens>] = {};
    const int64_t first = panel * kPanelGroups, left = w.Groups() - first;
    for (int64_t g = 0; g < (left < kPanelGroups ? left : kPanelGroups); ++g) {
      SumRowsOfWords<Simd, kTokens>(w, first + g, RowAt(x, 0), ahead, groups[g]);
    }
    PanelSums sums;
    for (int64_t p = 0; p < kPanelParts; ++p) {
      Simd::template EndFewSums<kTokens>(groups[2 * p], groups[2 * p + 1], sums.of[p]);
    }
    return sums;
  }

  [[gnu::noinline]] static void Multiply(const MatMulArgs& args, const uint8_t* x, int64_t first, int64_t count,
                                         int64_t ahead, int64_t panel_begin, int64_t panel_end) {
    const BlockSparseView w = WeightOf<BlockSparseWeight>(args).view;
    const TokenRange* const ranges = RangesOf(x, w.k);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const PanelSums sums = SumPanel(w, x, ahead, panel);
      for (int64_t p = 0; p < kPanelParts; ++p) {
        const OutputScales<Simd> scales(args, panel * kPanelOutputs + p * kLanes);
        for (int64_t t = 0; t < count; ++t) {
          scales.Store(args.Y(first + t, panel) + p * kLanes, sums.of[p][t], ranges[t].scale);
        }
      }
    }
  }

  [[gnu::noinline]] static void MultiplyHidden(const HiddenLayerArgs& args, const uint8_t* x, const Table& table,
                                               uint8_t* next, int64_t ahead, int64_t panel_begin, int64_t panel_end) {
    const HiddenLayerWeight layer = WeightOf<HiddenLayerWeight>(args);
    const Float factor = Simd::Set(1.0f / layer.table_x.scale);
    const Float x_factor = Simd::Multiply(Simd::Set(layer.x_range.scale), factor);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      const PanelSums sums = SumPanel(layer.view, x, ahead, panel);
      for (int64_t p = 0; p < kPanelParts; ++p) {
        const int64_t output = panel * kPanelOutputs + p * kLanes, left = layer.n - output;
        const Float scales = Simd::Multiply(Simd::LoadSome(layer.scales + output, left), x_factor);
        const Float bias =
            args.bias == nullptr ? Simd::Set(0.0f) : Simd::Multiply(Simd::LoadSome(args.bias + output, left), factor);
        Int integers[4];
        for (int t = 0; t < 4; ++t) {
          const Float value = Simd::MultiplyAdd(Simd::ToFloat(sums.of[p][t % kTokens]), scales, bias);
          integers[t] = Simd::RoundToInt(Simd::Min(value, Simd::Set(kMostBeforeRounding)));
        }
        alignas(32) uint8_t bytes[4][kLanes];
        Simd::StoreBytes(bytes[0], Simd::Lookup256(table, Simd::PackBytes(integers, layer.table_x.zero_point)));
        // Outputs past the last one are written to the padding.
        for (int64_t o = 0; o < kLanes; ++o) {
          for (int64_t i = 0; i < kRowWords; ++i) {
            RowAt(next, output + o)[i] = static_cast<int16_t>(bytes[i][o] - layer.table_y.zero_point);
          }
        }
      }
    }
  }
};

}  // namespace
}  // namespace ortolan
