// Cached keys of attention as 4-bit codes (product quantization; NoMAD-Attention, "Reorganizing Key Cache Memory
// Layout"), in a cache that grows a token at a time.
//
// A key of head_dim numbers is cut into S = head_dim / d_sub parts, its sub-quantizers; the code of a part is the
// number of the centroid nearest to it, of 16 that its sub-quantizer has.
//
//     codebook  float [S][16][d_sub], of one head of one layer
//     cache     u8 [tokens][row_bytes], of one head: a tensor [batch, kv_heads, tokens, row_bytes]
//
//     head_dim 16, 32, … 1024;  d_sub 1, 2 or 4;  row_bytes = S / 2;  quads = S / 4
//
// A block is 32 tokens, block_bytes = 32 row_bytes. Blocks that are full lie in the order in which kernels read them,
// four sub-quantizers (a quad) of 32 keys in 64 bytes, the key in the lane and its four codes side by side:
//
//     byte 64 quad + 4 k + j    low nibble: sub-quantizer 4 quad + j of key k;  high nibble: of key 16 + k;  k 0 … 15
//
// so that 32 bits hold the table indices whose entries vpdpbusd adds up. The tokens of the last block, as long as it is
// not full, lie one after another, row by row:
//
//     byte 4 w + j              low nibble: sub-quantizer 8 w + j;  high nibble: 8 w + 4 + j;  j 0 … 3
//     byte S / 2 - 2 + j        where S is no multiple of 8, of the last four: low S - 4 + j, high S - 2 + j;  j 0, 1
//
//                <-------- a full block: 32 row_bytes -------->  <------ tokens % 32 rows ------>
//     one head:  | quad 0 | quad 1 | … | quad S/4 - 1 |   …     | row | row | row |
//
// A cache of T tokens is T row_bytes bytes whatever T is, and those of its first T / 32 blocks never change again: a
// token is appended behind a copy of the cache as well as in a buffer that has room. Appending writes the row of a
// token, and once in 32 tokens it transposes a block in place: O(1) a token.
//
// Any bytes are a valid cache.
#pragma once

#include <cstdint>
#include <string>

namespace ortolan {

inline constexpr int64_t kCentroids = 16;
inline constexpr int64_t kKeyBlock = 32;  // tokens
inline constexpr int64_t kMaxHeadDim = 1024;

struct KeyCodeLayout {
  int64_t head_dim = 0;
  int64_t d_sub = 1;

  constexpr int64_t SubQuantizers() const { return head_dim / d_sub; }
  constexpr int64_t Quads() const { return SubQuantizers() / 4; }
  constexpr int64_t RowBytes() const { return SubQuantizers() / 2; }
  constexpr int64_t BlockBytes() const { return kKeyBlock * RowBytes(); }
  constexpr int64_t CodebookFloats() const { return kCentroids * head_dim; }
};

// Empty, or what is wrong with the sizes.
std::string ValidateKeyCodeLayout(const KeyCodeLayout& layout);

// The code of a sub-quantizer of a token, in a cache of `tokens` tokens.
int KeyCode(const KeyCodeLayout& layout, const uint8_t* cache, int64_t tokens, int64_t token, int64_t sub_quantizer);

}  // namespace ortolan
