// Operations on caches of keys and values (formats/key_code_cache.h, formats/value_cache.h) other than attention. All
// kernels give the same bits: each product and each sum is rounded separately.
#pragma once

#include <cstdint>
#include <span>

#include "formats/key_code_cache.h"
#include "formats/value_cache.h"
#include "isa/features.h"

namespace ortolan {

struct KvCacheFunctions {
  // Writes the codes [count][S], one a byte, of keys that are key_row_bytes apart. The code is the index of the nearest
  // centroid by the float32 sum of squared differences, in ascending order of dimensions. Ties go to the lowest index.
  // A part that contains a NaN, or whose squared distances all overflow float32, has code 0.
  void (*encode_keys)(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                      int64_t count, uint8_t* codes);

  // Converts `count` (1 … 32) rows to a full block; missing tokens get code 0. rows and block do not overlap.
  void (*key_rows_to_block)(const KeyCodeLayout& layout, const uint8_t* rows, int64_t count, uint8_t* block);

  // Writes the decoded keys of tokens begin … end-1 of a cache of `tokens` tokens.
  void (*decode_keys)(const KeyCodeLayout& layout, const float* codebook, const uint8_t* cache, int64_t tokens,
                      int64_t begin, int64_t end, float* keys, int64_t key_row_bytes);

  // Quantizes the values of a token to its row in an incomplete block.
  void (*encode_values)(int64_t head_dim, const float* values, uint8_t* row);

  // Converts 32 rows to a full block. rows and block do not overlap.
  void (*value_rows_to_block)(int64_t head_dim, const uint8_t* rows, uint8_t* block);

  // Writes the dequantized values of tokens begin … end-1 of a cache of `tokens` tokens.
  void (*decode_values)(int64_t head_dim, const uint8_t* cache, int64_t tokens, int64_t begin, int64_t end,
                        float* values, int64_t row_bytes);

  // Rotary position embedding of a row, with cos and sin [head_dim / 2] of its position. Each pair (x, y) of elements
  // (i, i + head_dim / 2), or (2 i, 2 i + 1) if interleaved, becomes (x cos - y sin, y cos + x sin). from and to do not
  // overlap.
  void (*rotate)(const float* from, const float* cos, const float* sin, int64_t head_dim, bool interleaved, float* to);
};

struct KvCacheKernel : KvCacheFunctions {
  const char* name;
  Features needs;
};

// The kernels of this build, best first; the last one runs on any CPU.
std::span<const KvCacheKernel> KvCacheKernels();

// Appends `count` keys, key_row_bytes apart, to a cache of `tokens` tokens. The buffer must be large enough.
void AppendKeys(const KvCacheKernel& kernel, const KeyCodeLayout& layout, const float* codebook, const float* keys,
                int64_t key_row_bytes, int64_t count, int64_t tokens, uint8_t* cache);

// Appends `count` rows of values, row_bytes apart, to a cache of `tokens` tokens. The buffer must be large enough.
void AppendValues(const KvCacheKernel& kernel, int64_t head_dim, const float* values, int64_t row_bytes, int64_t count,
                  int64_t tokens, uint8_t* cache);

}  // namespace ortolan
