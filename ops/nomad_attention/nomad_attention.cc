#include "nomad_attention/nomad_attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(set, name, precision) \
  AttentionFn Attention##name;               \
  AttentionScratchFn AttentionScratch##name;
#include "nomad_attention/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr AttentionKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name, precision) \
  {#name, feature_set::set, precision, &AttentionScratch##name, &Attention##name},
#include "nomad_attention/kernels.inc"
#undef ORTOLAN_KERNEL
};

const float* RowOf(const float* from, int64_t bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(from) + bytes);
}

}  // namespace

int64_t AttentionScratchScalar(int64_t keys, int64_t) { return keys * static_cast<int64_t>(sizeof(float)); }

void AttentionScalar(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch) {
  float* weights = static_cast<float*>(scratch);
  for (int64_t row = row_begin; row < row_end; ++row) {
    const int64_t head = row / args.queries;
    const int64_t query = row % args.queries;
    const float* q = RowOf(args.q, head * args.q_head_bytes + query * args.q_row_bytes);
    const int64_t seen = args.causal ? query + args.keys - args.queries + 1 : args.keys;
    float most = std::numeric_limits<float>::lowest();
    for (int64_t j = 0; j < seen; ++j) {
      const float* k = RowOf(args.k, j * args.k_row_bytes);
      float dot = 0;
      for (int64_t d = 0; d < args.head_dim; ++d) dot += q[d] * k[d];
      weights[j] = args.scale * dot;
      if (args.mask != nullptr) {
        weights[j] +=
            args.mask[head * args.mask_head_stride + query * args.mask_query_stride + j * args.mask_key_stride];
      }
      most = std::max(most, weights[j]);
    }
    float sum = 0;
    for (int64_t j = 0; j < seen; ++j) {
      weights[j] = std::exp(weights[j] - most);
      sum += weights[j];
    }
    float* y = const_cast<float*>(RowOf(args.y, head * args.y_head_bytes + query * args.y_row_bytes));
    std::fill(y, y + args.head_dim, 0.0f);
    if (args.zero_hidden_rows && !(sum > 0)) continue;
    for (int64_t j = 0; j < seen; ++j) {
      const float* v = RowOf(args.v, j * args.v_row_bytes);
      for (int64_t d = 0; d < args.head_dim; ++d) y[d] += weights[j] * v[d];
    }
    for (int64_t d = 0; d < args.head_dim; ++d) y[d] /= sum;
  }
}

std::span<const AttentionKernel> AttentionKernels() { return kKernels; }

const AttentionKernel& SelectAttention(Features features, int precision) {
  for (const AttentionKernel& kernel : AttentionKernels()) {
    if (features.Has(kernel.needs) && kernel.precision >= precision) return kernel;
  }
  return AttentionKernels().back();
}

}  // namespace ortolan
