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
#define ORTOLAN_X86_KERNEL(isa, name, row_block, least_rows, most_inputs)
#endif

#define ORTOLAN_KERNEL(isa, name, row_block, least_rows, most_inputs) \
  PackTokensFn PackTokens##name;                                      \
  VnniSpmmFn MultiplyBlockSparse##name;
#include "vnni_spmm/kernels.inc"
#undef ORTOLAN_KERNEL

// Row after row: q [k], then s and z behind the padding.
void PackTokensScalar(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed) {
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
    const TokenRange range = RangeOfToken(least, most, finite);
    for (int64_t l = 0; l < k; ++l) {
      out[l] = finite ? static_cast<uint8_t>(
                            std::min(static_cast<int>(std::nearbyint(row[l] * range.factor)) + range.zero_point, 255))
                      : uint8_t{0};
    }
    StoreRowRange(out, k, range);
  }
}

void MultiplyBlockSparseScalar(const VnniSpmmArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BlockSparseView& w = args.w;
  const int64_t group_end = std::min(panel_end * kPanelGroups, w.Groups());
  for (int64_t i = 0; i < args.m; ++i) {
    const uint8_t* x = static_cast<const uint8_t*>(args.x) + i * VnniSpmmKernel::PackedRowBytes(w.k);
    const TokenRange range = LoadRowRange(x, w.k);
    float* y = args.YRow(i);
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
      for (int64_t o = 0; o < std::min(kGroupOutputs, w.n - first); ++o) {
        const float product = static_cast<float>(totals[o]) * (range.scale * args.scales[first + o]);
        y[first + o] = args.bias != nullptr ? product + args.bias[first + o] : product;
      }
    }
  }
}

namespace {

constexpr VnniSpmmKernel kKernels[] = {
#define ORTOLAN_KERNEL(isa, name, row_block, least_rows, most_inputs) \
  {#name, Isa::isa, row_block, least_rows, most_inputs, &PackTokens##name, &MultiplyBlockSparse##name},
#include "vnni_spmm/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const VnniSpmmKernel> VnniSpmmKernels() { return kKernels; }

const VnniSpmmKernel& SelectVnniSpmm(Isa isa, int64_t m, int64_t k) {
  for (const VnniSpmmKernel& kernel : kKernels) {
    if (kernel.isa <= isa && kernel.least_rows <= m && k <= kernel.most_inputs) return kernel;
  }
  return kKernels[std::size(kKernels) - 1];
}

}  // namespace ortolan
