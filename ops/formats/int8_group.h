// 8-bit weights with scales per group of inputs. Every weight is stored.
//
// For a group g of G inputs (scales: formats/group.h):
//
//     W[l, j] = scales[g, j] q[l, j]        q -128 … 127;   g = l / G
//
//     weights   i8 [panels, tiles * 16, 16, 4]   the dense storage of formats/bitmap_int8.h
//
//                                  column 16p      column 16p + 1   …   column 16p + 15
//     panel p, row r  64 bytes   q[4r … 4r+3]    q[4r … 4r+3]         q[4r … 4r+3]
//
//     tiles = ceil(k / 64);   outside the k x n matrix: 0
//     bytes = 1 a weight + (2 or 4) / G
//
// Output j is weights[j / 16, :, j % 16, :], so a linear layer and an embedding table can share one copy.
#pragma once

#include <cstdint>
#include <cstring>

#include "formats/bitmap_int8.h"
#include "formats/group.h"

namespace ortolan {

// Packs one panel from 16 contiguous columns of kInt8Bitmap.PaddedK(k) weights each. Writes the same number of bytes.
inline void PackInt8GroupPanel(const int8_t* columns, int64_t k, uint8_t* packed) {
  const int64_t padded_k = kInt8Bitmap.PaddedK(k);
  for (int64_t input = 0; input < padded_k; input += kInt8Bitmap.row_inputs) {
    for (int64_t j = 0; j < kPanelColumns; ++j, packed += kInt8Bitmap.row_inputs) {
      std::memcpy(packed, columns + j * padded_k + input, static_cast<size_t>(kInt8Bitmap.row_inputs));
    }
  }
}

// Writes q, row-major [k, n]. The inverse of PackBitmapInt8(q, …, Storage::kDense), whose values are the weights.
inline void UnpackInt8Group(const uint8_t* weights, int64_t k, int64_t n, int8_t* q, int64_t row_stride) {
  BitmapView view;
  view.k = k;
  view.n = n;
  view.values = weights;
  UnpackBitmapInt8(view, q, row_stride);
}

}  // namespace ortolan
