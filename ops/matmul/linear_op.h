// What the adapters of linear layers share: inputs, outputs and attributes of linear_plan.h. A room's kernel derives
// from LinearOp, reads its weight and names the kernels; what does not change between calls is read and checked here,
// once.
#pragma once

#include <optional>
#include <span>
#include <string>
#include <vector>

#include "matmul/linear_plan.h"
#include "ort/ort_op.h"

namespace ortolan {

struct LinearInput {
  const char* name;
  // UNDEFINED: one of several, of which the kernel asks for one.
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
};

// The inputs of a node, in order: X, the weight's, which must be there, then those that may be left out: bias,
// residual, norm_weight, norm_bias and what else the room has, in any order. norm_weight and norm_bias, of a
// LayerNormalization, are constants [columns of Y]; they count where the attribute norm_epsilon is not -1, nor missing.
using LinearInputs = std::span<const LinearInput>;

// Where the input of this name is; their number if there is none.
size_t IndexOf(LinearInputs inputs, const std::string& name);

class LinearOp {
 public:
  void Compute(Ort::KernelContext& context, Host& host) const;

  // Y's shape: that of X with another last dimension. Left open where a residual may add dimensions by broadcasting:
  // one number, which stands for none, does not.
  static void InferShape(OrtShapeInferContext* context, LinearInputs inputs);

 protected:
  LinearOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs);

  // The last thing that a kernel's constructor does. layer: all but what the attributes activation, gated_columns and
  // norm_epsilon say.
  void MakePlan(const OrtKernelInfo& info, LinearLayer layer);

  const std::string& node() const { return node_; }
  bool Has(const OrtKernelInfo& info, const std::string& name) const { return HasInput(info, IndexOf(inputs_, name)); }
  // Whether it has, and not the zero that stands for none.
  bool IsThere(const OrtKernelInfo& info, const std::string& name) const {
    return Has(info, name) && !IsConstantZero(info, IndexOf(inputs_, name));
  }
  // A constant input, of its one type or one of these.
  ConstantTensor Constant(const OrtKernelInfo& info, const std::string& name) const;
  ConstantTensor Constant(const OrtKernelInfo& info, const std::string& name,
                          std::initializer_list<ONNXTensorElementDataType> types) const;

 private:
  void ReadAttributes(const OrtKernelInfo& info, LinearLayer& layer);
  void ReadNorm(const OrtKernelInfo& info, LinearLayer& layer);
  AlignedConstant<float> ReadVector(const OrtKernelInfo& info, const char* name, int64_t n) const;

  const float* Bias(const Ort::KernelContext& context) const;
  void AddResidual(Ort::KernelContext& context, Host& host, LinearCall call, const std::vector<int64_t>& shape) const;

  std::string node_;
  LinearInputs inputs_;
  std::string x_name_;
  size_t bias_index_, residual_index_;
  AlignedConstant<float> x_, bias_, residual_;  // where they are constants
  bool computes_bias_ = false;
  bool has_residual_ = false;
  AlignedConstant<float> norm_weight_, norm_bias_;
  std::optional<LinearPlan> plan_;  // made of the above
};

// The adapter of a kernel, which has kOpType and kInputs.
template <typename Kernel>
struct LinearOrtOp : OrtOp<LinearOrtOp<Kernel>, Kernel> {
  const char* GetName() const { return Kernel::kOpType; }
  size_t GetInputTypeCount() const { return std::size(Kernel::kInputs); }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return Kernel::kInputs[index].type; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= IndexOf(Kernel::kInputs, "bias") ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) { LinearOp::InferShape(context, Kernel::kInputs); }
};

}  // namespace ortolan
