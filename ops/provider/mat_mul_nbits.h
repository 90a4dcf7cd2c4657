// com.microsoft.MatMulNBits nodes: Y = X W + bias, W stored in 4 or 8 bits.
#pragma once

#include "provider/layer.h"

namespace ortolan::provider {

bool IsMatMulNBits(const Node& node);

// Throws UnfitError, which says why, for nodes of a kind that is not taken over.
Layer ReadMatMulNBits(const Node& node);

}  // namespace ortolan::provider
