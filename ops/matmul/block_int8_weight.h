// The int8 weight of a layer as models store it (int8_weight.h), with zero blocks of 4 outputs x 1 input, and the same
// weights as VNNISpMM's kernels read them (block_sparse_weight.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "matmul/block_sparse_layer.h"
#include "matmul/int8_weight.h"

namespace ortolan {

// VNNISpMM is not faster for denser weights. The recipe "weights as stored" uses the same limit
// (graph_passes/forms.py).
inline constexpr double kLeastZeroBlocks = 0.5;

// Return whether VNNISpMM supports the weight and at least this fraction of its values is in zero blocks, as the pass
// replace counts them (count_blocks in graph_passes/operators/vnni_spmm.py). Does not check WhyNot. Transposed weights
// return false: no stored layer has them.
bool IsBlockSparse(const Int8Weight& w, double least_zeros = kLeastZeroBlocks);

// Packed weights in memory or in a file (formats/block_sparse_4x1.h).
struct PackedBlocks {
  int64_t k = 0;
  int64_t n = 0;
  std::span<const int8_t> values;
  std::span<const uint16_t> indices;
  std::span<const int64_t> starts;
  std::span<const float> scales;  // [n]
};

// Packed weights that kernels can run on.
class BlockColumns {
 public:
  // Pack weights that share their inputs and are IsBlockSparse, columns concatenated; all but the last have whole
  // panels.
  explicit BlockColumns(std::span<const Int8Weight> parts);
  // Use packed weights owned by the caller, who must keep them. Throws OpError if they are malformed.
  explicit BlockColumns(const PackedBlocks& packed);
  BlockColumns(const BlockColumns&) = delete;
  BlockColumns& operator=(const BlockColumns&) = delete;

  LinearLayer Layer() const { return LayerOf(w_); }
  // Valid as long as this object.
  PackedBlocks Packed() const { return packed_; }

 private:
  void SetWeight();

  BlockSparseMatrix own_;
  std::vector<float> own_scales_;
  PackedBlocks packed_;  // `matrix_`, or the caller's
  std::vector<int32_t> sums_;
  BlockSparseWeight w_;  // view of `packed_`
};

}  // namespace ortolan
