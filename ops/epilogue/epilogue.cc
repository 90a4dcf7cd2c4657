#include "epilogue/epilogue.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column) \
  namespace column {           \
  EpilogueFn Epilogue;         \
  LayerNormFn LayerNorm;       \
  }
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const EpilogueKernel> EpilogueKernels() {
  static constexpr EpilogueKernel kernels[] = {
#define ORTOLAN_KERNEL(column) {#column, feature_set::column, &column::Epilogue, &column::LayerNorm},
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
