// Exact scaled dot-product attention: no approximation other than rounding.
//
//     s[i, j] = capped(scale (q[i] . k[j])) + mask[i, j]         i < queries, j < keys
//     y[i]    = sum over j of p[i, j] v[j],   p[i, j] = exp(s[i, j]) / sum over l of exp(s[i, l])
//
// for each of `heads` query heads, which share one head of keys and values. capped(x) = softcap tanh(x / softcap), or x
// if softcap is 0 (Gemma 2: Improving Open Language Models at a Practical Size, section 2). With `causal`, the queries
// are the last `queries` positions of the keys, and query i does not see keys j > i + keys - queries (their s is -Inf).
// With a window, which needs `causal`, it does not see keys j <= i + keys - queries - window either. With sinks, the
// sum over l has one more term, exp(sinks[h]) of head h (Reference: gpt-oss).
//
// Error bound of the float32 kernels (precision 32), with u = 2^-24 and dots[j] the sum of |q[i, d] k[j, d]| over d:
//
//     e[j] = (head_dim + 4) u |scale| dots[j]  +  4 u (|s[j]| + |max over l of s[l]|)
//     |error of y| <= 2 sum over j of p[j] |v[j]| (e[j] + e' + (keys + 16) u)  + keys 2^-125 max |v|,
//         e' = sum over j of p[j] e[j]
//
// provided that e[j] < 1/2 wherever p[j] is not negligible. Kernels of precision 16 round scale q, k, p and v to
// bfloat16 and accumulate in float32: e[j] grows by 2^-7 |scale| dots[j], and the term (keys + 16) u by 2^-7. Kernels
// with own_order also add (head_dim / 32) u |mask[j]| to e[j]. A softcap adds 4 u softcap to e[j]. Weights below 2^-126
// of a row's largest weight may be treated as zero.
//
// A mask of -Inf removes a key: its p is 0. If all s of a row are -Inf, y is NaN. If they are all the lowest float
// (-3.4e38) or all the largest, which absorb the products, y is the mean of v, as in ONNX Softmax. A NaN or +Inf among
// the s of a row makes its y NaN. With zero_hidden_rows, rows whose p are NaN give zeros instead, as PyTorch does for
// boolean masks. With sinks, y of a row whose s are all -Inf is 0. Inf and NaN in v propagate to y even where p is 0;
// in keys hidden by `causal` or the window they may or may not. |s| above 2^126 may be treated as Inf, unless the mask
// is the lowest or the largest float.
//
// A row's result depends only on its own q and mask, on k and v, and on the other arguments. All kernels of precision
// 16 except those with own_order give the same bits if v is finite (any NaN equals any other). They round to nearest
// even, read and write denormal floats as zero, and compute:
//
//   - bf16 values: scale log2(e) q (the factor and the product are first rounded to float32), k, v and the weights.
//   - s, in powers of two: a chain of fused multiply-adds from +0, by pairs of d in ascending order, the odd d of a
//     pair before the even one; an odd head_dim is padded with a zero. Then it is capped as in softcap.h, and the mask
//     times log2(e) is added.
//   - Keys in blocks of 128, from key 0 on. The weights of a block are 2^(s - m), with m the largest s so far; a sink
//   is
//     the first. Before they are added, the sum of weights and y are multiplied by 2^(previous m - m). Weights are
//     added to the sum one by one, before they are rounded to bf16. Products with v are added to y by pairs of keys,
//     the odd key first, fused.
//   - 2^s: with n = s rounded to the nearest integer and f = s - n, the polynomial of simd/vectors.h at f (fused, from
//     its highest power down), times 2^n.
//   - y is multiplied by 1 / sum, rounded.
//
// The AMX tile kernel is the only one with own_order. Its instructions add 32 products at once: a fused, ascending sum
// of the even ones and one of the odd ones, each from +0, are added to each other and then to the accumulator. s starts
// with the mask times log2(e) and consumes 32 d at a time, zero-padded beyond head_dim. y consumes 32 keys of a block
// at a time, with zero weights and values beyond the last key. The rest is as above.
//
// A kernel works on a range of rows; row r is query r % queries of head r / queries. Kernels neither allocate nor
// create threads.
#pragma once

#include <cstdint>
#include <span>

#include "isa/features.h"

namespace ortolan {

// Arguments for one head of keys and values of one sequence. `*_bytes` are strides in bytes.
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
  const float* mask = nullptr;   // [heads][queries][keys], or null
  int64_t mask_head_stride = 0;  // strides in elements; 0 for broadcast axes
  int64_t mask_query_stride = 0;
  int64_t mask_key_stride = 0;  // 0 or 1
  float scale = 1.0f;
  float softcap = 0.0f;  // 0: scores are not capped
  bool causal = false;
  bool zero_hidden_rows = false;
  int64_t window = 0;            // number of latest keys that a query sees, its own included; 0: all
  const float* sinks = nullptr;  // [heads]; null: none
  float* y = nullptr;            // [heads][queries][head_dim]; no overlap with other arguments
  int64_t y_head_bytes = 0;
  int64_t y_row_bytes = 0;
};

// Range of softcap, unless it is 0.
inline constexpr float kLeastSoftcap = 0x1p-10f, kMostSoftcap = 0x1p20f;
inline bool IsSoftcap(double softcap) { return softcap == 0 || (softcap >= kLeastSoftcap && softcap <= kMostSoftcap); }

// Rows of one call: enough to amortize copying each key and value.
inline constexpr int64_t kAttentionRows = 128;

struct AttentionFunctions {
  int64_t (*scratch_bytes)(int64_t head_dim);
  // Computes y for rows row_begin … row_end-1, at most kAttentionRows. scratch: scratch_bytes(head_dim), aligned to 64.
  void (*run)(const AttentionArgs& args, int64_t row_begin, int64_t row_end, void* scratch);
};

struct AttentionKernel : AttentionFunctions {
  const char* name;
  Features needs;
  int precision;           // 32 or 16, see above
  bool own_order = false;  // sums in its own order, so bits differ from the other kernels
};

// The kernels of this build: first all of precision 16, then of precision 32, best first. The last one of each
// precision runs on any CPU.
std::span<const AttentionKernel> AttentionKernels();

// Returns the fastest kernel of at least this precision for this CPU and the enabled features. Precision 16 takes the
// AMX kernel (own_order) if available, else bf16 dot products if the CPU runs them fast, else precision 32.
// reproducible: precision 16 always rounds to bf16 and gives the same bits on every CPU; precision 32 is not affected.
const AttentionKernel& FindAttentionKernel(int precision, bool reproducible);

}  // namespace ortolan
