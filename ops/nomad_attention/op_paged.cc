// ORT adapter of PagedNoMADAttention: attention of chunks of several sequences, one after another, over pools of blocks
// of keys and values that all sequences share.
//
//     query float [1, tokens, heads D] or [1, heads, tokens, D]; key, value: the same with kv_heads. Without key and
//         value, query holds all three: [1, tokens, (heads + 2 kv_heads) D]
//     key_pool, value_pool: a block has 16 tokens. Either bf16 [blocks, kv_heads, D, 16] and [blocks, kv_heads, 16, D],
//         or int8 [blocks, kv_heads, D / 4, 16, 4] and [blocks, kv_heads, 16, D]. All may also have the shape
//         [blocks, 16, kv_heads, D], which onnxruntime-genai allocates. It does not change the order of a block's
//         elements
//     sequence_starts int64 [sequences + 1]: the first token of each sequence in this call, then the number of tokens
//     past_lengths int64 [sequences]: tokens of each sequence that the pools hold
//     block_table int64 [sequences, columns]: the block of each 16 tokens of the sequence; entries beyond its tokens
//         after this call are ignored
//     cos, sin float [positions, D / 2 or less] (optional): rotary embedding of query and key, as in NoMADAttention
//     sinks float [heads] (optional): a further score of each head, without a value
//     key_scales, value_scales float [blocks, kv_heads, 16]: of int8 pools; attention/paged.h has the rounding
//     -> Y float [1, tokens, heads D], and the pools with the tokens appended, then the scales
//
// Attributes: num_heads, kv_num_heads, scale, softcap and rotary_interleaved as in NoMADAttention; window: a query sees
// this number of keys, its own included; 0: all.
//
// A token sees the earlier tokens of its sequence and itself, all as the pools store them. So its Y has the same bits
// however the sequence is divided into calls, and whatever other sequences are in the call. Sequences may share blocks
// to which no sequence of the call appends. The host binds one buffer to a pool or scales and their output; otherwise
// they are copied.
//
// ONNX Runtime up to 1.23 crashes on an omitted input before a given one; a constant 0 of shape [1] may replace key,
// value, cos and sin.
#include <cmath>
#include <cstring>

#include "nomad_attention/op_node.h"
#include "nomad_attention/paged_plan.h"
#include "operators.h"

namespace ortolan {
namespace {

constexpr const char* kPagedOpType = "PagedNoMADAttention";
constexpr int64_t kFloat = sizeof(float);

enum PagedInput : size_t {
  kPagedQuery,
  kPagedKey,
  kPagedValue,
  kKeyPool,
  kValuePool,
  kSequenceStarts,
  kPastLengths,
  kBlockTable,
  kPagedCos,
  kPagedSin,
  kSinks,
  kKeyScales,
  kValueScales,
  kPagedInputCount
};
enum PagedOutput : size_t { kPagedY, kNewKeyPool, kNewValuePool, kNewKeyScales, kNewValueScales, kPagedOutputCount };

class PagedKernel {
 public:
  explicit PagedKernel(const OrtKernelInfo& info) : node_(info, kPagedOpType, kPagedInputCount, kPagedOutputCount) {
    node_.ReadScores(info, sizes_);
    sizes_.batch = 1;
    sizes_.window = node_.Tokens(info, "window");
    interleaved_ = node_.Flag(info, "rotary_interleaved");
    packed_ = node_.IsPacked(info, kPagedKey, kPagedValue);
    has_rotary_ = node_.HasValues(info, kPagedCos);
    if (has_rotary_ != node_.HasValues(info, kPagedSin)) {
      throw node_.Error("only one of the inputs cos and sin is given, expected both or neither");
    }
    is_int8_ = InputType(info, kKeyPool) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8;
    for (const bool given : {node_.HasInput(kKeyScales), node_.HasInput(kValueScales), node_.HasOutput(kNewKeyScales),
                             node_.HasOutput(kNewValueScales)}) {
      if (given == is_int8_) continue;
      throw node_.Error("the pools are ", is_int8_ ? "int8" : "bfloat16",
                        is_int8_ ? ", expected inputs and outputs key_scales and value_scales"
                                 : ", which have no key_scales and value_scales");
    }
    for (const size_t i : {kPagedCos, kPagedSin, kSinks}) {
      if (node_.HasInput(i)) floats_[i] = AlignedConstant<float>(info, i);
    }
  }

