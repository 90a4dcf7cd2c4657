// int8 weights in blocks of 4 outputs x 1 input; a block is stored completely or not at all. Four blocks of the same
// group of outputs form a quad, the operand of vpdpbusd. Reference: sparse-int8-transformers (constant block size).
//
// W is [k, n]: k inputs, n outputs, y = x W. Group g is outputs 4g … 4g+3; outputs from n on are zero.
//
//     W[l, j] = scales[j] q[l, j]                        q: -128 … 127
//
//     values   i8  [quads, 4, 4]           quad, output o of its group, input i: q[indices[quad, i], 4g + o]
//     indices  u16 [quads, 4]              the inputs of a quad
//     starts   i64 [ceil(n / 4) + 1]       the first quad of each group; the last is the number of quads
//     scales   f32 [n]
//
//     bytes  = 24 quads + 8 (groups + 1) + 4 n;   1.5 a stored weight, plus the padding of each group's last quad
//
// The indices of a group ascend. In its last quad, an index that repeats the previous one is padding, with zero
// weights.
#pragma once

#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

namespace ortolan {

inline constexpr int64_t kGroupOutputs = 4;
inline constexpr int64_t kQuadInputs = 4;
inline constexpr int64_t kQuadBytes = kGroupOutputs * kQuadInputs;
inline constexpr int64_t kMostSparseInputs = int64_t{1} << 16;
inline constexpr int64_t kMostSparseOutputs = int64_t{1} << 28;

inline constexpr int64_t OutputGroups(int64_t n) { return (n + kGroupOutputs - 1) / kGroupOutputs; }

// A non-owning view of a packed matrix. values, indices and scales may be unaligned.
struct BlockSparseView {
  int64_t k = 0;
  int64_t n = 0;
  const int8_t* values = nullptr;
  const uint8_t* indices = nullptr;  // u16
  const int64_t* starts = nullptr;

  constexpr int64_t Groups() const { return OutputGroups(n); }
  constexpr const int8_t* Values(int64_t quad) const { return values + quad * kQuadBytes; }
  constexpr const uint8_t* Indices(int64_t quad) const { return indices + quad * kQuadInputs * 2; }
  int64_t Index(int64_t quad, int64_t i) const {
    uint16_t index;
    std::memcpy(&index, Indices(quad) + 2 * i, sizeof(index));
    return index;
  }
};

struct BlockSparseMatrix {
  std::vector<int8_t> values;
  std::vector<uint16_t> indices;
  std::vector<int64_t> starts;
};

// Packs the blocks of q that have a nonzero weight. q: row-major [k, n], rows `row_stride` bytes apart. Requires 1 <= k
// <= kMostSparseInputs and 1 <= n <= kMostSparseOutputs.
BlockSparseMatrix PackBlockSparse(const int8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Writes q, row-major [k, n]. The view must have passed ValidateBlockSparse.
void UnpackBlockSparse(const BlockSparseView& view, int8_t* q, int64_t row_stride);

// Returns the sum of each output's weights, padded to a multiple of 16 outputs: it compensates for unsigned activations
// (matmul/block_sparse_weight.h).
std::vector<int32_t> SumsOfOutputs(const BlockSparseView& view);

// The tensors of an untrusted file, with the counts of the tensors found.
struct BlockSparseClaim {
  BlockSparseView view;
  int64_t value_count = 0;
  int64_t index_count = 0;
  int64_t start_count = 0;
  int64_t scale_count = 0;
};

// Returns an empty string if kernels may run on the tensors; otherwise one sentence that names the tensor, the value
// found and the value expected.
std::string ValidateBlockSparse(const BlockSparseClaim& claim);

}  // namespace ortolan
