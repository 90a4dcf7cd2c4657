// The weight of a com.microsoft.MatMulNBits as a model stores it, and the same numbers as W4A8MatMul's and W8A8MatMul's
// kernels read them (formats/int4_group.h, formats/int8_group.h).
//
//     W[l, j] = scales[j, b] (q[j, l] - zero_points[j, b])      b = l / block_size;  q 0 … 15, or 0 … 255
//
// The rules are those of graph_passes/find/stored_int4.py and weight_only.py, so that a model which is run as it is and
// one that was optimized give the same answers. 4 bits: zero points 0 … 15 stay, others become minimums. 8 bits: zero
// points must be whole, and numbers less zero points fit an int8. Blocks longer than a group are several groups.
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
  const uint8_t* codes = nullptr;  // [n][Blocks()][block_size * bits / 8], of 4 bits the first of two is low
  std::vector<float> scales;       // [n][Blocks()]
  std::vector<float> zero_points;  // the same; none: 8 or 128

  int64_t Blocks() const { return (k + block_size - 1) / block_size; }
  int64_t ColumnBytes() const { return Blocks() * block_size * bits / 8; }
};

// Empty, or why sizes like these are not taken over. What it lets pass keeps all sizes inside int64.
std::string WhyNotSizes(int64_t k, int64_t n, int64_t bits, int64_t block_size);

// Packed numbers as they lie in memory, or in a file (formats/group.h).
struct PackedNBits {
  int64_t k = 0;
  int64_t n = 0;
  int64_t bits = 0;  // 4 or 8
  int64_t group = 0;
  bool has_half_scales = false;
  std::span<const uint8_t> weights, scales;
  std::span<const uint8_t> zero_points, minimums;  // of 4 bits, at most one of them
};

// Packed numbers that kernels may run on.
class NBitsGroups {
 public:
  // Of sizes that WhyNotSizes lets pass. Throws OpError if these numbers cannot be taken over (WhyNot).
  explicit NBitsGroups(const NBitsWeight& stored);
  // Numbers that others own, as long as this is there. Throws OpError if they are not as they must be.
  explicit NBitsGroups(const PackedNBits& packed);
  NBitsGroups(const NBitsGroups&) = delete;
  NBitsGroups& operator=(const NBitsGroups&) = delete;

  // Empty, or why these numbers cannot be taken over.
  static std::string WhyNot(const NBitsWeight& stored);

  LinearLayer Layer() const { return LayerOf(kind_, w_); }
  // As long as this is there.
  PackedNBits Packed() const;

 private:
  void PackCodes4(const NBitsWeight& stored);
  void PackCodes8(const NBitsWeight& stored);
  void PackScales(const NBitsWeight& stored);

  GroupKind kind_;
  LineBytes weights_, scales_, zero_points_, minimums_;
  GroupWeight w_;  // of the above
};

}  // namespace ortolan
