// ORT adapter of W4A8MatMul.
//
//     Y = LayerNormalization(activation(X W + bias) + residual), or without the last of these, perhaps gated
//         (matmul/linear_plan.h)
//
//     X float [..., k], weights u8, scales float or float16, bias float [n], residual float, zero_points u8,
//     norm_weight and norm_bias float [columns of Y], minimums of the type of scales
//     -> Y float [..., n], broadcast with residual;   attributes k, n, format_version, group_size,
//     activation, gated_columns, norm_epsilon
//
// weights, scales, zero_points and minimums are initializers: formats/int4_group.h. bias, residual, zero_points and
// minimums are optional; where they must not be missing, they are zeros, one zero, 8 or, with minimums, one zero, and
// one zero (see SparseAMXMatMul's adapter). Of the norm: see matmul/linear_op.h.
#include "matmul/group_weight.h"
#include "matmul/linear_op.h"
#include "rooms.h"

namespace ortolan {
namespace {

class Kernel : public LinearOp {
 public:
  static constexpr const char* kOpType = "W4A8MatMul";
  static constexpr int64_t kFormatVersion = 1;
  static constexpr LinearInput kInputs[] = {{"X"},
                                            {"weights", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"scales", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED},
                                            {"bias"},
                                            {"residual"},
                                            {"zero_points", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"norm_weight"},
                                            {"norm_bias"},
                                            {"minimums", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED}};

  explicit Kernel(const OrtKernelInfo& info) : LinearOp(info, kOpType, kFormatVersion, kInputs) {
    const ConstantTensor weights = Constant(info, "weights");
    const ConstantTensor scales =
        Constant(info, "scales", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16});
    ConstantTensor zero_points, minimums;
    if (IsThere(info, "minimums")) minimums = Constant(info, "minimums", {scales.type});
    if (IsThere(info, "zero_points")) zero_points = Constant(info, "zero_points");
    GroupView& view = w_.view;
    view.k = w_.k = IntAttribute(info, "k", node());
    view.n = w_.n = IntAttribute(info, "n", node());
    view.group = IntAttribute(info, "group_size", node());
    view.weights = static_cast<const uint8_t*>(weights.data);
    view.scales = static_cast<const uint8_t*>(scales.data);
    view.scale_type = scales.type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT ? ScaleType::kFloat32 : ScaleType::kFloat16;
    if (zero_points.count > 0) view.zero_points = static_cast<const uint8_t*>(zero_points.data);
    if (minimums.count > 0) view.minimums = static_cast<const uint8_t*>(minimums.data);
    CheckWeight({&weights, &scales, &zero_points, &minimums},
                ValidateGroups(kInt4Bitmap, {view.k, view.n, view.group, weights.count, scales.count, view.zero_points,
                                             zero_points.count, minimums.count}),
                node());
    LinearLayer layer;
    layer.w = &w_;
    layer.kernels = GroupInt4Kernels();
    layer.panel_inputs = kInt4Bitmap.PaddedK(w_.k);
    MakePlan(info, layer);
  }

 private:
  GroupWeight w_;
};

}  // namespace

const OrtCustomOp* W4A8MatMulOp() {
  static const LinearOrtOp<Kernel> op;
  return &op;
}

}  // namespace ortolan
