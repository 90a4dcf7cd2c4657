// Attention over a paged cache: queries of one sequence, for the query heads that share one head of keys and values.
//
//     s[t, h, j] = log2(e) capped(scale (q[t, h] . k[j]))       in powers of two; capped: attention.h
//     partial    = max, sum and y of 2^(s - max) as in decode.h, for the visible keys j of a range [begin, end)
//
// Token t is at `position` + t. It sees key j if position + t - window < j <= position + t; window 0 is unlimited. Keys
// and values are in blocks of kBlockTokens tokens; block i of the sequence is block blocks[i] of the pools. They are
// bfloat16, or int8 with a float32 scale for each token and head; everything else is float32:
//
//     bfloat16   keys          [block][kv_heads][head_dim][kBlockTokens]    a vector holds one dimension of keys
//                values        [block][kv_heads][kBlockTokens][head_dim]
//     int8       keys          [block][kv_heads][head_dim / 4][kBlockTokens][4]    operands of int8 dot products
//                values        [block][kv_heads][kBlockTokens][head_dim]
//                both scales   [block][kv_heads][kBlockTokens]
//
// int8(x): scale m / 127 and bytes x (127 / m) rounded to nearest even, m the largest |x|. If m < 2^-100, the bytes are
// 0; if x has Inf or NaN, the bytes are 0 and the scale is NaN.
//
// With sinks, each head has one more key, with score log2(e) sinks[h] and value 0; the part with
// the first key that a row sees adds it.
//
// A row's result has the same bits whatever the other tokens and heads of the call are, and on every CPU:
//
//   - s: a chain of fused multiply-adds from +0, by ascending d, of q (times scale log2(e), rounded) and k. With int8
//     keys, int8 of that q is taken, and s is the exact dot product of bytes times (scale of q times scale of k). Then
//     s is capped.
//   - Keys in tiles of kPagedTile, counted from key 0. Hidden keys do not count. The weights of a tile are
//     2^(s - m), with m the largest s so far. If m grew, y and the sums are first multiplied by 2^(previous m - m).
//   - Weights are added to sum j % 16. At the end, sums i and i + 8 are added, then i and i + 4, i + 2, i + 1.
//   - y: fused multiply-adds of the weights and v, by ascending j. Weights of int8 values are first multiplied by the
//     scale of v, after they were added to a sum.
//
// Error of y / sum: as for float32 keys and values in decode.h, without its second term. It is relative to the stored
// keys and values and, with int8, to the rounded q. Inf and NaN in keys and values reach only the rows that see them.
//
// Kernels neither allocate nor create threads.
#pragma once

#include <cstdint>
#include <span>

#include "attention/decode.h"
#include "isa/features.h"

namespace ortolan {

inline constexpr int64_t kBlockTokens = 16;
inline constexpr int64_t kPagedTile = 64;          // keys
inline constexpr int64_t kMostPagedHeadDim = 512;  // multiples of 16

// Pool of keys or values, from block 0 of one head on.
struct PagedPool {
  const void* blocks = nullptr;
  int64_t block_bytes = 0;        // from a block to the next one
  const float* scales = nullptr;  // null: bfloat16
  int64_t scales_bytes = 0;       // from a block to the next one
};

struct PagedAttentionArgs {
  int64_t heads = 1;  // query heads that share the keys and values
  int64_t head_dim = 0;
  int64_t tokens = 0;
  int64_t position = 0;
  const float* q = nullptr;  // [tokens][heads][head_dim]
  int64_t q_token_bytes = 0;
  int64_t q_head_bytes = 0;
  const int64_t* blocks = nullptr;
  PagedPool keys;
  PagedPool values;
  // The first blocks of the next call, which the kernel prefetches. next_count 0: there is no next call.
  const int64_t* next_blocks = nullptr;
  int64_t next_count = 0;
  PagedPool next_keys;
  PagedPool next_values;
  int64_t window = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  const float* sinks = nullptr;  // [heads]; null: none
};

struct PagedAttentionFunctions {
  // int8(x) of `count` values, a multiple of 16: writes the bytes and returns the scale.
  float (*quantize)(const float* x, int64_t count, int8_t* bytes);
  int64_t (*scratch_bytes)(int64_t rows, int64_t head_dim);
  // Rows of the partial result: token by token, then by head. begin is a multiple of kPagedTile. scratch:
  // scratch_bytes(tokens heads, head_dim), aligned to 64.
  void (*run)(const PagedAttentionArgs& args, int64_t begin, int64_t end, const DecodePartial& partial, void* scratch);
};

struct PagedAttentionKernel : PagedAttentionFunctions {
  const char* name;
  Features needs;
};

// The kernels of this build, best first; the last one runs on any CPU.
std::span<const PagedAttentionKernel> PagedAttentionKernels();

}  // namespace ortolan
