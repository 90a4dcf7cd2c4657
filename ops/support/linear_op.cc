#include "support/linear_op.h"

#include <utility>

namespace ortolan {

LinearOp::LinearOp(const OrtKernelInfo& info, std::string node, Inputs inputs, int64_t k, int64_t n)
    : node_(std::move(node)), inputs_(inputs), k_(k), n_(n) {
  CheckConstantVector(info, inputs_.bias, "bias", n_, node_);
  const int64_t activation = IntAttributeOr(info, "activation", 0);
  if (!IsActivation(activation)) {
    throw OpError(ErrorText(node_, ": activation is ", activation,
                            ", expected 0 (none), 1 (ReLU), 2 (GELU by erf), 3 (GELU by tanh) or 4 (SiLU)"));
  }
  activation_ = static_cast<Activation>(activation);
  has_residual_ = HasInput(info, inputs_.residual) && !IsConstantZero(info, inputs_.residual);
  x_name_ = Ort::ConstKernelInfo(&info).GetInputName(inputs_.x);
}

const float* LinearOp::Bias(const Ort::KernelContext& context) const {
  if (context.GetInputCount() <= inputs_.bias) return nullptr;
  const Ort::ConstValue bias = context.GetInput(inputs_.bias);
  if (!bias) return nullptr;
  const std::vector<int64_t> shape = bias.GetTensorTypeAndShapeInfo().GetShape();
  if (shape != std::vector<int64_t>{n_}) {
    throw OpError(ErrorText(node_, ": bias has shape ", ShapeText(shape), ", expected [", n_, "]"));
  }
  return bias.GetTensorData<float>();
}

}  // namespace ortolan
