// int8 weights in blocks of 4 outputs x 1 input, each stored whole or not at all (the constant block size of
// sparse int8 transformers), four blocks of one group of outputs to a quad: the operand of vpdpbusd.
//
// W is [k, n]: k inputs, n outputs, y = x W. Group g is outputs 4g … 4g+3; outputs from n on are zero.
//
//     W[l, j] = scales[j] q[l, j]                        q: -128 … 127
//
//     values   i8  [quads, 4, 4]           quad, output of its group, input: q[indices[quad, i], 4g + o]
//     indices  u16 [quads, 4]              the inputs of a quad
//     starts   i64 [ceil(n / 4) + 1]       the first quad of each group; starts[0] = 0, the last is the number of quads
//     scales   f32 [n]
//
//     bytes  = 24 quads + 8 (groups + 1) + 4 n;   1.5 a stored weight and the filling of each group's last quad
//
// Indices of a group ascend. Its last quad is filled up with its last index and zero weights: an index that equals the
// one before in the same quad stands for nothing.
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

// A packed matrix that someone else owns. values, indices and scales may lie at any address.
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

// Packs q, row-major [k, n] with rows `row_stride` bytes apart: blocks with a weight that is not zero. Needs 1 <= k <=
// kMostSparseInputs and 1 <= n <= kMostSparseOutputs.
BlockSparseMatrix PackBlockSparse(const int8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Writes q, row-major [k, n]. The view must have passed ValidateBlockSparse.
void UnpackBlockSparse(const BlockSparseView& view, int8_t* q, int64_t row_stride);

// The sum of each output's weights, n rounded up to a multiple of 16: what unsigned activations need
// (matmul/block_sparse_weight.h).
std::vector<int32_t> SumsOfOutputs(const BlockSparseView& view);

// What an untrusted file says: the counts are those of the tensors found.
struct BlockSparseClaim {
  BlockSparseView view;
  int64_t value_count = 0;
  int64_t index_count = 0;
  int64_t start_count = 0;
  int64_t scale_count = 0;
};

// Empty if kernels may run on it; otherwise one sentence that names the tensor, what was found and what was expected.
std::string ValidateBlockSparse(const BlockSparseClaim& claim);

}  // namespace ortolan
