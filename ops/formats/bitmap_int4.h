// The bitmap format with int4 weights, -8 … 7: one bit a weight plus half a byte for each that is not zero.
//
// Panels, tiles, rows and masks are those of formats/bitmap_int8.h. The values of a panel are two streams of nibbles
// side by side, so that no kernel needs to know whether a weight begins in the middle of a byte:
//
//     rows 0, 2, 4, … of the panel (even rows of all its tiles)   low nibbles of bytes 0, 1, 2, …
//     rows 1, 3, 5, …                                             high nibbles of bytes 0, 1, 2, …
//     nibble = weight + 8
//
//     masks    u8 [panels, tiles, 128]  16 little-endian u64 a tile, one a row; bit i is set where weight i is stored
//     values   u8 [offsets[panels] + 64]
//                  a panel takes as many bytes as the longer of its two streams has nibbles; the rest of the shorter is
//                  zero, as are the 64 bytes of padding
//     offsets  i64 [panels + 1]  the byte of values at which each panel starts; offsets[0] = 0
//
//     bytes  = 128 panels tiles + values + 64 + 8 (panels + 1);   (1 - sparsity) / 2 + 1/8 a weight, and what the
//              longer streams exceed the shorter ones by: at random positions about 0.4 % of values for k = 4096
//
// Dense storage as in formats/bitmap.h: values u8 [panels * tiles * 512], so that 64 bytes hold row 2i of a tile in low
// nibbles and row 2i+1 in high ones; a nibble outside of the matrix is 8.
#pragma once

#include <cstdint>

#include "formats/bitmap_int8.h"

namespace ortolan {

inline constexpr BitmapLayout kInt4Bitmap{4, 4, int64_t{1} << 17};

inline constexpr int kInt4Bias = 8;

// Packs what is not zero (dense: all) of q, row-major [k, n] with rows `row_stride` weights apart, each -8 … 7 (higher
// bits are cut off). Needs 1 <= k <= 2^17 and 1 <= n <= kMaxDimension.
QuantizedBitmapMatrix PackBitmapInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n,
                                     Storage storage = Storage::kBitmap);

// Writes the dense matrix, row-major [k, n]. The view must have passed ValidateBitmap with kInt4Bitmap.
void UnpackBitmapInt4(const BitmapView& view, int8_t* q, int64_t row_stride);

}  // namespace ortolan
