// Makes linear layers from weights in groups, for W4A8MatMul, W8A8MatMul and the execution provider.
#pragma once

#include <span>

#include "matmul/group_weight.h"
#include "matmul/linear_plan.h"

namespace ortolan {

// The number of bits of weights in groups: the layout of their rows, and their kernels.
struct GroupKind {
  const BitmapLayout& layout;
  std::span<const MatMulKernel> kernels;
};

inline GroupKind Int4Groups() { return {kInt4Bitmap, GroupInt4Kernels()}; }
inline GroupKind Int8Groups() { return {kInt8Bitmap, GroupInt8Kernels()}; }

// The layer of one weight.
inline LinearLayer LayerOf(const GroupKind& kind, const GroupWeight& w) {
  LinearLayer layer;
  layer.w = &w;
  layer.kernels = w.view.IsKQuant() ? KQuantKernels() : w.view.HasSubgroups() ? SubgroupKernels() : kind.kernels;
  layer.panel_inputs = kind.layout.PaddedK(w.k);
  return layer;
}

}  // namespace ortolan
