// In which of the storages of a bitmap format (formats/bitmap.h) this CPU is faster with a weight.
#pragma once

#include <cstdint>

#include "formats/bitmap.h"

namespace ortolan {

// Whether a bitmap is faster than dense storage for a weight of which so many numbers are not zero. The numbers behind
// it: sparse_amx_matmul/README.md.
bool IsForBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored);

// The bitmap of the same weight in dense storage: entries [panels][padded k][16] in its order.
template <typename Mask, typename Value>
PackedBitmap<Mask, Value> BitmapOfDense(const BitmapLayout& layout, int64_t k, int64_t n, const Value* dense) {
  PackedBitmap<Mask, Value> bitmap;
  const int64_t rows = layout.PaddedK(k) / layout.row_inputs;
  bitmap.offsets.push_back(0);
  for (int64_t panel = 0; panel < BitmapPanels(n); ++panel) {
    for (int64_t row = 0; row < rows; ++row, dense += layout.RowBits()) {
      Mask mask = 0;
      for (int64_t bit = 0; bit < layout.RowBits(); ++bit) {
        if (dense[bit] == 0) continue;
        mask |= Mask{1} << bit;
        bitmap.values.push_back(dense[bit]);
      }
      bitmap.masks.push_back(mask);
    }
    bitmap.offsets.push_back(static_cast<int64_t>(bitmap.values.size()));
  }
  bitmap.values.resize(bitmap.values.size() + static_cast<size_t>(layout.Padding()));
  return bitmap;
}

}  // namespace ortolan
