#include "vnni_spmm/vnni_spmm.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>

#include "vnni_spmm/token_range.h"

namespace ortolan {

#if defined(__x86_64__)
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL
#else
#define ORTOLAN_X86_KERNEL(set, name, row_block, least_rows, most_inputs)
#endif

#define ORTOLAN_KERNEL(set, name, row_block, least_rows, most_inputs) \
  PackTokensFn PackTokens##name;                                      \
  VnniSpmmFn MultiplyBlockSparse##name;                               \
  HiddenLayerFn MultiplyHidden##name;
#include "vnni_spmm/kernels.inc"
#undef ORTOLAN_KERNEL

// Row after row: q [k], then s and z behind the padding.
void PackTokensScalar(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, const FixedRange* fixed,
                      void* packed) {
  uint8_t* out = static_cast<uint8_t*>(packed);
  for (int64_t i = 0; i < m; ++i, out += VnniSpmmKernel::PackedRowBytes(k)) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
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

namespace {

// Calls store(token, output, sum, range of x) for the panels.
template <typename Store>
void ForEachSum(const VnniSpmmArgs& args, int64_t panel_begin, int64_t panel_end, const Store& store) {
  const BlockSparseView& w = args.w;
  const int64_t group_end = std::min(panel_end * kPanelGroups, w.Groups());
  for (int64_t i = 0; i < args.m; ++i) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + i * VnniSpmmKernel::PackedRowBytes(w.k);
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

}  // namespace

void MultiplyBlockSparseScalar(const VnniSpmmArgs& args, int64_t panel_begin, int64_t panel_end) {
  ForEachSum(args, panel_begin, panel_end, [&](int64_t i, int64_t j, int32_t sum, const TokenRange& range) {
    const float product = static_cast<float>(sum) * (range.scale * args.scales[j]);
    args.YRow(i)[j] = args.bias != nullptr ? product + args.bias[j] : product;
  });
}

void MultiplyHiddenScalar(const HiddenLayerArgs& args, int64_t panel_begin, int64_t panel_end) {
  const int64_t row_bytes = VnniSpmmKernel::PackedRowBytes(args.w.n);
  uint8_t* next = static_cast<uint8_t*>(args.next);
  const float factor = 1.0f / args.table_x.scale;
  ForEachSum(args, panel_begin, panel_end, [&](int64_t i, int64_t j, int32_t sum, const TokenRange& range) {
    const float bias = args.bias == nullptr ? 0.0f : args.bias[j] * factor;
    const float number = static_cast<float>(sum) * (args.scales[j] * (range.scale * factor)) + bias;
    next[i * row_bytes + j] = args.table[ToByte(number, args.table_x.zero_point)];
  });
  if (panel_begin > 0) return;
  for (int64_t i = 0; i < args.m; ++i) StoreRowRange(next + i * row_bytes, args.w.n, RangeOfToken(args.table_y));
}

namespace {

constexpr VnniSpmmKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name, row_block, least_rows, most_inputs) \
  {#name,                                                             \
   feature_set::set,                                                  \
   row_block,                                                         \
   least_rows,                                                        \
   most_inputs,                                                       \
   &PackTokens##name,                                                 \
   &MultiplyBlockSparse##name,                                        \
   &MultiplyHidden##name},
#include "vnni_spmm/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const VnniSpmmKernel> VnniSpmmKernels() { return kKernels; }

const VnniSpmmKernel& SelectVnniSpmm(Features features, int64_t m, int64_t k) {
  for (const VnniSpmmKernel& kernel : kKernels) {
    if (features.Has(kernel.needs) && kernel.least_rows <= m && k <= kernel.most_inputs) return kernel;
  }
  return kKernels[std::size(kKernels) - 1];
}

}  // namespace ortolan
