// ORT adapter of VNNISpMM.
//
//     Y = LayerNormalization(activation(X W + bias) + residual), or without the last of these, perhaps gated
//         (matmul/linear_op.h)
//
//     X float [..., k], values i8, indices u16, starts i64, scales float [n], bias float [n], residual float
//     -> Y float [..., n], broadcast with residual;   attributes k, n, format_version, activation, gated_columns,
//     norm_epsilon
//
// values, indices, starts and scales are initializers: formats/block_sparse_4x1.h. bias and residual are optional;
// where they must not be missing, they are zeros and one zero (see SparseAMXMatMul's adapter).
//
// norm_weight float [columns of Y], norm_bias float [columns of Y]: constants, needed where the attribute norm_epsilon
// is 0 or more; -1, or none, stands for no LayerNormalization, and they are ignored.
//
// x_scale float [], x_zero_point u8 []: constants, the range that X is quantized with. Optional; x_scale 0 stands for
// none: token by token.
//
// hidden_k: with this attribute above 0 another layer comes first (HiddenLayerArgs in matmul/block_sparse_weight.h), of
// hidden_k inputs and k outputs:
//
//     X float [..., hidden_k]; hidden_values, hidden_indices, hidden_starts, hidden_scales float [k], hidden_bias float
//     [k]; table u8 [256], table_x_scale float [], table_x_zero_point u8 [], table_y_scale, table_y_zero_point
//
// All of these are constants, and x_scale is needed. hidden_k 0: whatever stands in their places is ignored.
#include <limits>
#include <optional>

#include "matmul/block_sparse_weight.h"
#include "matmul/linear_op.h"
#include "ort/rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "VNNISpMM";
constexpr int64_t kFormatVersion = 1;
// Tokens whose activations the cores keep in the cache, while the weights pass by.
constexpr int64_t kTokenChunk = 64;
static_assert(kTokenChunk <= kRowChunk && kTokenChunk % kMostRowBlock == 0);

enum Input : size_t {
  kX,
  kValues,
  kIndices,
  kStarts,
  kScales,
  kBias,
  kResidual,
  kNormWeight,
  kNormBias,
  kXScale,
  kXZeroPoint,
  kHiddenValues,
  kHiddenIndices,
  kHiddenStarts,
  kHiddenScales,
  kHiddenBias,
  kTable,
  kTableXScale,
  kTableXZeroPoint,
  kTableYScale,
  kTableYZeroPoint,
  kInputCount
};

constexpr const char* kInputNames[] = {"X",
                                       "values",
                                       "indices",
                                       "starts",
                                       "scales",
                                       "bias",
                                       "residual",
                                       "norm_weight",
                                       "norm_bias",
                                       "x_scale",
                                       "x_zero_point",
                                       "hidden_values",
                                       "hidden_indices",
                                       "hidden_starts",
                                       "hidden_scales",
                                       "hidden_bias",
                                       "table",
                                       "table_x_scale",
                                       "table_x_zero_point",
                                       "table_y_scale",
                                       "table_y_zero_point"};
static_assert(std::size(kInputNames) == kInputCount);

constexpr ONNXTensorElementDataType TypeOf(size_t input) {
  switch (input) {
    case kValues:
    case kHiddenValues:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    case kIndices:
    case kHiddenIndices:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16;
    case kStarts:
    case kHiddenStarts:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
    case kXZeroPoint:
    case kTable:
    case kTableXZeroPoint:
    case kTableYZeroPoint:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
    default:
      return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
  }
}

ConstantTensor Constant(const OrtKernelInfo& info, size_t input, const std::string& node) {
  return ConstantInput(info, input, kInputNames[input], {TypeOf(input)}, node);
}

// Of `count` elements.
ConstantTensor Constant(const OrtKernelInfo& info, size_t input, int64_t count, const std::string& node) {
  ConstantTensor tensor = Constant(info, input, node);
  if (tensor.count == count) return tensor;
  throw OpError(ErrorText(node, ": ", kInputNames[input], " '", tensor.name, "' has shape ", ShapeText(tensor.shape),
                          ", expected ", count, " element", count == 1 ? "" : "s",
                          ". Optimize the original model again."));
}

// The scale at this input, and the zero point at the next one.
FixedRange RangeAt(const OrtKernelInfo& info, size_t input, const std::string& node) {
  FixedRange range;
  const ConstantTensor scale = Constant(info, input, 1, node);
  range.scale = *static_cast<const float*>(scale.data);
  range.zero_point = *static_cast<const uint8_t*>(Constant(info, input + 1, 1, node).data);
  if (range.scale >= std::numeric_limits<float>::min() && range.scale <= std::numeric_limits<float>::max()) {
    return range;
  }
  throw OpError(ErrorText(node, ": ", kInputNames[input], " '", scale.name, "' is ", range.scale,
                          ", expected a number above 0. Optimize the original model again."));
}

bool IsZero(const OrtKernelInfo& info, size_t input, const std::string& node) {
  return *static_cast<const float*>(Constant(info, input, 1, node).data) == 0.0f;
}

