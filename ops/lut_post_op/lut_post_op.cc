#include "lut_post_op/lut_post_op.h"

#include <array>

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column)    \
  namespace column {              \
  extern const LutFunctions kLut; \
  }
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const LutKernel> LutKernels() {
  static const auto kernels = [] {
    std::array rows{
#define ORTOLAN_KERNEL(column) LutKernel{{column::kLut}, #column, feature_set::column},
#include "lut_post_op/kernels.inc"
#undef ORTOLAN_KERNEL
    };
    for (LutKernel& row : rows) {
      for (int index = 0; index < 2; ++index) {
        for (int entry = 0; entry < 3; ++entry) {
          if (row.run[index][entry] == nullptr) row.run[index][entry] = scalar::kLut.run[index][entry];
        }
      }
    }
    return rows;
  }();
  return kernels;
}

}  // namespace ortolan
