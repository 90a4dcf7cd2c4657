#include "formats/key_code_cache.h"

#include <algorithm>
#include <cstring>

#include "host/error_text.h"

namespace ortolan {
namespace {

// The position of a sub-quantizer's code in a token's row or in a block.
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

int KeyCode(const KeyCodeLayout& layout, const uint8_t* cache, int64_t tokens, int64_t token, int64_t sub_quantizer) {
  const int64_t first = token / kKeyBlock * kKeyBlock;
  if (first + kKeyBlock <= tokens) {
    const Nibble at = InBlock(sub_quantizer, token - first);
    return cache[first * layout.RowBytes() + at.byte] >> at.shift & 0xf;
  }
  const Nibble at = InRow(layout.SubQuantizers(), sub_quantizer);
  return cache[token * layout.RowBytes() + at.byte] >> at.shift & 0xf;
}

}  // namespace ortolan
