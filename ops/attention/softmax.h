// What attention does with rows of scores beside products: which of them a mask leaves, their weights, and partial
// results, which add up. decode.h has the kernels.
#pragma once

#include <cstdint>

namespace ortolan {

// Of the tokens of a range: max[h] of the scores s[h, j], in powers of two, sum[h] of the weights 2^(s[h, j] - max[h]),
// y[h] of weights times values. Written whole, contiguous. The partial result of no tokens: the lowest float, 0 and 0.
struct DecodePartial {
  float* max = nullptr;  // [heads]
  float* sum = nullptr;  // [heads]
  float* y = nullptr;    // [heads][head_dim]
};

// A mask hides what it holds this or less for, as exporters' masks do.
inline constexpr float kHidden = -1e4f;

struct VisibleRange {
  int64_t begin = 0;
  int64_t end = 0;    // begin if all are hidden
  bool plain = true;  // the mask is 0 in all of it; smaller than 2^-126 counts as 0
};

struct SoftmaxFunctions {
  // From the first to the last of a row of a mask that are not hidden.
  VisibleRange (*visible)(const float* mask, int64_t count);

  // In place, scores s[i], i < count, become weights 2^(factor s[i] - maximum), whose sum is put out; 1 <= count. There
  // is room for count rounded up to 16; what is behind count may be anything. A NaN among the scores makes the sum NaN.
  void (*weigh)(float* scores, int64_t count, float factor, float* maximum, float* sum);

  // Adds `from` to `into`.
  void (*merge)(int64_t heads, int64_t head_dim, const DecodePartial& from, const DecodePartial& into);

  // y = partial.y / partial.sum, rows y_head_bytes apart. y may be partial.y.
  void (*finish)(int64_t heads, int64_t head_dim, const DecodePartial& partial, float* y, int64_t y_head_bytes);
};

}  // namespace ortolan