  void Compute(KernelContext& context, Host& host) const {
    PagedCall call(sizes_);
    ReadRows(context, call);
    if (call.scale == 0) call.scale = 1.0f / std::sqrt(static_cast<float>(call.head_dim));
    CheckPool(context, kKeyPool,
              is_int8_ ? Shape{call.head_dim / 4, kBlockTokens, 4} : Shape{call.head_dim, kBlockTokens}, call);
    CheckPool(context, kValuePool, {kBlockTokens, call.head_dim}, call);
    if (is_int8_) {
      CheckScales(context, kKeyScales, "key_scales", call);
      CheckScales(context, kValueScales, "value_scales", call);
    }
    ReadSequences(context, call);
    ReadFloats(context, call);
    call.y = context.Output<float>(kPagedY, {1, call.queries, call.heads * call.head_dim});
    if (is_int8_) {
      call.keys = {Appended<int8_t>(context, kKeyPool, kNewKeyPool),
                   Appended<float>(context, kKeyScales, kNewKeyScales)};
      call.values = {Appended<int8_t>(context, kValuePool, kNewValuePool),
                     Appended<float>(context, kValueScales, kNewValueScales)};
    } else {
      call.keys = {Appended<uint16_t>(context, kKeyPool, kNewKeyPool)};
      call.values = {Appended<uint16_t>(context, kValuePool, kNewValuePool)};
    }
    plan_.Run(host, call);
  }

 private:
  // Reads query, key and value, and the sizes that follow from them.
  void ReadRows(const KernelContext& context, PagedCall& call) const {
    const int64_t in_query = call.heads + (packed_ ? 2 * call.kv_heads : 0);
    call.q = ReadOperand(context, kPagedQuery, "query", in_query, call);
    if (call.head_dim < kBlockTokens || call.head_dim > kMostPagedHeadDim || call.head_dim % kBlockTokens != 0) {
      throw node_.Error("head size is ", call.head_dim, ", expected a multiple of ", kBlockTokens, " from ",
                        kBlockTokens, " to ", kMostPagedHeadDim);
    }
    if (packed_) {
      call.k = call.v = call.q;
      call.k.data += call.heads * call.head_dim;
      call.v.data += (call.heads + call.kv_heads) * call.head_dim;
    } else {
      call.k = ReadOperand(context, kPagedKey, "key", call.kv_heads, call);
      call.v = ReadOperand(context, kPagedValue, "value", call.kv_heads, call);
    }
  }

  // Reads an operand with this number of heads. The query sets the tokens and the head size of the call.
  HeadRows ReadOperand(const KernelContext& context, size_t input, const char* meaning, int64_t heads,
                       PagedCall& call) const {
    const Shape shape = ShapeOf(context, input);
    const bool by_heads = shape.size() == 4 && !packed_;
    const bool fits = by_heads ? shape[0] == 1 && shape[1] == heads
                               : shape.size() == 3 && shape[0] == 1 && shape[2] > 0 && shape[2] % heads == 0;
    const int64_t tokens = fits ? shape[by_heads ? 2 : 1] : 0,
                  dim = fits ? (by_heads ? shape[3] : shape[2] / heads) : 0;
    if (input == kPagedQuery) {
      call.queries = tokens;
      call.head_dim = dim;
    }
    if (!fits || tokens != call.queries || dim != call.head_dim) {
      throw node_.WrongShape(
          context, input, meaning,
          packed_ ? ErrorText("[1, tokens, ", heads, " heads], as key and value are part of it")
                  : ErrorText("[1, tokens, ", heads, " heads] or [1, ", heads, ", tokens, D]",
                              input == kPagedQuery ? "" : ", with the tokens and head size of the query"));
    }
    const int64_t bytes = dim * kFloat;
    return HeadRows{context.Input(input).Data<float>(), 0, by_heads ? tokens * bytes : bytes,
                    by_heads ? bytes : heads * bytes};
  }

  // Checks a pool, and sets the number of blocks. `of_head` is the shape of a head in a block.
  void CheckPool(const KernelContext& context, size_t input, const Shape& of_head, PagedCall& call) const {
    Shape shape = ShapeOf(context, input);
    const int64_t blocks = shape.empty() ? 0 : shape[0];
    if (!shape.empty()) shape[0] = 0;
    Shape expected{0, call.kv_heads};
    expected.insert(expected.end(), of_head.begin(), of_head.end());
    const bool fits = shape == expected || shape == Shape{0, kBlockTokens, call.kv_heads, call.head_dim};
    if (!fits || (input == kValuePool && blocks != call.blocks)) {
      const std::string count = input == kValuePool ? std::to_string(call.blocks) : "blocks";
      std::string sizes;
      for (const int64_t size : of_head) sizes += ErrorText(", ", size);
      throw node_.WrongShape(context, input, input == kKeyPool ? "key_pool" : "value_pool",
                             ErrorText("[", count, ", ", call.kv_heads, sizes, "] or [", count, ", ", kBlockTokens,
                                       ", ", call.kv_heads, ", ", call.head_dim, "]"));
    }
    call.blocks = blocks;
  }
  void CheckScales(const KernelContext& context, size_t input, const char* meaning, const PagedCall& call) const {
    const Shape expected{call.blocks, call.kv_heads, kBlockTokens};
    if (ShapeOf(context, input) != expected) throw node_.WrongShape(context, input, meaning, ShapeText(expected));
  }

