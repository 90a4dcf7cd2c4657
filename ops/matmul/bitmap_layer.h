// The layer of a weight in one of the bitmap formats (bitmap_weight.h), as a plan takes it.
#pragma once

#include <span>

#include "matmul/bitmap_weight.h"
#include "matmul/linear_plan.h"

namespace ortolan {

// w and what it points to outlive the layer.
inline LinearLayer BitmapLayer(const BitmapWeight& w, const BitmapLayout& layout,
                               std::span<const MatMulKernel> kernels) {
  LinearLayer layer;
  layer.w = &w;
  layer.kernels = kernels;
  layer.panel_inputs = layout.PaddedK(w.k);
  if (w.view.IsDense() && layout.value_bits >= 8) {
    layer.tile_bytes = BitmapPanels(w.n) * layout.Tiles(w.k) * layout.TileEntries() * layout.EntryBytes();
  }
  return layer;
}

}  // namespace ortolan
