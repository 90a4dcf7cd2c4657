// Linear layers of weights in groups, whoever makes them: the adapters of W4A8MatMul and W8A8MatMul, and the execution
// provider.
#pragma once

#include <span>

#include "matmul/group_weight.h"
#include "matmul/linear_plan.h"

namespace ortolan {

// The bits of a weight in groups: how its rows are laid out, and the kernels for it.
struct GroupKind {
  const BitmapLayout& layout;
  std::span<const MatMulKernel> kernels;
};

inline GroupKind Int4Groups() { return {kInt4Bitmap, GroupInt4Kernels()}; }
inline GroupKind Int8Groups() { return {kInt8Bitmap, GroupInt8Kernels()}; }

// The layer of this weight alone.
inline LinearLayer LayerOf(const GroupKind& kind, const GroupWeight& w) {
  LinearLayer layer;
  layer.w = &w;
  layer.kernels = kind.kernels;
  layer.panel_inputs = kind.layout.PaddedK(w.k);
  return layer;
}

}  // namespace ortolan
