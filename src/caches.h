// Caches of key codes and int8 values, as arrays; shared by ortolan._native and ortolan._testing.
#pragma once

#include "arrays.h"
#include "attention/kv_cache/kv_cache.h"

namespace ortolan {

// Checks the shape [S, 16, d_sub] of a codebook and returns its layout.
inline KeyCodeLayout CodebookLayout(int64_t sub_quantizers, int64_t centroids, int64_t d_sub) {
  const KeyCodeLayout layout{sub_quantizers * d_sub, d_sub};
  const std::string problem = ValidateKeyCodeLayout(layout);
  Require(centroids == kCentroids && problem.empty(), "codebook is ", sub_quantizers, " x ", centroids, " x ", d_sub,
          ", expected [head_dim / d_sub, 16, d_sub]; ", problem);
  return layout;
}

inline KeyCodeLayout CodebookLayout(const CastArray<float>& codebook) {
  Require(codebook.ndim() == 3, "codebook must be [head_dim / d_sub, 16, d_sub]");
  return CodebookLayout(codebook.shape(0), codebook.shape(1), codebook.shape(2));
}

inline void CheckCache(const py::array_t<uint8_t>& cache, int64_t row_bytes, int64_t tokens) {
  Require(cache.ndim() == 2 && cache.shape(1) == row_bytes && tokens >= 0 && tokens <= cache.shape(0),
          "cache must be uint8 [at least ", tokens, " tokens, ", row_bytes, "], and tokens at least 0");
}

// Checks rows to be appended and returns their number.
inline int64_t CheckRows(const CastArray<float>& rows, int64_t head_dim, int64_t room) {
  Require(rows.ndim() == 2 && rows.shape(1) == head_dim && rows.shape(0) <= room, "rows must be [count, ", head_dim,
          "] with a count of at most ", room, ", the room in the cache");
  return rows.shape(0);
}

inline void AppendKeysTo(const KvCacheKernel& kernel, Array<uint8_t>& cache, int64_t tokens,
                         const CastArray<float>& keys, const CastArray<float>& codebook) {
  const KeyCodeLayout layout = CodebookLayout(codebook);
  CheckCache(cache, layout.RowBytes(), tokens);
  const int64_t count = CheckRows(keys, layout.head_dim, cache.shape(0) - tokens);
  AppendKeys(kernel, layout, codebook.data(), keys.data(), layout.head_dim * kFloat, count, tokens,
             cache.mutable_data());
}

// Returns the decoded keys of tokens begin … end-1.
inline Array<float> DecodedKeys(const KvCacheKernel& kernel, const Array<uint8_t>& cache, int64_t tokens,
                                const CastArray<float>& codebook, int64_t begin, int64_t end) {
  const KeyCodeLayout layout = CodebookLayout(codebook);
  CheckCache(cache, layout.RowBytes(), tokens);
  Require(0 <= begin && begin <= end && end <= tokens, "expected 0 <= begin <= end <= ", tokens);
  Array<float> keys({end - begin, layout.head_dim});
  kernel.decode_keys(layout, codebook.data(), cache.data(), tokens, begin, end, keys.mutable_data(),
                     layout.head_dim * kFloat);
  return keys;
}

// Returns the head size of a cache [tokens, 2 + head_dim].
inline int64_t ValueHeadDim(const py::array_t<uint8_t>& cache) {
  const int64_t head_dim = cache.ndim() == 2 ? cache.shape(1) - kValueScaleBytes : 0;
  const std::string problem = ValidateKeyCodeLayout({head_dim, 1});
  Require(problem.empty(), "cache must be uint8 [tokens, 2 + head_dim]; ", problem);
  return head_dim;
}

inline void AppendValuesTo(const KvCacheKernel& kernel, Array<uint8_t>& cache, int64_t tokens,
                           const CastArray<float>& values) {
  const int64_t head_dim = ValueHeadDim(cache);
  CheckCache(cache, ValueRowBytes(head_dim), tokens);
  const int64_t count = CheckRows(values, head_dim, cache.shape(0) - tokens);
  AppendValues(kernel, head_dim, values.data(), head_dim * kFloat, count, tokens, cache.mutable_data());
}

inline Array<float> DecodedValues(const KvCacheKernel& kernel, const Array<uint8_t>& cache, int64_t tokens,
                                  int64_t begin, int64_t end) {
  const int64_t head_dim = ValueHeadDim(cache);
  CheckCache(cache, ValueRowBytes(head_dim), tokens);
  Require(0 <= begin && begin <= end && end <= tokens, "expected 0 <= begin <= end <= ", tokens);
  Array<float> values({end - begin, head_dim});
  kernel.decode_values(head_dim, cache.data(), tokens, begin, end, values.mutable_data(), head_dim * kFloat);
  return values;
}

}  // namespace ortolan
