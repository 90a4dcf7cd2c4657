#include <algorithm>
#include <cstring>

#include "formats/bf16.h"
#include "matmul/bitmap_weight.h"

namespace ortolan {

namespace scalar {

void PackBf16(const MatMulWeight& w, const float* x, int64_t x_row_bytes, int64_t m, void* packed) {
  float* out = static_cast<float*>(packed);
  const int64_t padded_k = BitmapPaddedK(w.k);
  for (int64_t i = 0; i < m; ++i, out += padded_k) {
    const float* row = reinterpret_cast<const float*>(reinterpret_cast<const char*>(x) + i * x_row_bytes);
    for (int64_t l = 0; l < w.k; ++l) out[l] = Bf16ToFloat(RoundToBf16(row[l]));
    std::fill(out + w.k, out + padded_k, 0.0f);
  }
}

void MultiplyBf16(const MatMulArgs& args, int64_t panel_begin, int64_t panel_end) {
  const BitmapView& w = WeightOf<BitmapWeight>(args).view;
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
      float* y = args.Y(i, panel);
      for (int64_t j = 0; j < columns; ++j) y[j] = sums[j] + (args.bias != nullptr ? args.bias[first + j] : 0.0f);
    }
  }
}

}  // namespace scalar
}  // namespace ortolan
