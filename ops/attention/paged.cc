#include "attention/paged.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)                          \
  namespace target {                                    \
  extern const PagedAttentionFunctions kPagedAttention; \
  }
#include "attention/paged_kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const PagedAttentionKernel> PagedAttentionKernels() {
  static const PagedAttentionKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {{target::kPagedAttention}, #target, feature_set::target},
#include "attention/paged_kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
