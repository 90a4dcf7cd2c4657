// The numbers of an int8 layer, read from the constant inputs of a node.
#pragma once

#include <vector>

#include "matmul/int8_weight.h"
#include "provider/node.h"

namespace ortolan::provider {

// One number for all columns, or one for each.
template <typename Element>
std::vector<Element> Spread(const std::vector<Element>& values, int64_t n) {
  return values.size() == 1 ? std::vector<Element>(static_cast<size_t>(n), values[0]) : values;
}

std::vector<Shape> ShapesOfColumns(int64_t n);

// 8-bit numbers [k, n], or [n, k] if transposed, with zero points; without scales. Throws UnfitError.
Int8Weight ReadInt8Weight(const Node& node, size_t codes, size_t zero_points, bool transposed = false);

std::vector<float> ReadScales(const Node& node, size_t scales, int64_t n);

}  // namespace ortolan::provider
