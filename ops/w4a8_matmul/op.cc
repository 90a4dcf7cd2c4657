// ORT adapter of W4A8MatMul. README.md lists inputs, outputs and attributes.
//
//     Y = LayerNormalization(activation(X W + bias) + residual)    optionally gated or without normalization:
//                                                                  matmul/linear_plan.h
//
// These values mean the same as omitted inputs (see SparseAMXMatMul's adapter): zeros for bias, one zero for residual
// and minimums, 8 for zero_points (one zero if there are minimums or subgroups), one zero for high_bits. Without
// subgroups, subgroup_scales and high_bits are ignored.
#include "matmul/group_op.h"
#include "operators.h"
#include "w4a8_matmul/op_opencl.h"

namespace ortolan {
namespace {

class Kernel : public GroupOp {
 public:
  static constexpr const char* kOpType = "W4A8MatMul";
  static constexpr LinearInput kInputs[] = {{"X"},
                                            {"weights", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"scales", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED},
                                            {"bias"},
                                            {"residual"},
                                            {"zero_points", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"norm_weight"},
                                            {"norm_bias"},
                                            {"minimums", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED},
                                            {"subgroup_scales", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"high_bits", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"subgroup_minimums", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}};

  explicit Kernel(const OrtKernelInfo& info)
      : GroupOp(info, kOpType, FormatVersion(info), kInputs, Int4Groups(), &OpenOnOpenCl) {}

 private:
  // Older libraries must refuse weights in subgroups, of either kind.
  static int64_t FormatVersion(const OrtKernelInfo& info) {
    if (SubgroupSize(info) == 0) return 1;
    return KQuantScaleBits(info) == 0 ? 2 : 3;
  }
};

}  // namespace

const OrtCustomOp* W4A8MatMulOp() {
  static const LinearOrtOp<Kernel> op;
  return &op;
}

}  // namespace ortolan
