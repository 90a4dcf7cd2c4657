#include "formats/int4_group.h"

namespace ortolan {
namespace {

constexpr int64_t kRowInputs = kInt4Bitmap.row_inputs;
constexpr int64_t kPairInputs = 2 * kRowInputs;
constexpr int64_t kPairBytes = kPanelColumns * kRowInputs;

// Calls at(byte, input, column) for each byte: it holds the weight of this input in its low nibble, and in its high one
// that of the input kRowInputs further on.
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

}  // namespace

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
