// ORT adapter of VNNISpMM.
//
//     Y = activation(X W + bias) + residual, perhaps gated (support/linear_op.h)
//
//     X float [..., k], values i8, indices u16, starts i64, scales float [n], bias float [n], residual float
//     -> Y float [..., n], broadcast with residual;   attributes k, n, format_version, activation, gated_columns
//
// values, indices, starts and scales are initializers: formats/block_sparse_4x1.h. bias and residual are optional;
// where they must not be missing, they are zeros and one zero (see SparseAMXMatMul's adapter).
#include <optional>

#include "support/linear_op.h"
#include "support/rooms.h"
#include "vnni_spmm/vnni_spmm.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "VNNISpMM";
constexpr int64_t kFormatVersion = 1;
// Tokens whose activations the cores keep in the cache, while the weights pass by.
constexpr int64_t kTokenChunk = 64;
static_assert(kTokenChunk <= kRowChunk);

#define ORTOLAN_KERNEL(isa, name, row_block, least_rows, most_inputs) static_assert(kTokenChunk % row_block == 0);
#define ORTOLAN_X86_KERNEL ORTOLAN_KERNEL
#include "vnni_spmm/kernels.inc"
#undef ORTOLAN_X86_KERNEL
#undef ORTOLAN_KERNEL

enum Input : size_t { kX, kValues, kIndices, kStarts, kScales, kBias, kResidual, kInputCount };

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    const ConstantTensor values = ConstantInput(info, kValues, "values", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8}, node_);
    const ConstantTensor indices =
        ConstantInput(info, kIndices, "indices", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16}, node_);
    const ConstantTensor starts = ConstantInput(info, kStarts, "starts", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}, node_);
    const ConstantTensor scales = ConstantInput(info, kScales, "scales", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    args_.w.k = IntAttribute(info, "k", node_);
    args_.w.n = IntAttribute(info, "n", node_);
    args_.w.values = static_cast<const int8_t*>(values.data);
    args_.w.indices = static_cast<const uint8_t*>(indices.data);
    args_.w.starts = static_cast<const int64_t*>(starts.data);
    args_.scales = static_cast<const float*>(scales.data);
    const std::string problem = ValidateBlockSparse({args_.w, values.count, indices.count, starts.count, scales.count});
    if (!problem.empty()) {
      throw OpError(ErrorText(node_, ": malformed weight in tensors '", values.name, "', '", indices.name, "', '",
                              starts.name, "', '", scales.name, "': ", problem,
                              ". Optimize the original model again."));
    }
    sums_ = SumsOfOutputs(args_.w);
    args_.sums = sums_.data();
    linear_.emplace(info, node_, LinearOp::Inputs{kX, kBias, kResidual}, args_.w.k, args_.w.n);
  }

  void Compute(Ort::KernelContext& context) {
    linear_->Compute(context, [&](const LinearOp::Rows& rows, const float* bias) {
      const BlockSparseView& w = args_.w;
      const VnniSpmmKernel& kernel = SelectVnniSpmm(ActiveIsa(), rows.m, w.k);
      VnniSpmmArgs args = args_;
      args.bias = bias;
      // A quarter of what a panel holds: a piece of work should have some panels, since the kernels write y by several.
      const int64_t inputs = w.starts[w.Groups()] * kQuadInputs / w.Groups() / 4 + 1;
      linear_->Run(rows, {kernel.row_block, kernel.PackedBytes(rows.m, w.k), kernel.PackedRowBytes(w.k), kTokenChunk},
                   inputs, args, kernel.multiply, [&](const float* x, int64_t count, char* to) {
                     kernel.pack(x, linear_->XRowBytes(), count, w.k, to);
                   });
    });
  }

 private:
  std::string node_;
  VnniSpmmArgs args_;  // the weight
  std::vector<int32_t> sums_;
  std::optional<LinearOp> linear_;  // made when the weight's size is known
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    switch (index) {
      case kValues:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
      case kIndices:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16;
      case kStarts:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
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

const OrtCustomOp* VNNISpMMOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
