// ORT adapter of VNNISpMM.
//
//     Y = LayerNormalization(activation(X W + bias) + residual), or without the last of these, perhaps gated
//         (matmul/linear_plan.h)
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
static_assert(kTokenChunk % kMostRowBlock == 0);

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
                          ", expected ", count, " element", count == 1 ? "" : "s", ". ", kOptimizeAgain));
}

// The scale at this input, and the zero point at the next one.
FixedRange RangeAt(const OrtKernelInfo& info, size_t input, const std::string& node) {
  FixedRange range;
  const ConstantTensor scale = Constant(info, input, 1, node);
  range.scale = NumberIn<float>(scale);
  range.zero_point = NumberIn<uint8_t>(Constant(info, input + 1, 1, node));
  if (range.scale >= std::numeric_limits<float>::min() && range.scale <= std::numeric_limits<float>::max()) {
    return range;
  }
  throw OpError(ErrorText(node, ": ", kInputNames[input], " '", scale.name, "' is ", range.scale,
                          ", expected a number above 0. ", kOptimizeAgain));
}

bool IsZero(const OrtKernelInfo& info, size_t input, const std::string& node) {
  return NumberIn<float>(Constant(info, input, 1, node)) == 0.0f;
}

// What a weight holds beside its tensors.
struct WeightMemory {
  AlignedConstant<int64_t> starts;
  AlignedConstant<float> scales;
  std::vector<int32_t> sums;
};

// The weight whose values, indices, starts and scales begin at input `first`.
BlockSparseWeight ReadWeight(const OrtKernelInfo& info, size_t first, int64_t k, int64_t n, const std::string& node,
                             WeightMemory& memory) {
  const ConstantTensor values = Constant(info, first, node);
  const ConstantTensor indices = Constant(info, first + 1, node);
  const ConstantTensor starts = Constant(info, first + 2, node);
  const ConstantTensor scales = Constant(info, first + 3, node);
  memory.starts = AlignedConstant<int64_t>(starts);
  memory.scales = AlignedConstant<float>(scales);
  const BlockSparseView view{k, n, static_cast<const int8_t*>(values.data), static_cast<const uint8_t*>(indices.data),
                             memory.starts.data()};
  CheckWeight({&values, &indices, &starts, &scales},
              ValidateBlockSparse({view, values.count, indices.count, starts.count, scales.count}), node);
  memory.sums = SumsOfOutputs(view);
  return {{k, n}, view, memory.sums.data(), memory.scales.data(), {}};
}

// What a panel costs, for cutting up the work: a quarter of the inputs that it holds. A piece should have some panels,
// since the kernels write y by several.
int64_t InputsOfPanel(const BlockSparseView& w) { return w.starts[w.Groups()] * kQuadInputs / w.Groups() / 4 + 1; }

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    w_ = ReadWeight(info, kValues, IntAttribute(info, "k", node_), IntAttribute(info, "n", node_), node_, w_memory_);
    LinearLayer layer;
    layer.w = &w_;
    layer.kernels = BlockSparseKernels();
    layer.panel_inputs = InputsOfPanel(w_.view);
    layer.row_chunk = kTokenChunk;
    const int64_t hidden_k = IntAttributeOr(info, "hidden_k", 0);
    if (hidden_k != 0) {
      ReadHiddenLayer(info, hidden_k);
      layer.hidden = &hidden_;
      layer.hidden_bias = hidden_bias_.data();
      layer.hidden_panel_inputs = InputsOfPanel(hidden_.view);
    } else if (HasInput(info, kXScale) && !IsZero(info, kXScale, node_)) {
      w_.x_range = RangeAt(info, kXScale, node_);
    } else if (!HasInput(info, kXScale) && HasInput(info, kXZeroPoint)) {
      throw OpError(ErrorText(node_, ": x_zero_point is given without x_scale. ", kOptimizeAgain));
    }
    linear_.emplace(info, node_, LinearOp::Inputs{kX, kBias, kResidual, kNormWeight}, layer);
  }

  void Compute(Ort::KernelContext& context, Host& host) { linear_->Compute(context, host); }

 private:
  void ReadHiddenLayer(const OrtKernelInfo& info, int64_t hidden_k) {
    static_cast<BlockSparseWeight&>(hidden_) = ReadWeight(info, kHiddenValues, hidden_k, w_.k, node_, hidden_memory_);
    hidden_bias_ = AlignedConstant<float>(Constant(info, kHiddenBias, w_.k, node_));
    hidden_.x_range = RangeAt(info, kXScale, node_);
    hidden_.table = static_cast<const uint8_t*>(Constant(info, kTable, 256, node_).data);
    hidden_.table_x = RangeAt(info, kTableXScale, node_);
    hidden_.table_y = RangeAt(info, kTableYScale, node_);
  }

  std::string node_;
  BlockSparseWeight w_;
  WeightMemory w_memory_;
  HiddenLayerWeight hidden_;  // if there is one
  WeightMemory hidden_memory_;
  AlignedConstant<float> hidden_bias_;
  std::optional<LinearOp> linear_;  // made when the weight is known
};

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
