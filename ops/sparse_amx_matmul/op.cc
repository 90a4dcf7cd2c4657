// ORT adapter of SparseAMXMatMul. README.md lists inputs, outputs and attributes.
//
//     Y = LayerNormalization(activation(X W + bias) + residual)    optionally gated or without normalization:
//                                                                  matmul/linear_plan.h
//
// The element type of values selects the format (formats/bitmap.h, bitmap_int8.h, bitmap_int4.h, two_four.h). Empty
// masks and offsets mean dense storage, empty offsets alone 2:4 storage.
//
// A bias of zeros, a residual of one zero and zero_points of a single zero mean the same as omitted inputs: an ONNX
// function cannot test whether an input is present, and ONNX Runtime up to 1.23 crashes on an omitted input before a
// given one, so graph_passes fills them in.
#include <algorithm>
#include <iterator>
#include <span>
#include <vector>

#include "formats/two_four.h"
#include "matmul/bitmap_layer.h"
#include "matmul/linear_op.h"
#include "matmul/storage.h"
#include "operators.h"

namespace ortolan {
namespace {

// The format that the element type of values selects.
struct Kind {
  ONNXTensorElementDataType values;
  const BitmapLayout* layout;
  std::span<const MatMulKernel> (*kernels)();
  ONNXTensorElementDataType scales;
};
constexpr Kind kKinds[] = {
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, &kBf16Bitmap, &Bf16Kernels, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, &kInt8Bitmap, &Int8Kernels, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT},
    {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, &kInt4Bitmap, &Int4Kernels, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16}};

class Kernel : public LinearOp {
 public:
  static constexpr const char* kOpType = "SparseAMXMatMul";
  static constexpr int64_t kFormatVersion = 1;
  static constexpr LinearInput kInputs[] = {{"X"},
                                            {"masks", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"values", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED},
                                            {"offsets", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                                            {"bias"},
                                            {"residual"},
                                            {"scales", ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED},
                                            {"norm_weight"},
                                            {"norm_bias"},
                                            {"zero_points", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8}};

  explicit Kernel(const OrtKernelInfo& info) : LinearOp(info, kOpType, kFormatVersion, kInputs) {
    ReadWeight(info);
    ReadScales(info);
    ReadRowZeroPoints(info);
    ReadZeroPoints(info);
    MakePlan(info, BitmapLayer(w_, *kind_->layout, kind_->kernels()));
  }

 private:
  void ReadWeight(const OrtKernelInfo& info) {
    const ConstantTensor masks = Constant(info, "masks");
    const ConstantTensor values = Constant(info, "values", {kKinds[0].values, kKinds[1].values, kKinds[2].values});
    const ConstantTensor offsets = Constant(info, "offsets");
    offsets_ = AlignedConstant<int64_t>(offsets);
    kind_ = std::find_if(kKinds, std::end(kKinds) - 1, [&](const Kind& kind) { return kind.values == values.type; });
    const BitmapLayout& layout = *kind_->layout;
    const int64_t weight_bits = IntAttributeOr(info, "weight_bits", layout.value_bits);
    if (weight_bits != layout.value_bits) {
      throw OpError(ErrorText(node(), ": weight_bits is ", weight_bits, ", but values '", values.name, "' hold ",
                              layout.value_bits, "-bit weights. ", kOptimizeAgain));
    }
    const BitmapClaim claim{IntAttribute(info, "k", node()),
                            IntAttribute(info, "n", node()),
                            static_cast<const uint8_t*>(masks.data),
                            masks.count,
                            values.count,
                            offsets_.data(),
                            offsets.count};
    CheckWeight({&masks, &values, &offsets}, ValidateStored(claim, layout), node());
    w_ = {{claim.k, claim.n}, claim.View(static_cast<const uint8_t*>(values.data))};
  }

  void ReadScales(const OrtKernelInfo& info) {
    w_.group = IntAttributeOr(info, "group_size", kWholeColumn);
    const bool is_int4 = kind_->layout == &kInt4Bitmap;
    if (is_int4 ? !IsGroupSize(w_.group) : w_.group != kWholeColumn) {
      throw OpError(ErrorText(node(), ": group_size is ", w_.group, ", expected ",
                              is_int4 ? "32, 64 or 128 for int4 weights" : "0 for weights that are not int4"));
    }
    const bool is_bf16 = kind_->layout == &kBf16Bitmap;
    if (is_bf16 && !Has(info, "scales")) return;
    const ConstantTensor scales = Constant(info, "scales", {kind_->scales});
    CheckShape(scales, "scales", {BitmapPanels(w_.n), ScaleRows(w_.k, w_.group), kPanelColumns}, node(),
               " (panels, groups, columns)");
    w_.scales = scales.data;
    if (!is_bf16) return;
    const AlignedConstant<float> ones(scales);
    const float* const end = ones.data() + scales.count;
    const float* const other = std::find_if(ones.data(), end, [](float scale) { return scale != 1.0f; });
    if (other != end) {
      throw OpError(ErrorText(node(), ": scales '", scales.name, "' holds ", *other,
                              ", expected 1 everywhere for bf16 weights. ", kOptimizeAgain));
    }
  }

  void ReadRowZeroPoints(const OrtKernelInfo& info) {
    const int64_t zero_points = IntAttributeOr(info, "x_zero_points", 0);
    if (zero_points == 0) return;
    if (zero_points != 1 || kind_->layout != &kInt8Bitmap || w_.k > kMostInputsWithZeroPoints) {
      throw OpError(ErrorText(node(), ": x_zero_points is ", zero_points, " with ", w_.k, " inputs and ",
                              kind_->layout->value_bits,
                              "-bit weights, expected 0, or 1 with int8 weights and at most ",
                              kMostInputsWithZeroPoints, " inputs. ", kOptimizeAgain));
    }
    column_sums_ = SumsOfColumnsInt8(w_.view);
    w_.column_sums = column_sums_.data();
    w_.pairs_fit = PairsAreKnownToFit(w_.view);
  }

  void ReadZeroPoints(const OrtKernelInfo& info) {
    if (!IsThere(info, "zero_points")) return;
    const ConstantTensor zero_points = Constant(info, "zero_points");
    CheckShape(zero_points, "zero_points", {BitmapPanels(w_.n), 1, kPanelColumns}, node(),
               " (panels, groups, columns)");
    if (w_.column_sums == nullptr || w_.k > kMostInputsWithWeightZeroPoints) {
      throw OpError(ErrorText(node(), ": zero_points '", zero_points.name, "' are given for ",
                              kind_->layout->value_bits, "-bit weights with ", w_.k,
                              " inputs, expected int8 weights with at most ", kMostInputsWithWeightZeroPoints,
                              " inputs, and x_zero_points 1. ", kOptimizeAgain));
    }
    const int8_t* const values = static_cast<const int8_t*>(zero_points.data);
    zero_points_.assign(values, values + zero_points.count);
    w_.zero_points = zero_points_.data();
  }

  const Kind* kind_ = nullptr;
  AlignedConstant<int64_t> offsets_;
  std::vector<int32_t> column_sums_, zero_points_;
  BitmapWeight w_;
};

}  // namespace

const OrtCustomOp* SparseAMXMatMulOp() {
  static const LinearOrtOp<Kernel> op;
  return &op;
}

}  // namespace ortolan
