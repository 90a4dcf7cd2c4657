// Shapes and sums by ONNX's (NumPy's) broadcasting rules.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ortolan {

// Return the shape that two shapes broadcast to, or nothing if they do not fit.
std::optional<std::vector<int64_t>> BroadcastShape(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

// Return the strides, in elements, of an operand of `shape` read as a tensor of the broadcast shape; 0 in repeated
// dimensions.
std::vector<int64_t> BroadcastStrides(const std::vector<int64_t>& shape, const std::vector<int64_t>& broadcast);

// Return the offset, in an operand with these strides, of element `index` of a tensor of `shape`.
int64_t OffsetOf(int64_t index, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

// out = a + b, where out has the broadcast shape. out may be a if a has that shape; otherwise it overlaps neither
// operand.
void BroadcastAdd(const float* a, const std::vector<int64_t>& a_shape, const float* b,
                  const std::vector<int64_t>& b_shape, float* out, const std::vector<int64_t>& shape);

}  // namespace ortolan
