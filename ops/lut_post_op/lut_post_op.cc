#include "lut_post_op/lut_post_op.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column)    \
  namespace column {              \
  extern const LutFunctions kLut; \
  }
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const LutKernel> LutKernels() {
  static const LutKernel kernels[] = {
#define ORTOLAN_KERNEL(column) {{column::kLut}, #column, feature_set::column},
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
