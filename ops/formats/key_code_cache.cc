#include "formats/key_code_cache.h"

#include <algorithm>
#include <cstring>

#include "ort/error_text.h"

namespace ortolan {
namespace {

const float* RowAt(const float* from, int64_t bytes) {
  return reinterpret_cast<const float*>(reinterpret_cast<const char*>(from) + bytes);
}

// Where the code of a sub-quantizer stands in a token's row.
struct Nibble {
  int64_t byte;
  int shift;
};

Nibble InRow(int64_t sub_quantizers, int64_t s) {
  if (sub_quantizers % 8 != 0 && s >= sub_quantizers - 4) {
    const int64_t i = s - (sub_quantizers - 4);
    return {sub_quantizers / 2 - 2 + i % 2, i < 2 ? 0 : 4};
  }
  return {s / 8 * 4 + s % 4, s % 8 < 4 ? 0 : 4};
}

Nibble InBlock(int64_t s, int64_t key) { return {s / 4 * 64 + key % 16 * 4 + s % 4, key < 16 ? 0 : 4}; }

// The row of a token's codes.
void WriteRow(const uint8_t* codes, int64_t sub_quantizers, uint8_t* row) {
  for (; sub_quantizers >= 8; sub_quantizers -= 8, codes += 8, row += 4) {
    uint32_t low;
    uint32_t high;
    std::memcpy(&low, codes, 4);
    std::memcpy(&high, codes + 4, 4);
    low |= high << 4;
    std::memcpy(row, &low, 4);
  }
  if (sub_quantizers == 0) return;
  for (int j = 0; j < 2; ++j) row[j] = static_cast<uint8_t>(codes[j] | codes[2 + j] << 4);
}

}  // namespace

std::string ValidateKeyCodeLayout(const KeyCodeLayout& layout) {
  if (layout.head_dim < 16 || layout.head_dim > kMaxHeadDim || layout.head_dim % 16 != 0) {
    return ErrorText("head_dim is ", layout.head_dim, ", expected a multiple of 16 from 16 to ", kMaxHeadDim);
  }
  if (layout.d_sub != 1 && layout.d_sub != 2 && layout.d_sub != 4) {
    return ErrorText("d_sub is ", layout.d_sub, ", expected 1, 2 or 4");
  }
  return {};
}

void AppendKeys(const KeyCodeLayout& layout, const float* codebook, const float* keys, int64_t key_row_bytes,
                int64_t count, int64_t tokens, uint8_t* cache, EncodeKeysFn* encode) {
  const int64_t parts = layout.SubQuantizers();
  const int64_t row_bytes = layout.RowBytes();
  uint8_t codes[kKeyBlock * kMaxHeadDim];
  uint8_t rows[kKeyBlock * kMaxHeadDim / 2];
  while (count > 0) {  // up to the end of a block
    const int64_t before = tokens % kKeyBlock;
    const int64_t added = std::min(count, kKeyBlock - before);
    encode(layout, codebook, keys, key_row_bytes, added, codes);
    uint8_t* block = cache + (tokens - before) * row_bytes;
    const bool full = before + added == kKeyBlock;
    uint8_t* to = full ? rows : block;
    if (full) std::memcpy(rows, block, static_cast<size_t>(before * row_bytes));
    for (int64_t i = 0; i < added; ++i) WriteRow(codes + i * parts, parts, to + (before + i) * row_bytes);
    if (full) KeyRowsToBlock(layout, rows, kKeyBlock, block);
    keys = RowAt(keys, added * key_row_bytes);
    count -= added;
    tokens += added;
  }
}

int KeyCode(const KeyCodeLayout& layout, const uint8_t* cache, int64_t tokens, int64_t token, int64_t sub_quantizer) {
  const int64_t first = token / kKeyBlock * kKeyBlock;
  if (first + kKeyBlock <= tokens) {
    const Nibble at = InBlock(sub_quantizer, token - first);
    return cache[first * layout.RowBytes() + at.byte] >> at.shift & 0xf;
  }
  const Nibble at = InRow(layout.SubQuantizers(), sub_quantizer);
  return cache[token * layout.RowBytes() + at.byte] >> at.shift & 0xf;
}

void DecodeKeys(const KeyCodeLayout& layout, const float* codebook, const uint8_t* cache, int64_t tokens, int64_t begin,
                int64_t end, float* keys, int64_t key_row_bytes) {
  for (int64_t token = begin; token < end; ++token) {
    float* key = const_cast<float*>(RowAt(keys, (token - begin) * key_row_bytes));
    for (int64_t s = 0; s < layout.SubQuantizers(); ++s) {
      const int code = KeyCode(layout, cache, tokens, token, s);
      const float* centroid = codebook + (s * kCentroids + code) * layout.d_sub;
      std::copy(centroid, centroid + layout.d_sub, key + s * layout.d_sub);
    }
  }
}

// Eight sub-quantizers of a key are 32 bits of its row: the low nibbles make one lane of a quad, the high ones of the
// next.
void KeyRowsToBlock(const KeyCodeLayout& layout, const uint8_t* rows, int64_t count, uint8_t* block) {
  constexpr uint32_t kLow = 0x0f0f0f0f;
  const int64_t row_bytes = layout.RowBytes();
  const auto word = [&](int64_t key, int64_t byte, int64_t bytes) {
    uint32_t value = 0;
    if (key < count) std::memcpy(&value, rows + key * row_bytes + byte, static_cast<size_t>(bytes));
    return value;
  };
  int64_t byte = 0;
  for (; byte + 4 <= row_bytes; byte += 4, block += 128) {
    for (int64_t k = 0; k < 16; ++k) {
      const uint32_t a = word(k, byte, 4);
      const uint32_t b = word(16 + k, byte, 4);
      const uint32_t even = (a & kLow) | (b & kLow) << 4;
      const uint32_t odd = (a >> 4 & kLow) | (b & ~kLow);
      std::memcpy(block + 4 * k, &even, 4);
      std::memcpy(block + 64 + 4 * k, &odd, 4);
    }
  }
  if (byte == row_bytes) return;
  for (int64_t k = 0; k < 16; ++k) {
    for (int64_t j = 0; j < 4; ++j) {
      const auto code = [&](int64_t key) {
        return key < count ? rows[key * row_bytes + byte + j % 2] >> (j < 2 ? 0 : 4) & 0xf : 0;
      };
      block[4 * k + j] = static_cast<uint8_t>(code(k) | code(16 + k) << 4);
    }
  }
}

}  // namespace ortolan
