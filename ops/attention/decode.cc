#include "attention/decode.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(target)          \
  namespace target {                    \
  extern const DecodeFunctions kDecode; \
  }
#include "attention/decode_kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const DecodeAttentionKernel> DecodeAttentionKernels() {
  static const DecodeAttentionKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {{target::kDecode}, #target, feature_set::target},
#include "attention/decode_kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

}  // namespace ortolan
