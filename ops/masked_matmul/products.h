// The products for many rows of A, built from the kernels: packing, passes, work items. No sum depends on how the work
// is split.
#pragma once

#include "masked_matmul/pattern.h"

namespace ortolan {

// The number of work items to aim for where their size is free.
inline constexpr int64_t kMostPieces = 16;

// y = A B, [m][n], with Way::kBlocks or Way::kTwoSided; pattern is that of a and b. Returns whether a is finite, as b
// must be; otherwise y is invalid.
bool MultiplyBlocks(const MaskedMatMulKernel& kernel, Way way, const Pattern& pattern, const FloatRows& a,
                    const FloatRows& b, float* y, CallMemory& memory);

// y = A B, [m][n], with Way::kValues; B is finite.
void MultiplyByValues(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, float* y,
                      CallMemory& memory);

// Computes args for all columns with Way::kPanels: panels of B are unpacked on the fly, B is neither packed ahead nor
// unpacked as a whole.
void MultiplyByPanels(const MaskedMatMulKernel& kernel, ElementType element_type, const RowsArgs& args,
                      CallMemory& memory);

}  // namespace ortolan
