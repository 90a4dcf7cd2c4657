// What the arguments of all matrix-product kernels have in common.
#pragma once

#include <cstdint>

namespace ortolan {

// Each adds its weight, `w`, of w.n outputs.
struct MatMulArgs {
  int64_t m = 0;
  const void* x = nullptr;      // m rows, packed by the kernel's own pack function
  const float* bias = nullptr;  // [w.n], or null
  float* y = nullptr;           // [m][w.n]; must overlap nothing else
  int64_t y_row_bytes = 0;      // from one row of y to the next, a multiple of 4

  float* YRow(int64_t i) const { return reinterpret_cast<float*>(reinterpret_cast<char*>(y) + i * y_row_bytes); }
};

// Rows of x that a pack function may fill: m in whole blocks.
constexpr int64_t PackedRows(int64_t m, int64_t row_block) { return (m + row_block - 1) / row_block * row_block; }

// The part of the work that rows first … first+most-1 are, or as many as there are of them. first is a multiple of the
// kernel's row_block.
template <typename Args>
Args RowsOf(Args args, int64_t first, int64_t most, int64_t packed_row_bytes) {
  args.m = args.m - first < most ? args.m - first : most;
  args.x = static_cast<const char*>(args.x) + first * packed_row_bytes;
  args.y = args.YRow(first);
  return args;
}

}  // namespace ortolan
