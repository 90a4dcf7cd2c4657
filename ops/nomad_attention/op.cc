// ORT adapter of NoMADAttention and PackedNoMADAttention. README.md lists inputs, outputs and attributes; op_cached.h
// describes the cache.
//
//     Y = softmax(capped(scale Q K^T) + mask) V,   capped(x) = softcap tanh(x / softcap), or x if softcap is 0
//
// Query head h reads key and value head h / (num_heads / kv_num_heads). causal: query i does not see keys after i + T -
// S, so T >= S; with local_window_size w above 0, it does not see keys up to i + T - S - w either. head_sink: a number
// for each head, whose exponential is added to the sum of the softmax (gpt-oss). Without `reproducible`, precision 16
// may take a float32 kernel.
//
// With a cache, outputs 0 to 2 are required, output 3 if window or sinks are not 0. The operator is registered once for
// each kind of cache: float, codes with int8 values, codes with float values.
//
// PackedNoMADAttention: S and T are the number of kept tokens; query, key and value may also be [B, heads, tokens, D].
// The score of a token that no query sees is the lowest float.
//
// ONNX Runtime up to 1.23 crashes on an omitted input before a given one. So constants may replace omitted inputs: a
// float 0 of shape [1] for mask, key, value, cos, sin and past_exact_key, int32 of shape [0] for lengths.
#include <cmath>

#include "host/broadcast.h"
#include "nomad_attention/nomad_attention.h"
#include "nomad_attention/op_cached.h"
#include "operators.h"
#include "ort/ort_op.h"
#include "pack_tokens/kept_input.h"

namespace ortolan {
namespace {

constexpr const char* kOpType = "NoMADAttention";
constexpr const char* kPackedOpType = "PackedNoMADAttention";
constexpr int64_t kMostHeadDim = int64_t{1} << 24;
constexpr int64_t kFloat = sizeof(float);

class Kernel {
 public:
  Kernel(const OrtKernelInfo& info, bool of_packed)
      : node_(info, of_packed ? kPackedOpType : kOpType, kInputCount, kOutputCount), has_kept_(of_packed) {
    node_.ReadScores(info, call_);
    sinks_ = node_.ReadSinks(info);
    if (!sinks_.empty()) call_.sinks = sinks_.data();
    call_.causal = node_.Flag(info, "causal");
    call_.zero_hidden_rows = node_.Flag(info, "zero_hidden_rows");
    call_.window = node_.Tokens(info, "local_window_size");
    if (call_.window != 0 && (!call_.causal || of_packed)) {
      throw node_.Error("local_window_size is ", call_.window, ", expected 0 ",
                        of_packed ? "for packed sequences" : "unless causal is 1");
    }
    const int64_t precision = IntAttributeOr(info, "precision", 32);
    if (precision != 32 && precision != 16) throw node_.Error("precision is ", precision, ", expected 32 or 16");
    node_.precision = static_cast<int>(precision);
    ReadReproducible(info);
    packed_ = node_.IsPacked(info, kKey, kValue);
    has_mask_ = node_.HasValues(info, kMask);
    for (size_t i = 0; i < std::size(floats_); ++i) floats_[i] = AlignedConstant<float>(info, i);
    if (has_kept_) {
      plan_.emplace(node_.precision, node_.reproducible);
    } else if (node_.HasValues(info, kPastKey)) {
      cache_.emplace(info, node_);
    } else {
      CheckNoCache(info);
      plan_.emplace(node_.precision, node_.reproducible);
    }
  }

  void Compute(KernelContext& context, Host& host) const {
    if (cache_) {
      CachedCall call(call_);
      ReadInputs(context, call);
      cache_->ReadLengths(context, call);
      Complete(context, call);
      return cache_->Run(context, host, call);
    }
    AttentionCall call = call_;
    ReadInputs(context, call);
    if (has_kept_) return RunKept(context, host, call);
    if (call.keys > kMaxTokens) throw node_.Error("key has ", call.keys, " tokens, expected at most ", kMaxTokens);
    if (call.causal && call.keys < call.queries) {
      throw node_.Error("causal attention has ", call.queries, " queries and ", call.keys, " keys, expected at least ",
                        call.queries, " keys");
    }
    Complete(context, call);
    plan_->Run(host, call);
  }

  void RunKept(KernelContext& context, Host& host, AttentionCall& call) const {
    const KeptTokens kept = ReadKept(context, kKept, node_.text, node_.inputs[kKept]);
    if (kept.tokens > kMaxTokens) {
      throw node_.Error("kept has ", kept.tokens, " tokens a sequence, expected at most ", kMaxTokens);
    }
    if (call.batch != 1 || call.queries != kept.Count() || call.keys != kept.Count()) {
      throw node_.Error("query has ", call.batch, " x ", call.queries, " tokens and key ", call.keys, ", but kept '",
                        node_.inputs[kKept], "' marks ", kept.Count(), " tokens as kept, expected 1 x ", kept.Count(),
                        " for both");
    }
    Complete(context, call, {kept.batch, call.heads, kept.tokens, kept.tokens});
    plan_->Run(host, call, kept);
  }

