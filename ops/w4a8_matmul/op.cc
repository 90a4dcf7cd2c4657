// ORT adapter of W4A8MatMul.
//
//     Y = activation(X W + bias) + residual, perhaps gated (matmul/linear_plan.h)
//
//     X float [..., k], weights u8, scales float or float16, bias float [n], residual float, zero_points u8
//     -> Y float [..., n], broadcast with residual;   attributes k, n, format_version, group_size,
//     activation, gated_columns
//
// weights, scales and zero_points are initializers: formats/int4_group.h. bias, residual and zero_points are optional;
// where they must not be missing, they are zeros, one zero and 8 (see SparseAMXMatMul's adapter).
#include <optional>

#include "matmul/group_int4_weight.h"
#include "matmul/linear_op.h"
#include "ort/rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "W4A8MatMul";
constexpr int64_t kFormatVersion = 1;

enum Input : size_t { kX, kWeights, kScales, kBias, kResidual, kZeroPoints, kInputCount };

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    const ConstantTensor weights =
        ConstantInput(info, kWeights, "weights", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, node_);
    const ConstantTensor scales = ConstantInput(
        info, kScales, "scales", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16}, node_);
    ConstantTensor zero_points;
    if (HasInput(info, kZeroPoints)) {
      zero_points = ConstantInput(info, kZeroPoints, "zero_points", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, node_);
    }
    Int4GroupView& view = w_.view;
    view.k = w_.k = IntAttribute(info, "k", node_);
    view.n = w_.n = IntAttribute(info, "n", node_);
    view.group = IntAttribute(info, "group_size", node_);
    view.weights = static_cast<const uint8_t*>(weights.data);
    view.scales = static_cast<const uint8_t*>(scales.data);
    view.scale_type = scales.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? ScaleType::kFloat32 : ScaleType::kFloat16;
    if (zero_points.count > 0) view.zero_points = static_cast<const uint8_t*>(zero_points.data);
    CheckWeight({&weights, &scales, &zero_points},
                ValidateInt4Group(
                    {view.k, view.n, view.group, weights.count, scales.count, view.zero_points, zero_points.count}),
                node_);
    LinearLayer layer;
    layer.w = &w_;
    layer.kernels = GroupInt4Kernels();
    layer.panel_inputs = kInt4Bitmap.PaddedK(w_.k);
    linear_.emplace(info, node_, LinearOp::Inputs{kX, kBias, kResidual}, layer);
  }

  void Compute(Ort::KernelContext& context, Host& host) { linear_->Compute(context, host); }

 private:
  std::string node_;
  GroupInt4Weight w_;
  std::optional<LinearOp> linear_;  // made when the weight is known
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    switch (index) {
      case kWeights:
      case kZeroPoints:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
      case kScales:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // one of two: the kernel looks
      default:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
    }
  }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kBias ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) { LinearOp::InferShape(context, kResidual); }
};

}  // namespace

const OrtCustomOp* W4A8MatMulOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
