// The weight of a com.microsoft.MatMulNBits node as models store it, and the same weight as the kernels of W4A8MatMul
// and W8A8MatMul read it (formats/int4_group.h, formats/int8_group.h).
//
//     W[l, j] = scales[j, b] (q[j, l] - zero_points[j, b])      b = l / block_size;  q 0 … 15, or 0 … 255
//
// The rules are those of graph_passes/find/stored_int4.py and weight_only.py, so a model gives the same answers whether
// it was optimized or runs as it is. 4 bits: zero points 0 … 15 are kept, others become minimums. 8 bits: zero points
// must be integers, and codes less zero points must fit int8. A block longer than a group becomes several groups.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "matmul/group_layer.h"
#include "matmul/line_bytes.h"

namespace ortolan {

struct NBitsWeight {
  int64_t k = 0;
  int64_t n = 0;
  int64_t bits = 0;  // 4 or 8
  int64_t block_size = 0;
  const uint8_t* codes =
      nullptr;                // [n][Blocks()][block_size * bits / 8]; with 4 bits the first code is in the low nibble
  std::vector<float> scales;  // [n][Blocks()]
  std::vector<float> zero_points;  // the same shape; empty: 8 or 128

  int64_t Blocks() const { return (k + block_size - 1) / block_size; }
  int64_t ColumnBytes() const { return Blocks() * block_size * bits / 8; }
};

// Return why a weight of these sizes cannot be used; empty if it can. Accepted sizes stay within int64.
std::string WhyNotSizes(int64_t k, int64_t n, int64_t bits, int64_t block_size);

// Packed weights in memory or in a file (formats/group.h).
struct PackedNBits {
  int64_t k = 0;
  int64_t n = 0;
  int64_t bits = 0;  // 4 or 8
  int64_t group = 0;
  bool has_half_scales = false;
  std::span<const uint8_t> weights, scales;
  std::span<const uint8_t> zero_points, minimums;  // 4 bits only, at most one of them
};

// Packed weights that kernels can run on.
class NBitsGroups {
 public:
  // Requires sizes that pass WhyNotSizes. Throws OpError if the weight cannot be used (WhyNot).
  explicit NBitsGroups(const NBitsWeight& stored);
  // Use packed weights owned by the caller, who must keep them. Throws OpError if they are malformed.
  explicit NBitsGroups(const PackedNBits& packed);
  NBitsGroups(const NBitsGroups&) = delete;
  NBitsGroups& operator=(const NBitsGroups&) = delete;

  // Return why the weight cannot be used; empty if it can.
  static std::string WhyNot(const NBitsWeight& stored);

  LinearLayer Layer() const { return LayerOf(kind_, w_); }
  // Valid as long as this object.
  PackedNBits Packed() const;

 private:
  void PackCodes4(const NBitsWeight& stored);
  void PackCodes8(const NBitsWeight& stored);
  void PackScales(const NBitsWeight& stored);

  GroupKind kind_;
  LineBytes weights_, scales_, zero_points_, minimums_;
  GroupWeight w_;  // view of the packed weights
};

}  // namespace ortolan
