// 4-bit weights in groups with scales, and zero points or minimums, every weight stored (EGEMV, "Memory Layout": each
// cache line is read once, in order).
//
// Of a group g of G inputs (formats/group.h, where scales, zero_points and minimums are):
//
//     W[l, j] = scales[g, j] (q[l, j] - zero_points[g, j])        q, zero_points 0 … 15;   g = l / G
//             = scales[g, j] q[l, j] + minimums[g, j]             where there are minimums
//             = scales[g, j] (q[l, j] - 8)                        where there are neither
//
//     weights      u8 [panels, tiles * 8, 64]   the dense storage of formats/bitmap_int4.h, whose nibble is q:
//                  panels of 16 columns; a row of a tile is 4 inputs of 16 columns;
//                  two rows share 64 bytes, low and high nibbles
//
//     tiles = ceil(k / 64);   outside of the k x n matrix: 0
//     bytes = 1/2 a weight + (2 or 4) / G + (0 or 1) / G, or with minimums (4 or 8) / G
//
// Activations are broadcast against rows of 16 outputs, so the weights need no order of their own for AVX2, AVX-512 or
// AMX: the sequence of the activations follows from the rows of weights.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/bitmap_int4.h"
#include "formats/group.h"

namespace ortolan {

inline constexpr int kLargestInt4 = 15;

// Packs q, row-major [k, n] with rows `row_stride` bytes apart, each 0 … 15 (higher bits are cut off). Needs
// 1 <= k <= 2^17 and 1 <= n <= kMaxDimension.
std::vector<uint8_t> PackInt4Group(const uint8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Packs one panel from numbers that lie column by column, two inputs to a byte, the first one low: column j begins at
// byte j * column_bytes and has ceil(k / 2) bytes or more. columns: 1 to 16. Writes GroupWeightBytes(kInt4Bitmap, k, 1)
// bytes.
void PackInt4GroupPanel(const uint8_t* nibbles, int64_t column_bytes, int64_t k, int64_t columns, uint8_t* packed);

// Writes q, row-major [k, n].
void UnpackInt4Group(const uint8_t* weights, int64_t k, int64_t n, uint8_t* q, int64_t row_stride);

}  // namespace ortolan
