// ORT adapter of VNNISpMM. README.md lists inputs, outputs and attributes.
//
//     Y = LayerNormalization(activation(X W + bias) + residual)    optionally gated or without normalization:
//                                                                  matmul/linear_plan.h
//
// All inputs except X and residual are constants. Zeros as bias and one zero as residual mean the same as omitted
// inputs (see SparseAMXMatMul's adapter). hidden_k above 0: another layer comes first, with hidden_k inputs and k
// outputs (HiddenLayerArgs in matmul/block_sparse_weight.h). Its inputs and x_scale are then required;
// otherwise its inputs are ignored.
#include <limits>

#include "matmul/block_sparse_layer.h"
#include "matmul/linear_op.h"
#include "operators.h"

namespace ortolan {
namespace {

// Memory of one packed weight besides its constant tensors.
struct WeightMemory {
  AlignedConstant<int64_t> starts;
  AlignedConstant<float> scales;
  std::vector<int32_t> sums;
};

class Kernel : public LinearOp {
 public:
  static constexpr const char* kOpType = "VNNISpMM";
  static constexpr int64_t kFormatVersion = 1;
  static constexpr LinearInput kInputs[] = {{"X"},
                                            {"values", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
                                            {"indices", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16},
                                            {"starts", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                                            {"scales"},
                                            {"bias"},
                                            {"residual"},
                                            {"norm_weight"},
                                            {"norm_bias"},
                                            {"x_scale"},
                                            {"x_zero_point", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"hidden_values", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8},
                                            {"hidden_indices", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16},
                                            {"hidden_starts", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                                            {"hidden_scales"},
                                            {"hidden_bias"},
                                            {"table", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"table_x_scale"},
                                            {"table_x_zero_point", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8},
                                            {"table_y_scale"},
                                            {"table_y_zero_point", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8}};

  explicit Kernel(const OrtKernelInfo& info) : LinearOp(info, kOpType, kFormatVersion, kInputs) {
    w_ = ReadWeight(info, "", IntAttribute(info, "k", node()), IntAttribute(info, "n", node()), w_memory_);
    LinearLayer layer = LayerOf(w_);
    const int64_t hidden_k = IntAttributeOr(info, "hidden_k", 0);
    if (hidden_k != 0) {
      ReadHiddenLayer(info, hidden_k);
      layer.hidden = &hidden_;
      layer.hidden_bias = hidden_bias_.data();
      layer.hidden_panel_inputs = InputsOfPanel(hidden_.view);
    } else if (Has(info, "x_scale")) {
      if (ScalarIn<float>(Elements(info, "x_scale", 1)) != 0.0f) w_.x_range = ReadRange(info, "x_");
    } else if (Has(info, "x_zero_point")) {
      throw OpError(
          ErrorText(node(), ": x_zero_point is given without x_scale, expected both or neither. ", kOptimizeAgain));
    }
    MakePlan(info, layer);
  }

 private:
  // Reads a constant with `count` elements.
  ConstantTensor Elements(const OrtKernelInfo& info, const std::string& name, int64_t count) const {
    ConstantTensor tensor = Constant(info, name);
    if (tensor.count == count) return tensor;
    throw OpError(ErrorText(node(), ": ", name, " '", tensor.name, "' has shape ", ShapeText(tensor.shape),
                            ", expected ", count, " element", count == 1 ? "" : "s", ". ", kOptimizeAgain));
  }

  // Reads <prefix>scale and <prefix>zero_point.
  FixedRange ReadRange(const OrtKernelInfo& info, const std::string& prefix) const {
    const ConstantTensor tensor = Elements(info, prefix + "scale", 1);
    const float scale = ScalarIn<float>(tensor);
    const FixedRange range{scale, ScalarIn<uint8_t>(Elements(info, prefix + "zero_point", 1))};
    if (scale >= std::numeric_limits<float>::min() && scale <= std::numeric_limits<float>::max()) return range;
    throw OpError(ErrorText(node(), ": ", prefix, "scale '", tensor.name, "' is ", scale,
                            ", expected a normal float above 0. ", kOptimizeAgain));
  }

  // Reads the weight <prefix>values, <prefix>indices, <prefix>starts and <prefix>scales.
  BlockSparseWeight ReadWeight(const OrtKernelInfo& info, const std::string& prefix, int64_t k, int64_t n,
                               WeightMemory& memory) const {
    const ConstantTensor values = Constant(info, prefix + "values");
    const ConstantTensor indices = Constant(info, prefix + "indices");
    const ConstantTensor starts = Constant(info, prefix + "starts");
    const ConstantTensor scales = Constant(info, prefix + "scales");
    memory.starts = AlignedConstant<int64_t>(starts);
    memory.scales = AlignedConstant<float>(scales);
    const BlockSparseView view{k, n, static_cast<const int8_t*>(values.data), static_cast<const uint8_t*>(indices.data),
                               memory.starts.data()};
    CheckWeight({&values, &indices, &starts, &scales},
                ValidateBlockSparse({view, values.count, indices.count, starts.count, scales.count}), node());
    memory.sums = SumsOfOutputs(view);
    return {{k, n}, view, memory.sums.data(), memory.scales.data(), {}};
  }

  void ReadHiddenLayer(const OrtKernelInfo& info, int64_t hidden_k) {
    static_cast<BlockSparseWeight&>(hidden_) = ReadWeight(info, "hidden_", hidden_k, w_.k, hidden_memory_);
    hidden_bias_ = AlignedConstant<float>(Elements(info, "hidden_bias", w_.k));
    hidden_.x_range = ReadRange(info, "x_");
    hidden_.table = static_cast<const uint8_t*>(Elements(info, "table", 256).data);
    hidden_.table_x = ReadRange(info, "table_x_");
    hidden_.table_y = ReadRange(info, "table_y_");
  }

  BlockSparseWeight w_;
  WeightMemory w_memory_;
  HiddenLayerWeight hidden_;  // if there is one
  WeightMemory hidden_memory_;
  AlignedConstant<float> hidden_bias_;
};

}  // namespace

const OrtCustomOp* VNNISpMMOp() {
  static const LinearOrtOp<Kernel> op;
  return &op;
}

}  // namespace ortolan
