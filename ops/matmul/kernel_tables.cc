// The kernel tables of the matmul family.
#include "isa/kernel_table.h"
#include "matmul/kernel.h"

namespace ortolan {

// Declares what target_functions.h defines for the targets in the tables.
#define ORTOLAN_FEATURE_SET(target, features)                                                                 \
  namespace target {                                                                                          \
  extern const MatMulFunctions kBf16, kInt8, kInt4, kGroupInt4, kGroupInt8, kSubgroup, kKQuant, kBlockSparse; \
  }
#include "isa/feature_sets.inc"
#undef ORTOLAN_FEATURE_SET

#define ORTOLAN_KERNEL(target, functions, least_rows) {{target::functions}, #target, feature_set::target, least_rows},

std::span<const MatMulKernel> Bf16Kernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/bf16_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> Int8Kernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/int8_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> Int4Kernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/int4_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> GroupInt4Kernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/group_int4_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> GroupInt8Kernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/group_int8_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> SubgroupKernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/subgroup_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> KQuantKernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/k_quant_kernels.inc"
  };
  return kernels;
}

std::span<const MatMulKernel> BlockSparseKernels() {
  static const MatMulKernel kernels[] = {
#include "matmul/block_sparse_kernels.inc"
  };
  return kernels;
}

}  // namespace ortolan
