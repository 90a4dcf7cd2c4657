// ORT adapter of LinearAttention. README.md lists inputs, outputs and attributes.
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "linear_attention/plan.h"
#include "operators.h"
#include "ort/ort_op.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "LinearAttention";
constexpr int64_t kFormatVersion = 1;
constexpr int64_t kMaxHeads = int64_t{1} << 20;

enum Input : size_t { kQuery, kKey, kValue, kPast, kDecay, kBeta, kInputCount };
constexpr const char* kNames[] = {"query", "key", "value", "past_state", "decay", "beta"};

struct UpdateRule {
  std::string_view name;
  bool decays, corrects;  // reads decay, beta
};
constexpr UpdateRule kRules[] = {
    {"linear", false, false}, {"gated", true, false}, {"delta", false, true}, {"gated_delta", true, true}};

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)), plan_(ActiveFeatures()) {
    CheckFormatVersion(info, kFormatVersion, node_);
    query_heads_ = Heads(info, "q_num_heads");
    value_heads_ = Heads(info, "kv_num_heads");
    if (query_heads_ % value_heads_ != 0 && value_heads_ % query_heads_ != 0) {
      throw OpError(ErrorText(node_, ": q_num_heads is ", query_heads_, " and kv_num_heads ", value_heads_,
                              ", expected one to be a multiple of the other. ", kOptimizeAgain));
    }
    scale_ = FloatAttributeOr(info, "scale", 0.0f);
    if (!std::isfinite(scale_)) {
      throw OpError(ErrorText(node_, ": scale is ", scale_, ", expected a finite value. ", kOptimizeAgain));
    }
    const std::string rule = StringAttributeOr(info, "update_rule", "gated_delta");
    for (const UpdateRule& known : kRules) {
      if (known.name == rule) rule_ = &known;
    }
    if (rule_ == nullptr) {
      throw OpError(ErrorText(node_, ": update_rule is '", rule, "', expected linear, gated, delta or gated_delta. ",
                              kOptimizeAgain));
    }
    for (size_t i = 0; i < kInputCount; ++i) {
      names_[i] = InputName(info, i);
      constants_[i] = AlignedConstant<float>(info, i);
    }
  }

  void Compute(KernelContext& context, Host& host) const {
    LinearAttentionCall call;
    call.query_heads = query_heads_;
    call.value_heads = value_heads_;
    const Tensor query = context.Input(kQuery), key = context.Input(kKey), value = context.Input(kValue);
    const std::vector<int64_t> shape = query.Shape();
    if (shape.size() != 3 || shape[2] < 1 || shape[2] % query_heads_ != 0) {
      Refuse(kQuery, shape, ErrorText("[batch, tokens, a multiple of q_num_heads, ", query_heads_, "]"));
    }
    call.batch = shape[0];
    call.tokens = shape[1];
    call.key_size = shape[2] / query_heads_;
    const auto rows = [&](size_t input, const Tensor& tensor) {
      const std::vector<int64_t> found = tensor.Shape();
      if (found.size() != 3 || found[0] != call.batch || found[1] != call.tokens) {
        Refuse(input, found, ErrorText("[", call.batch, ", ", call.tokens, ", …], as query"));
      }
      return found;
    };
    const std::vector<int64_t> keys = rows(kKey, key), values = rows(kValue, value);
    call.key_heads = keys[2] / call.key_size;
    if (call.key_heads < 1 || keys[2] % call.key_size != 0 || value_heads_ % call.key_heads != 0) {
      Refuse(kKey, keys,
             ErrorText("[…, heads of ", call.key_size,
                       " elements, as query], whose number divides "
                       "kv_num_heads, ",
                       value_heads_));
    }
    call.value_size = values[2] / value_heads_;
    if (call.value_size < 1 || values[2] % value_heads_ != 0) {
      Refuse(kValue, values, ErrorText("[…, a multiple of kv_num_heads, ", value_heads_, "]"));
    }
    const std::vector<int64_t> state{call.batch, value_heads_, call.key_size, call.value_size};
    const Tensor past = context.Input(kPast);
    if (past.Shape() != state) Refuse(kPast, past.Shape(), ShapeText(state));
    if (rule_->decays) {
      const Tensor decay = context.Input(kDecay);
      const std::vector<int64_t> found = rows(kDecay, decay);
      call.row_decays = found[2] != value_heads_;
      if (call.row_decays && found[2] != value_heads_ * call.key_size) {
        Refuse(kDecay, found, ErrorText("[…, ", value_heads_, "] or […, ", value_heads_ * call.key_size, "]"));
      }
      call.decay = constants_[kDecay].In(decay);
    }
    if (rule_->corrects) {
      const Tensor beta = context.Input(kBeta);
      const std::vector<int64_t> found = rows(kBeta, beta);
      call.head_betas = found[2] == value_heads_;
      if (!call.head_betas && found[2] != 1) Refuse(kBeta, found, ErrorText("[…, ", value_heads_, "] or […, 1]"));
      call.beta = constants_[kBeta].In(beta);
    }
    call.scale = scale_ == 0.0f ? 1.0f / std::sqrt(static_cast<float>(call.key_size)) : scale_;
    call.query = constants_[kQuery].In(query);
    call.key = constants_[kKey].In(key);
    call.value = constants_[kValue].In(value);
    call.past = constants_[kPast].In(past);
    const int64_t heads = std::max(query_heads_, value_heads_);
    call.y = context.Output<float>(0, {call.batch, call.tokens, heads * call.value_size});
    call.present = context.Output<float>(1, state);
    plan_.Run(host, call);
  }

 private:
  int64_t Heads(const OrtKernelInfo& info, const char* name) const {
    const int64_t heads = IntAttribute(info, name, node_);
    if (heads >= 1 && heads <= kMaxHeads) return heads;
    throw OpError(ErrorText(node_, ": ", name, " is ", heads, ", expected 1 to ", kMaxHeads, ". ", kOptimizeAgain));
  }

  [[noreturn]] void Refuse(size_t input, const std::vector<int64_t>& shape, const std::string& expected) const {
    throw OpError(ErrorText(node_, ": ", kNames[input], " '", names_[input], "' has shape ", ShapeText(shape),
                            ", expected ", expected, ". Feed the model inputs of the shapes it was exported for."));
  }

  std::string node_;
  std::array<std::string, kInputCount> names_;
  std::array<AlignedConstant<float>, kInputCount> constants_;
  int64_t query_heads_ = 1, value_heads_ = 1;
  float scale_ = 0.0f;  // 0: 1 / sqrt(key_size)
  const UpdateRule* rule_ = nullptr;
  LinearAttentionPlan plan_;
};

struct Op : OrtOp<Op, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 2; }
  ONNXTensorElementDataType GetInputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT; }
  // The width of the output is that of value, unless several query heads read a state.
  static void InferShape(OrtShapeInferContext* context) {
    const int64_t width = LastDimension(context, kValue);
    const int64_t queries = ShapeAttributeOr(context, "q_num_heads", 0);
    const int64_t values = ShapeAttributeOr(context, "kv_num_heads", 0);
    if (width > 0 && queries > 0 && values > 0) {
      CopyShape(context, queries > values ? width / values * queries : width);
    }
  }
};

}  // namespace

const OrtCustomOp* LinearAttentionOp() {
  static const Op op;
  return &op;
}

}  // namespace ortolan
