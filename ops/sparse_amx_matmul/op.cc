// ORT adapter of SparseAMXMatMul.
//
//     Y = activation(X W + bias) + residual, perhaps gated (matmul/linear_op.h)
//
//     X float [..., k], masks u8, values bf16, int8 or u8 (int4), offsets i64, bias float [n], residual float, scales
//     -> Y float [..., n], broadcast with residual;   attributes k, n, format_version, weight_bits,
//     group_size, activation, gated_columns
//
// masks, values, offsets and scales are initializers: formats/bitmap.h and its like. The element type of values says
// which; masks and offsets without elements mean dense storage. bias and residual are optional, and scales for bf16,
// where they are 1; so are a bias of zeros and a residual of one zero. (An ONNX function cannot ask whether an input is
// there, and ONNX Runtime up to 1.21 crashes where one is left out in front of another: graph_passes fills them.)
#include <algorithm>
#include <cstring>
#include <optional>

#include "matmul/bitmap_weight.h"
#include "matmul/linear_op.h"
#include "ort/ort_op.h"
#include "ort/rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "SparseAMXMatMul";
constexpr int64_t kFormatVersion = 1;

enum Input : size_t { kX, kMasks, kValues, kOffsets, kBias, kResidual, kScales, kInputCount };

// The format of the weight, by the element type of values.
const BitmapLayout& LayoutOf(ONNXTensorElementDataType values) {
  if (values == ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16) return kBf16Bitmap;
  return values == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ? kInt8Bitmap : kInt4Bitmap;
}

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    const ConstantTensor masks = ConstantInput(info, kMasks, "masks", {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}, node_);
    const ConstantTensor values =
        ConstantInput(info, kValues, "values",
                      {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8,
                       ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                      node_);
    const ConstantTensor offsets =
        ConstantInput(info, kOffsets, "offsets", {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64}, node_);
    // Copied: a file may place them at an odd address.
    offsets_.resize(static_cast<size_t>(offsets.count));
    std::copy_n(static_cast<const char*>(offsets.data), offsets.count * sizeof(int64_t),
                reinterpret_cast<char*>(offsets_.data()));
    layout_ = &LayoutOf(values.type);
    const int64_t weight_bits = IntAttributeOr(info, "weight_bits", layout_->value_bits);
    if (weight_bits != layout_->value_bits) {
      throw OpError(ErrorText(node_, ": weight_bits is ", weight_bits, ", but values '", values.name, "' hold ",
                              layout_->value_bits, "-bit weights. Optimize the original model again."));
    }
    const BitmapClaim claim{IntAttribute(info, "k", node_),
                            IntAttribute(info, "n", node_),
                            static_cast<const uint8_t*>(masks.data),
                            masks.count,
                            values.count,
                            offsets_.data(),
                            offsets.count};
    const std::string problem = ValidateBitmap(claim, *layout_);
    if (!problem.empty()) {
      throw OpError(ErrorText(node_, ": malformed weight in tensors '", masks.name, "', '", values.name, "', '",
                              offsets.name, "': ", problem, ". Optimize the original model again."));
    }
    w_ = claim.View(static_cast<const uint8_t*>(values.data));
    ReadScales(info);
    linear_.emplace(info, node_, LinearOp::Inputs{kX, kBias, kResidual}, w_.k, w_.n);
  }

  void Compute(Ort::KernelContext& context) {
    linear_->Compute(context, [&](const LinearOp::Rows& rows, const float* bias) { Multiply(rows, bias); });
  }

 private:
  void ReadScales(const OrtKernelInfo& info) {
    group_ = IntAttributeOr(info, "group_size", kWholeColumn);
    const bool is_int4 = layout_ == &kInt4Bitmap;
    if (is_int4 ? !IsInt4Group(group_) : group_ != kWholeColumn) {
      throw OpError(ErrorText(node_, ": group_size is ", group_, ", expected ",
                              is_int4 ? "32, 64 or 128 for int4 weights" : "0 for weights that are not int4"));
    }
    const bool is_bf16 = layout_ == &kBf16Bitmap;
    if (is_bf16 && !HasInput(info, kScales)) return;
    const ConstantTensor scales =
        ConstantInput(info, kScales, "scales",
                      {is_int4 ? ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 : ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    const std::vector<int64_t> expected{BitmapPanels(w_.n), ScaleRows(w_.k, group_), kPanelColumns};
    if (scales.shape != expected) {
      throw OpError(ErrorText(node_, ": scales '", scales.name, "' has shape ", ShapeText(scales.shape), ", expected ",
                              ShapeText(expected), " (panels, groups, columns). Optimize the original model again."));
    }
    scales_ = scales.data;
    if (!is_bf16) return;
    for (int64_t i = 0; i < scales.count; ++i) {
      float scale;
      std::memcpy(&scale, static_cast<const char*>(scales.data) + i * sizeof(scale), sizeof(scale));
      if (scale != 1.0f) {
        throw OpError(ErrorText(node_, ": scales '", scales.name, "' holds ", scale,
                                ", expected 1 everywhere for bf16 weights. Optimize the original model again."));
      }
    }
  }

  void Multiply(const LinearOp::Rows& rows, const float* bias) const {
    const BitmapWeight weight{{w_.k, w_.n}, w_, group_, scales_};
    const std::span<const MatMulKernel> kernels = layout_ == &kBf16Bitmap   ? Bf16Kernels()
                                                  : layout_ == &kInt8Bitmap ? Int8Kernels()
                                                                            : Int4Kernels();
    const MatMulKernel& kernel = SelectKernel(kernels, ActiveFeatures(), {rows.m, weight.k});
    MatMulArgs args;
    args.w = &weight;
    args.bias = bias;
    linear_->Run(rows, {kernel.row_block, kernel.PackedBytes(weight, rows.m), kernel.packed_row_bytes(weight)},
                 layout_->PaddedK(w_.k), args, kernel.multiply, [&](const float* x, int64_t count, char* to) {
                   kernel.pack(weight, x, linear_->XRowBytes(), count, to);
                 });
  }

  std::string node_;
  const BitmapLayout* layout_ = nullptr;
  std::vector<int64_t> offsets_;
  BitmapView w_;
  int64_t group_ = kWholeColumn;
  const void* scales_ = nullptr;
  std::optional<LinearOp> linear_;  // made when the weight's size is known
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    switch (index) {
      case kMasks:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
      case kValues:
      case kScales:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // one of several: the kernel looks
      case kOffsets:
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

const OrtCustomOp* SparseAMXMatMulOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
