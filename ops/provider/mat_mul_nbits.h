// com.microsoft.MatMulNBits nodes: Y = X W + bias, W stored in 4 or 8 bits.
#pragma once

#include "provider/layer.h"

namespace ortolan::provider {

bool IsMatMulNBits(const Node& node);

// Throws UnfitError, with the reason, for unsupported nodes.
Layer ReadMatMulNBits(const Node& node);

}  // namespace ortolan::provider
