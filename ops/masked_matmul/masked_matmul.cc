#include "masked_matmul/masked_matmul.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)                      \
  namespace target {                                \
  extern const MaskedMatMulFunctions kMaskedMatMul; \
  }
#include "masked_matmul/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const MaskedMatMulKernel> MaskedMatMulKernels() {
  static const MaskedMatMulKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {{target::kMaskedMatMul}, #target, feature_set::target},
#include "masked_matmul/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
