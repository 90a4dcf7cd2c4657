// The products of many rows, out of the kernels: packing, passes, pieces of work. No sum depends on how the work is
// divided.
#pragma once

#include "masked_matmul/pattern.h"

namespace ortolan {

// Pieces of work, at most, that are worth making where their size is free.
inline constexpr int64_t kMostPieces = 16;

// y = A B, [m][n], by Way::kBlocks or Way::kTwoSided; pattern is that of a and b. Returns whether a is finite, as b is:
// else y is not the product.
bool MultiplyBlocks(const MaskedMatMulKernel& kernel, Way way, const Pattern& pattern, const FloatRows& a,
                    const FloatRows& b, float* y, CallMemory& memory);

// y = A B, [m][n], by Way::kNumbers; B is finite.
void MultiplyByValues(const MaskedMatMulKernel& kernel, const FloatRows& a, const FloatRows& b, float* y,
                      CallMemory& memory);

// What args says for all columns, by Way::kPanels: B of these numbers is neither packed ahead nor unpacked as a whole.
void MultiplyByPanels(const MaskedMatMulKernel& kernel, ElementType element_type, const RowsArgs& args,
                      CallMemory& memory);

}  // namespace ortolan
