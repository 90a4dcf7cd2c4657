#include "matmul/linear_op.h"

#include <algorithm>
#include <limits>

#include "host/broadcast.h"

namespace ortolan {
namespace {

constexpr float kNoNorm = -1.0f;  // the value of norm_epsilon without a norm
constexpr const char* kWindow = "window";

}  // namespace

size_t IndexOf(LinearInputs inputs, const std::string& name) {
  return static_cast<size_t>(
      std::find_if(inputs.begin(), inputs.end(), [&](const LinearInput& input) { return input.name == name; }) -
      inputs.begin());
}

LinearOp::LinearOp(const OrtKernelInfo& info, const char* op_type, int64_t format_version, LinearInputs inputs)
    : node_(DescribeNode(info, op_type)),
      inputs_(inputs),
      bias_index_(IndexOf(inputs, "bias")),
      residual_index_(IndexOf(inputs, "residual")) {
  CheckFormatVersion(info, format_version, node_);
}

ConstantTensor LinearOp::Constant(const OrtKernelInfo& info, const std::string& name) const {
  return Constant(info, name, {inputs_[IndexOf(inputs_, name)].type});
}

ConstantTensor LinearOp::Constant(const OrtKernelInfo& info, const std::string& name,
                                  std::initializer_list<ONNXTensorElementDataType> types) const {
  return ConstantInput(info, IndexOf(inputs_, name), name.c_str(), types, node_);
}

void LinearOp::MakePlan(const OrtKernelInfo& info, LinearLayer layer) {
  ReadAttributes(info, layer);
  plan_.emplace(layer, ActiveFeatures());
  x_name_ = InputName(info, 0);
  x_ = AlignedConstant<float>(info, 0);
  residual_ = AlignedConstant<float>(info, residual_index_);
  has_residual_ = HasInput(info, residual_index_) && !IsConstantZero(info, residual_index_);
  if (!HasInput(info, bias_index_)) return;
  computes_bias_ = !IsConstant(info, bias_index_);
  if (!computes_bias_) bias_ = ReadVector(info, "bias", layer.w->n);
}

void LinearOp::ReadAttributes(const OrtKernelInfo& info, LinearLayer& layer) {
  const int64_t activation = IntAttributeOr(info, "activation", 0);
  if (!IsActivation(activation)) {
    throw OpError(ErrorText(node_, ": activation is ", activation,
                            ", expected 0 (none), 1 (ReLU), 2 (GELU by erf), 3 (GELU by tanh) or 4 (SiLU)"));
  }
  layer.activation = static_cast<Activation>(activation);
  const int64_t gated = IntAttributeOr(info, "gated_columns", 0);
  const int64_t n = layer.w->n;
  if (gated != 0 && (gated < 1 || gated > n || n != 2 * kPanelColumns * BitmapPanels(gated))) {
    throw OpError(ErrorText(node_, ": gated_columns is ", gated, " with ", n,
                            " columns of weights, expected 0, or half of them less the padding of each half to a "
                            "multiple of ",
                            kPanelColumns, ". ", kOptimizeAgain));
  }
  layer.gated_columns = gated;
  ReadNorm(info, layer);
  ReadWindows(info, layer);
}

void LinearOp::ReadWindows(const OrtKernelInfo& info, LinearLayer& layer) const {
  Windows& windows = layer.windows;
  const auto read = [&](const char* name, int64_t least) {
    const int64_t value = IntAttributeOr(info, name, least);
    if (value >= least && value <= Windows::kMost) return value;
    throw OpError(ErrorText(node_, ": ", name, " is ", value, ", expected ", least, " to ", Windows::kMost, ". ",
                            kOptimizeAgain));
  };
  windows = {read(kWindow, 1), read("window_stride", 1), read("window_pads_begin", 0), read("window_pads_end", 0)};
  if (windows.AreRows()) return;
  if (layer.hidden != nullptr || layer.w->k % windows.size != 0) {
    throw OpError(ErrorText(node_, ": ", kWindow, " is ", windows.size, " with ", layer.w->k,
                            " inputs, expected a divisor of them, and no hidden layer. ", kOptimizeAgain));
  }
  layer.device = nullptr;
}

void LinearOp::ReadNorm(const OrtKernelInfo& info, LinearLayer& layer) {
  const float epsilon = FloatAttributeOr(info, "norm_epsilon", kNoNorm);
  if (epsilon == kNoNorm) return;
  if (!(epsilon >= 0.0f && epsilon <= std::numeric_limits<float>::max())) {
    throw OpError(ErrorText(node_, ": norm_epsilon is ", epsilon, ", expected a finite number from 0 on, or ", kNoNorm,
                            " for no LayerNormalization. ", kOptimizeAgain));
  }
  norm_weight_ = ReadVector(info, "norm_weight", layer.Columns());
  norm_bias_ = ReadVector(info, "norm_bias", layer.Columns());
  LayerNormArgs& norm = layer.norm.emplace();
  norm.epsilon = epsilon;
  norm.weight = norm_weight_.data();
  norm.bias = norm_bias_.data();
}

AlignedConstant<float> LinearOp::ReadVector(const OrtKernelInfo& info, const char* name, int64_t n) const {
  const ConstantTensor tensor = Constant(info, name);
  CheckShape(tensor, name, {n}, node_);
  return AlignedConstant<float>(tensor);
}

void LinearOp::Compute(KernelContext& context, Host& host) const {
  const Tensor x = context.Input(0);
  std::vector<int64_t> shape = x.Shape();
  LinearCall call;
  call.m = plan_->CountRows(shape, node_, x_name_);
  call.x = x_.In(x);
  call.bias = computes_bias_ ? Bias(context) : bias_.data();
  if (const Windows& windows = plan_->layer().windows; !windows.AreRows()) {
    int64_t& frames = shape[shape.size() - 2];
    call.frames = frames;
    frames = windows.Count(frames);
  }
  shape.back() = plan_->layer().Columns();
  if (has_residual_) return AddResidual(context, host, call, shape);
  call.y = context.Output<float>(0, shape);
  plan_->Run(host, call);
}

// Y has the shape that X W and the residual broadcast to.
void LinearOp::AddResidual(KernelContext& context, Host& host, LinearCall call,
                           const std::vector<int64_t>& shape) const {
  const Tensor value = context.Input(residual_index_);
  const Residual residual{residual_.In(value), value.Shape()};
  const std::optional<std::vector<int64_t>> sum_shape = BroadcastShape(shape, residual.shape);
  if (!sum_shape) {
    throw OpError(ErrorText(node_, ": residual has shape ", ShapeText(residual.shape), ", which does not fit X W of ",
                            ShapeText(shape), ". Feed the model inputs of the shapes it was exported for."));
  }
  if (plan_->layer().norm && sum_shape->back() != shape.back()) {
    throw OpError(ErrorText(node_, ": residual has shape ", ShapeText(residual.shape), ", expected [..., ",
                            shape.back(), "], as norm_weight has. ", kOptimizeAgain));
  }
  call.y = context.Output<float>(0, *sum_shape);
  plan_->RunWithResidual(host, call, shape, residual, *sum_shape);
}

const float* LinearOp::Bias(const KernelContext& context) const {
  const Tensor bias = context.Input(bias_index_);
  const std::vector<int64_t> shape = bias.Shape();
  if (shape != std::vector<int64_t>{plan_->layer().w->n}) {
    throw OpError(ErrorText(node_, ": bias has shape ", ShapeText(shape), ", expected [", plan_->layer().w->n, "]"));
  }
  return bias.Data<float>();
}

void LinearOp::InferShape(OrtShapeInferContext* context, LinearInputs inputs) {
  const size_t residual = IndexOf(inputs, "residual");
  if (HasMoreInputs(context, residual) && !HasOneElement(context, residual)) return;
  if (ShapeAttributeOr(context, kWindow, 1) != 1 || ShapeAttributeOr(context, "window_stride", 1) != 1) return;
  if (!InferLastDimension(context, "gated_columns")) InferLastDimension(context, "n");
}

}  // namespace ortolan
