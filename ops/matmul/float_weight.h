// The float weight of a layer as models store it, and what kernels of fewer bits read in its place (bitmap_weight.h).
//
// The rules are those of `ortolan optimize` with weights="bf16" and weights="int8" (round to nearest), so that a model
// which is run as it is and one that was optimized give the same answers:
//
//     bf16   W[l, j] to nearest even
//     int8   q[l, j] = round(W[l, j] / scales[j]), ties to even, scales[j] = max over l of |W[l, j]| / 127, but at
//          least the smallest normal float
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "matmul/int8_weight.h"

namespace ortolan {

struct FloatWeight {
  int64_t k = 0;
  int64_t n = 0;
  const void* values = nullptr;  // float32 or float16 [k][n], or [n][k] if transposed; at any address
  bool is_half = false;          // float16
  bool transposed = false;
};

// Empty, or why these numbers are not taken over as bf16, or as int8.
std::string WhyNotBf16(const FloatWeight& w);
std::string WhyNotInt8(const FloatWeight& w);

// The weight as int8. Its numbers are put into `codes`.
Int8Weight RoundedToInt8(const FloatWeight& w, std::vector<int8_t>& codes);

// Packed bf16 numbers that kernels may run on.
class Bf16Columns {
 public:
  // Weights of the same inputs, their columns side by side; all but the last of whole panels.
  explicit Bf16Columns(std::span<const FloatWeight> parts);
  // Numbers that others own, as long as this is there (formats/bitmap.h). Throws OpError if they are not as they must
  // be.
  explicit Bf16Columns(const StoredBytes& packed);
  Bf16Columns(const Bf16Columns&) = delete;
  Bf16Columns& operator=(const Bf16Columns&) = delete;

  LinearLayer Layer() const;
  // As long as this is there.
  StoredBytes Packed() const { return BytesOf(kBf16Bitmap, w_.view); }

 private:
  void StoreAsBitmap();

  LineBytes dense_;
  BitmapMatrix bitmap_;  // in its place
  BitmapWeight w_;       // of the above
};

}  // namespace ortolan
