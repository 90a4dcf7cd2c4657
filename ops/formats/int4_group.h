// 4-bit weights with scales, and optionally zero points or minimums, per group of inputs. Every weight is stored, and
// each cache line is read once, in order. Reference: EGEMV, "Memory Layout".
//
// For a group g of G inputs (scales, zero_points and minimums: formats/group.h), g = l / G:
//
//     W[l, j] = scales[g, j] (q[l, j] - zero_points[g, j])        q, zero_points 0 … 15
//             = scales[g, j] q[l, j] + minimums[g, j]             with minimums
//             = scales[g, j] (q[l, j] - 8)                        with neither
//
//     weights      u8 [panels, tiles * 8, 64]   the dense storage of formats/bitmap_int4.h with nibble q
//
//     tiles = ceil(k / 64);   outside the k x n matrix: 0
//     bytes = 1/2 a weight + (2 or 4) / G + (0 or 1) / G, or with minimums (4 or 8) / G
//
// Kernels broadcast activations against rows of 16 outputs, so AVX2, AVX-512 and AMX share one order of weights.
#pragma once

#include <cstdint>
#include <vector>

#include "formats/bitmap_int4.h"
#include "formats/group.h"

namespace ortolan {

inline constexpr int kLargestInt4 = 15;

// Packs q, row-major [k, n] with rows `row_stride` bytes apart, each 0 … 15 (higher bits are ignored). Requires 1 <= k
// <= 2^17 and 1 <= n <= kMaxDimension.
std::vector<uint8_t> PackInt4Group(const uint8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Packs one panel of `columns` (1 to 16) columns from column-major nibbles, two inputs a byte, the first one low.
// Column j starts at byte j * column_bytes. Writes GroupWeightBytes(kInt4Bitmap, k, 1) bytes.
void PackInt4GroupPanel(const uint8_t* nibbles, int64_t column_bytes, int64_t k, int64_t columns, uint8_t* packed);

// Writes q, row-major [k, n].
void UnpackInt4Group(const uint8_t* weights, int64_t k, int64_t n, uint8_t* q, int64_t row_stride);

}  // namespace ortolan
