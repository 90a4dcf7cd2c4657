// ORT adapter of NoMADAttention.
//
//     Y = softmax(scale Q K^T + mask) V, for each head
//
//     query float [B, S, H D], or query, key and value side by side [B, S, (H + 2 KV) D]
//     mask float, optional, added to the scaled scores: of a shape that broadcasts to [B, H, S, T]
//     key, value float [B, T, KV D], both left out where they are packed into query
//     -> Y float [B, S, H D];   attributes num_heads (H), kv_num_heads (KV; 0: H), scale (0: 1 / sqrt(D)), causal,
//     zero_hidden_rows (1: rows whose softmax is NaN, because nothing is left of their scores, give zeros), precision
//     (32, or 16: products may be computed from bfloat16 where that is faster)
//
// Query head h reads key and value head h / (H / KV). causal: query i does not see keys behind i + T - S, so T >= S.
//
// With a cache (op_cached.h): past_key, past_value, codebooks, lengths, cos, sin, past_exact_key, six tensors of a
// prompt (op_prompt.h) -> Y, present_key, present_value, present_exact_key; attributes rotary_interleaved, window,
// sinks, prompt_tokens, prompt_head_dim; all of the first three outputs are there, and the fourth where window or sinks
// are not 0. Query, key and value may then also be [B, H, S, D] and [B, KV, S, D]. What is left out in front of a given
// input may be constants: mask, key, value, cos, sin, past_exact_key a 0 as below, lengths int32 of shape [0]. The
// operator is there once for each kind of cache: float, codes with int8 values, codes with float values.
//
// The order of the inputs makes one that is left out in front of a given one rare, which ORT 1.21 and older crash on:
// only key and value without a mask have it. Where the model must run there, the mask is a constant float 0 of shape
// [1], which stands for none.
#include <cmath>

#include "nomad_attention/nomad_attention.h"
#include "nomad_attention/op_cached.h"
#include "ort/broadcast.h"
#include "ort/ort_op.h"
#include "ort/rooms.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "NoMADAttention";
constexpr int64_t kMaxKeys = int64_t{1} << 24;
constexpr int64_t kMaxHeads = int64_t{1} << 16;
constexpr int64_t kMostHeadDim = int64_t{1} << 24;
constexpr int64_t kFloat = sizeof(float);

enum Input : size_t {
  kQuery,
  kMask,
  kKey,
  kValue,
  kPastKey,
  kPastValue,
  kCodebooks,
  kLengths,
  kCos,
  kSin,
  kPastExactKey,
  kPromptKeyMasks,
  kPromptKeyValues,
  kPromptKeyOffsets,
  kPromptValueMasks,
  kPromptValueValues,
  kPromptValueOffsets,
  kInputCount
};

class Kernel {
 public:
  explicit Kernel(const OrtKernelInfo& info) : node_(DescribeNode(info, kOpType)) {
    heads_ = IntAttribute(info, "num_heads", node_);
    kv_heads_ = IntAttributeOr(info, "kv_num_heads", 0);
    if (kv_heads_ == 0) kv_heads_ = heads_;
    if (heads_ < 1 || heads_ > kMaxHeads || kv_heads_ < 1 || heads_ % kv_heads_ != 0) {
      throw OpError(ErrorText(node_, ": num_heads is ", heads_, " and kv_num_heads ", kv_heads_,
                              ", expected a positive number of heads (", kMaxHeads,
                              " at most) and one that divides it"));
    }
    scale_ = FloatAttributeOr(info, "scale", 0);
    if (!std::isfinite(scale_)) throw OpError(ErrorText(node_, ": scale is ", scale_, ", expected a finite number"));
    causal_ = Flag(info, "causal");
    zero_hidden_rows_ = Flag(info, "zero_hidden_rows");
    const int64_t precision = IntAttributeOr(info, "precision", 32);
    if (precision != 32 && precision != 16) {
      throw OpError(ErrorText(node_, ": precision is ", precision, ", expected 32 or 16"));
    }
    const auto given = [&](size_t input) { return HasInput(info, input) && !IsConstantZero(info, input); };
    packed_ = !given(kKey);
    if (packed_ == given(kValue)) {
      throw OpError(ErrorText(node_, ": only one of the inputs key and value is given, expected both, or none and a ",
                              "query that holds them, [B, S, (num_heads + 2 kv_num_heads) D]"));
    }
    has_mask_ = HasInput(info, kMask) && !IsConstantZero(info, kMask);
    const Ort::ConstKernelInfo names(&info);
    for (size_t i = 0; i < names.GetInputCount(); ++i) names_.push_back(names.GetInputName(i));
    if (HasInput(info, kPastKey)) {
      cache_.emplace(
          info, node_,
          CacheInputs{kPastKey, kPastValue, kCodebooks, kLengths, kCos, kSin, kPastExactKey, kPromptKeyMasks},
          kv_heads_, static_cast<int>(precision));
    } else {
      CheckNoCache(info);
      plan_.emplace(static_cast<int>(precision));
    }
  }

