#include "ort/broadcast.h"

#include <algorithm>
#include <cstddef>

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
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0; stride *= shape[i]) {
    if (shape[i] != 1) strides[ahead + i] = stride;
  }
  return strides;
}

void BroadcastAdd(const float* a, const std::vector<int64_t>& a_shape, const float* b,
                  const std::vector<int64_t>& b_shape, float* out, const std::vector<int64_t>& shape) {
  if (shape.empty()) {
    *out = *a + *b;
    return;
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return;
  const std::vector<int64_t> a_strides = BroadcastStrides(a_shape, shape);
  const std::vector<int64_t> b_strides = BroadcastStrides(b_shape, shape);
  const size_t last = shape.size() - 1;
  std::vector<int64_t> index(shape.size(), 0);
  while (true) {
    for (int64_t j = 0; j < shape[last]; ++j) out[j] = a[j * a_strides[last]] + b[j * b_strides[last]];
    out += shape[last];
    // On to the next row, as an odometer.
    size_t i = last;
    while (true) {
      if (i == 0) return;
      --i;
      a += a_strides[i];
      b += b_strides[i];
      if (++index[i] < shape[i]) break;
      a -= a_strides[i] * shape[i];
      b -= b_strides[i] * shape[i];
      index[i] = 0;
    }
  }
}

}  // namespace ortolan
