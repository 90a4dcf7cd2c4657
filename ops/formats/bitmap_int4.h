// The bitmap format with int4 weights, -8 … 7: one bit a weight plus half a byte for each nonzero weight.
//
// Panels, tiles, rows and masks are those of formats/bitmap_int8.h. The values of a panel are two interleaved streams
// of nibbles, so that no weight starts in the middle of a byte:
//
//     rows 0, 2, 4, … of the panel (even rows of all its tiles)   low nibbles of bytes 0, 1, 2, …
//     rows 1, 3, 5, …                                             high nibbles of bytes 0, 1, 2, …
//     nibble = weight + 8
//
//     masks    u8 [panels, tiles, 128]  16 little-endian u64 a tile, one a row; bit i is set if weight i is stored
//     values   u8 [offsets[panels] + 64]
//                  a panel has one byte for each nibble of its longer stream; the rest of the shorter stream and the 64
//                  bytes of padding are zero
//     offsets  i64 [panels + 1]  index in values of each panel's first byte; offsets[0] = 0
//
//     bytes  = 128 panels tiles + values + 64 + 8 (panels + 1);   (1 - sparsity) / 2 + 1/8 a weight, plus what the
//              shorter streams lack: for random sparsity about 0.4 % of values at k = 4096
//
// Dense storage is as in formats/bitmap.h: values u8 [panels * tiles * 512], with row 2i of a tile in the low nibbles
// of 64 bytes and row 2i+1 in the high ones. A nibble outside the matrix is 8.
#pragma once

#include <cstdint>

#include "formats/bitmap_int8.h"

namespace ortolan {

inline constexpr BitmapLayout kInt4Bitmap{4, 4, int64_t{1} << 17};

inline constexpr int kInt4Bias = 8;

// Packs the nonzero weights (dense: all) of q, row-major [k, n] with rows `row_stride` weights apart, each -8 … 7
// (higher bits are ignored). Requires 1 <= k <= 2^17 and 1 <= n <= kMaxDimension.
QuantizedBitmapMatrix PackBitmapInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n,
                                     Storage storage = Storage::kBitmap);

// Writes the dense matrix, row-major [k, n]. The view must have passed ValidateBitmap with kInt4Bitmap.
void UnpackBitmapInt4(const BitmapView& view, int8_t* q, int64_t row_stride);

}  // namespace ortolan
