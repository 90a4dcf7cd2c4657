// 2:4 storage of a weight matrix: of four consecutive inputs of a column (a quad) two weights are stored, each with its
// position in the quad. Pruned checkpoints use it because GPUs support it.
//
// Like dense storage, it is a storage of the formats in bitmap.h, bitmap_int8.h and bitmap_int4.h: panels of 16 columns
// and the same three tensors. Masks without offsets mean 2:4.
//
//     masks    u8  with the bitmap's shape: [panels, tiles, 64] bf16, [panels, tiles, 128] int8 and int4; 64 bytes of
//                  positions for each span of 32 inputs x 16 columns
//     values   half of dense storage: [panels * tiles * 256] bf16, [… * 512] int8, [… * 256] int4
//     offsets  i64 [0]
//     bytes    1 1/8 a weight bf16, 5/8 int8, 3/8 int4
//
// Slot 0 of a quad is the weight at the lower position, slot 1 the weight at the higher one. If a quad has fewer than
// two nonzero weights, zeros at the lowest free positions fill the slots. Rows and columns outside the matrix are zero.
//
// The rows of a span match one load of activations, so that a kernel shuffles activations instead of weights:
//
//     int8   4 rows of 8 inputs: 64 bytes, for each column 4 slots: those of quad 2r, then those of quad 2r + 1
//            values      row 0, row 1, row 2, row 3: 256 bytes
//            positions   byte s, bits 2r and 2r+1: the position, 0 … 3, of slot s of row r      (s = 4 column + 0 … 3)
//     int4   rows and positions as in int8
//            values      rows 0 and 1, rows 2 and 3: 128 bytes; byte s has slot s of the even row in its low nibble and
//                        slot s of the odd row in its high nibble; nibble = weight + 8
//     bf16   8 rows of 4 inputs: 32 weights, for each column 2 slots: those of quad r
//            values      row 0, …, row 7: 512 bytes
//            positions   little-endian u16 s, bits 2r and 2r+1: the position of slot s of row r (s = 2 column + 0 or 1)
//
// (positions >> 2r) & 3, with 4 added in slots 2 and 3 of int8 and int4, is the shuffle control of row r.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"

namespace ortolan {

inline constexpr int64_t kTwoFourSpanInputs = 32;
inline constexpr int64_t kTwoFourPositionBytes = 64;  // of a span
inline constexpr int64_t kTwoFourStored = 2;          // of each quad

template <typename Value>
using TwoFourMatrix = PackedBitmap<uint8_t, Value>;

// Returns an empty string if each quad of w, row-major [k, n], has at most two nonzero weights (floats: after rounding
// to bf16); otherwise one sentence that names the first quad with more.
std::string CheckTwoFour(const float* w, int64_t row_stride, int64_t k, int64_t n);
std::string CheckTwoFour(const int8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Pack w as PackBitmap, PackBitmapInt8 and PackBitmapInt4 do. A matrix that fails CheckTwoFour loses weights.
TwoFourMatrix<uint16_t> PackTwoFour(const float* w, int64_t row_stride, int64_t k, int64_t n);
TwoFourMatrix<uint8_t> PackTwoFourInt8(const int8_t* q, int64_t row_stride, int64_t k, int64_t n);
TwoFourMatrix<uint8_t> PackTwoFourInt4(const int8_t* q, int64_t row_stride, int64_t k, int64_t n);

// Write the dense matrix, row-major [k, n]. The view must be 2:4 and have passed ValidateStored.
void UnpackTwoFour(const BitmapView& view, float* w, int64_t row_stride);
void UnpackTwoFourInt8(const BitmapView& view, int8_t* q, int64_t row_stride);
void UnpackTwoFourInt4(const BitmapView& view, int8_t* q, int64_t row_stride);

// ValidateBitmap for all three storages. For 2:4 it checks the sizes of masks and values, and that the positions of
// each quad ascend: two equal positions would be two weights of one input. Values outside the matrix are not checked.
std::string ValidateStored(const BitmapClaim& claim, const BitmapLayout& layout = kBf16Bitmap);

}  // namespace ortolan
