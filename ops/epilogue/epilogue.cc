#include "epilogue/epilogue.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target) \
  namespace target {           \
  EpilogueFn Epilogue;         \
  LayerNormFn LayerNorm;       \
  }
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const EpilogueKernel> EpilogueKernels() {
  static constexpr EpilogueKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {#target, feature_set::target, &target::Epilogue, &target::LayerNorm},
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
