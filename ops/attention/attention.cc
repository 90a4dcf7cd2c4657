#include "attention/attention.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column, precision) \
  namespace column {                      \
  AttentionFn Attention;                  \
  AttentionScratchFn AttentionScratch;    \
  }
#include "attention/attention_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr AttentionKernel kKernels[] = {
#define ORTOLAN_KERNEL(column, precision) \
  {#column, feature_set::column, precision, &column::AttentionScratch, &column::Attention},
#include "attention/attention_kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const AttentionKernel> AttentionKernels() { return kKernels; }

}  // namespace ortolan
