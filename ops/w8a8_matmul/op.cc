// ORT adapter of W8A8MatMul.
//
//     Y = LayerNormalization(activation(X W + bias) + residual)    optionally gated or without normalization:
//                                                                  matmul/linear_plan.h
//
//     X float [..., k], weights i8, scales float or float16, bias float [n], residual float,
//     norm_weight and norm_bias float [columns of Y]
//     -> Y float [..., n], broadcast with residual
//     attributes k, n, format_version, group_size, activation, gated_columns, norm_epsilon
//
// weights and scales are initializers: formats/int8_group.h. bias and residual are optional; zeros and one zero mean
// the same as omitted inputs (see SparseAMXMatMul's adapter). matmul/linear_op.h describes the norm.
#include "matmul/group_op.h"
#include "rooms.h"

namespace ortolan {
namespace {

class Kernel : public GroupOp {
 public:
  static constexpr const char* kOpType = "W8A8MatMul";
  static constexpr int64_t kFormatVersion = 1;
  static constexpr LinearInput kInputs[] = {{"X"},
                                            {"weights", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
                                            {"scales", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED},
                                            {"bias"},
                                            {"residual"},
                                            {"norm_weight"},
                                            {"norm_bias"}};

  explicit Kernel(const OrtKernelInfo& info) : GroupOp(info, kOpType, kFormatVersion, kInputs, Int8Groups()) {}
};

}  // namespace

const OrtCustomOp* W8A8MatMulOp() {
  static const LinearOrtOp<Kernel> op;
  return &op;
}

}  // namespace ortolan
