// The loop for up to four contiguous packed tokens: u8 [k], padded, then a TokenRange. Weights are multiplied in place:
// a vector holds kLanes / 4 quads, whose inputs are gathered for a vector of bytes at a time. Included by *kernels.cc
// only; local to each.
#pragma once

#include "matmul/token_blocks.h"

namespace ortolan {
namespace {

template <typename Simd, int kTokens>
struct FewTokens {
  using Float = typename Simd::Float;
  using Int = typename Simd::Int;
  using Bytes = typename Simd::Bytes;
  using Table = typename Simd::ByteTable;
  static constexpr int64_t kLanes = Simd::kLanes;
  static constexpr int64_t kWidth = kTokens;
  static_assert(kLanes == kPanelOutputs);

  static void SetRanges(uint8_t* rows, int64_t k, const FixedRange& fixed) {
    for (int t = 0; t < kTokens; ++t) StoreRowRange(rows + t * PackedTokenBytes<uint8_t>(k), k, RangeOfToken(fixed));
  }

  [[gnu::noinline]] static void Pack(const float* x, int64_t x_row_bytes, int64_t, int64_t k, const FixedRange* fixed,
                                     uint8_t* to) {
    for (int t = 0; t < kTokens; ++t, to += PackedTokenBytes<uint8_t>(k)) {
      const float* row = AtByte(x, t * x_row_bytes);
      const TokenRange range = fixed != nullptr ? RangeOfToken(*fixed) : RangeOfToken<Simd>(row, k);
      for (int64_t l = 0; l < k; l += 4 * kLanes) {
        Simd::StoreBytes(to + l, QuantizeInputs<Simd>(row + l, k - l, range));
      }
      StoreRowRange(to, k, range);
    }
  }

  // Compute the sums of a group's outputs; output o is in lanes 4 i + o.
  [[gnu::always_inline]] static inline void SumGroup(const BlockSparseView& w, int64_t group, const uint8_t* x,
                                                     int64_t row_bytes, Int (&total)[kTokens]) {
    for (int t = 0; t < kTokens; ++t) total[t] = Simd::SetInt(0);
    const int64_t end = group < w.Groups() ? w.starts[group + 1] : 0;
    for (int64_t quad = group < w.Groups() ? w.starts[group] : 0; quad < end; quad += kLanes) {
      const int64_t quads = end - quad < kLanes ? end - quad : kLanes;
      Bytes inputs[kTokens];
      Simd::GatherBytes(x, row_bytes, w.Indices(quad), quads, inputs);
      Int order = Simd::LoadInt(kFourOfEach);
      for (int64_t q = 0; q < quads; q += kLanes / 4, order = Simd::AddInt(order, Simd::SetInt(kLanes / 4))) {
        const Bytes weights = Simd::LoadSomeQuads(w.Values(quad + q), 4 * (quads - q));
#pragma GCC unroll 4
        for (int t = 0; t < kTokens; ++t) {
          total[t] = Simd::DotQuad(total[t], Simd::PermuteQuads(inputs[t], order), weights);
        }
      }
    }
  }

  // Call store(panel, sums by token, token ranges) for the panels.
  template <typename Store>
  [[gnu::always_inline]] static inline void ForEachPanel(const MatMulArgs& args, const uint8_t* x, int64_t panel_begin,
                                                         int64_t panel_end, const Store& store) {
    const BlockSparseWeight& weight = WeightOf<BlockSparseWeight>(args);
    const BlockSparseView& w = weight.view;
    const int64_t row_bytes = PackedTokenBytes<uint8_t>(w.k);
    TokenRange ranges[kTokens];
    for (int t = 0; t < kTokens; ++t) ranges[t] = LoadRowRange(x + t * row_bytes, w.k);
    for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
      Int totals[kPanelGroups][kTokens];
#pragma GCC unroll 4
      for (int64_t g = 0; g < kPanelGroups; ++g) {
        Int total[kTokens];
        SumGroup(w, panel * kPanelGroups + g, x, row_bytes, total);
        for (int t = 0; t < kTokens; ++t) totals[g][t] = total[t];
      }
      const Int weight_sums = Simd::LoadInt(weight.sums + panel * kPanelOutputs);
      Int sums[kTokens];
#pragma GCC unroll 4
      for (int t = 0; t < kTokens; ++t) {
        const Int zero = Simd::MultiplyInt(Simd::SetInt(ranges[t].zero_point), weight_sums);
        sums[t] = Simd::SubtractInt(Simd::SumsOfQuarters(totals[0][t], totals[1][t], totals[2][t], totals[3][t]), zero);
      }
      store(panel, sums, ranges);
    }
  }

  [[gnu::noinline]] static void Multiply(const MatMulArgs& args, const uint8_t* x, int64_t first, int64_t, int64_t,
                                         int64_t panel_begin, int64_t panel_end) {
    ForEachPanel(args, x, panel_begin, panel_end,
                 [&](int64_t panel, const Int(&sums)[kTokens], const TokenRange(&ranges)[kTokens]) {
                   const OutputScales<Simd> scales(args, panel * kPanelOutputs);
#pragma GCC unroll 4
                   for (int t = 0; t < kTokens; ++t) {
                     scales.Store(args.Y(first + t, panel), sums[t], ranges[t].scale);
                   }
                 });
  }

  [[gnu::noinline]] static void MultiplyHidden(const HiddenLayerArgs& args, const uint8_t* x, const Table& table,
                                               uint8_t* next, int64_t, int64_t panel_begin, int64_t panel_end) {
    const HiddenLayerWeight& layer = WeightOf<HiddenLayerWeight>(args);
    const int64_t row_bytes = PackedTokenBytes<uint8_t>(layer.n);
    const Float factor = Simd::Set(1.0f / layer.table_x.scale);
    const Float x_factor = Simd::Multiply(Simd::Set(layer.x_range.scale), factor);
    const int32_t zero_point = layer.table_x.zero_point;
    ForEachPanel(
        args, x, panel_begin, panel_end, [&](int64_t panel, const Int(&sums)[kTokens], const TokenRange(&)[kTokens]) {
          const int64_t output = panel * kPanelOutputs, left = layer.n - output;
          const Float scales = Simd::Multiply(Simd::LoadSome(layer.scales + output, left), x_factor);
          const Float bias =
              args.bias == nullptr ? Simd::Set(0.0f) : Simd::Multiply(Simd::LoadSome(args.bias + output, left), factor);
          Int integers[4];
#pragma GCC unroll 4
          for (int t = 0; t < 4; ++t) {
            const Float value = Simd::MultiplyAdd(Simd::ToFloat(sums[t % kTokens]), scales, bias);
            integers[t] = Simd::RoundToInt(Simd::Min(value, Simd::Set(kMostBeforeRounding)));
          }
          alignas(64) uint8_t bytes[4][kLanes];
          Simd::StoreBytes(bytes[0], Simd::Lookup256(table, Simd::PackBytes(integers, zero_point)));
          // Outputs past the last one are written to the padding.
          for (int t = 0; t < kTokens; ++t) std::memcpy(next + t * row_bytes + output, bytes[t], kLanes);
        });
  }

 private:
  static constexpr int32_t kFourOfEach[] = {0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3};
};

}  // namespace
}  // namespace ortolan