  void Compute(Ort::KernelContext& context, Host& host) {
    if (cache_) return ComputeCached(context, host);
    AttentionCall call = ReadInputs(context);
    if (call.keys > kMaxKeys) {
      throw OpError(ErrorText(node_, ": there are ", call.keys, " keys, expected at most ", kMaxKeys));
    }
    if (causal_ && call.keys < call.queries) {
      throw OpError(ErrorText(node_, ": causal with ", call.queries, " queries and ", call.keys,
                              " keys, expected at least as many keys"));
    }
    Complete(context, call);
    plan_->Run(host, call);
  }

 private:
  bool Flag(const OrtKernelInfo& info, const char* name) const {
    const int64_t flag = IntAttributeOr(info, name, 0);
    if (flag != 0 && flag != 1) throw OpError(ErrorText(node_, ": ", name, " is ", flag, ", expected 0 or 1"));
    return flag == 1;
  }

  void CheckNoCache(const OrtKernelInfo& info) const {
    for (const char* name : {"window", "sinks", "prompt_tokens"}) {
      const int64_t count = IntAttributeOr(info, name, 0);
      if (count != 0) throw OpError(ErrorText(node_, ": ", name, " is ", count, ", but past_key is not given"));
    }
    for (size_t i = kPastValue; i < names_.size(); ++i) {
      if (names_[i].empty()) continue;
      throw OpError(ErrorText(node_, ": input ", i, " '", names_[i], "' is given without past_key (input ",
                              static_cast<size_t>(kPastKey), "), expected both or none"));
    }
    const Ort::ConstKernelInfo outputs(&info);
    for (size_t i = 1; i < outputs.GetOutputCount(); ++i) {
      if (outputs.GetOutputName(i).empty()) continue;
      throw OpError(ErrorText(node_, ": output ", i, " '", outputs.GetOutputName(i),
                              "' is of a cache, but past_key is not given"));
    }
  }

  static std::vector<int64_t> Shape(const Ort::KernelContext& context, size_t index) {
    return context.GetInput(index).GetTensorTypeAndShapeInfo().GetShape();
  }

  std::string Wrong(size_t index, const std::vector<int64_t>& shape, const char* meaning,
                    const std::string& expected) const {
    return ErrorText(node_, ": ", meaning, " '", names_[index], "' has shape ", ShapeText(shape), ", expected ",
                     expected, ". Feed the model inputs of the shapes it was exported for.");
  }

  // Of heads that lie side by side in the rows of an input, from a head on.
  static HeadRows SideBySide(const Ort::KernelContext& context, size_t index, int64_t first, int64_t heads,
                             int64_t rows, int64_t head_dim) {
    const Ort::ConstValue value = context.GetInput(index);
    if (value.GetTensorTypeAndShapeInfo().GetElementCount() == 0) return {};  // of any huge sizes
    const int64_t bytes = head_dim * kFloat;
    return {value.GetTensorData<float>() + first * head_dim, heads * rows * bytes, bytes, heads * bytes};
  }

  void CheckHeadDim(int64_t head_dim) const {
    if (head_dim <= kMostHeadDim) return;
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, expected at most ", kMostHeadDim));
  }

