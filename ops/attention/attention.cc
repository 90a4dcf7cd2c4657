#include "attention/attention.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column, precision)     \
  namespace column {                          \
  extern const AttentionFunctions kAttention; \
  }
#include "attention/attention_kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const AttentionKernel> AttentionKernels() {
  static const AttentionKernel kernels[] = {
#define ORTOLAN_KERNEL(column, precision) {{column::kAttention}, #column, feature_set::column, precision},
#include "attention/attention_kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
