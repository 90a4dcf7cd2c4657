// What attention does with rows of scores beside products: which of them a mask leaves, their weights, and partial
// results, which add up.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

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

// From the first to the last of a row of a mask that are not hidden.
using VisibleRangeFn = VisibleRange(const float* mask, int64_t count);

// In place, scores s[i], i < count, become weights 2^(factor s[i] - maximum), whose sum is put out; 1 <= count. There
// is room for count rounded up to 16; what is behind count may be anything. A NaN among the scores makes the sum NaN.
using WeighScoresFn = void(float* scores, int64_t count, float factor, float* maximum, float* sum);

// Adds `from` to `into`.
using MergePartialFn = void(int64_t heads, int64_t head_dim, const DecodePartial& from, const DecodePartial& into);

// y = partial.y / partial.sum, rows y_head_bytes apart. y may be partial.y.
using FinishPartialFn = void(int64_t heads, int64_t head_dim, const DecodePartial& partial, float* y,
                             int64_t y_head_bytes);

struct SoftmaxKernel {
  const char* name;
  Features needs;
  VisibleRangeFn* visible;
  WeighScoresFn* weigh;
  MergePartialFn* merge;
  FinishPartialFn* finish;
};

// The rows of softmax_kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const SoftmaxKernel> SoftmaxKernels();

}  // namespace ortolan
