// Scaled dot-product attention, exact (no approximation but rounding).
//
//     s[i, j] = scale (q[i] . k[j]) + mask[i, j]         i < queries, j < keys
//     y[i]    = sum over j of p[i, j] v[j],   p[i, j] = exp(s[i, j]) / sum over l of exp(s[i, l])
//
// for each of `heads` query heads, which share one head of keys and values. causal: the queries are the last of the
// keys, query i does not see the keys j > i + keys - queries (their s is -Inf).
//
// Error, with u = 2^-24, of the kernels that multiply float32 (precision 32), against the exact formula; dots is the
// sum of |q[i, d] k[j, d]|:
//
//     e[j] = (head_dim + 4) u |scale| dots[j]  +  4 u (|s[j]| + |max over l of s[l]|)
//     |error of y| <= 2 sum over j of p[j] |v[j]| (e[j] + e' + (keys + 16) u)  + keys 2^-125 max |v|,
//         e' = sum over j of p[j] e[j]
//
// while all e[j] that p[j] does not make negligible are below 1/2. Kernels of precision 16 round scale q, k, p and v to
// bfloat16 and add up in float32: e[j] grows by 2^-7 |scale| dots[j], the term (keys + 16) u by 2^-7; where they have
// an order of their own (own_order), e[j] grows by (head_dim / 32) u |mask[j]| besides. Weights below 2^-126 of a row's
// largest may count as zero.
//
// A mask of -Inf takes a key out: its p is 0. In a row where all s are -Inf, y is NaN; where they all are the lowest
// float (-3.4e38) or the largest, which absorb the products, y is the mean of v: as ONNX Softmax has it. A NaN in a row
// of s, or a +Inf, makes the row of y NaN. With zero_hidden_rows, rows whose p are NaN give zeros instead, as PyTorch
// has it for masks of truth values. Inf and NaN in v reach y by IEEE 754's rules, also where p is 0; those of keys that
// causal hides may or may not. |s| above 2^126 of which the mask is no such float may count as Inf.
//
// A row's result depends on nothing but its own q and mask, k, v and the rest of the arguments, and all kernels of
// precision 16 but those of an order of their own (own_order) give the same bits (any NaN counts as the same, and only
// finite v are promised it). Numbers are rounded to nearest even, and denormal floats count as zero wherever they are
// read or made.
//
//   - Inputs that are bf16: scale log2(e) q (the factor and the product rounded to float32 before), k, v and weights.
//   - s in powers of two: for each pair of d, ascending, first the odd one's product is added, then the even one's,
//     each fused, from +0 on; a zero follows an odd head_dim. Then the mask times log2(e).
//   - Keys come in blocks of 128. A block's first weights are 2^(s - m), m the largest s so far; the sum of weights, as
//     floats, and y so far are multiplied by 2^(m before - m); weights are added to the sum key by key; and to y are
//     added, for each pair of keys, first the odd one's product, then the even one's, as above.
//   - 2^s: n = s to the nearest integer, f = s - n; the polynomial of simd/vectors.h at f by fused steps from its
//     highest power down, times 2^n.
//   - y times the rounded 1 / sum.
//
// In AMX tiles, the one order of its own that there is, products add up by instructions for 32 of them: the even ones
// and the odd ones, ascending and fused, from +0 on, then both sums, and that is added to what was there. s begins with
// the mask times log2(e) and takes 32 d at a time, zeros behind head_dim; y takes 32 keys of a block at a time, weights
// and values of zero behind the last. All else is as above.
//
// A kernel works on a range of rows, row r being query r % queries of head r / queries. It allocates nothing and knows
// no threads.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

// Of one head of keys and values, of one batch. Bytes are those from one to the next.
struct AttentionArgs {
  int64_t heads = 1;
  int64_t queries = 0;
  int64_t keys = 0;  // 1 … 2^24; at least `queries` if causal
  int64_t head_dim = 0;
  const float* q = nullptr;  // [heads][queries][head_dim]
  int64_t q_head_bytes = 0;
  int64_t q_row_bytes = 0;
  const float* k = nullptr;  // [keys][head_dim]
  int64_t k_row_bytes = 0;
  const float* v = nullptr;  // [keys][head_dim]
  int64_t v_row_bytes = 0;
  const float* mask = nullptr;   // [heads][queries][keys], or null: none
  int64_t mask_head_stride = 0;  // these three in elements; 0 where it is broadcast
  int64_t mask_query_stride = 0;
  int64_t mask_key_stride = 0;  // 0 or 1
  float scale = 1.0f;
  bool causal = false;
  bool zero_hidden_rows = false;
  float* y = nullptr;  // [heads][queries][head_dim]; overlaps nothing
  int64_t y_head_bytes = 0;
  int64_t y_row_bytes = 0;
};

// The rows of one call: enough to make up for copying each key and value.
inline constexpr int64_t kAttentionRows = 128;

struct AttentionFunctions {
  int64_t (*scratch_bytes)(int64_t head_dim);
  // Computes y for rows row_begin … row_end-1, at most kAttentionRows. scratch: scratch_bytes, aligned to 64 bytes.
  void (*run)(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch);
};

struct AttentionKernel : AttentionFunctions {
  const char* name;
  Features needs;
  int precision;           // of the products: 32 or 16, see above
  bool own_order = false;  // of sums: not the bits of the others
};

// The rows of attention_tiles_kernels.inc, attention_bf16_kernels.inc and attention_kernels.inc that this build has,
// best first for each precision; the last one of each runs on any CPU.
std::span<const AttentionKernel> AttentionKernels();

// The fastest of at least this precision for this CPU and the features that kernels may use. any_order: with
// precision 16 the fastest of all, which need not have the bits that another CPU's kernel has: in tiles, by products of
// pairs where the CPU is fast at them, else of precision 32.
const AttentionKernel& FindAttentionKernel(int precision, bool any_order);

}  // namespace ortolan
