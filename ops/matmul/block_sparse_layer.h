// Linear layers of weights in blocks of 4 outputs x 1 input, whoever makes them: the adapter of VNNISpMM and the
// execution provider.
#pragma once

#include "matmul/block_sparse_weight.h"
#include "matmul/linear_plan.h"

namespace ortolan {

// What a panel costs, for cutting up the work: a quarter of the inputs that it holds. A piece should have some panels,
// since the kernels write y by several.
inline int64_t InputsOfPanel(const BlockSparseView& w) {
  return w.starts[w.Groups()] * kQuadInputs / w.Groups() / 4 + 1;
}

// The layer of this weight alone.
inline LinearLayer LayerOf(const BlockSparseWeight& w) {
  constexpr int64_t kTokenChunk = 64;  // tokens whose activations the cores keep in the cache, while weights pass by
  static_assert(kTokenChunk % kMostRowBlock == 0);
  LinearLayer layer;
  layer.w = &w;
  layer.kernels = BlockSparseKernels();
  layer.panel_inputs = InputsOfPanel(w.view);
  layer.row_chunk = kTokenChunk;
  return layer;
}

}  // namespace ortolan
