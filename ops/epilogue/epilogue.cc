#include "epilogue/epilogue.h"

#include "epilogue/layer_norm.h"
#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column) \
  namespace column {           \
  EpilogueFn Epilogue;         \
  LayerNormFn LayerNorm;       \
  }
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr EpilogueKernel kEpilogues[] = {
#define ORTOLAN_KERNEL(column) {#column, feature_set::column, &column::Epilogue},
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL
};

constexpr LayerNormKernel kLayerNorms[] = {
#define ORTOLAN_KERNEL(column) {#column, feature_set::column, &column::LayerNorm},
#include "epilogue/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const EpilogueKernel> EpilogueKernels() { return kEpilogues; }

std::span<const LayerNormKernel> LayerNormKernels() { return kLayerNorms; }

}  // namespace ortolan
