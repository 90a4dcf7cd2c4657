// Reads the weight of an int8 layer from the constant inputs of a node.
#pragma once

#include <vector>

#include "matmul/int8_weight.h"
#include "provider/ort_graph.h"

namespace ortolan::provider {

// Expand one value for all columns to n values; return n values unchanged.
template <typename Element>
std::vector<Element> Spread(const std::vector<Element>& values, int64_t n) {
  return values.size() == 1 ? std::vector<Element>(static_cast<size_t>(n), values[0]) : values;
}

std::vector<Shape> ShapesOfColumns(int64_t n);

// Read 8-bit weights [k, n], or [n, k] if transposed, and their zero points. The scales are left empty. Throws
// UnfitError.
Int8Weight ReadInt8Weight(const Node& node, size_t codes, size_t zero_points, bool transposed = false);

std::vector<float> ReadScales(const Node& node, size_t scales, int64_t n);

}  // namespace ortolan::provider
