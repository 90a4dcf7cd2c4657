// The int8 weight of a layer as models store it, and the same numbers as SparseAMXMatMul's kernels read them
// (bitmap_weight.h).
//
//     W[l, j] = scales[j] (codes[l, j] - zero_points[j])        codes int8 or uint8
//
// Where all codes less zero points fit an int8 there are no zero points, else int8 codes (uint8 less 128) with theirs.
// The execution provider and, by way of ortolan._native, graph_passes/find/stored_int8.py follow these rules.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "matmul/bitmap_weight.h"
#include "matmul/line_bytes.h"
#include "matmul/linear_plan.h"
#include "matmul/storage.h"

namespace ortolan {

struct Int8Weight {
  int64_t k = 0;
  int64_t n = 0;
  const uint8_t* codes = nullptr;  // [k][n], or [n][k] if transposed
  bool is_signed = true;
  bool transposed = false;
  std::vector<float> scales;         // [n]
  std::vector<int16_t> zero_points;  // [n], in the range of the codes' type
};

struct ValueRange {
  int least = 0;
  int most = 0;

  bool FitsInt8() const { return least >= -128 && most <= 127; }
};

// Of codes less zero points, which lie in the range of the codes' type; where any code would do, of what codes there
// may be. It has a zero.
ValueRange RangeOf(const Int8Weight& w);

// Empty, or why such scales are not taken over.
std::string WhyNotScales(std::span<const float> scales);
// Empty, or why a weight of these sizes and numbers is not taken over.
std::string WhyNotValues(int64_t k, int64_t n, const ValueRange& range);
// Empty, or why the weight is not taken over.
std::string WhyNot(const Int8Weight& w);

// Packed numbers as they lie in memory, or in a file (formats/bitmap_int8.h).
struct PackedInt8 : StoredBytes {
  std::span<const float> scales;  // [panels][16]
  // [panels][16]: sums where there are kMostInputsWithZeroPoints at most; zero points where there are any, beside sums.
  std::span<const int32_t> column_sums, zero_points;
};

// Packed numbers that kernels may run on.
class Int8Columns {
 public:
  // Weights of the same inputs, their columns side by side; all but the last of whole panels. WhyNot says nothing of
  // any.
  explicit Int8Columns(std::span<const Int8Weight> parts);
  // Numbers that others own, as long as this is there. Throws OpError if they are not as they must be.
  explicit Int8Columns(const PackedInt8& packed);
  Int8Columns(const Int8Columns&) = delete;
  Int8Columns& operator=(const Int8Columns&) = delete;

  LinearLayer Layer() const;
  // As long as this is there.
  PackedInt8 Packed() const;

 private:
  void PackDense(std::span<const Int8Weight> parts);
  void StoreAsBitmap();

  LineBytes dense_;
  QuantizedBitmapMatrix bitmap_;  // in its place
  std::vector<float> scales_;
  std::vector<int32_t> column_sums_, zero_points_;
  BitmapWeight w_;  // of the above
};

}  // namespace ortolan
