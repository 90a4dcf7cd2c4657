// In which of the storages of a bitmap format (formats/bitmap.h) this CPU is faster with a weight.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "formats/bitmap.h"

namespace ortolan {

// Whether this CPU multiplies by a bitmap of such weights faster than by dense ones.
bool BitmapsAreFast(const BitmapLayout& layout);

// Whether the kernels of this CPU are faster with int8 weights whose pairs fit (PairsFitInt8).
bool GainsFromPairs();

// BitmapWeight::pairs_fit of such a weight, asked for only where kernels gain from it.
bool PairsAreKnownToFit(const BitmapView& view);

// Whether, where they are fast, a bitmap is faster or much smaller for a weight of which so many numbers are not zero.
// The numbers behind it: sparse_amx_matmul/README.md.
bool IsWorthBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored);

inline bool IsForBitmap(const BitmapLayout& layout, int64_t k, int64_t n, int64_t stored) {
  return BitmapsAreFast(layout) && IsWorthBitmap(layout, k, n, stored);
}

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

// A packed matrix as it lies in memory, or in a file: dense, or as a bitmap.
struct StoredBytes {
  int64_t k = 0;
  int64_t n = 0;
  std::span<const uint8_t> masks, values;
  std::span<const int64_t> offsets;

  // Of what has been found fit.
  BitmapView View() const;
};

// As long as what the view is of. Of no 2:4 storage.
StoredBytes BytesOf(const BitmapLayout& layout, const BitmapView& view);
// Empty, or why kernels may not run on it.
std::string WhyNotStored(const BitmapLayout& layout, const StoredBytes& stored);

}  // namespace ortolan
