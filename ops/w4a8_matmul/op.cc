// ORT adapter of W4A8MatMul.
//
//     Y = activation(X W + bias) + residual, perhaps gated (matmul/linear_op.h)
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
    w_.k = IntAttribute(info, "k", node_);
    w_.n = IntAttribute(info, "n", node_);
    w_.group = IntAttribute(info, "group_size", node_);
    w_.weights = static_cast<const uint8_t*>(weights.data);
    w_.scales = static_cast<const uint8_t*>(scales.data);
    w_.scale_type = scales.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? ScaleType::kFloat32 : ScaleType::kFloat16;
    if (zero_points.count > 0) w_.zero_points = static_cast<const uint8_t*>(zero_points.data);
    const std::string problem =
        ValidateInt4Group({w_.k, w_.n, w_.group, weights.count, scales.count, w_.zero_points, zero_points.count});
    if (!problem.empty()) {
      throw OpError(ErrorText(node_, ": malformed weight in tensors '", weights.name, "', '", scales.name, "', '",
                              zero_points.name, "': ", problem, ". Optimize the original model again."));
    }
    linear_.emplace(info, node_, LinearOp::Inputs{kX, kBias, kResidual}, w_.k, w_.n);
  }

  void Compute(Ort::KernelContext& context) {
    linear_->Compute(context, [&](const LinearOp::Rows& rows, const float* bias) {
      const GroupInt4Weight weight{{w_.k, w_.n}, w_};
      const MatMulKernel& kernel = SelectKernel(GroupInt4Kernels(), ActiveFeatures(), {rows.m, weight.k});
      MatMulArgs args;
      args.w = &weight;
      args.bias = bias;
      linear_->Run(rows, {kernel.row_block, kernel.PackedBytes(weight, rows.m), kernel.packed_row_bytes(weight)},
                   kInt4Bitmap.PaddedK(w_.k), args, kernel.multiply, [&](const float* x, int64_t count, char* to) {
                     kernel.pack(weight, x, linear_->XRowBytes(), count, to);
                   });
    });
  }

 private:
  std::string node_;
  Int4GroupView w_;
  std::optional<LinearOp> linear_;  // made when the weight's size is known
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