  // Query, key and value without a cache.
  AttentionCall ReadInputs(const Ort::KernelContext& context) const {
    const std::vector<int64_t> query_shape = Shape(context, kQuery);
    const int64_t query_heads = packed_ ? heads_ + 2 * kv_heads_ : heads_;
    if (query_shape.size() != 3 || query_shape[2] < 1 || query_shape[2] % query_heads != 0) {
      throw OpError(Wrong(
          kQuery, query_shape, "query",
          ErrorText("[B, S, a multiple of ", query_heads, packed_ ? " heads of query, key and value]" : " heads]")));
    }
    AttentionCall call;
    call.batch = query_shape[0];
    call.queries = call.keys = query_shape[1];
    call.head_dim = query_shape[2] / query_heads;
    CheckHeadDim(call.head_dim);
    const auto rows_of = [&](size_t index, int64_t first, int64_t heads, int64_t rows) {
      return SideBySide(context, index, first, heads, rows, call.head_dim);
    };
    call.q = rows_of(kQuery, 0, query_heads, call.queries);
    if (packed_) {
      call.k = rows_of(kQuery, heads_, query_heads, call.queries);
      call.v = rows_of(kQuery, heads_ + kv_heads_, query_heads, call.queries);
      return call;
    }
    const std::vector<int64_t> key_shape = Shape(context, kKey);
    const int64_t width = kv_heads_ * call.head_dim;
    if (key_shape.size() != 3 || key_shape[0] != call.batch || key_shape[2] != width) {
      throw OpError(
          Wrong(kKey, key_shape, "key",
                ErrorText("[", call.batch, ", T, ", width, "] (", kv_heads_, " heads of ", call.head_dim, ")")));
    }
    const std::vector<int64_t> value_shape = Shape(context, kValue);
    if (value_shape != key_shape) {
      throw OpError(Wrong(kValue, value_shape, "value", ErrorText("that of the key, ", ShapeText(key_shape))));
    }
    call.keys = key_shape[1];
    call.k = rows_of(kKey, 0, kv_heads_, call.keys);
    call.v = rows_of(kValue, 0, kv_heads_, call.keys);
    return call;
  }

  // The rows of an input of [B, S, heads D] or [B, heads, S, D].
  HeadRows Rows(const Ort::KernelContext& context, size_t index, const char* meaning, int64_t heads, int64_t* batch,
                int64_t* rows, int64_t* head_dim) const {
    const std::vector<int64_t> shape = Shape(context, index);
    const bool by_heads = shape.size() == 4;
    if (by_heads ? shape[1] != heads || shape[3] < 1 : shape.size() != 3 || shape[2] < 1 || shape[2] % heads != 0) {
      throw OpError(Wrong(index, shape, meaning, ErrorText("[B, S, ", heads, " heads] or [B, ", heads, ", S, D]")));
    }
    *batch = shape[0];
    *rows = by_heads ? shape[2] : shape[1];
    *head_dim = by_heads ? shape[3] : shape[2] / heads;
    CheckHeadDim(*head_dim);
    HeadRows found = SideBySide(context, index, 0, heads, *rows, *head_dim);
    if (by_heads && found.data != nullptr) {
      found.row_bytes = *head_dim * kFloat;
      found.head_bytes = *rows * found.row_bytes;
    }
    return found;
  }

  // Query, key and value of a call with a cache.
  CachedCall ReadCachedInputs(const Ort::KernelContext& context) const {
    CachedCall call;
    if (packed_) {
      const int64_t all = heads_ + 2 * kv_heads_;
      call.q = Rows(context, kQuery, "query", all, &call.batch, &call.queries, &call.head_dim);
      if (Shape(context, kQuery).size() != 3) {
        throw OpError(Wrong(kQuery, Shape(context, kQuery), "query",
                            ErrorText("[B, S, ", all, " heads of query, key and value]")));
      }
      call.k = SideBySide(context, kQuery, heads_, all, call.queries, call.head_dim);
      call.v = SideBySide(context, kQuery, heads_ + kv_heads_, all, call.queries, call.head_dim);
      return call;
    }
    call.q = Rows(context, kQuery, "query", heads_, &call.batch, &call.queries, &call.head_dim);
    const auto rows_of = [&](size_t index, const char* meaning) {
      int64_t batch, rows, head_dim;
      const HeadRows found = Rows(context, index, meaning, kv_heads_, &batch, &rows, &head_dim);
      if (batch == call.batch && rows == call.queries && head_dim == call.head_dim) return found;
      throw OpError(Wrong(index, Shape(context, index), meaning,
                          ErrorText(call.batch, " sequences of ", call.queries, " rows and ", kv_heads_, " heads of ",
                                    call.head_dim, ", as the query has it")));
    };
    call.k = rows_of(kKey, "key");
    call.v = rows_of(kValue, "value");
    return call;
  }

