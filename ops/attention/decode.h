// One token's attention over cached keys and values, compressed or not: the decode step of the query heads that share a
// head of the cache.
//
//     s[h, j] = log2(e) scale (q[h] . k[j])                     h < heads; in powers of two
//     partial: max[h] >= s[h, j], sum[h] = sum of 2^(s[h, j] - max[h]), y[h] = sum of 2^(s[h, j] - max[h]) v[j]
//
// over the tokens j of a range [begin, end). Partial results of any ranges, of different threads, of compressed and of
// exact keys, add up to that of all their tokens (merge, as in FlashDecoding); the attention's result is
// y / sum. The query's own token is in the cache already, so causality hides nothing; padding is
// what a range leaves out.
//
// Keys are float32 rows or codes (formats/key_code_cache.h), values float32 rows or int8 (formats/value_cache.h).
//
// Scores of codes are sums of table entries (NoMAD-Attention, algorithm 2). With b[s, c] centroid c of sub-quantizer s,
// S of them, and q_s the part of the query that meets it:
//
//     t[s, c]  = log2(e) scale (q_s . b[s, c])
//     step     = max over s of (max over c of t[s, c] - min over c of t[s, c]) / 255
//     table    = round((t[s, c] - min over c of t[s, c]) / step)          0 … 255
//     s[h, j]  = sum over s of min over c of t[s, c]  +  step * (sum over s of table[s, code of j])
//
// one step for all sub-quantizers of a query head, so that the sum is one of integers, and exact.
//
// Error of s against the exact product with the centroids, u = 2^-24, A = sum over s of the largest |t[s, c]|, of which
// each product of q_s . b counts by its magnitude:
//
//     e = S step (1/2 + 2^-12) + S 2^-100 + (2 S + 16) u A                codes
//     e = (head_dim + 8) u (sum over d of |log2(e) scale q_d k_d|)         float32 keys
//
// Error of y / sum against exact attention over the decoded keys and values, T the tokens, p the exact weights, whose
// sum is 1, E the largest e; while 2 E < 1:
//
//     |error of y| <= (2^(2 E) - 1 + (T + 32) 2^-22) sum over j of p[j] |v[j]|
//                     + 2^-11 max |v|, of float keys and values 2^-23 max |v|          tokens left out, see below
//                     + 2^-16 (1 + 2^-14) T max p max |v|                              int8 values only
//
// The tokens left out of a call weigh less than 2^-12 / (end - begin) of the heaviest one so far, or 2^-24 where keys
// and values are floats: less than what rounding the sum takes. int8 values may be multiplied by weights of 15 bits or
// more, in units of 1 / 32767 or less of the heaviest token times the largest scale of up to 128 tokens around.
//
// NaN and Inf: a query head with a t, or a range of t, that is not finite has a sum of NaN, and so y / sum is NaN
// (codes). Float32 keys follow IEEE 754: a score of -Inf weighs 0, one of +Inf or NaN makes the sum NaN. NaN and Inf
// among the values of tokens that weigh more than 0 and are not left out reach y. int8 values whose scale is below
// 2^-100 may count as 0. Other heads are not touched.
//
// Kernels allocate nothing and know no threads.
#pragma once

#include <cstdint>
#include <span>

#include "formats/key_code_cache.h"
#include "formats/value_cache.h"
#include "isa/features.h"

namespace ortolan {

// Of the tokens of a range: max[h] of the scores s[h, j], in powers of two, sum[h] of the weights 2^(s[h, j] - max[h]),
// y[h] of weights times values. Written whole, contiguous. The partial result of no tokens: the lowest float, 0 and 0.
struct DecodePartial {
  float* max = nullptr;  // [heads]
  float* sum = nullptr;  // [heads]
  float* y = nullptr;    // [heads][head_dim]
};

// A mask hides what it holds this or less for: what a score below 4e8 in magnitude then weighs is 0 by the formula too.
inline constexpr float kHidden = -1e9f;

struct VisibleRange {
  int64_t begin = 0;
  int64_t end = 0;    // begin if all are hidden
  bool plain = true;  // the mask is 0 in all of it; smaller than 2^-126 counts as 0
};

// What attention does with rows of scores beside products: which of them a mask leaves, their weights, and partial
// results, which add up.
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

struct DecodeAttentionArgs {
  int64_t heads = 1;         // that share the keys and values
  int64_t head_dim = 0;      // 16, 32, … kMaxHeadDim
  const float* q = nullptr;  // [heads][head_dim]
  int64_t q_head_bytes = 0;
  float scale = 1.0f;
  int64_t tokens = 0;  // in the caches
  // Keys: codes and their codebook, or floats, which may begin at a later token than 0.
  const uint8_t* key_codes = nullptr;
  int64_t d_sub = 1;
  const float* codebook = nullptr;
  const float* keys = nullptr;
  int64_t key_row_bytes = 0;
  int64_t first_key = 0;
  // Values: int8, or floats.
  const uint8_t* int8_values = nullptr;
  const float* values = nullptr;
  int64_t value_row_bytes = 0;

  constexpr KeyCodeLayout Layout() const { return {head_dim, d_sub}; }
};

// scratch: scratch_bytes, aligned to 64 bytes. 0 <= begin <= end <= args.tokens.
struct DecodeFunctions : SoftmaxFunctions {
  int64_t (*scratch_bytes)(int64_t heads, int64_t head_dim);
  void (*run)(const DecodeAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial, void* scratch);
  // The scores alone, [heads][end - begin].
  void (*scores)(const DecodeAttentionArgs& args, int64_t begin, int64_t end, float* scores, void* scratch);
};

struct DecodeAttentionKernel : DecodeFunctions {
  const char* name;
  Features needs;
};

// The rows of decode_kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const DecodeAttentionKernel> DecodeAttentionKernels();

// Scores below that of the heaviest token so far by more than this, plus log2 of the tokens of the call, may be left
// out.
inline constexpr float kNegligiblePowersOfTwo = 12;
inline constexpr float kNegligiblePowersOfTwoExact = 24;  // float keys and values

}  // namespace ortolan
