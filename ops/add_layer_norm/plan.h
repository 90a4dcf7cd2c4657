// The plan of AddLayerNorm: rows of a sum of up to three, each of them normalized. Free of ONNX Runtime.
//
//     Y = LayerNormalization((X + addend) + second_addend)
//
// Operands are repeated over the axes in front of the last by the rules of ONNX Add. Each addition is rounded. A row of
// Y depends on its own row of the sum alone.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "epilogue/epilogue.h"
#include "host/host.h"
#include "isa/features.h"

namespace ortolan {

inline constexpr size_t kMostSumOperands = 3;

struct SumOperand {
  std::string_view name;  // for errors
  const float* data = nullptr;
  std::vector<int64_t> shape;  // [..., n]
};

class AddLayerNormPlan {
 public:
  // norm: n, weight, bias and epsilon. They have been checked, and outlive the plan.
  AddLayerNormPlan(const LayerNormArgs& norm, Features features);

  const LayerNormArgs& norm() const { return norm_; }

  // Of the sum, of at least one operand. Throws OpError, whose text begins with `node` and names the operand.
  std::vector<int64_t> Shape(std::span<const SumOperand> operands, const std::string& node) const;

  // shape: what Shape gave. y: of that shape; it overlaps nothing else.
  void Run(Host& host, std::span<const SumOperand> operands, const std::vector<int64_t>& shape, float* y) const;

 private:
  struct Rows;
  void AddRows(const Rows& rows, int64_t row, int64_t count, float* y) const;

  LayerNormArgs norm_;
  const EpilogueKernel& kernel_;
};

}  // namespace ortolan
