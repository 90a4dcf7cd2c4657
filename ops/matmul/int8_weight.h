// The int8 weight of a layer as models store it, and the same weight as SparseAMXMatMul's kernels read it
// (bitmap_weight.h).
//
//     W[l, j] = scales[j] (codes[l, j] - zero_points[j])        codes int8 or uint8
//
// If all codes less zero points fit int8, the packed weight has no zero points; otherwise it has int8 codes (uint8 less
// 128) and zero points. The execution provider and, through ortolan._native, graph_passes/find/stored_int8.py use these
// rules.
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
  int64_t row = 0;                   // distance of two inputs in `codes` if it has further columns; 0: n
  std::vector<float> scales;         // [n]
  std::vector<int16_t> zero_points;  // [n], within the range of the codes' type

  // Distance in `codes` of two inputs, or of two columns if transposed.
  int64_t Row() const { return transposed ? k : row == 0 ? n : row; }
};

struct ValueRange {
  int least = 0;
  int most = 0;

  bool FitsInt8() const { return least >= -128 && most <= 127; }
};

// Return the range of codes less zero points; it includes 0. If all zero points are the middle of the codes' type, this
// is the range of any code, without a look at the codes.
ValueRange RangeOf(const Int8Weight& w);

// Return why these scales cannot be used; empty if they can.
std::string WhyNotScales(std::span<const float> scales);
// Return why a weight of this size and range of values cannot be used; empty if it can.
std::string WhyNotValues(int64_t k, int64_t n, const ValueRange& range);
// Return why the weight cannot be used; empty if it can.
std::string WhyNot(const Int8Weight& w);

// Packed weights in memory or in a file (formats/bitmap_int8.h).
struct PackedInt8 : StoredBytes {
  std::span<const float> scales;  // [panels][16]
  // [panels][16]: sums for at most kMostInputsWithZeroPoints inputs; zero points, if any, require sums.
  std::span<const int32_t> column_sums, zero_points;
};

// Packed int8 weights that kernels can run on.
class Int8Columns {
 public:
  // Pack weights that share their inputs and pass WhyNot, columns concatenated; all but the last have whole panels.
  explicit Int8Columns(std::span<const Int8Weight> parts);
  // Use packed weights owned by the caller, who must keep them. Throws OpError if they are malformed.
  explicit Int8Columns(const PackedInt8& packed);
  Int8Columns(const Int8Columns&) = delete;
  Int8Columns& operator=(const Int8Columns&) = delete;

  LinearLayer Layer() const;
  // Valid as long as this object.
  PackedInt8 Packed() const;

 private:
  void PackDense(std::span<const Int8Weight> parts);
  void StoreAsBitmap();

  LineBytes dense_;
  QuantizedBitmapMatrix bitmap_;  // used instead of `dense_` where faster
  std::vector<float> scales_;
  std::vector<int32_t> column_sums_, zero_points_;
  BitmapWeight w_;  // view of the packed weights
};

}  // namespace ortolan
