// The int8 weight of a layer as models store it (int8_weight.h) where blocks of 4 outputs x 1 input are zero, and the
// same numbers as VNNISpMM's kernels read them (block_sparse_weight.h).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "matmul/block_sparse_layer.h"
#include "matmul/int8_weight.h"

namespace ortolan {

// VNNISpMM gains from nothing denser. Recipe "weights as stored" has it too (graph_passes/forms.py).
inline constexpr double kLeastZeroBlocks = 0.5;

// Whether VNNISpMM takes the weight, and at least this share of its numbers lies in blocks that are all zero, as pass
// replace counts them (count_blocks in graph_passes/operators/vnni_spmm.py). WhyNot says nothing of it. Transposed ones
// are not looked at: no stored layer has them.
bool IsBlockSparse(const Int8Weight& w, double least_zeros = kLeastZeroBlocks);

// Packed numbers as they lie in memory, or in a file (formats/block_sparse_4x1.h).
struct PackedBlocks {
  int64_t k = 0;
  int64_t n = 0;
  std::span<const int8_t> values;
  std::span<const uint16_t> indices;
  std::span<const int64_t> starts;
  std::span<const float> scales;  // [n]
};

// Packed numbers that kernels may run on.
class BlockColumns {
 public:
  // Weights of the same inputs that are IsBlockSparse, their columns side by side; all but the last of whole panels.
  explicit BlockColumns(std::span<const Int8Weight> parts);
  // Numbers that others own, as long as this is there. Throws OpError if they are not as they must be.
  explicit BlockColumns(const PackedBlocks& packed);
  BlockColumns(const BlockColumns&) = delete;
  BlockColumns& operator=(const BlockColumns&) = delete;

  LinearLayer Layer() const { return LayerOf(w_); }
  // As long as this is there.
  PackedBlocks Packed() const { return packed_; }

 private:
  void SetWeight();

  BlockSparseMatrix own_;
  std::vector<float> own_scales_;
  PackedBlocks packed_;  // that, or a file's
  std::vector<int32_t> sums_;
  BlockSparseWeight w_;  // of the above
};

}  // namespace ortolan
