#include "host/broadcast.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <numeric>

namespace ortolan {

std::optional<std::vector<int64_t>> BroadcastShape(const std::vector<int64_t>& a, const std::vector<int64_t>& b) {
  const std::vector<int64_t>& longer = a.size() >= b.size() ? a : b;
  const std::vector<int64_t>& shorter = a.size() >= b.size() ? b : a;
  std::vector<int64_t> shape = longer;
  const size_t ahead = longer.size() - shorter.size();
  for (size_t i = 0; i < shorter.size(); ++i) {
    int64_t& to = shape[ahead + i];
    if (to == shorter[i] || shorter[i] == 1) continue;
    if (to != 1) return std::nullopt;
    to = shorter[i];
  }
  return shape;
}

std::vector<int64_t> BroadcastStrides(const std::vector<int64_t>& shape, const std::vector<int64_t>& broadcast) {
  std::vector<int64_t> strides(broadcast.size(), 0);
  const size_t ahead = broadcast.size() - shape.size();
  // With a dimension of 0 the tensor is empty, so its strides do not matter.
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return strides;
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    if (shape[i] != 1) strides[ahead + i] = stride;
  }
  return strides;
}

int64_t OffsetOf(int64_t index, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides) {
  int64_t offset = 0;
  for (size_t i = shape.size(); i-- > 0;) {
    offset += index % shape[i] * strides[i];
    index /= shape[i];
  }
  return offset;
}

void BroadcastAdd(const float* a, const std::vector<int64_t>& a_shape, const float* b,
                  const std::vector<int64_t>& b_shape, float* out, const std::vector<int64_t>& shape) {
  if (shape.empty()) {
    *out = *a + *b;
    return;
  }
  const int64_t count = std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  const std::vector<int64_t> a_strides = BroadcastStrides(a_shape, shape);
  const std::vector<int64_t> b_strides = BroadcastStrides(b_shape, shape);
  for (int64_t first = 0; first < count; first += shape.back()) {
    const float* a_row = a + OffsetOf(first, shape, a_strides);
    const float* b_row = b + OffsetOf(first, shape, b_strides);
    for (int64_t j = 0; j < shape.back(); ++j) {
      out[first + j] = a_row[j * a_strides.back()] + b_row[j * b_strides.back()];
    }
  }
}

}  // namespace ortolan
