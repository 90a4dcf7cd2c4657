// Cached attention keys as 4-bit codes (product quantization), in a cache that grows token by token. Reference:
// NoMAD-Attention, "Reorganizing Key Cache Memory Layout".
//
// A key of head_dim values is divided into S = head_dim / d_sub parts, one for each sub-quantizer. The code of a part
// is the index of the nearest of the sub-quantizer's 16 centroids.
//
//     codebook  float [S][16][d_sub], for one head of one layer
//     cache     u8 [tokens][row_bytes], for one head: a tensor [batch, kv_heads, tokens, row_bytes]
//
//     head_dim 16, 32, … 1024;  d_sub 1, 2 or 4;  row_bytes = S / 2;  quads = S / 4
//
// A block is 32 tokens, block_bytes = 32 row_bytes. Full blocks are stored in the order in which kernels read them. 64
// bytes hold four sub-quantizers (a quad) of 32 keys: keys are lanes, and a lane's 32 bits hold the table indices whose
// entries one vpdpbusd adds:
//
//     byte 64 quad + 4 k + j    low nibble: sub-quantizer 4 quad + j of key k;  high nibble: of key 16 + k;  k 0 … 15
//
// The tokens of an incomplete last block are stored row by row:
//
//     byte 4 w + j              low nibble: sub-quantizer 8 w + j;  high nibble: 8 w + 4 + j;  j 0 … 3
//     byte S / 2 - 2 + j        if S is not a multiple of 8, for the last four: low S - 4 + j, high S - 2 + j;  j 0, 1
//
//                <-------- a full block: 32 row_bytes -------->  <------ tokens % 32 rows ------>
//     one head:  | quad 0 | quad 1 | … | quad S/4 - 1 |   …     | row | row | row |
//
// A cache of T tokens always has T row_bytes bytes, and full blocks never change: a token can be appended to a copy or
// in place. Appending writes one row and transposes a block every 32 tokens: O(1) a token.
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

// Returns an empty string if the sizes are valid, otherwise a message.
std::string ValidateKeyCodeLayout(const KeyCodeLayout& layout);

// Returns the code of a sub-quantizer of a token in a cache of `tokens` tokens.
int KeyCode(const KeyCodeLayout& layout, const uint8_t* cache, int64_t tokens, int64_t token, int64_t sub_quantizer);

}  // namespace ortolan
