// What the adapters of linear layers share: inputs, outputs and attributes of linear_plan.h. A room reads its weight
// and names the kernels; what does not change between calls is read and checked here, once.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "matmul/linear_plan.h"
#include "ort/ort_op.h"

namespace ortolan {

class LinearOp {
 public:
  // Where the node has its inputs; those but x may be left out. norm: weight and bias of a LayerNormalization,
  // constants [columns of Y], begin there; they count where the attribute norm_epsilon is not -1, nor missing.
  struct Inputs {
    size_t x, bias, residual;
    std::optional<size_t> norm = std::nullopt;
  };

  // layer: all but what the attributes activation, gated_columns and norm_epsilon say. Throws OpError.
  LinearOp(const OrtKernelInfo& info, std::string node, Inputs inputs, const LinearLayer& layer);

  void Compute(Ort::KernelContext& context, Host& host) const;

  // Y's shape: that of X with another last dimension. Left open where a residual may add dimensions by broadcasting:
  // one number, which stands for none, does not.
  static void InferShape(OrtShapeInferContext* context, size_t residual);

 private:
  LinearLayer ReadAttributes(const OrtKernelInfo& info, LinearLayer layer);
  void ReadNorm(const OrtKernelInfo& info, LinearLayer& layer);
  AlignedConstant<float> ReadVector(const OrtKernelInfo& info, size_t input, const char* meaning, int64_t n) const;

  int64_t RowsOf(const std::vector<int64_t>& x_shape) const;
  const float* Bias(const Ort::KernelContext& context) const;
  void AddResidual(Ort::KernelContext& context, Host& host, LinearCall call, const std::vector<int64_t>& shape) const;

  std::string node_;
  Inputs inputs_;
  std::string x_name_;
  AlignedConstant<float> bias_;  // where it is a constant
  bool computes_bias_ = false;
  bool has_residual_ = false;
  AlignedConstant<float> norm_weight_, norm_bias_;
  LinearPlan plan_;  // made of the above
};

}  // namespace ortolan
