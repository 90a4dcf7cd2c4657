// The bitmap format with int8 weights: one bit a weight plus a byte for each nonzero weight.
//
// Like formats/bitmap.h, but with rows of k-quads, the order of AMX's int8 B tile; one row is one operand of vpdpbusd:
//
//     panel p                      = columns 16p … 16p+15
//     tile t of panel p            = inputs 64t … 64t+63 of these columns: 16 rows of k-quads x 16 columns
//     row r of a tile, 64 weights  = W[64t+4r … 64t+4r+3][c0]  W[64t+4r … 64t+4r+3][c1]  …   (c0 = 16p)
//
//     masks    u8  [panels, tiles, 128]  16 little-endian u64 a tile, one a row; bit i is set if weight i is stored
//     values   i8  [offsets[panels] + 64]  the stored weights panel by panel, in the order of their mask bits; 64 zeros
//     offsets  i64 [panels + 1]  index in values of each panel's first value; the last is the number of values
//
//     panels = ceil(n / 16), tiles = ceil(k / 64)
//     bytes  = 128 panels tiles + values + 64 + 8 (panels + 1);   (1 - sparsity) + 1/8 a weight
//
// Dense storage is as in formats/bitmap.h: values i8 [panels * tiles * 1024].
//
// k is at most 2^17, so that an int32 holds a sum of k products of an int8 and a value of -127 … 127.
#pragma once

#include <cstdint>

#include "formats/bitmap.h"

namespace ortolan {

inline constexpr BitmapLayout kInt8Bitmap{4, 8, int64_t{1} << 17};

using QuantizedBitmapMatrix = PackedBitmap<uint64_t, uint8_t>;

// Packs the nonzero weights (dense: all) of q, row-major [k, n] with rows `row_stride` weights apart. Requires 1 <= k
// <= 2^17 and 1 <= n <= kMaxDimension.
QuantizedBitmapMatrix PackBitmapInt8(const int8_t* q, int64_t row_stride, int64_t k, int64_t n,
                                     Storage storage = Storage::kBitmap);

// Writes the dense matrix, row-major [k, n]. The view must have passed ValidateBitmap with kInt8Bitmap.
void UnpackBitmapInt8(const BitmapView& view, int8_t* q, int64_t row_stride);

// Returns the sum of the weights of each column, [panels][16], modulo 2^32.
std::vector<int32_t> SumsOfColumnsInt8(const BitmapView& view);

// Returns whether storage is dense and in each quad of inputs weights 0 and 1, and weights 2 and 3, sum to -128 … 128:
// their products with bytes 0 … 255 then fit 16 bits.
bool PairsFitInt8(const BitmapView& view);

}  // namespace ortolan
