// Weights in the bitmap formats, bf16, int8 or int4, sparse, dense or 2:4, and the formulas of their kernels.
// Reference: SparAMX, sections 4.2 to 4.4.
//
// bf16:
//
//     y[i, j] = sum over l of bf16(x[i, l]) * W[l, j]  + bias[j]        i < m, l < k, j < n
//
// x and y are float32, and bf16() rounds to nearest even. Products and sums are float32; each product is added without
// being rounded (fused), except on i8mm. The order of sums, and so the last bits of y, depend on the kernel only, not
// on m or on the storage.
//
//     amx          for each 32 inputs one sum over even l and one over odd l, both from +0 and ascending;
//                  total = bias[j] or +0; for each 32 inputs: total += even sum + odd sum; y = total + 0
//     avx512bf16   one sum from +0; of each pair of inputs the odd l, then the even l; y = (sum + 0) + bias[j]
//     i8mm         one sum from +0; of each four inputs, the products of the first two are added to each other and
//                  then to the sum; then those of the last two. Each addition rounds to odd; y = (sum + 0) + bias[j]
//     others       one sum from +0 over ascending l; y = (sum + 0) + bias[j]
//
// y is never -0. avx512bf16, amx and i8mm kernels treat denormal operands as zero and flush denormal results, as the
// instructions do. Inf and NaN propagate as in the dense product: zero times Inf is NaN, whether the zero is stored or
// not. Which NaN results may depend on m.
//
// int8 and int4, with x quantized per row:
//
//     a_i  = max over l of |x[i, l]|, but at least 2^-100
//     s_i  = a_i / 127                                 NaN if the row holds an Inf or a NaN
//     q_il = x[i, l] * (127 / a_i), rounded to the nearest integer, ties to even: -127 … 127
//
//     int8   y[i, j] = (sum over l of q_il W[l, j]) * (s_i scales[0, j])  + bias[j]
//
//            or, with zero points of x, for k up to 2^16,
//                     h_i = max(0, max over l of x[i, l]) / 2 - min(0, min over l of x[i, l]) / 2, but at least 2^-100
//                     s_i = h_i / 127,  z_i = round(-min(0, …) * (127 / h_i)) - 127
//                     q_il = min(round(x[i, l] * (127 / h_i)) + z_i, 127), and q_il - z_i replaces q_il above
//            and, if weights have zero points as well, for k up to 2^15, W[l, j] - zero_points[j] replaces W[l, j]
//
//     int4   y[i, j] = s_i * sum over g of scales[g, j] * (sum over the l of group g of q_il W[l, j])  + bias[j]
//
// formats/scales.h defines the groups of inputs and the packed order of scales. s, q and all operations outside the
// inner sums are float32. The inner sums are exact: k is at most 2^17, so 128 * 127 * k fits int32. The float32
// operations add at most (u = 2^-24, exact inner sums D)
//
//     int8   |y - exact| <= 4 u |D s_i scales[0, j]|                       + u |y|
//     int4   |y - exact| <= (groups + 4) u s_i sum over g of |scales[g, j] D_g|  + u |y|
//
// plus the error of results below 2^-126, where float32 loses bits. Compared with the product of the float row and the
// dequantized weights, and including the rounding of q (|x - s q| <= s_i / 2, and 2^-14 of that for its float32
// arithmetic),
//
//     |y - sum over l of x[i, l] scale W[l, j] - bias[j]| <= s_i / 2 (1 + 2^-14) sum over l of |scale W[l, j]|
//                                                            + the bound above.
//
// Sparsity adds no error. q and s are the same on every CPU. A row with an Inf or a NaN gives NaN in all of y[i, :]; a
// row of zeros gives the bias. Stored weights may be zero, and -128 and -8 are valid weights.
#pragma once

#include <cstdint>

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/scales.h"
#include "matmul/kernel.h"

namespace ortolan {

// Limit so that the sum of (q - z) W fits int32.
inline constexpr int64_t kMostInputsWithZeroPoints = int64_t{1} << 16;
// Limit so that the sum of (q - z) (W - zero_points) fits int32.
inline constexpr int64_t kMostInputsWithWeightZeroPoints = int64_t{1} << 15;

struct BitmapWeight : MatMulWeight {
  BitmapView view;               // has passed ValidateStored with its layout; the result does not depend on the storage
  int64_t group = kWholeColumn;  // int4: 32, 64 or 128
  // [panels][ScaleRows(k, group)][16] float (int8) or bf16 (int4), at any address; null for bf16
  const void* scales = nullptr;
  const int32_t* column_sums = nullptr;  // SumsOfColumnsInt8(view) if x has zero points; int8 only
  const int32_t* zero_points = nullptr;  // [panels][16], zero points of int8 weights, or null; requires column_sums
  bool pairs_fit = false;  // PairsFitInt8(view), which some kernels use to be faster; requires column_sums

  // The 16 scales of a group.
  const uint8_t* Scales(int64_t panel, int64_t g) const {
    return static_cast<const uint8_t*>(scales) + (panel * ScaleRows(k, group) + g) * kPanelColumns * ScaleBytes(group);
  }

  // Size of a quantized row of x: k padded to whole tiles, a scale, and a sum per group (for int8 also a zero point and
  // a second sum); a multiple of 64.
  int64_t QuantizedRowBytes() const { return kInt8Bitmap.PaddedK(k) + (4 + 4 * ScaleRows(k, group) + 63) / 64 * 64; }
};

}  // namespace ortolan
