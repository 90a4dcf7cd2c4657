#include "attention/softmax.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column)   \
  namespace column {             \
  VisibleRangeFn VisibleOf;      \
  WeighScoresFn WeighScores;     \
  MergePartialFn MergePartial;   \
  FinishPartialFn FinishPartial; \
  }
#include "attention/softmax_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr SoftmaxKernel kKernels[] = {
#define ORTOLAN_KERNEL(column) \
  {#column,                    \
   feature_set::column,        \
   &column::VisibleOf,         \
   &column::WeighScores,       \
   &column::MergePartial,      \
   &column::FinishPartial},
#include "attention/softmax_kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const SoftmaxKernel> SoftmaxKernels() { return kKernels; }

}  // namespace ortolan
