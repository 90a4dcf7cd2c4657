#include "formats/int4_group.h"

#include <algorithm>

#include "ort/error_text.h"

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
  std::vector<uint8_t> packed(static_cast<size_t>(Int4GroupWeightBytes(k, n)));
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

std::string ValidateInt4Group(const Int4GroupClaim& claim) {
  if (claim.k < 1 || claim.k > kInt4Bitmap.max_k || claim.n < 1 || claim.n > kMaxDimension) {
    return ErrorText("k x n is ", claim.k, " x ", claim.n, ", expected 1 to ", kInt4Bitmap.max_k, " x 1 to ",
                     kMaxDimension);
  }
  if (!IsInt4Group(claim.group)) return ErrorText("group_size is ", claim.group, ", expected 32, 64 or 128");
  const int64_t panels = BitmapPanels(claim.n);
  const int64_t groups = ScaleRows(claim.k, claim.group);
  if (claim.weight_bytes != Int4GroupWeightBytes(claim.k, claim.n)) {
    return ErrorText("weights hold ", claim.weight_bytes, " bytes, expected ", Int4GroupWeightBytes(claim.k, claim.n));
  }
  const int64_t expected = panels * groups * kPanelColumns;
  if (claim.scale_count != expected) {
    return ErrorText("scales have ", claim.scale_count, " elements, expected ", expected, " (", panels, " panels x ",
                     groups, " groups x ", kPanelColumns, ")");
  }
  if (claim.zero_point_count == 0) return {};
  if (claim.zero_point_count != expected) {
    return ErrorText("zero_points have ", claim.zero_point_count, " elements, expected ", expected, " or none");
  }
  const uint8_t* end = claim.zero_points + claim.zero_point_count;
  const uint8_t* outside = std::find_if(claim.zero_points, end, [](uint8_t zero) { return zero > kLargestInt4; });
  if (outside != end) {
    return ErrorText("zero_points hold ", static_cast<int>(*outside), ", expected 0 to ", kLargestInt4);
  }
  return {};
}

}  // namespace ortolan
