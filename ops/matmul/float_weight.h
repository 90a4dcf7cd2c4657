// The float weight of a layer as models store it, and its bf16 or int8 form for the kernels (bitmap_weight.h).
//
// The rounding is that of `ortolan optimize` with weights="bf16" or weights="int8" (round to nearest), so a model gives
// the same answers whether it was optimized or runs as it is:
//
//     bf16   W[l, j] to nearest even
//     int8   q[l, j] = round(W[l, j] / scales[j]), ties to even, scales[j] = max over l of |W[l, j]| / 127, but at
//            least the smallest normal float
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
  int64_t row = 0;  // distance of two inputs in `values` if it has further columns; 0: n
};

// Return why the weight cannot be used as bf16, or as int8; empty if it can.
std::string WhyNotBf16(const FloatWeight& w);
std::string WhyNotInt8(const FloatWeight& w);

// Return the weight as int8; its codes are stored in `codes`.
Int8Weight RoundedToInt8(const FloatWeight& w, std::vector<int8_t>& codes);

// Packed bf16 weights that kernels can run on.
class Bf16Columns {
 public:
  // Pack weights that share their inputs, columns concatenated; all but the last have whole panels.
  explicit Bf16Columns(std::span<const FloatWeight> parts);
  // Use packed weights owned by the caller, who must keep them (formats/bitmap.h). Throws OpError if they are
  // malformed.
  explicit Bf16Columns(const StoredBytes& packed);
  Bf16Columns(const Bf16Columns&) = delete;
  Bf16Columns& operator=(const Bf16Columns&) = delete;

  LinearLayer Layer() const;
  // Valid as long as this object.
  StoredBytes Packed() const { return BytesOf(kBf16Bitmap, w_.view); }

 private:
  void StoreAsBitmap();

  LineBytes dense_;
  BitmapMatrix bitmap_;  // used instead of `dense_` where faster
  BitmapWeight w_;       // view of the packed weights
};

}  // namespace ortolan
