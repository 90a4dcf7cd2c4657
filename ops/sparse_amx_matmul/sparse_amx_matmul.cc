#include "sparse_amx_matmul/sparse_amx_matmul.h"

#include <algorithm>
#include <cstring>

#include "formats/bf16.h"
#include "isa/kernel_table.h"

namespace ortolan {

#define ORTOLAN_KERNEL(set, name, activation_bytes, row_block, least_rows) \
  PackActivationsFn Pack##name;                                            \
  SparseMatMulFn Multiply##name;
#include "sparse_amx_matmul/kernels.inc"
#undef ORTOLAN_KERNEL

void PackScalar(const float* x, int64_t x_row_bytes, int64_t m, int64_t k, void* packed) {
  float* out = static_cast<float*>(packed);
  const int64_t padded_k = BitmapPaddedK(k);
  for (int64_t i = 0; i < m; ++i, out += padded_k) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    for (int64_t l = 0; l < k; ++l) out[l] = Bf16ToFloat(RoundToBf16(row[l]));
    std::fill(out + k, out + padded_k, 0.0f);
  }
}

void MultiplyScalar(const SparseMatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BitmapView& w = args.w;
  const int64_t rows = BitmapTiles(w.k) * kTileRows;
  const float* x = static_cast<const float*>(args.x);
  for (int64_t panel = panel_begin; panel < panel_end; ++panel) {
    const int64_t first = panel * kPanelColumns;
    const int64_t columns = std::min(kPanelColumns, w.n - first);
    for (int64_t i = 0; i < args.m; ++i) {
      const uint8_t* masks = w.PanelMasks(kBf16Bitmap, panel);
      const uint8_t* value = w.PanelValues(kBf16Bitmap, panel);
      float sums[kPanelColumns] = {};
      for (int64_t row = 0; row < rows; ++row) {
        uint32_t mask = ~uint32_t{0};
        if (!w.IsDense()) std::memcpy(&mask, masks + row * sizeof(mask), sizeof(mask));
        const float* pair = x + i * BitmapPaddedK(w.k) + 2 * row;
        for (int64_t bit = 0; bit < kRowValues; ++bit) {
          float weight = 0.0f;
          if (((mask >> bit) & 1u) != 0) {
            uint16_t stored;
            std::memcpy(&stored, value, sizeof(stored));
            value += kValueBytes;
            weight = Bf16ToFloat(stored);
          }
          sums[bit >> 1] += pair[bit & 1] * weight;
        }
      }
      float* y = args.YRow(i) + first;
      for (int64_t j = 0; j < columns; ++j) y[j] = sums[j] + (args.bias != nullptr ? args.bias[first + j] : 0.0f);
    }
  }
}

namespace {

constexpr SparseMatMulKernel kKernels[] = {
#define ORTOLAN_KERNEL(set, name, activation_bytes, row_block, least_rows) \
  {#name, feature_set::set, activation_bytes, row_block, least_rows, &Pack##name, &Multiply##name},
#include "sparse_amx_matmul/kernels.inc"
#undef ORTOLAN_KERNEL
};

}  // namespace

std::span<const SparseMatMulKernel> SparseMatMulKernels() { return kKernels; }

const SparseMatMulKernel& SelectSparseMatMul(Features features, int64_t m) {
  return SelectKernel(SparseMatMulKernels(), features, {m});
}

}  // namespace ortolan
