// The execution plan of AddLayerNorm: sums up to three operands row by row and normalizes each row. Independent of ONNX
// Runtime.
//
//     Y = LayerNormalization((X + addend) + second_addend)
//
// Operands broadcast over all axes except the last, as in ONNX Add. Each addition is rounded. A row of Y depends only
// on its own row of the sum.
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
  // norm: n, weight, bias and epsilon, already validated; weight and bias must outlive the plan.
  AddLayerNormPlan(const LayerNormArgs& norm, Features features);

  const LayerNormArgs& norm() const { return norm_; }

  // Returns the shape of the sum of at least one operand. Throws OpError, which starts with `node` and names the
  // operand.
  std::vector<int64_t> Shape(std::span<const SumOperand> operands, const std::string& node) const;

  // shape: the result of Shape. y has that shape and overlaps no operand.
  void Run(Host& host, std::span<const SumOperand> operands, const std::vector<int64_t>& shape, float* y) const;

 private:
  struct Rows;
  void AddRows(const Rows& rows, int64_t row, int64_t count, float* y) const;

  LayerNormArgs norm_;
  const EpilogueKernel& kernel_;
};

}  // namespace ortolan