  void ComputeCached(Ort::KernelContext& context, Host& host) {
    CachedCall call = ReadCachedInputs(context);
    call.heads = heads_;
    call.kv_heads = kv_heads_;
    cache_->ReadLengths(context, call);
    Complete(context, call);
    cache_->Run(context, host, call);
  }

  // Sets what follows from attributes, the mask and the output.
  void Complete(Ort::KernelContext& context, AttentionCall& call) const {
    call.heads = heads_;
    call.kv_heads = kv_heads_;
    call.scale = scale_ != 0 ? scale_ : 1.0f / std::sqrt(static_cast<float>(call.head_dim));
    call.causal = causal_;
    call.zero_hidden_rows = zero_hidden_rows_;
    if (has_mask_) {
      const std::vector<int64_t> shape = Shape(context, kMask);
      const std::vector<int64_t> full{call.batch, heads_, call.queries, call.keys};
      if (shape.size() > full.size() || BroadcastShape(full, shape) != full) {
        throw OpError(Wrong(kMask, shape, "mask", "one that broadcasts to " + ShapeText(full)));
      }
      call.mask.data = context.GetInput(kMask).GetTensorData<float>();
      const std::vector<int64_t> strides = BroadcastStrides(shape, full);
      std::copy(strides.begin(), strides.end(), call.mask.strides.begin());
    }
    call.y = context.GetOutput(0, {call.batch, call.queries, heads_ * call.head_dim}).GetTensorMutableData<float>();
  }

  std::string node_;
  std::vector<std::string> names_;  // of the inputs
  int64_t heads_ = 0;
  int64_t kv_heads_ = 0;
  float scale_ = 0;
  bool causal_ = false;
  bool zero_hidden_rows_ = false;
  bool packed_ = false;
  bool has_mask_ = false;
  std::optional<AttentionPlan> plan_;  // without a cache
  std::optional<CachedAttention> cache_;
};

constexpr ONNXTensorElementDataType kFloats = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kBytes = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;

template <ONNXTensorElementDataType kKeyType, ONNXTensorElementDataType kValueType>
struct Op : OrtOp<Op<kKeyType, kValueType>, Kernel> {
  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return 4; }
  ONNXTensorElementDataType GetInputType(size_t index) const {
    switch (index) {
      case kPastKey:
        return kKeyType;
      case kPastValue:
        return kValueType;
      case kLengths:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
      case kPromptKeyMasks:
      case kPromptValueMasks:
        return kBytes;
      case kPromptKeyValues:
      case kPromptValueValues:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
      case kPromptKeyOffsets:
      case kPromptValueOffsets:
        return ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
      default:
        return kFloats;
    }
  }
  ONNXTensorElementDataType GetOutputType(size_t index) const {
    return index == 1 ? kKeyType : index == 2 ? kValueType : kFloats;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index == kQuery ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index == 0 ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  static void InferShape(OrtShapeInferContext* context) {
    // Y alone: of present_key and present_value, the number of tokens has no name.
    if (Rank(context, kQuery) != 3) return;
    int64_t width = LastDimension(context, kQuery);
    if (width < 0) return;
    if (Rank(context, kKey) < 2) {
      // Packed, or a key of which nothing is known.
      const bool packed = !HasMoreInputs(context, kKey) || IsOneNumber(context, kKey);
      if (!packed) return;
      const int64_t heads = ShapeAttributeOr(context, "num_heads", 1);
      int64_t kv_heads = ShapeAttributeOr(context, "kv_num_heads", 0);
      if (kv_heads == 0) kv_heads = heads;
      if (heads < 1 || kv_heads < 1 || width % (heads + 2 * kv_heads) != 0) return;  // the kernel complains
      width = width / (heads + 2 * kv_heads) * heads;
    }
    CopyShape(context, width);
  }
};

template <ONNXTensorElementDataType kKeyType, ONNXTensorElementDataType kValueType>
const OrtCustomOp* OpFor() {
  static const Op<kKeyType, kValueType> op;
  return &op;
}

}  // namespace

const OrtCustomOp* NoMADAttentionOp() { return OpFor<kFloats, kFloats>(); }
const OrtCustomOp* NoMADAttentionCodesOp() { return OpFor<kBytes, kBytes>(); }
const OrtCustomOp* NoMADAttentionCodesFloatOp() { return OpFor<kBytes, kFloats>(); }

}  // namespace ortolan
