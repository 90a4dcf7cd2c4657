#include "attention/kv_cache/kv_cache.h"

#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column) \
  namespace column {           \
  EncodeKeysFn EncodeKeys;     \
  }
#include "attention/kv_cache/kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

constexpr KvCacheKernel kKernels[] = {
#define ORTOLAN_KERNEL(column) {#column, feature_set::column, &column::EncodeKeys},
#include "attention/kv_cache/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const KvCacheKernel> KvCacheKernels() { return kKernels; }

}  // namespace ortolan
