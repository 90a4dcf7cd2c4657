// Rotary embedding of queries and keys by tables of cosines and sines.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/kv_cache/kv_cache.h"
#include "host/op_error.h"

namespace ortolan {

struct RotaryTables {
  const float* cos = nullptr;  // [positions][dims / 2]
  const float* sin = nullptr;
  int64_t dims = 0;  // elements of a head that are rotated, its first ones; 0: no rotary embedding
  bool interleaved = false;

  // Rotates a row. from and to do not overlap.
  void Rotate(const KvCacheFunctions& kernel, const float* from, int64_t position, int64_t head_dim, float* to) const {
    const int64_t at = position * (dims / 2);
    kernel.rotate(from, cos + at, sin + at, dims, interleaved, to);
    std::copy(from + dims, from + head_dim, to + dims);
  }
};

// Returns what is wrong with the shapes of the tables for heads of this width, or an empty string.
inline std::string RotaryProblem(const std::vector<int64_t>& cos, const std::vector<int64_t>& sin, int64_t head_dim,
                                 const std::string& cos_name = "cos", const std::string& sin_name = "sin") {
  if (cos.size() == 2 && sin == cos && cos[1] > 0 && cos[1] <= head_dim / 2) return {};
  return ErrorText(cos_name, " has shape ", ShapeText(cos), " and ", sin_name, " ", ShapeText(sin),
                   ", expected [positions, ", head_dim / 2, "] for both, or fewer columns");
}

}  // namespace ortolan