 private:
  struct Rows {
    HeadRows heads;
    int64_t batch, count, head_dim;
  };

  void ReadReproducible(const OrtKernelInfo& info) {
    const std::string where = StringAttributeOr(info, "reproducible", "");
    if (where != "" && where != "everywhere") {
      throw node_.Error("reproducible is '", where, "', expected 'everywhere' or no value");
    }
    if (where == "everywhere" && node_.precision != 16) {
      throw node_.Error("reproducible is 'everywhere' with precision ", node_.precision, ", expected precision 16");
    }
    // Older files have any_order instead: 0 asks for the same bits on every CPU with precision 16.
    const int64_t any_order = IntAttributeOr(info, "any_order", 1);
    if (any_order != 0 && any_order != 1) throw node_.Error("any_order is ", any_order, ", expected 0 or 1");
    node_.reproducible = where == "everywhere" || (any_order == 0 && node_.precision == 16);
  }

  void CheckNoCache(const OrtKernelInfo& info) const {
    for (const char* name : {"window", "sinks", "prompt_tokens"}) {
      const int64_t count = IntAttributeOr(info, name, 0);
      if (count != 0) throw node_.Error(name, " is ", count, ", but past_key is missing; expected 0 without a cache");
    }
    for (size_t i = kPastValue; i < kInputCount; ++i) {
      if (!node_.HasValues(info, i) || IsEmptyConstant(info, i)) continue;
      throw node_.Error("input ", i, " '", node_.inputs[i], "' is given without past_key (input ",
                        static_cast<size_t>(kPastKey), "), expected both or neither");
    }
    // Nodes with and without a cache may share a function, which gives all of them these outputs; without a cache they
    // have no consumer.
    for (size_t i = node_.HasInput(kPastKey) ? kPresentExactKey : kPresentKey; i < kOutputCount; ++i) {
      if (!node_.HasOutput(i)) continue;
      throw node_.Error("output ", i, " '", node_.outputs[i], "' belongs to a cache, but past_key is missing");
    }
  }

  // Reads an input [B, S, heads D] or [B, heads, S, D]; no value if it has another shape.
  std::optional<Rows> RowsOf(const KernelContext& context, size_t input, int64_t heads) const {
    const Shape shape = ShapeOf(context, input);
    const bool by_heads = shape.size() == 4 && !packed_;
    if (by_heads ? shape[1] != heads || shape[3] < 1 : shape.size() != 3 || shape[2] < 1 || shape[2] % heads != 0) {
      return std::nullopt;
    }
    Rows rows{{}, shape[0], by_heads ? shape[2] : shape[1], by_heads ? shape[3] : shape[2] / heads};
    if (rows.head_dim > kMostHeadDim) {
      throw node_.Error("head size is ", rows.head_dim, ", expected at most ", kMostHeadDim);
    }
    const Tensor value = context.Input(input);
    if (value.Count() == 0) return rows;  // other sizes may be arbitrarily large
    const int64_t bytes = rows.head_dim * kFloat;
    rows.heads = {floats_[input].In(value), heads * rows.count * bytes, by_heads ? rows.count * bytes : bytes,
                  by_heads ? bytes : heads * bytes};
    return rows;
  }

  // Reads query, key and value, and the sizes that follow from them.
  void ReadInputs(const KernelContext& context, AttentionCall& call) const {
    const int64_t query_heads = packed_ ? call.heads + 2 * call.kv_heads : call.heads;
    const std::optional<Rows> query = RowsOf(context, kQuery, query_heads);
    if (!query) {
      throw node_.WrongShape(context, kQuery, "query",
                             ErrorText("[B, S, ", cache_ ? "" : "a multiple of ", query_heads,
                                       packed_ ? " heads of query, key and value]" : " heads]",
                                       packed_ ? "" : ErrorText(" or [B, ", query_heads, ", S, D]")));
    }
    call.batch = query->batch;
    call.queries = call.keys = query->count;
    call.head_dim = query->head_dim;
    call.q = call.k = call.v = query->heads;
    if (packed_) {
      call.k.data = call.q.At(0, call.heads, 0);
      call.v.data = call.q.At(0, call.heads + call.kv_heads, 0);
      return;
    }
    const Rows key = ReadKeys(context, kKey, "key", call);
    call.keys = key.count;
    call.k = key.heads;
    call.v = ReadKeys(context, kValue, "value", call).heads;
  }

