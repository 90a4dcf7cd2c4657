// Attention of one token over cached keys and values, compressed or not: the decode step for the query heads that share
// one head of the cache.
//
//     s[h, j] = log2(e) capped(scale (q[h] . k[j]))             h < heads; in powers of two; capped: attention.h
//     partial: max[h] >= s[h, j], sum[h] = sum of 2^(s[h, j] - max[h]), y[h] = sum of 2^(s[h, j] - max[h]) v[j]
//
// for the tokens j of a range [begin, end). `merge` combines partial results of any ranges, compressed or exact, as in
// FlashDecoding; the result of attention is y / sum. The cache already holds the query's own token, so no causal mask
// is needed. The range excludes padding.
//
// Keys are float32 rows or codes (formats/key_code_cache.h), values float32 rows or int8 (formats/value_cache.h).
//
// Scores of codes are sums of table entries (Reference: NoMAD-Attention, algorithm 2). With S sub-quantizers, b[s, c]
// centroid c of sub-quantizer s, and q_s the part of the query for sub-quantizer s:
//
//     t[s, c]  = log2(e) scale (q_s . b[s, c])
//     step     = max over s of (max over c of t[s, c] - min over c of t[s, c]) / 255
//     table    = round((t[s, c] - min over c of t[s, c]) / step)          0 … 255
//     s[h, j]  = sum over s of min over c of t[s, c]  +  step * (sum over s of table[s, code of j])
//
// All sub-quantizers of a query head share one step, so the last sum is a sum of integers, which is exact.
//
// Error of s against the exact product with the centroids, with u = 2^-24 and A = sum over s of the largest |t[s, c]|,
// computed with the magnitudes of the products in q_s . b:
//
//     e = S step (1/2 + 2^-12) + S 2^-100 + (2 S + 16) u A                codes
//     e = (head_dim + 8) u (sum over d of |log2(e) scale q_d k_d|)         float32 keys
//
// plus 4 u log2(e) softcap if scores are capped. The sums of table entries are capped after they are added.
//
// Error of y / sum against exact attention over the decoded keys and values, with T tokens, exact weights p (their sum
// is 1) and E the largest e, if 2 E < 1:
//
//     |error of y| <= (2^(2 E) - 1 + (T + 32) 2^-22) sum over j of p[j] |v[j]|
//                     + 2^-11 max |v|, for float keys and values 2^-23 max |v|         skipped tokens, see below
//                     + 2^-16 (1 + 2^-14) T max p max |v|                              int8 values only
//
// A call may skip tokens whose weight is below 2^-12 / (end - begin) of the heaviest token so far (2^-24 if keys and
// values are floats). Weights of int8 values may be quantized to 15 bits or more. Their unit is at most 1 / 32767 of
// the heaviest token's weight times the largest scale among up to 128 neighboring tokens.
//
// NaN and Inf: for codes, a query head with a t or a range of t that is not finite gets a NaN sum. For float32 keys, a
// score of -Inf has weight 0, a score of +Inf or NaN makes the sum NaN. NaN and Inf in values reach y if their token
// has a weight above 0 and is not skipped. int8 values with a scale below 2^-100 may be treated as 0. Other heads are
// unaffected.
//
// Kernels neither allocate nor create threads.
#pragma once

#include <cstdint>
#include <span>

#include "formats/key_code_cache.h"
#include "formats/value_cache.h"
#include "isa/features.h"

namespace ortolan {

// Partial result of a range of tokens, as above. The arrays are contiguous and fully overwritten. Without tokens max is
// the lowest float, sum and y are 0.
struct DecodePartial {
  float* max = nullptr;  // [heads]
  float* sum = nullptr;  // [heads]
  float* y = nullptr;    // [heads][head_dim]
};

// Mask values up to this hide their token: if |score| < 4e8, its weight is 0 by the formula too.
inline constexpr float kHidden = -1e9f;

struct VisibleRange {
  int64_t begin = 0;
  int64_t end = 0;    // equals begin if all tokens are hidden
  bool plain = true;  // the mask is 0 in the range (below 2^-126 counts as 0)
};

struct SoftmaxFunctions {
  // Returns the range from the first to the last visible token of a mask row.
  VisibleRange (*visible)(const float* mask, int64_t count);

  // Replaces the scores s[i], i < count, by weights 2^(capped(factor s[i]) - maximum), where softcap 0 caps nothing;
  // writes the maximum and the sum of the weights. count >= 1. The buffer is as long as count rounded up to 16; what
  // follows `count` is overwritten. A NaN score makes the sum NaN.
  void (*weigh)(float* scores, int64_t count, float factor, float softcap, float* maximum, float* sum);

  void (*merge)(int64_t heads, int64_t head_dim, const DecodePartial& from, const DecodePartial& into);

  // y = partial.y / partial.sum, rows y_head_bytes apart. y may be partial.y.
  void (*finish)(int64_t heads, int64_t head_dim, const DecodePartial& partial, float* y, int64_t y_head_bytes);
};

struct DecodeAttentionArgs {
  int64_t heads = 1;         // query heads that share the keys and values
  int64_t head_dim = 0;      // 16, 32, … kMaxHeadDim
  const float* q = nullptr;  // [heads][head_dim]
  int64_t q_head_bytes = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  int64_t tokens = 0;  // in the caches
  // Keys are codes with a codebook, or floats whose first row is token first_key.
  const uint8_t* key_codes = nullptr;
  int64_t d_sub = 1;
  const float* codebook = nullptr;
  const float* keys = nullptr;
  int64_t key_row_bytes = 0;
  int64_t first_key = 0;
  // Values are int8 rows or floats.
  const uint8_t* int8_values = nullptr;
  const float* values = nullptr;
  int64_t value_row_bytes = 0;

  constexpr KeyCodeLayout Layout() const { return {head_dim, d_sub}; }
};

// scratch: scratch_bytes, aligned to 64 bytes. 0 <= begin <= end <= args.tokens.
struct DecodeFunctions : SoftmaxFunctions {
  int64_t (*scratch_bytes)(int64_t heads, int64_t head_dim);
  void (*run)(const DecodeAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial, void* scratch);
  // Computes only the scores, [heads][end - begin].
  void (*scores)(const DecodeAttentionArgs& args, int64_t begin, int64_t end, float* scores, void* scratch);
};

struct DecodeAttentionKernel : DecodeFunctions {
  const char* name;
  Features needs;
};

// The kernels of this build, best first; the last one runs on any CPU.
std::span<const DecodeAttentionKernel> DecodeAttentionKernels();

// Tokens may be skipped if their score is below the largest so far by more than this plus log2 of the call's tokens.
inline constexpr float kNegligiblePowersOfTwo = 12;
inline constexpr float kNegligiblePowersOfTwoExact = 24;  // float keys and values

}  // namespace ortolan
