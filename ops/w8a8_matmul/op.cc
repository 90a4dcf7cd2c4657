// ORT adapter of W8A8MatMul. README.md lists inputs, outputs and attributes.
//
//     Y = LayerNormalization(activation(X W + bias) + residual)    optionally gated or without normalization:
//                                                                  matmul/linear_plan.h
//
// Zeros for bias and one zero for residual mean the same as omitted inputs (see SparseAMXMatMul's adapter).
#include "matmul/group_op.h"
#include "operators.h"

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
