// LayerNormalization of rows, in place: what may stand behind a linear layer and its epilogue. A part that the matmul
// rooms share, no op of its own: they run it on rows whose last column is done, while these are in the cache.
//
//     y[i, j] = (x[i, j] - mean_i) / s_i  weight[j] + bias[j]                                    i < m, j < n
//
//     mean_i = sum over j of x[i, j] / n
//     s_i    = sqrt(sum over j of (x[i, j] - mean_i)^2 / n + epsilon)
//
// The mean is summed up twice, the second time over what the first left of the row, and then the squares of what the
// second leaves: so a mean far from zero costs its own rounding, and numbers that are all equal give the bias. Error,
// every kernel, with u = 2^-24, c = (n / 4 + 16) u, a_i = sum over j of |x[i, j]| / n and p = |x[i, j] - mean_i| / s_i,
// for epsilon >= 2^-60 and |x| <= 2^60:
//
//     |error| <= |weight[j]| (t + p (t^2 / 2 + c)) + 2 u |y| + 2^-126,      t = c + (u + c^2) a_i / s_i
//
// t is how far the mean may be off. (Measured: README.md.) A NaN or Inf in row i makes all of y[i, :] NaN. So does a
// row of equal numbers with epsilon 0; where sums exceed float32, it is what float32 makes of the formulas.
//
// A row's result depends on nothing but the row, weight, bias and epsilon, and every kernel gives the same bits (any
// NaN counts as the same). All three sums have one order: column j goes into partial sum j % 64 in the blocks of 64
// columns, behind these into j % 16, ascending, the last 16 filled up with what adds 0. Of the partial sums s, t[i] =
// (s[i] + s[i + 16]) + (s[i + 32] + s[i + 48]), then t[i] + t[i + 8] of 16, and so on with 4, 2 and 1. The factor
// f = 1 / s_i and x - mean_i are rounded, then their product, then that times weight plus bias, fused.
#pragma once

#include <cstdint>

namespace ortolan {

struct LayerNormArgs {
  int64_t m = 0;
  int64_t n = 0;
  float* y = nullptr;             // [m][n]: x before, y after; only these elements are written
  int64_t y_row_bytes = 0;        // from one row to the next
  const float* weight = nullptr;  // [n]
  const float* bias = nullptr;    // [n]
  float epsilon = 0.0f;           // 0 or more
};

using LayerNormFn = void(const LayerNormArgs& args);

}  // namespace ortolan
