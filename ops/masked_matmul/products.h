// Products for many rows of A: packing, passes, work items. No sum depends on how the work is split.
#pragma once

#include "masked_matmul/pattern.h"

namespace ortolan {

inline constexpr int64_t kMostPieces = 16;

// y = A B, [m][n], with Way::kBlocks or Way::kTwoSided and the pattern of a and b. b must be finite. Returns whether a
// is finite; otherwise y is invalid.
bool MultiplyBlocks(const MaskedMatMulKernel& kernel, Way way, const Pattern& pattern, const FloatRows& a,
                    const FloatRows& b, float* y, CallMemory& memory);

// y = A B, [m][n], with Way::kValues; B is finite.
void MultiplyByValues(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, float* y,
                      CallMemory& memory);

// Computes args for all columns with Way::kPanels: unpacks panels of B on the fly.
void MultiplyByPanels(const MaskedMatMulKernel& kernel, ElementType element_type, const RowsArgs& args,
                      CallMemory& memory);

}  // namespace ortolan
