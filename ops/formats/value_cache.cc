#include "formats/value_cache.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "support/bf16.h"

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

// A token's row.
void Quantize(int64_t head_dim, const float* values, uint8_t* row) {
  float most = 0;
  bool finite = true;
  for (int64_t d = 0; d < head_dim; ++d) {
    most = std::max(most, std::fabs(values[d]));
    finite &= std::isfinite(values[d]);
  }
  const uint16_t bits = finite ? RoundUpToBf16(most / kLargest) : RoundToBf16(std::numeric_limits<float>::quiet_NaN());
  std::memcpy(row, &bits, kValueScaleBytes);
  uint8_t* q = row + kValueScaleBytes;
  const float scale = Bf16ToFloat(bits);
  if (!(scale > 0)) {
    std::fill(q, q + head_dim, uint8_t{0});
    return;
  }
  for (int64_t d = 0; d < head_dim; ++d) {
    const float units = std::clamp(values[d] / scale, -kLargest, kLargest);
    // Adding 1.5 x 2^23 leaves the integer, rounded to nearest even, in the low bits.
    q[d] = static_cast<uint8_t>(std::bit_cast<uint32_t>(units + 12582912.0f));
  }
}

void RowsToBlock(int64_t head_dim, const uint8_t* rows, uint8_t* block) {
  for (int64_t t = 0; t < kValueBlock; ++t) {
    const uint8_t* row = rows + t * ValueRowBytes(head_dim);
    std::memcpy(block + t * kValueScaleBytes, row, kValueScaleBytes);
    uint8_t* to = block + kScalesBytes + t / 4 * 4 * head_dim + t % 4;
    for (int64_t d = 0; d < head_dim; ++d) to[4 * d] = row[kValueScaleBytes + d];
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
  for (int64_t i = 0; i < count; ++i) {
    const int64_t end = tokens + i + 1;
    Quantize(head_dim, RowAt(values, i * row_bytes), cache + (end - 1) * cache_row);
    if (end % kValueBlock != 0) continue;
    uint8_t rows[kValueBlock * ValueRowBytes(kMaxHeadDim)];
    uint8_t* block = cache + (end - kValueBlock) * cache_row;
    std::memcpy(rows, block, static_cast<size_t>(kValueBlock * cache_row));
    RowsToBlock(head_dim, rows, block);
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
