#include "formats/value_cache.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "formats/bf16.h"

namespace ortolan {
namespace {

constexpr float kLargest = 127.0f;
constexpr int64_t kScalesBytes = kValueBlock * kValueScaleBytes;

const float* RowAt(const float* from, int64_t bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(from) + bytes);
}

// Of a finite number of 0 or more.
uint16_t RoundUpToBf16(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

// A token's row. Written for the compiler to make vectors of.
void Quantize(int64_t head_dim, const float* values, uint8_t* row) {
  int32_t most_bits = 0;  // of |v|: the order of the numbers, then infinity, then NaN
  for (int64_t d = 0; d < head_dim; ++d) {
    most_bits = std::max(most_bits, std::bit_cast<int32_t>(values[d]) & 0x7fffffff);
  }
  const float most = std::bit_cast<float>(most_bits);
  const uint16_t bits =
      std::isfinite(most) ? RoundUpToBf16(most / kLargest) : RoundToBf16(std::numeric_limits<float>::quiet_NaN());
  std::memcpy(row, &bits, kValueScaleBytes);
  uint8_t* q = row + kValueScaleBytes;
  const float scale = Bf16ToFloat(bits);
  if (!(scale > 0)) {
    std::fill(q, q + head_dim, uint8_t{0});
    return;
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    // -127 … 127, but for a rounding. Adding 1.5 x 2^23 leaves the nearest integer, or the even one, in the low bits.
    q[d] = static_cast<uint8_t>(std::bit_cast<uint32_t>(values[d] / scale + 12582912.0f));
  }
}

void RowsToBlock(int64_t head_dim, const uint8_t* rows, uint8_t* block) {
  const int64_t row_bytes = ValueRowBytes(head_dim);
  for (int64_t t = 0; t < kValueBlock; ++t) {
    std::memcpy(block + t * kValueScaleBytes, rows + t * row_bytes, kValueScaleBytes);
  }
  uint8_t* to = block + kScalesBytes;
  for (int64_t t = 0; t < kValueBlock; t += 4) {
    const uint8_t* a = rows + t * row_bytes + kValueScaleBytes;
    const uint8_t* b = a + row_bytes;
    const uint8_t* c = b + row_bytes;
    const uint8_t* d = c + row_bytes;
    for (int64_t i = 0; i < head_dim; ++i, to += 4) {
      to[0] = a[i];
      to[1] = b[i];
      to[2] = c[i];
      to[3] = d[i];
    }
  }
}

float ScaleAt(const uint8_t* from) {
  uint16_t bits;
  std::memcpy(&bits, from, kValueScaleBytes);
  return Bf16ToFloat(bits);
}

}  // namespace

void AppendValues(int64_t head_dim, const float* values, int64_t row_bytes, int64_t count, int64_t tokens,
                  uint8_t* cache) {
  const int64_t cache_row = ValueRowBytes(head_dim);
  uint8_t rows[kValueBlock * ValueRowBytes(kMaxHeadDim)];
  while (count > 0) {  // up to the end of a block
    const int64_t before = tokens % kValueBlock;
    const int64_t added = std::min(count, kValueBlock - before);
    uint8_t* block = cache + (tokens - before) * cache_row;
    const bool full = before + added == kValueBlock;
    uint8_t* to = full ? rows : block;
    if (full) std::memcpy(rows, block, static_cast<size_t>(before * cache_row));
    for (int64_t i = 0; i < added; ++i) {
      Quantize(head_dim, RowAt(values, i * row_bytes), to + (before + i) * cache_row);
    }
    if (full) RowsToBlock(head_dim, rows, block);
    values = RowAt(values, added * row_bytes);
    count -= added;
    tokens += added;
  }
}

void DecodeValues(int64_t head_dim, const uint8_t* cache, int64_t tokens, int64_t begin, int64_t end, float* values,
                  int64_t row_bytes) {
  const int64_t cache_row = ValueRowBytes(head_dim);
  for (int64_t token = begin; token < end; ++token) {
    float* to = const_cast<float*>(RowAt(values, (token - begin) * row_bytes));
    const int64_t first = token / kValueBlock * kValueBlock;
    const bool full = first + kValueBlock <= tokens;
    const int64_t t = token - first;
    const uint8_t* block = cache + first * cache_row;
    const uint8_t* row = cache + token * cache_row;
    const uint8_t* q = full ? block + kScalesBytes + t / 4 * 4 * head_dim + t % 4 : row + kValueScaleBytes;
    const float scale = ScaleAt(full ? block + t * kValueScaleBytes : row);
    for (int64_t d = 0; d < head_dim; ++d) to[d] = scale * static_cast<float>(static_cast<int8_t>(q[full ? 4 * d : d]));
  }
}

}  // namespace ortolan
