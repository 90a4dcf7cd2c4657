// The common base of adapters of linear layers: inputs, outputs and attributes of linear_plan.h. An operator's kernel
// derives from LinearOp, reads its weight and lists the kernels. What does not change between calls is read and checked
// here once.
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
  // UNDEFINED: one of several types, which the kernel checks.
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
};

// The inputs of a node, in order: X, the required inputs of the weight, then optional ones in any order: bias,
// residual, norm_weight, norm_bias and others of the operator. norm_weight and norm_bias are constants [columns of Y]
// of a LayerNormalization, used if the attribute norm_epsilon is present and not -1.
using LinearInputs = std::span<const LinearInput>;

// Return the index of the named input, or the number of inputs if it is not listed.
size_t IndexOf(LinearInputs inputs, const std::string& name);

class LinearOp {
 public:
  void Compute(KernelContext& context, Host& host) const;

  // Give Y the shape of X with another last dimension. The shape stays unknown if rows are windows, or if a residual
  // may add dimensions by broadcasting. A one-element residual, which replaces a missing one, does not.
  static void InferShape(OrtShapeInferContext* context, LinearInputs inputs);

 protected:
  LinearOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs);

  // Called last in a kernel's constructor. layer: everything except what the attributes activation, gated_columns,
  // norm_epsilon and window… set.
  void MakePlan(const OrtKernelInfo& info, LinearLayer layer);

  const std::string& node() const { return node_; }
  bool Has(const OrtKernelInfo& info, const std::string& name) const { return HasInput(info, IndexOf(inputs_, name)); }
  // Return whether the node has this input and it is not the constant zero that replaces a missing input.
  bool IsThere(const OrtKernelInfo& info, const std::string& name) const {
    return Has(info, name) && !IsConstantZero(info, IndexOf(inputs_, name));
  }
  // Return a constant input of its type, or of one of these types.
  ConstantTensor Constant(const OrtKernelInfo& info, const std::string& name) const;
  ConstantTensor Constant(const OrtKernelInfo& info, const std::string& name,
                          std::initializer_list<ONNXTensorElementDataType> types) const;

 private:
  void ReadAttributes(const OrtKernelInfo& info, LinearLayer& layer);
  void ReadNorm(const OrtKernelInfo& info, LinearLayer& layer);
  void ReadWindows(const OrtKernelInfo& info, LinearLayer& layer) const;
  AlignedConstant<float> ReadVector(const OrtKernelInfo& info, const char* name, int64_t n) const;

  const float* Bias(const KernelContext& context) const;
  void AddResidual(KernelContext& context, Host& host, LinearCall call, const std::vector<int64_t>& shape) const;

  std::string node_;
  LinearInputs inputs_;
  std::string x_name_;
  size_t bias_index_, residual_index_;
  AlignedConstant<float> x_, bias_, residual_;  // set if constant
  bool computes_bias_ = false;
  bool has_residual_ = false;
  AlignedConstant<float> norm_weight_, norm_bias_;
  std::optional<LinearPlan> plan_;  // uses the members above
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
