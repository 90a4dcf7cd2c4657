// ORT adapter of MoE. README.md lists inputs, outputs and attributes.
#include <array>
#include <cmath>
#include <optional>

#include "matmul/group_op.h"
#include "moe/plan.h"
#include "operators.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "MoE";
constexpr int64_t kFormatVersion = 1;

constexpr ONNXTensorElementDataType kChecked = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
constexpr ONNXTensorElementDataType kBytes = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
constexpr LinearInput kInputs[] = {{"X"},
                                   {"experts", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64},
                                   {"routing_weights"},
                                   {"up_weights", kBytes},
                                   {"up_scales", kChecked},
                                   {"down_weights", kBytes},
                                   {"down_scales", kChecked},
                                   {"up_bias"},
                                   {"down_bias"},
                                   {"up_zero_points", kBytes},
                                   {"down_zero_points", kBytes},
                                   {"up_minimums", kChecked},
                                   {"down_minimums", kChecked},
                                   {"up_subgroup_scales", kBytes},
                                   {"down_subgroup_scales", kBytes},
                                   {"up_high_bits", kBytes},
                                   {"down_high_bits", kBytes},
                                   {"up_subgroup_minimums", kBytes},
                                   {"down_subgroup_minimums", kBytes}};
constexpr size_t kRequiredInputs = 7;

// The weights of one layer of all experts, and what owns its memory.
struct StackedLayer {
  GroupWeight w;
  AlignedConstant<float> bias;
};

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    CheckFormatVersion(info, kFormatVersion, node_);
    Experts experts;
    experts.count = Dimension(info, "expert_count");
    experts.hidden = Dimension(info, "hidden_size");
    experts.inner = Dimension(info, "inner_size");
    ReadActivation(info, experts);
    const int64_t halves = experts.gated ? 2 : 1;
    experts.up = Read(info, "up_", experts.hidden, experts.count, halves * BitmapPanels(experts.inner), up_);
    experts.down = Read(info, "down_", experts.inner, experts.count, BitmapPanels(experts.hidden), down_);
    plan_.emplace(experts, ActiveFeatures());
    for (size_t i = 0; i < names_.size(); ++i) names_[i] = InputName(info, i);
    x_ = AlignedConstant<float>(info, 0);
    selected_ = AlignedConstant<int64_t>(info, 1);
    routing_weights_ = AlignedConstant<float>(info, 2);
  }

  void Compute(KernelContext& context, Host& host) const {
    const Experts& experts = plan_->experts();
    const Tensor x = context.Input(0), selected = context.Input(1), weights = context.Input(2);
    const std::vector<int64_t> shape = x.Shape(), routed = selected.Shape();
    if (shape.empty() || shape.back() != experts.hidden) {
      throw OpError(ErrorText(node_, ": X '", names_[0], "' has shape ", ShapeText(shape), ", expected [..., ",
                              experts.hidden, "]. Feed the model inputs of the shapes it was exported for."));
    }
    ExpertsCall call;
    call.m = x.Count() / experts.hidden;
    call.k = routed.empty() ? 0 : routed.back();
    if (call.k < 1 || selected.Count() / call.k != call.m || selected.Count() % call.k != 0) {
      throw OpError(ErrorText(node_, ": experts '", names_[1], "' has shape ", ShapeText(routed), ", expected [",
                              call.m, ", experts per row]. ", kOptimizeAgain));
    }
    if (weights.Shape() != routed) {
      throw OpError(ErrorText(node_, ": routing_weights '", names_[2], "' has shape ", ShapeText(weights.Shape()),
                              ", expected ", ShapeText(routed), ", as experts. ", kOptimizeAgain));
    }
    call.x = x_.In(x);
    call.selected = selected_.In(selected);
    call.routing_weights = routing_weights_.In(weights);
    for (int64_t i = 0; i < call.m * call.k; ++i) {
      if (call.selected[i] >= 0 && call.selected[i] < experts.count) continue;
      throw OpError(ErrorText(node_, ": experts '", names_[1], "' holds ", call.selected[i], ", expected 0 to ",
                              experts.count - 1));
    }
    call.y = context.Output<float>(0, shape);
    if (call.m > 0) plan_->Run(host, call);
  }

 private:
  int64_t Dimension(const OrtKernelInfo& info, const char* name) const {
    const int64_t value = IntAttribute(info, name, node_);
    if (value >= 1 && value <= kMaxDimension) return value;
    throw OpError(ErrorText(node_, ": ", name, " is ", value, ", expected 1 to ", kMaxDimension, ". ", kOptimizeAgain));
  }

  void ReadActivation(const OrtKernelInfo& info, Experts& experts) const {
    const int64_t activation = IntAttributeOr(info, "activation", 0);
    if (!IsActivation(activation)) {
      throw OpError(ErrorText(node_, ": activation is ", activation,
                              ", expected 0 (none), 1 (ReLU), 2 (GELU by erf), 3 (GELU by tanh) or 4 (SiLU)"));
    }
    experts.activation = static_cast<Activation>(activation);
    experts.gated = IntAttributeOr(info, "gated", 0) != 0;
    experts.alpha = FloatAttributeOr(info, "alpha", 1.0f);
    experts.beta = FloatAttributeOr(info, "beta", 0.0f);
    experts.limit = FloatAttributeOr(info, "limit", std::numeric_limits<float>::infinity());
    const bool finite = std::isfinite(experts.alpha) && std::isfinite(experts.beta);
    const bool scales = experts.alpha == 1.0f || experts.activation == Activation::kSilu;
    if (!finite || !(experts.alpha > 0.0f) || !(experts.limit > 0.0f) || !scales) {
      throw OpError(ErrorText(node_, ": alpha is ", experts.alpha, ", beta ", experts.beta, " and limit ",
                              experts.limit,
                              ", expected finite alpha and beta, positive alpha and limit, and alpha 1 "
                              "unless the activation is 4 (SiLU). ",
                              kOptimizeAgain));
    }
  }

  // Read a layer of `count` experts with `panels` panels each. All panels are one weight.
  ExpertsLayer Read(const OrtKernelInfo& info, const std::string& prefix, int64_t inputs, int64_t count, int64_t panels,
                    StackedLayer& stacked) const {
    // Both factors are below 2^29.
    const int64_t n = count * panels * kPanelColumns;
    const bool int8 = IntAttributeOr(info, (prefix + "bits").c_str(), 4) == 8;
    const GroupKind kind = int8 ? Int8Groups() : Int4Groups();
    stacked.w = ReadGroupWeight(info, kInputs, prefix, kind, inputs, n, node_);
    const LinearLayer layer = LayerOf(kind, stacked.w);
    const std::string bias = prefix + "bias";
    const size_t index = IndexOf(kInputs, bias);
    if (HasInput(info, index) && !IsConstantZero(info, index)) {
      const ConstantTensor tensor =
          ConstantInput(info, index, bias.c_str(), {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
      CheckShape(tensor, bias.c_str(), {count, panels * kPanelColumns}, node_);
      stacked.bias = AlignedConstant<float>(tensor);
    }
    return {&stacked.w, layer.kernels, layer.panel_inputs, stacked.bias.data()};
  }

  std::string node_;
  std::array<std::string, 3> names_;
  StackedLayer up_, down_;
  AlignedConstant<float> x_, routing_weights_;
  AlignedConstant<int64_t> selected_;
  std::optional<ExpertsPlan> plan_;  // uses the members above
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return std::size(kInputs); }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return kInputs[index].type; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index >= kRequiredInputs ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) { InferSameShape(context, 0); }
};

}  // namespace

const OrtCustomOp* MoEOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
