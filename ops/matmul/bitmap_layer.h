// Makes the layer of a plan from a weight in a bitmap format (bitmap_weight.h).
#pragma once

#include <span>

#include "matmul/bitmap_weight.h"
#include "matmul/linear_plan.h"

namespace ortolan {

// w and the data it points to must outlive the layer.
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
