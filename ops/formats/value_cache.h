// Cached attention values as int8 with one scale a token, in a cache that grows token by token.
//
//     v[token, d] = scale[token] q[token, d]          q -127 … 127, scale bfloat16
//
//     cache     u8 [tokens][row_bytes], for one head: a tensor [batch, kv_heads, tokens, row_bytes]
//     head_dim 16, 32, … 1024;  row_bytes = 2 + head_dim
//
// A block is 32 tokens. In full blocks, the values of four tokens (a quad) at the same d are adjacent, as vpdpbusd
// consumes them:
//
//     bytes 0 … 63                                scales, bfloat16 [32]
//     byte  64 + (t / 4 head_dim + d) 4 + t % 4   q of token t, dimension d;  t 0 … 31
//
// The tokens of an incomplete last block are stored row by row: scale, then q [head_dim]. As in
// formats/key_code_cache.h, a cache of T tokens always has T row_bytes bytes, and appending is O(1) a token.
//
// The scale is the token's largest |v| / 127, rounded up to bfloat16: |error of v| <= scale / 2, and scale <= (1 +
// 2^-7) max |v| / 127 if that is a normal float (at least 2^-126). A token with a NaN or Inf has the scale NaN, and all
// its values are NaN.
//
// Any bytes are memory-safe. Negative and infinite scales are never written; for them, results are undefined.
#pragma once

#include <cstdint>

#include "formats/key_code_cache.h"

namespace ortolan {

inline constexpr int64_t kValueBlock = 32;  // tokens
static_assert(kValueBlock == kKeyBlock);    // kernels process both together

inline constexpr int64_t kValueScaleBytes = 2;
inline constexpr int64_t ValueRowBytes(int64_t head_dim) { return kValueScaleBytes + head_dim; }

}  // namespace ortolan
