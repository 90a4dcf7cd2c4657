// ORT adapter of AddLayerNorm. README.md lists inputs, outputs and attributes, plan.h the computation.
#include <limits>
#include <optional>

#include "add_layer_norm/plan.h"
#include "operators.h"
#include "ort/ort_op.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "AddLayerNorm";
constexpr int64_t kFormatVersion = 1;

enum Input : size_t { kX, kAddend, kSecondAddend, kWeight, kBias, kInputCount };
constexpr size_t kOperands = kWeight;
static_assert(kOperands == kMostSumOperands);

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    LayerNormArgs norm;
    norm.epsilon = FloatAttributeOr(info, "epsilon", -1.0f);
    if (!(norm.epsilon >= 0.0f && norm.epsilon <= std::numeric_limits<float>::max())) {
      throw OpError(
          ErrorText(node_, ": epsilon is ", norm.epsilon, ", expected a finite value of at least 0. ", kOptimizeAgain));
    }
    const auto vector = [&](size_t index, const char* name) {
      return ConstantInput(info, index, name, {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    };
    const ConstantTensor weight = vector(kWeight, "norm_weight"), bias = vector(kBias, "norm_bias");
    if (weight.shape.size() != 1 || weight.count == 0) {
      throw OpError(ErrorText(node_, ": norm_weight '", weight.name, "' has shape ", ShapeText(weight.shape),
                              ", expected [n] with n at least 1. ", kOptimizeAgain));
    }
    CheckShape(bias, "norm_bias", weight.shape, node_, " like norm_weight");
    weight_ = AlignedConstant<float>(weight);
    bias_ = AlignedConstant<float>(bias);
    norm.n = weight.count;
    norm.weight = weight_.data();
    norm.bias = bias_.data();
    plan_.emplace(norm, ActiveFeatures());
    for (size_t index = kX; index < kOperands; ++index) {
      constants_[index] = AlignedConstant<float>(info, index);
      is_given_[index] = index == kX || !IsConstantZero(info, index);
    }
  }

  void Compute(KernelContext& context, Host& host) const {
    constexpr const char* kNames[] = {"X", "addend", "second_addend"};
    std::vector<SumOperand> operands;
    for (size_t index = kX; index < kOperands; ++index) {
      if (!is_given_[index]) continue;
      const Tensor value = context.Input(index);
      operands.push_back({kNames[index], constants_[index].In(value), value.Shape()});
    }
    const std::vector<int64_t> shape = plan_->Shape(operands, node_);
    plan_->Run(host, operands, shape, context.Output<float>(0, shape));
  }

 private:
  std::string node_;
  AlignedConstant<float> weight_;
  AlignedConstant<float> bias_;
  std::optional<AddLayerNormPlan> plan_;  // refers to the members above
  AlignedConstant<float> constants_[kOperands];
  bool is_given_[kOperands] = {};
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  // With an addend, X may be broadcast, so its shape is not Y's.
  static void InferShape(OrtShapeInferContext* context) {
    if (HasOneElement(context, kAddend) && HasOneElement(context, kSecondAddend)) InferSameShape(context, kX);
  }
};

}  // namespace

const OrtCustomOp* AddLayerNormOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
