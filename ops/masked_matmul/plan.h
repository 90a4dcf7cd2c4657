// What MaskedMatMul runs: which way of multiplying, and its steps. Free of ONNX Runtime: its dense product is handed
// in.
#pragma once

#include <functional>
#include <vector>

#include "masked_matmul/pattern.h"

namespace ortolan {

// Up to so many rows of A the time goes into reading B: the rows kernels are asked first.
inline constexpr int64_t kMostDecodeRows = 16;

// y [m][n] = a [m][k] b [k][n].
using DenseProduct = std::function<void(const ProductSize& size, const float* a, const float* b, float* y)>;

// What is known of B before a call. Numbers that are not float: it is known whether they are finite.
struct KnownB {
  ElementType element_type = ElementType::kFloat;
  bool finite = false;            // but for the rows that `always` names
  std::vector<uint8_t> always;    // a byte for each row that is not finite, or nothing
  const float* scales = nullptr;  // [groups][n] or none
  int64_t group = 0;              // rows of a group; 0: all
};

struct MaskedMatMulCall {
  CallMemory& memory;
  const DenseProduct& dense;
  ProductSize size;  // m, k and n are 1 or more
  const float* a;
  const void* b;
  float* y;
};

class MaskedMatMulPlan {
 public:
  MaskedMatMulPlan() = default;
  MaskedMatMulPlan(const MaskedMatMulKernel& kernel, const MaskedMatMulCosts& costs, KnownB b)
      : kernel_(&kernel), costs_(costs), b_(std::move(b)) {}

  // y = A B. Returns the way that was taken.
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

// x [rows][columns] with zeros where |x| <= threshold or keep is 0, as a copy. keep: a byte for each element of a
// matrix or vector that is repeated to `shape`, that of x, by these strides; or null.
const float* MaskedCopy(CallMemory& memory, const float* x, const std::vector<int64_t>& shape, float threshold,
                        const uint8_t* keep, const std::vector<int64_t>& strides);

}  // namespace ortolan