  void ReadSequences(const KernelContext& context, PagedCall& call) const {
    const auto read = [&](size_t input, const char* meaning, size_t rank) {
      if (ShapeOf(context, input).size() != rank) {
        throw node_.WrongShape(context, input, meaning, rank == 1 ? "one dimension" : "two dimensions");
      }
      const Tensor value = context.Input(input);
      return std::span<const int64_t>(value.Data<int64_t>(), static_cast<size_t>(value.Count()));
    };
    call.starts = read(kSequenceStarts, "sequence_starts", 1);
    call.past = read(kPastLengths, "past_lengths", 1);
    call.table = read(kBlockTable, "block_table", 2).data();
    const Shape table = ShapeOf(context, kBlockTable);
    call.table_columns = table[1];
    if (table[0] != call.Sequences()) {
      throw node_.WrongShape(context, kBlockTable, "block_table",
                             ErrorText("a row for each of ", call.Sequences(), " sequences of past_lengths"));
    }
    const std::string problem = call.Problem();
    if (!problem.empty()) throw node_.Error(problem);
  }

  void ReadFloats(const KernelContext& context, PagedCall& call) const {
    if (node_.HasInput(kSinks)) {
      if (ShapeOf(context, kSinks) != Shape{call.heads}) {
        throw node_.WrongShape(context, kSinks, "sinks", ErrorText("[", call.heads, "]"));
      }
      call.sinks = floats_[kSinks].In(context.Input(kSinks));
    }
    if (!has_rotary_) return;
    const Shape shape = ShapeOf(context, kPagedCos), sin_shape = ShapeOf(context, kPagedSin);
    const std::string problem = RotaryProblem(shape, sin_shape, call.head_dim);
    if (!problem.empty()) throw node_.Error(problem);
    for (int64_t b = 0; b < call.Sequences(); ++b) {
      const int64_t tokens = call.Past(b) + call.Added(b);
      if (call.Added(b) == 0 || tokens <= shape[0]) continue;
      throw node_.Error("sequence ", b, " has ", tokens, " tokens, but cos and sin have ", shape[0],
                        " positions. Pass shorter sequences.");
    }
    call.rotary = {floats_[kPagedCos].In(context.Input(kPagedCos)), floats_[kPagedSin].In(context.Input(kPagedSin)),
                   2 * shape[1], interleaved_};
  }

  // Returns the pool of an output, copied from the input unless they are one buffer.
  template <typename T>
  static T* Appended(KernelContext& context, size_t input, size_t output) {
    const Tensor pool = context.Input(input);
    const T* from = pool.Data<T>();
    T* to = context.Output<T>(output, pool.Shape());
    if (to != from && pool.Count() > 0) std::memcpy(to, from, static_cast<size_t>(pool.Count()) * sizeof(T));
    return to;
  }

  AttentionNode node_;
  AttentionCall sizes_;  // from attributes
  bool packed_ = false, has_rotary_ = false, interleaved_ = false, is_int8_ = false;
  AlignedConstant<float> floats_[kPagedInputCount];  // cos, sin and sinks
  PagedPlan plan_;
};

constexpr ONNXTensorElementDataType kFloats = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr ONNXTensorElementDataType kInts = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;

template <ONNXTensorElementDataType kPools>
struct PagedOp : OrtOp<PagedOp<kPools>, PagedKernel> {
  static constexpr ONNXTensorElementDataType kInputTypes[] = {
      kFloats, kFloats, kFloats, kPools, kPools, kInts, kInts, kInts, kFloats, kFloats, kFloats, kFloats, kFloats};
  static_assert(std::size(kInputTypes) == kPagedInputCount);

  const char* GetName() const { return kPagedOpType; }
  size_t GetInputTypeCount() const { return kPagedInputCount; }
  size_t GetOutputTypeCount() const { return kPagedOutputCount; }
  ONNXTensorElementDataType GetInputType(size_t index) const { return kInputTypes[index]; }
  ONNXTensorElementDataType GetOutputType(size_t index) const {
    return index == kNewKeyPool || index == kNewValuePool ? kPools : kFloats;
  }
  OrtCustomOpInputOutputCharacteristic GetOutputCharacteristic(size_t index) const {
    return index >= kNewKeyScales ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  OrtCustomOpInputOutputCharacteristic GetInputCharacteristic(size_t index) const {
    const bool may_miss = index == kPagedKey || index == kPagedValue || index >= kPagedCos;
    return may_miss ? INPUT_OUTPUT_OPTIONAL : INPUT_OUTPUT_REQUIRED;
  }
  static void InferShape(OrtShapeInferContext* context) { InferAttention(context, kPagedQuery, kPagedKey); }
};

}  // namespace

const OrtCustomOp* PagedNoMADAttentionOp() {
  static const PagedOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16> op;
  return &op;
}
const OrtCustomOp* PagedNoMADAttentionInt8Op() {
  static const PagedOp<ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8> op;
  return &op;
}

}  // namespace ortolan
