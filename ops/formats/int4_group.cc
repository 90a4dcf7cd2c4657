#include "formats/int4_group.h"

#include <cstring>

namespace ortolan {
namespace {

constexpr int64_t kRowInputs = kInt4Bitmap.row_inputs;
constexpr int64_t kPairInputs = 2 * kRowInputs;
constexpr int64_t kPairBytes = kPanelColumns * kRowInputs;

// Calls at(byte, input, column) for each byte. Its low nibble is the weight of `input`, its high nibble that of input +
// kRowInputs.
template <typename At>
void ForEachByte(int64_t k, int64_t n, At at) {
  int64_t byte = 0;
  for (int64_t panel = 0; panel < BitmapPanels(n); ++panel) {
    for (int64_t first = 0; first < kInt4Bitmap.PaddedK(k); first += kPairInputs) {
      for (int64_t i = 0; i < kPairBytes; ++i, ++byte) {
        at(byte, first + i % kRowInputs, panel * kPanelColumns + i / kRowInputs);
      }
    }
  }
}

// Loads inputs first … first+7 of a column, 4 bits each, lowest first; inputs beyond k are 0. first is a multiple of 8.
uint32_t EightNibbles(const uint8_t* column, int64_t first, int64_t k) {
  uint32_t eight = 0;
  if (first + kPairInputs <= k) {  // full pairs: a copy of constant size
    std::memcpy(&eight, column + first / 2, sizeof(eight));
    return eight;
  }
  for (int64_t l = first; l < k; ++l) {
    const uint32_t nibble = column[l / 2] >> l % 2 * 4 & 0xf;
    eight |= nibble << 4 * (l - first);
  }
  return eight;
}

// Expands the four nibbles in the low half to four bytes.
uint32_t AsBytes(uint32_t eight) {
  const uint32_t pairs = (eight | eight << 8) & 0x00ff00ff;
  return (pairs | pairs << 4) & 0x0f0f0f0f;
}

}  // namespace

// Loops over tiles, then over columns: a tile stays in the cache, and distant columns are read in full cache lines.
void PackInt4GroupPanel(const uint8_t* nibbles, int64_t column_bytes, int64_t k, int64_t columns, uint8_t* packed) {
  constexpr int64_t kPairs = kInt4Bitmap.TileInputs() / kPairInputs;
  for (int64_t tile = 0; tile < kInt4Bitmap.PaddedK(k); tile += kInt4Bitmap.TileInputs()) {
    for (int64_t j = 0; j < kPanelColumns; ++j) {
      for (int64_t pair = 0; pair < kPairs; ++pair) {
        const int64_t first = tile + pair * kPairInputs;
        const uint32_t eight = j < columns ? EightNibbles(nibbles + j * column_bytes, first, k) : 0;
        const uint32_t bytes = AsBytes(eight & 0xffff) | AsBytes(eight >> 16) << 4;
        std::memcpy(packed + pair * kPairBytes + j * kRowInputs, &bytes, sizeof(bytes));
      }
    }
    packed += kPairs * kPairBytes;
  }
}

std::vector<uint8_t> PackInt4Group(const uint8_t* q, int64_t row_stride, int64_t k, int64_t n) {
  std::vector<uint8_t> packed(static_cast<size_t>(GroupWeightBytes(kInt4Bitmap, k, n)));
  const auto weight = [&](int64_t input, int64_t column) {
    return input < k && column < n ? q[input * row_stride + column] & 0xf : 0;
  };
  ForEachByte(k, n, [&](int64_t byte, int64_t input, int64_t column) {
    packed[static_cast<size_t>(byte)] =
        static_cast<uint8_t>(weight(input, column) | weight(input + kRowInputs, column) << 4);
  });
  return packed;
}

void UnpackInt4Group(const uint8_t* weights, int64_t k, int64_t n, uint8_t* q, int64_t row_stride) {
  ForEachByte(k, n, [&](int64_t byte, int64_t input, int64_t column) {
    if (column >= n) return;
    if (input < k) q[input * row_stride + column] = weights[byte] & 0xf;
    if (input + kRowInputs < k) q[(input + kRowInputs) * row_stride + column] = weights[byte] >> 4;
  });
}

}  // namespace ortolan
