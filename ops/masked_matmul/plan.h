// The execution plan of MaskedMatMul: chooses the way to multiply and runs its steps. Independent of ONNX Runtime: the
// caller passes in the dense product.
#pragma once

#include <functional>
#include <vector>

#include "masked_matmul/pattern.h"

namespace ortolan {

// Up to this many rows of A, reading B dominates, so the rows kernels are used.
inline constexpr int64_t kMostDecodeRows = 16;

// y [m][n] = a [m][k] b [k][n].
using DenseProduct = std::function<void(const ProductSize& size, const float* a, const float* b, float* y)>;

// Properties of B that are known before a call. `finite` is known unless B is float.
struct KnownB {
  ElementType element_type = ElementType::kFloat;
  bool finite = false;            // except for the rows marked in `always`
  std::vector<uint8_t> always;    // one byte a row, nonzero if the row is not finite; or empty
  const float* scales = nullptr;  // [groups][n] or null
  int64_t group = 0;              // rows of B in a group; 0: all rows
};

struct MaskedMatMulCall {
  CallMemory& memory;
  const DenseProduct& dense;
  ProductSize size;  // m, k and n are at least 1
  const float* a;
  const void* b;
  float* y;
};

class MaskedMatMulPlan {
 public:
  MaskedMatMulPlan() = default;
  MaskedMatMulPlan(const MaskedMatMulKernel& kernel, const MaskedMatMulCosts& costs, KnownB b)
      : kernel_(&kernel), costs_(costs), b_(std::move(b)) {}

  // y = A B. Returns the way that was used.
  Way Run(const MaskedMatMulCall& call) const;

 private:
  Way RunMany(const MaskedMatMulCall& call) const;
  Way RunFull(const MaskedMatMulCall& call) const;
  Way RunPacked(const MaskedMatMulCall& call) const;
  Way RunUnpacked(const MaskedMatMulCall& call) const;
  Way RunRows(const MaskedMatMulCall& call) const;
  Way RunCompact(const MaskedMatMulCall& call, const uint64_t* active) const;
  RowsArgs AllInputs(const MaskedMatMulCall& call) const;
  RowsArgs UsedInputs(const MaskedMatMulCall& call) const;

  const MaskedMatMulKernel* kernel_ = nullptr;
  MaskedMatMulCosts costs_{};
  KnownB b_;
};

// Returns a copy of x [rows][columns] with zeros where |x| <= threshold or keep is 0. keep: one byte an element,
// broadcast with these strides to `shape`, the shape of x; or null.
const float* MaskedCopy(CallMemory& memory, const float* x, const std::vector<int64_t>& shape, float threshold,
                        const uint8_t* keep, const std::vector<int64_t>& strides);

}  // namespace ortolan
