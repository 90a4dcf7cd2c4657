// Chooses the storage of a bitmap format (formats/bitmap.h) that is faster on this CPU.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "formats/bitmap.h"

namespace ortolan {

// Return whether this CPU multiplies bitmaps of such weights faster than dense ones.
bool BitmapsAreFast(const BitmapLayout& layout);

// Return whether the kernels of this CPU are faster for int8 weights whose pairs fit (PairsFitInt8).
bool GainsFromPairs();

// Return BitmapWeight::pairs_fit of the weight; only checked if kernels gain from it.
bool PairsAreKnownToFit(const BitmapView& view);

// Return whether, on a CPU where bitmaps are fast, a bitmap is faster or much smaller for a weight with `stored`
// nonzero values. The limits are explained in sparse_amx_matmul/README.md.
bool IsWorthBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored);

inline bool IsForBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored) {
  return BitmapsAreFast(layout) && IsWorthBitmap(layout, k, n, stored);
}

// Return the bitmap of a weight in dense storage: entries [panels][padded k][16] in its order.
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

// A packed matrix in memory or in a file: dense or a bitmap.
struct StoredBytes {
  int64_t k = 0;
  int64_t n = 0;
  std::span<const uint8_t> masks, values;
  std::span<const int64_t> offsets;

  // Requires validated data.
  BitmapView View() const;
};

// Valid as long as the view's data. Does not support 2:4 storage.
StoredBytes BytesOf(const BitmapLayout& layout, const BitmapView& view);
// Return why kernels cannot run on it; empty if they can.
std::string WhyNotStored(const BitmapLayout& layout, const StoredBytes& stored);

}  // namespace ortolan