  // Reads key or value; value must match the key. With a cache, both have as many tokens as the query.
  Rows ReadKeys(const KernelContext& context, size_t input, const char* meaning, const AttentionCall& call) const {
    const std::optional<Rows> rows = RowsOf(context, input, call.kv_heads);
    const bool any_count = input == kKey && !cache_;
    if (rows && rows->batch == call.batch && rows->head_dim == call.head_dim &&
        (any_count || rows->count == call.keys)) {
      return *rows;
    }
    const std::string heads = ErrorText(call.kv_heads, " heads of ", call.head_dim);
    throw node_.WrongShape(
        context, input, meaning,
        cache_      ? ErrorText(call.batch, " sequences of ", call.queries, " tokens with ", heads, ", like the query")
        : any_count ? ErrorText("[", call.batch, ", T, ", call.kv_heads * call.head_dim, "] (", heads, "), or [",
                                call.batch, ", ", call.kv_heads, ", T, ", call.head_dim, "]")
                    : ErrorText(call.batch, " sequences of ", call.keys, " tokens with ", heads, ", like the key"));
  }

  void Complete(KernelContext& context, AttentionCall& call) const {
    Complete(context, call, {call.batch, call.heads, call.queries, call.keys});
  }
  // Sets the default scale, the mask, which broadcasts to `full`, and the output.
  void Complete(KernelContext& context, AttentionCall& call, const Shape& full) const {
    if (call.scale == 0) call.scale = 1.0f / std::sqrt(static_cast<float>(call.head_dim));
    if (has_mask_) {
      const Shape shape = ShapeOf(context, kMask);
      if (shape.size() > full.size() || BroadcastShape(full, shape) != full) {
        throw node_.WrongShape(context, kMask, "mask", "a shape that broadcasts to " + ShapeText(full));
      }
      call.mask.data = floats_[kMask].In(context.Input(kMask));
      const Shape strides = BroadcastStrides(shape, full);
      std::copy(strides.begin(), strides.end(), call.mask.strides.begin());
    }
    call.y = context.Output<float>(kY, {call.batch, call.queries, call.heads * call.head_dim});
  }

  AttentionNode node_;
  AttentionCall call_;                         // from attributes; scale 0: default for the head size
  std::vector<float> sinks_;                   // of call_
  AlignedConstant<float> floats_[kValue + 1];  // query, mask, key and value
  bool has_kept_;
  bool packed_ = false;
  bool has_mask_ = false;
  std::optional<AttentionPlan> plan_;  // unless there is a cache
  std::optional<CachedAttention> cache_;
};

constexpr ONNXTensorElementDataType kFloats = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kBytes = ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;

constexpr ONNXTensorElementDataType kBf16 = ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16;
constexpr ONNXTensorElementDataType kInt32 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
constexpr ONNXTensorElementDataType kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

template <bool kOfPacked>
struct KernelOf : Kernel {
  explicit KernelOf(const OrtKernelInfo& info) : Kernel(info, kOfPacked) {}
};

template <ONNXTensorElementDataType kKeyType, ONNXTensorElementDataType kValueType>
struct Op : OrtOp<Op<kKeyType, kValueType>, KernelOf<false>> {
  static constexpr ONNXTensorElementDataType kInputTypes[] = {
      kFloats,  kFloats,    kFloats, kFloats,  // query, mask, key, value
      kKeyType, kValueType, kFloats, kInt32,   // the past cache, codebooks, lengths
      kFloats,  kFloats,    kFloats,           // cos, sin, past_exact_key
      kBytes,   kBf16,      kInt64,  kBytes,
      kBf16,    kInt64,  // masks, values and offsets of a prompt's keys, and its values
  };
  static constexpr ONNXTensorElementDataType kOutputTypes[] = {kFloats, kKeyType, kValueType, kFloats};
  static_assert(std::size(kInputTypes) == kInputCount && std::size(kOutputTypes) == kOutputCount);

  const char* GetName() const { return kOpType; }
  size_t GetInputTypeCount() const { return kInputCount; }
  size_t GetOutputTypeCount() const { return kOutputCount; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return kInputTypes[index]; }
  ONNXTensorElementDataType GetOutputType(size_t index) const { return kOutputTypes[index]; }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    return index == kQuery ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index == kY ? INPUT_OUTPUT_REQUIRED : INPUT_OUTPUT_OPTIONAL;
  }
  static void InferShape(OrtShapeInferContext* context) { InferAttention(context, kQuery, kKey); }
};

struct PackedOp : OrtOp<PackedOp, KernelOf<true>> {
  const char* GetName() const { return kPackedOpType; }
  size_t GetInputTypeCount() const { return kKept + 1; }
  size_t GetOutputTypeCount() const { return 1; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return index == kKept ? kInt64 : kFloats; }
  ONNXTensorElementDataType GetOutputType(size_t) const { return kFloats; }
  static void InferShape(OrtShapeInferContext* context) { InferAttention(context, kQuery, kKey); }
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
const OrtCustomOp* PackedNoMADAttentionOp() {
  static const PackedOp op;
  return &op;
}

}  // namespace ortolan
