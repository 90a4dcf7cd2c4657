// The portable kernel for block-sparse weights. A packed token is q [k], then s and z after the padding. Sums are
// scaled and offset without rounding in between, so the result has the same bits as that of the vector kernels.
#include <algorithm>
#include <cmath>

#include "matmul/token_range.h"
#include "simd/at_byte.h"

namespace ortolan {
namespace {

int64_t TokenBytes(const MatMulWeight& w) { return PackedTokenBytes<uint8_t>(w.k); }

void PackBlockSparse(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  const int64_t k = w.k;
  const FixedRange* fixed = static_cast<const BlockSparseWeight&>(w).Fixed();
  uint8_t* out = static_cast<uint8_t*>(packed);
  for (int64_t i = 0; i < m; ++i, out += PackedTokenBytes<uint8_t>(k)) {
    const float* row = AtByte(x, i * x_row_bytes);
    float least = 0.0f, most = 0.0f;
    bool finite = true;
    for (int64_t l = 0; l < k; ++l) {
      finite = finite && std::isfinite(row[l]);
      least = std::min(least, row[l]);
      most = std::max(most, row[l]);
    }
    const TokenRange range = fixed != nullptr ? RangeOfToken(*fixed) : RangeOfToken(least, most, finite);
    for (int64_t l = 0; l < k; ++l) out[l] = ToByte(row[l] * range.factor, range.zero_point);
    StoreRowRange(out, k, range);
  }
}

// Call store(token, output, sum, range of x) for the panels.
template <typename Store>
void ForEachSum(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end, const Store& store) {
  const BlockSparseView& w = WeightOf<BlockSparseWeight>(args).view;
  const int64_t group_end = std::min(panel_end * kPanelGroups, w.Groups());
  for (int64_t i = 0; i < args.m; ++i) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + i * PackedTokenBytes<uint8_t>(w.k);
    const TokenRange range = LoadRowRange(x, w.k);
    for (int64_t group = panel_begin * kPanelGroups; group < group_end; ++group) {
      int32_t totals[kGroupOutputs] = {};
      for (int64_t quad = w.starts[group]; quad < w.starts[group + 1]; ++quad) {
        const int8_t* values = w.Values(quad);
        for (int64_t l = 0; l < kQuadInputs; ++l) {
          const int32_t q = x[w.Index(quad, l)] - range.zero_point;
          for (int64_t o = 0; o < kGroupOutputs; ++o) totals[o] += q * values[o * kQuadInputs + l];
        }
      }
      const int64_t first = group * kGroupOutputs;
      for (int64_t o = 0; o < std::min(kGroupOutputs, w.n - first); ++o) store(i, first + o, totals[o], range);
    }
  }
}

void MultiplyBlockSparse(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const float* scales = WeightOf<BlockSparseWeight>(args).scales;
  ForEachSum(args, panel_begin, panel_end, [&](int64_t i, int64_t j, int32_t sum, const TokenRange& range) {
    const float bias = args.bias != nullptr ? args.bias[j] : -0.0f;
    args.Y(i, j / kPanelOutputs)[j % kPanelOutputs] = std::fma(static_cast<float>(sum), range.scale * scales[j], bias);
  });
}

void MultiplyHidden(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  const HiddenLayerWeight& w = WeightOf<HiddenLayerWeight>(args);
  const int64_t row_bytes = PackedTokenBytes<uint8_t>(w.n);
  uint8_t* next = static_cast<uint8_t*>(args.next);
  const float factor = 1.0f / w.table_x.scale;
  ForEachSum(args, panel_begin, panel_end, [&](int64_t i, int64_t j, int32_t sum, const TokenRange& range) {
    const float bias = args.bias == nullptr ? 0.0f : args.bias[j] * factor;
    const float value = std::fma(static_cast<float>(sum), w.scales[j] * (range.scale * factor), bias);
    next[i * row_bytes + j] = w.table[ToByte(value, w.table_x.zero_point)];
  });
  if (panel_begin > 0) return;
  for (int64_t i = 0; i < args.m; ++i) StoreRowRange(next + i * row_bytes, w.n, RangeOfToken(w.table_y));
}

}  // namespace

namespace scalar {

extern const MatMulFunctions kBlockSparse;
constexpr MatMulFunctions kBlockSparse{
    1, kMostSparseInputs, &TokenBytes, &PackBlockSparse, &MultiplyBlockSparse, &MultiplyHidden};

}  // namespace scalar
}  // namespace ortolan
