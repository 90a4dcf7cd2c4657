#include "attention/decode.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column)       \
  namespace column {                 \
  DecodeAttentionFn DecodeAttention; \
  DecodeScoresFn DecodeScores;       \
  DecodeScratchFn DecodeScratch;     \
  }
#include "attention/decode_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr DecodeAttentionKernel kKernels[] = {
#define ORTOLAN_KERNEL(column) \
  {#column, feature_set::column, &column::DecodeScratch, &column::DecodeAttention, &column::DecodeScores},
#include "attention/decode_kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const DecodeAttentionKernel> DecodeAttentionKernels() { return kKernels; }

}  // namespace ortolan
