// Cached values of attention as int8 numbers with one scale a token, in a cache that grows a token at a time.
//
//     v[token, d] = scale[token] q[token, d]          q -127 … 127, scale bfloat16
//
//     cache     u8 [tokens][row_bytes], of one head: a tensor [batch, kv_heads, tokens, row_bytes]
//     head_dim 16, 32, … 1024;  row_bytes = 2 + head_dim
//
// A block is 32 tokens. In blocks that are full, four tokens (a quad) of a number lie side by side, as vpdpbusd takes
// them:
//
//     bytes 0 … 63                                scales, bfloat16 [32]
//     byte  64 + (t / 4 head_dim + d) 4 + t % 4   q of token t, number d;  t 0 … 31
//
// The tokens of the last block, as long as it is not full, lie one after another: scale, then q [head_dim]. As in
// formats/key_code_cache.h, a cache of T tokens is T row_bytes bytes whatever T is, and appending is O(1) a token.
//
// The scale is the largest |v| of the token / 127, rounded up to bfloat16: |error of v| <= scale / 2, and scale <=
// (1 + 2^-7) max |v| / 127 where that is a normal number (2^-126 and more). A token that holds a NaN or an infinity has
// the scale NaN, and all its numbers are NaN.
//
// Any bytes are memory-safe; scales that are negative or infinite are not written, and what kernels make of them is not
// defined.
#pragma once

#include <cstdint>

#include "formats/key_code_cache.h"

namespace ortolan {

inline constexpr int64_t kValueBlock = 32;  // tokens
static_assert(kValueBlock == kKeyBlock);    // kernels go through both together

inline constexpr int64_t kValueScaleBytes = 2;
inline constexpr int64_t ValueRowBytes(int64_t head_dim) { return kValueScaleBytes + head_dim; }

}  // namespace ortolan
