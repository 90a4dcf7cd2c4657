// Weights in the bitmap formats, bf16, int8 or int4, sparse, dense or 2:4 (SparAMX, sections 4.2 to 4.4), and what the
// kernels compute with them.
//
// bf16:
//
//     y[i, j] = sum over l of bf16(x[i, l]) * W[l, j]  + bias[j]        i < m, l < k, j < n
//
// x and y are float32; bf16() rounds to nearest even; products and sums are float32, and each product is added without
// being rounded (fused), but for i8mm. The order of the sums, and so the last bits of y, depend on the kernel alone:
// not on m, nor on the storage.
//
//     amx          of each 32 inputs one sum over the even l and one over the odd l, both from +0 and ascending;
//                  total = bias[j] or +0; for each 32 inputs: total += even sum + odd sum; y = total + 0
//     avx512bf16   one sum from +0, of each pair of inputs the odd l, then the even one; y = (sum + 0) + bias[j]
//     i8mm         one sum from +0: of each four inputs the products of the first two are added, then the sum of
//                  these; likewise the last two; each rounded to odd; y = (sum + 0) + bias[j]
//     others       one sum from +0 over ascending l; y = (sum + 0) + bias[j]
//
// No y is -0. avx512bf16, amx and i8mm kernels treat denormal operands as zero and flush denormal results (the
// instructions' own rule). Inf and NaN spread as in the dense product: a stored or unstored zero times Inf is NaN.
// Which NaN it is may depend on m.
//
// int8 and int4, x quantized row by row:
//
//     a_i  = max over l of |x[i, l]|, but at least 2^-100
//     s_i  = a_i / 127                                 NaN if the row holds an Inf or a NaN
//     q_il = x[i, l] * (127 / a_i), rounded to the nearest integer, ties to even: -127 … 127
//
//     int8   y[i, j] = (sum over l of q_il W[l, j]) * (s_i scales[0, j])  + bias[j]
//            or, with zero points, for k of 2^16 at most,
//                     h_i = max(0, max over l of x[i, l]) / 2 - min(0, min over l of x[i, l]) / 2, but at least 2^-100
//                     s_i = h_i / 127,  z_i = round(-min(0, …) * (127 / h_i)) - 127
//                     q_il = min(round(x[i, l] * (127 / h_i)) + z_i, 127), and q_il - z_i in the place of q_il above
//            and, where weights have zero points as well, for k of 2^15 at most, W[l, j] - zero_points[j] in the place
//            of W[l, j]
//     int4   y[i, j] = s_i * sum over g of scales[g, j] * (sum over the l of group g of q_il W[l, j])  + bias[j]
//
// Groups of inputs and the packed order of scales: formats/scales.h.
// s, q and the rest outside of the inner sums are float32. The inner sums are exact: k is at most 2^17, so that
// 128 * 127 * k fits an int32. What float32 adds to that (u = 2^-24, exact inner sums D):
//
//     int8   |y - exact| <= 4 u |D s_i scales[0, j]|                       + u |y|
//     int4   |y - exact| <= (groups + 4) u s_i sum over g of |scales[g, j] D_g|  + u |y|
//
// and results below 2^-126, where float32 loses bits. Against the product of the float row with the dequantized weights
// that is, with the rounding of q (|x - s q| <= s_i / 2, and its float32 arithmetic, 2^-14 of that),
//
//     |y - sum over l of x[i, l] scale W[l, j] - bias[j]| <= s_i / 2 (1 + 2^-14) sum over l of |scale W[l, j]|  + the
//     above.
//
// Sparsity itself adds none. q and s are the same on every CPU. A row with an Inf or a NaN gives NaN in all of y[i, :];
// a row of zeros gives the bias. A weight that is stored and zero is allowed, and -128 and -8 are weights like others.
#pragma once

#include <cstdint>

#include "formats/bitmap_int4.h"
#include "formats/bitmap_int8.h"
#include "formats/scales.h"
#include "matmul/kernel.h"

namespace ortolan {

// So that (q - z) W, summed up, fits an int32.
inline constexpr int64_t kMostInputsWithZeroPoints = int64_t{1} << 16;
// So that (q - z) (W - zero_points) does.
inline constexpr int64_t kMostInputsWithWeightZeroPoints = int64_t{1} << 15;

struct BitmapWeight : MatMulWeight {
  BitmapView view;               // has passed ValidateStored with its layout; any storage, with equal results
  int64_t group = kWholeColumn;  // int4: 32, 64 or 128
  // [panels][ScaleRows(k, group)][16] float (int8) or bf16 (int4), at any address; bf16: null
  const void* scales = nullptr;
  const int32_t* column_sums = nullptr;  // SumsOfColumnsInt8(view), if x has zero points; int8 only
  const int32_t* zero_points = nullptr;  // [panels][16], those of int8 numbers, or null; only beside column_sums
  bool pairs_fit = false;                // PairsFitInt8(view); only beside column_sums. Some kernels are faster then

  // The 16 scales of a group.
  const uint8_t* Scales(int64_t panel, int64_t g) const {
    return static_cast<const uint8_t*>(scales) + (panel * ScaleRows(k, group) + g) * kPanelColumns * ScaleBytes(group);
  }

  // Of a row of x that is quantized: k padded to whole tiles, a scale, a sum a group (and, int8, a zero point and
  // another sum); a multiple of 64.
  int64_t QuantizedRowBytes() const { return kInt8Bitmap.PaddedK(k) + (4 + 4 * ScaleRows(k, group) + 63) / 64 * 64; }
};

}  // namespace ortolan
