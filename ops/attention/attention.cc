#include "attention/attention.h"

#include "isa/kernel_table.h"
#include "isa/tuning.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)                \
  namespace target {                          \
  extern const AttentionFunctions kAttention; \
  }
#include "attention/attention_kernels.inc"
#undef ORTOLAN_KERNEL
#define ORTOLAN_KERNEL(target)                    \
  namespace target {                              \
  extern const AttentionFunctions kAttentionBf16; \
  }
#include "attention/attention_bf16_kernels.inc"
#undef ORTOLAN_KERNEL
#define ORTOLAN_KERNEL(target)                     \
  namespace target {                               \
  extern const AttentionFunctions kAttentionTiles; \
  }
#include "attention/attention_tiles_kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const AttentionKernel> AttentionKernels() {
  static const AttentionKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {{target::kAttentionTiles}, #target "/16 in tiles", feature_set::target, 16, true},
#include "attention/attention_tiles_kernels.inc"
#undef ORTOLAN_KERNEL
#define ORTOLAN_KERNEL(target) {{target::kAttentionBf16}, #target "/16", feature_set::target, 16},
#include "attention/attention_bf16_kernels.inc"
#undef ORTOLAN_KERNEL
#define ORTOLAN_KERNEL(target) {{target::kAttention}, #target "/32", feature_set::target, 32},
#include "attention/attention_kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

const AttentionKernel& FindAttentionKernel(int precision, bool reproducible) {
  const Features features = ActiveFeatures();
  if (!reproducible && precision == 16) {
    const AttentionKernel& kernel = SelectKernel(AttentionKernels(), features, {.any_order = true});
    if (kernel.own_order) return kernel;
  }
  Features fast = features;
  if (!ActiveTuning().fast_dot_bf16) fast.bits &= ~uint32_t{kAvx512Bf16};
  // Without bf16 dot products, rounding to bf16 only costs time.
  if (!reproducible && !fast.Has({kAvx512Bf16})) precision = 32;
  return SelectKernel(AttentionKernels(), fast, {.precision = precision});
}

}  // namespace ortolan
