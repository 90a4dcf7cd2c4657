// com.microsoft.MatMulNBits nodes: Y = X W + bias, W stored in 4 or 8 bits.
#pragma once

#include <string>
#include <vector>

#include "matmul/nbits_weight.h"
#include "provider/node.h"

namespace ortolan::provider {

// What a node stores. The numbers lie in the graph.
struct StoredLayer {
  NBitsWeight weight;
  std::vector<float> bias;  // [n], or none
};

bool IsMatMulNBits(const Node& node);

// Throws UnfitError, which says why, for nodes of a kind that is not taken over. Of the numbers themselves
// NBitsGroups::WhyNot judges.
StoredLayer ReadMatMulNBits(const Node& node);

}  // namespace ortolan::provider
