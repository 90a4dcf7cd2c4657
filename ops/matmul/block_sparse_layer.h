// Makes linear layers from weights in blocks of 4 outputs x 1 input, for VNNISpMM and the execution provider.
#pragma once

#include "matmul/block_sparse_weight.h"
#include "matmul/linear_plan.h"

namespace ortolan {

// The cost of a panel, for dividing the work: a quarter of the inputs it holds. Kernels write y in several panels at
// once, so a piece of work should have several.
inline int64_t InputsOfPanel(const BlockSparseView& w) {
  return w.starts[w.Groups()] * kQuadInputs / w.Groups() / 4 + 1;
}

// The layer of one weight.
inline LinearLayer LayerOf(const BlockSparseWeight& w) {
  constexpr int64_t kTokenChunk = 64;  // tokens whose activations stay in the cores' caches while weights stream by
  static_assert(kTokenChunk % kMostRowBlock == 0);
  LinearLayer layer;
  layer.w = &w;
  layer.kernels = BlockSparseKernels();
  layer.panel_inputs = InputsOfPanel(w.view);
  layer.row_chunk = kTokenChunk;
  return layer;
}

}  // namespace ortolan
