// In-place LayerNormalization of rows, which may follow a linear layer and its epilogue. It is not an operator: the
// matmul operators run it on finished rows while these are in the cache.
//
//     y[i, j] = (x[i, j] - mean_i) / s_i  weight[j] + bias[j]                                    i < m, j < n
//
//     mean_i = sum over j of x[i, j] / n
//     s_i    = sqrt(sum over j of (x[i, j] - mean_i)^2 / n + epsilon)
//
// A first pass computes a mean, a second one corrects it by the average difference from it. The third pass sums the
// squares of the differences from the corrected mean. So a mean far from zero costs only its own rounding, and a row of
// equal values gives the bias. Error bound of every kernel, with u = 2^-24, c = (n / 4 + 16) u, a_i = sum over j of
// |x[i, j]| / n and p = |x[i, j] - mean_i| / s_i, for epsilon >= 2^-60 and |x| <= 2^60:
//
//     |error| <= |weight[j]| (t + p (t^2 / 2 + c)) + 2 u |y| + 2^-126,      t = c + (u + c^2) a_i / s_i
//
// t bounds the error of the mean. A NaN or Inf in row i makes all of y[i, :] NaN, as does a row of equal values with
// epsilon 0. If sums overflow float32, the result is whatever float32 arithmetic gives.
//
// A row's result depends only on the row, weight, bias and epsilon, and every kernel gives the same bits (any NaN
// equals any other). All three sums have the same order: in blocks of 64 columns, column j is added to partial sum
// s[j % 64]; remaining columns to s[j % 16], the last 16 padded with values that add 0. Then
//
//     t[i] = (s[i] + s[i + 16]) + (s[i + 32] + s[i + 48])        i < 16
//
// and t[i] + t[i + 8] for i < 8, and so on with 4, 2 and 1. Rounded: the factor 1 / s_i, x - mean_i, and their product;
// the product with weight, plus bias, is fused.
#pragma once

#include <cstdint>

namespace ortolan {

struct LayerNormArgs {
  int64_t m = 0;
  int64_t n = 0;
  float* y = nullptr;             // [m][n]: input x, output y
  int64_t y_row_bytes = 0;        // stride of y
  const float* weight = nullptr;  // [n]
  const float* bias = nullptr;    // [n]
  float epsilon = 0.0f;           // at least 0
};

using LayerNormFn = void(const LayerNormArgs& args);

}  // namespace ortolan
