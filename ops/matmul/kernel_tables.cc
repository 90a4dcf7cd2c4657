// The tables of the matmul family as C++.
#include "isa/kernel_table.h"
#include "matmul/bitmap_weight.h"
#include "matmul/block_sparse_weight.h"
#include "matmul/group_int4_weight.h"
#include "matmul/kernel.h"

namespace ortolan {

#define ORTOLAN_KERNEL(column, activation_bytes, row_block, least_rows) \
  static_assert(kMostRowBlock % row_block == 0);                        \
  namespace column {                                                    \
  PackRowsFn PackBf16;                                                  \
  MultiplyFn MultiplyBf16;                                              \
  }
#include "matmul/bf16_kernels.inc"
#undef ORTOLAN_KERNEL

#define ORTOLAN_KERNEL(column, row_block, least_rows) \
  static_assert(kMostRowBlock % row_block == 0);      \
  namespace column {                                  \
  PackRowsFn PackInt8;                                \
  MultiplyFn MultiplyInt8;                            \
  }
#include "matmul/int8_kernels.inc"
#undef ORTOLAN_KERNEL

#define ORTOLAN_KERNEL(column, row_block, least_rows) \
  static_assert(kMostRowBlock % row_block == 0);      \
  namespace column {                                  \
  PackRowsFn PackInt4;                                \
  MultiplyFn MultiplyInt4;                            \
  }
#include "matmul/int4_kernels.inc"
#undef ORTOLAN_KERNEL

#define ORTOLAN_KERNEL(column, row_block, least_rows) \
  static_assert(kMostRowBlock % row_block == 0);      \
  namespace column {                                  \
  PackRowsFn PackGroupInt4;                           \
  MultiplyFn MultiplyGroupInt4;                       \
  }
#include "matmul/group_int4_kernels.inc"
#undef ORTOLAN_KERNEL

#define ORTOLAN_KERNEL(column, row_block, least_rows) \
  static_assert(kMostRowBlock % row_block == 0);      \
  namespace column {                                  \
  PackRowsFn PackBlockSparse;                         \
  MultiplyFn MultiplyBlockSparse;                     \
  MultiplyHiddenFn MultiplyHidden;                    \
  }
#include "matmul/block_sparse_kernels.inc"
#undef ORTOLAN_KERNEL

namespace {

template <int64_t kActivationBytes>
int64_t Bf16RowBytes(const MatMulWeight& w) {
  return BitmapPaddedK(w.k) * kActivationBytes;
}
int64_t QuantizedRowBytes(const MatMulWeight& w) { return static_cast<const BitmapWeight&>(w).QuantizedRowBytes(); }
int64_t GroupInt4RowBytes(const MatMulWeight& w) { return static_cast<const GroupInt4Weight&>(w).PackedRowBytes(); }
int64_t TokenBytes(const MatMulWeight& w) { return PackedTokenBytes(w.k); }

constexpr MatMulKernel kBf16[] = {
#define ORTOLAN_KERNEL(column, activation_bytes, row_block, least_rows)                                                \
  {#column,           feature_set::column,  row_block, least_rows, kBf16Bitmap.max_k, &Bf16RowBytes<activation_bytes>, \
   &column::PackBf16, &column::MultiplyBf16},
#include "matmul/bf16_kernels.inc"
#undef ORTOLAN_KERNEL
};

constexpr MatMulKernel kInt8[] = {
#define ORTOLAN_KERNEL(column, row_block, least_rows)                     \
  {#column,           feature_set::column, row_block,         least_rows, \
   kInt8Bitmap.max_k, &QuantizedRowBytes,  &column::PackInt8, &column::MultiplyInt8},
#include "matmul/int8_kernels.inc"
#undef ORTOLAN_KERNEL
};

constexpr MatMulKernel kInt4[] = {
#define ORTOLAN_KERNEL(column, row_block, least_rows)                     \
  {#column,           feature_set::column, row_block,         least_rows, \
   kInt4Bitmap.max_k, &QuantizedRowBytes,  &column::PackInt4, &column::MultiplyInt4},
#include "matmul/int4_kernels.inc"
#undef ORTOLAN_KERNEL
};

constexpr MatMulKernel kGroupInt4[] = {
#define ORTOLAN_KERNEL(column, row_block, least_rows) \
  {#column,                                           \
   feature_set::column,                               \
   row_block,                                         \
   least_rows,                                        \
   kInt4Bitmap.max_k,                                 \
   &GroupInt4RowBytes,                                \
   &column::PackGroupInt4,                            \
   &column::MultiplyGroupInt4},
#include "matmul/group_int4_kernels.inc"
#undef ORTOLAN_KERNEL
};

constexpr MatMulKernel kBlockSparse[] = {
#define ORTOLAN_KERNEL(column, row_block, least_rows) \
  {#column,                                           \
   feature_set::column,                               \
   row_block,                                         \
   least_rows,                                        \
   kMostSparseInputs,                                 \
   &TokenBytes,                                       \
   &column::PackBlockSparse,                          \
   &column::MultiplyBlockSparse,                      \
   &column::MultiplyHidden},
#include "matmul/block_sparse_kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const MatMulKernel> Bf16Kernels() { return kBf16; }
std::span<const MatMulKernel> Int8Kernels() { return kInt8; }
std::span<const MatMulKernel> Int4Kernels() { return kInt4; }
std::span<const MatMulKernel> GroupInt4Kernels() { return kGroupInt4; }
std::span<const MatMulKernel> BlockSparseKernels() { return kBlockSparse; }

}  // namespace ortolan
