// Shapes and sums by the broadcasting rules of ONNX (those of NumPy).
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace ortolan {

// The shape that two shapes are broadcast to, or nothing if they do not fit.
std::optional<std::vector<int64_t>> BroadcastShape(const std::vector<int64_t>& a, const std::vector<int64_t>& b);

// The elements of an operand of this shape that one of the broadcast shape is apart in each of its dimensions; 0 where
// it is repeated.
std::vector<int64_t> BroadcastStrides(const std::vector<int64_t>& shape, const std::vector<int64_t>& broadcast);

// The place of element `index` of a tensor of this shape in an operand with these strides.
int64_t OffsetOf(int64_t index, const std::vector<int64_t>& shape, const std::vector<int64_t>& strides);

// out = a + b. out has the broadcast shape; it may be a itself where a has that shape, else it overlaps nothing.
void BroadcastAdd(const float* a, const std::vector<int64_t>& a_shape, const float* b,
                  const std::vector<int64_t>& b_shape, float* out, const std::vector<int64_t>& shape);

}  // namespace ortolan
