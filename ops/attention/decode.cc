#include "attention/decode.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column)          \
  namespace column {                    \
  extern const DecodeFunctions kDecode; \
  }
#include "attention/decode_kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const DecodeAttentionKernel> DecodeAttentionKernels() {
  static const DecodeAttentionKernel kernels[] = {
#define ORTOLAN_KERNEL(column) {{column::kDecode}, #column, feature_set::column},
#include "attention/decode_kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