// Reads the weight whose values, indices, starts and scales begin at input `first`; gives the sums for weight.sums.
std::vector<int32_t> ReadWeight(const OrtKernelInfo& info, size_t first, int64_t k, int64_t n, const std::string& node,
                                BlockSparseWeight& weight) {
  const ConstantTensor values = Constant(info, first, node);
  const ConstantTensor indices = Constant(info, first + 1, node);
  const ConstantTensor starts = Constant(info, first + 2, node);
  const ConstantTensor scales = Constant(info, first + 3, node);
  static_cast<MatMulWeight&>(weight) = {k, n};
  weight.view = {k, n, static_cast<const int8_t*>(values.data), static_cast<const uint8_t*>(indices.data),
                 static_cast<const int64_t*>(starts.data)};
  weight.scales = static_cast<const float*>(scales.data);
  const std::string problem =
      ValidateBlockSparse({weight.view, values.count, indices.count, starts.count, scales.count});
  if (!problem.empty()) {
    throw OpError(ErrorText(node, ": malformed weight in tensors '", values.name, "', '", indices.name, "', '",
                            starts.name, "', '", scales.name, "': ", problem, ". Optimize the original model again."));
  }
  return SumsOfOutputs(weight.view);
}

// What a panel costs, for cutting up the work: a quarter of the inputs that it holds. A piece should have some panels,
// since the kernels write y by several.
int64_t InputsOfPanel(const BlockSparseView& w) { return w.starts[w.Groups()] * kQuadInputs / w.Groups() / 4 + 1; }

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    const int64_t k = IntAttribute(info, "k", node_);
    sums_ = ReadWeight(info, kValues, k, IntAttribute(info, "n", node_), node_, w_);
    w_.sums = sums_.data();
    const int64_t hidden_k = IntAttributeOr(info, "hidden_k", 0);
    if (hidden_k != 0) {
      hidden_sums_ = ReadWeight(info, kHiddenValues, hidden_k, k, node_, hidden_.emplace());
      hidden_->sums = hidden_sums_.data();
      hidden_bias_ = static_cast<const float*>(Constant(info, kHiddenBias, k, node_).data);
      hidden_->table = static_cast<const uint8_t*>(Constant(info, kTable, 256, node_).data);
      hidden_->table_x = RangeAt(info, kTableXScale, node_);
      hidden_->table_y = RangeAt(info, kTableYScale, node_);
      hidden_->x_range = RangeAt(info, kXScale, node_);
    } else if (HasInput(info, kXScale) && !IsZero(info, kXScale, node_)) {
      w_.x_range = RangeAt(info, kXScale, node_);
    } else if (!HasInput(info, kXScale) && HasInput(info, kXZeroPoint)) {
      throw OpError(ErrorText(node_, ": x_zero_point is given without x_scale. Optimize the original model again."));
    }
    linear_.emplace(info, node_, LinearOp::Inputs{kX, kBias, kResidual, kNormWeight}, hidden_ ? hidden_k : k, w_.n);
  }

  void Compute(Ort::KernelContext& context);

 private:
  static LinearOp::Packing PackingOf(const MatMulKernel& kernel, int64_t m, const MatMulWeight& w) {
    return {kernel.row_block, kernel.PackedBytes(w, m), kernel.packed_row_bytes(w), kTokenChunk};
  }

  auto PackWith(const MatMulKernel& kernel, const BlockSparseWeight& w) const {
    return [this, &kernel, &w](const float* x, int64_t count, char* to) {
      kernel.pack(w, x, linear_->XRowBytes(), count, to);
    };
  }

  // The hidden layer, then the other.
  void RunBoth(const LinearOp::Rows& rows, MatMulArgs args) const {
    // One packs what the other reads.
    const MatMulKernel& kernel =
        SelectKernel(BlockSparseKernels(), ActiveFeatures(), {rows.m, std::max(hidden_->k, w_.k)});
    const LinearOp::Packing x = PackingOf(kernel, rows.m, *hidden_), next = PackingOf(kernel, rows.m, w_);
    const Scratch packed(rows.context, static_cast<size_t>(x.bytes + next.bytes));
    linear_->PackRows(rows, x, packed.data(), PackWith(kernel, *hidden_));
    HiddenLayerArgs hidden;
    hidden.w = &*hidden_;
    hidden.bias = hidden_bias_;
    hidden.m = rows.m;
    hidden.x = packed.data();
    hidden.next = static_cast<char*>(packed.data()) + x.bytes;
    args.x = hidden.next;
    const auto piece = [&](int64_t row, int64_t panel, int64_t panel_end) {
      const HiddenLayerArgs part{RowsOf(hidden, row, kTokenChunk, x.row_bytes),
                                 static_cast<char*>(hidden.next) + row * next.row_bytes};
      kernel.multiply_hidden(part, panel, panel_end);
    };
    LinearOp::ForEachPiece(rows.context, rows.m, kTokenChunk, BitmapPanels(hidden_->n), InputsOfPanel(hidden_->view),
                           piece);
    linear_->Multiply(rows, next, InputsOfPanel(w_.view), args, kernel.multiply);
  }

  std::string node_;
  BlockSparseWeight w_;
  std::vector<int32_t> sums_;
  std::optional<HiddenLayerWeight> hidden_;
  std::vector<int32_t> hidden_sums_;
  const float* hidden_bias_ = nullptr;
  std::optional<LinearOp> linear_;  // made when the weight's size is known
};

void Kernel::Compute(Ort::KernelContext& context) {
  linear_->Compute(context, [&](const LinearOp::Rows& rows, const float* bias) {
    MatMulArgs args;
    args.w = &w_;
    args.bias = bias;
    if (hidden_) return RunBoth(rows, args);
    const MatMulKernel& kernel = SelectKernel(BlockSparseKernels(), ActiveFeatures(), {rows.m, w_.k});
    linear_->Run(rows, PackingOf(kernel, rows.m, w_), InputsOfPanel(w_.view), args, kernel.multiply,
                 PackWith(kernel, w_));
  });
}

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return TypeOf(index); }
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
