// What is done with the caches of keys and values beside attention itself. formats/key_code_cache.h and value_cache.h
// say how they are laid out. All kernels give the same bytes and the same bits: products and sums are rounded one by
// one.
#pragma once

#include <cstdint>
#include <span>

#include "formats/key_code_cache.h"
#include "formats/value_cache.h"
#include "isa/features.h"

namespace ortolan {

struct KvCacheFunctions {
  // Writes codes [count][S], one a byte, of keys that are key_row_bytes apart: the nearest centroid by (float32) sum of
  // squared differences, each product and each sum rounded, added from the first number of the part to the last; of
  // equal ones the first. A part with a NaN, or so far from all centroids that float32 does not hold the squares, has
  // code 0.
  void (*encode_keys)(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                      int64_t count, uint8_t* codes);

  // Writes `count` (1 … 32) rows as a full block; the codes of the missing tokens are 0. The two do not overlap.
  void (*key_rows_to_block)(const KeyCodeLayout& layout, const uint8_t* rows, int64_t count, uint8_t* block);

  // Writes the centroids of tokens begin … end-1 of a cache of `tokens` tokens, rows key_row_bytes apart.
  void (*decode_keys)(const KeyCodeLayout& layout, const float* codebook, const uint8_t* cache, int64_t tokens,
                      int64_t begin, int64_t end, float* keys, int64_t key_row_bytes);

  // Writes the row of a token as it lies in the last block.
  void (*encode_values)(int64_t head_dim, const float* values, uint8_t* row);

  // Writes 32 rows as a full block. The two do not overlap.
  void (*value_rows_to_block)(int64_t head_dim, const uint8_t* rows, uint8_t* block);

  // Writes the values of tokens begin … end-1 of a cache of `tokens` tokens, rows row_bytes apart.
  void (*decode_values)(int64_t head_dim, const uint8_t* cache, int64_t tokens, int64_t begin, int64_t end,
                        float* values, int64_t row_bytes);

  // Rotary embedding of a row at the position of cos and sin [head_dim / 2]: of the pairs (i, i + head_dim / 2), or
  // (2 i, 2 i + 1) if interleaved, (x, y) becomes (x cos - y sin, y cos + x sin). The rows do not overlap.
  void (*rotate)(const float* from, const float* cos, const float* sin, int64_t head_dim, bool interleaved, float* to);
};

struct KvCacheKernel : KvCacheFunctions {
  const char* name;
  Features needs;
};

// The rows of kernels.inc that this build has, best first; the last one runs on any CPU.
std::span<const KvCacheKernel> KvCacheKernels();

// Appends `count` keys, key_row_bytes apart, to a cache of `tokens` tokens, whose buffer has room for them.
void AppendKeys(const KvCacheKernel& kernel, const KeyCodeLayout& layout, const float* codebook, const float* keys,
                int64_t key_row_bytes, int64_t count, int64_t tokens, uint8_t* cache);

// The same of rows of values, row_bytes apart.
void AppendValues(const KvCacheKernel& kernel, int64_t head_dim, const float* values, int64_t row_bytes, int64_t count,
                  int64_t tokens, uint8_t* cache);

}  // namespace ortolan
