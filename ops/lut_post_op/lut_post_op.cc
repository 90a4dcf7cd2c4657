#include "lut_post_op/lut_post_op.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)    \
  namespace target {              \
  extern const LutFunctions kLut; \
  }
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const LutKernel> LutKernels() {
  static const LutKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {{target::kLut}, #target, feature_set::target},
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
