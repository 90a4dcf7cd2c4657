#include "provider/cached_attention_compute.h"

#include <algorithm>

namespace ortolan::provider {
namespace {

constexpr int64_t kFloatBytes = sizeof(float);
constexpr const char* kFeed = "Feed the model inputs of the shapes it was exported for.";

CacheForm FormOf(const CachedAttention& attention) {
  CacheForm form;
  form.interleaved = attention.is_interleaved;
  return form;
}

}  // namespace

CachedAttentionCompute::CachedAttentionCompute(const CachedAttention& attention, const Node& fused)
    : node_(attention.node->Described()),
      y_(OutputSlot(fused, attention.y)),
      present_key_(OutputSlot(fused, attention.present_key)),
      present_value_(OutputSlot(fused, attention.present_value)),
      plan_(FormOf(attention)) {
  sizes_.heads = attention.heads;
  sizes_.kv_heads = attention.kv_heads;
  sizes_.head_dim = attention.head_dim;
  sizes_.scale = attention.scale;
  sizes_.causal = true;
  const auto slot = [&](Value value) { return NamedInput{InputSlot(fused, value), value->name}; };
  query_ = slot(attention.query);
  past_key_ = slot(attention.past_key);
  past_value_ = slot(attention.past_value);
  lengths_ = slot(attention.lengths);
  total_ = slot(attention.total);
  if (attention.key != nullptr) {
    key_ = slot(attention.key);
    value_ = slot(attention.value);
  }
  if (attention.cos != nullptr) {
    cos_ = slot(attention.cos);
    sin_ = slot(attention.sin);
  }
}

struct CachedAttentionCompute::Running {
  const OrtApi& ort;
  OrtKernelContext& context;
  CallMemory memory;

  // Read an input; copy it if its address is not aligned, because initializers may have any address.
  template <typename Element>
  InputTensor<Element> Read(const NamedInput& slot) {
    return memory.AlignedInput(ReadInput<Element>(ort, context, slot.index));
  }
  // Return the memory of an output, or temporary memory if no node reads the output.
  float* Make(std::optional<size_t> slot, const Shape& shape) {
    return slot ? MakeOutput(ort, context, *slot, shape) : memory.Floats(CountOf(shape));
  }
};

OpError CachedAttentionCompute::WrongShape(const NamedInput& slot, const Shape& found,
                                           const std::string& expected) const {
  return Error("'", slot.name, "' has shape ", ShapeText(found), ", expected ", expected, ". ", kFeed);
}

HeadRows CachedAttentionCompute::ReadRows(Running& running, const NamedInput& slot, int64_t heads,
                                          CachedCall& call) const {
  const FloatInput input = running.Read<float>(slot);
  const Shape& shape = input.shape;
  const int64_t width = heads * call.head_dim;
  const bool is_first = slot.index == query_.index;
  if (shape.size() != 3 || shape[2] != width || (!is_first && (shape[0] != call.batch || shape[1] != call.queries))) {
    throw WrongShape(slot, shape,
                     is_first ? ErrorText("[batch, rows, ", width, "]")
                              : ShapeText({call.batch, call.queries, width}) + ", the query's batch and rows");
  }
  if (shape[1] > kMaxTokens) throw Error("there are ", shape[1], " rows, expected at most ", kMaxTokens);
  call.batch = shape[0];
  call.queries = shape[1];
  const int64_t head_bytes = call.head_dim * kFloatBytes;
  return {input.data, call.queries * heads * head_bytes, head_bytes, heads * head_bytes};
}

int64_t CachedAttentionCompute::ReadRoom(Running& running, const CachedCall& call) const {
  const auto tokens_of = [&](const NamedInput& slot) {
    const Shape shape = running.Read<float>(slot).shape;
    if (shape.size() == 4 && shape == Shape{call.batch, call.kv_heads, shape[2], call.head_dim}) return shape[2];
    throw WrongShape(slot, shape, ErrorText("[", call.batch, ", ", call.kv_heads, ", tokens, ", call.head_dim, "]"));
  };
  const int64_t room = tokens_of(past_key_), value_room = tokens_of(past_value_);
  if (room != value_room) {
    throw Error("'", past_key_.name, "' holds ", room, " tokens and '", past_value_.name, "' ", value_room,
                ", expected equal lengths. Feed the present caches that the model returned.");
  }
  if (room > kMaxTokens - call.queries) {
    throw Error("there are ", room, " tokens in the cache and ", call.queries, " in the call, expected at most ",
                kMaxTokens);
  }
  return room;
}

void CachedAttentionCompute::ReadLengths(Running& running, CachedCall& call) const {
  const int64_t room = ReadRoom(running, call);
  const InputTensor<int32_t> lengths = running.Read<int32_t>(lengths_), total = running.Read<int32_t>(total_);
  if (CountOf(lengths.shape) != call.batch) {
    throw WrongShape(lengths_, lengths.shape, ErrorText("[", call.batch, "], one length for each sequence"));
  }
  if (CountOf(total.shape) != 1) throw WrongShape(total_, total.shape, "one element");
  const std::string problem = call.SetLengths({lengths.data, static_cast<size_t>(call.batch)}, room, 0,
                                              "'" + lengths_.name + "'", "'" + past_key_.name + "'");
  if (!problem.empty()) throw Error(problem);
  if (*total.data > room + call.queries) {
    throw Error("'", total_.name, "' is ", *total.data, ", but '", past_key_.name, "' holds ", room,
                " tokens and the call ", call.queries, ", expected at most their sum. ", kFeed);
  }
  // The host may expect present caches that are longer than the past and the new tokens.
  call.room = std::max<int64_t>(call.room, *total.data);
  call.keys = call.room;
}

void CachedAttentionCompute::ReadRotary(Running& running, CachedCall& call) const {
  if (!cos_ || call.batch == 0 || call.queries == 0) return;
  const FloatInput cos = running.Read<float>(*cos_), sin = running.Read<float>(*sin_);
  const int64_t half = call.head_dim / 2, most = call.MostTokens();
  const bool fits = cos.shape.size() == 2 && cos.shape[1] == half && sin.shape == cos.shape;
  if (!fits) {
    throw Error("'", cos_->name, "' has shape ", ShapeText(cos.shape), " and '", sin_->name, "' ", ShapeText(sin.shape),
                ", expected [positions, ", half, "] for both");
  }
  if (cos.shape[0] < most) {
    throw Error("a sequence has ", most, " tokens, but '", cos_->name, "' and '", sin_->name, "' are for ",
                cos.shape[0], " positions. Feed shorter sequences.");
  }
  call.cos = cos.data;
  call.sin = sin.data;
}

CacheRows CachedAttentionCompute::Present(Running& running, const NamedInput& past, std::optional<size_t> present,
                                          const CachedCall& call) const {
  const FloatInput before = running.Read<float>(past);
  const int64_t room = before.shape[2], row_bytes = call.head_dim * kFloatBytes;
  float* const data = running.Make(present, {call.batch, call.kv_heads, call.room, call.head_dim});
  if (before.data == data && room != call.room && call.room != 0) {
    throw Error("past and present of '", past.name, "' are one buffer of ", room, " tokens, expected ", call.room,
                ". Share a buffer for all tokens, or none.");
  }
  return {reinterpret_cast<char*>(data), row_bytes, call.room * row_bytes, reinterpret_cast<const char*>(before.data),
          room * row_bytes};
}

void CachedAttentionCompute::Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const {
  Running running{ort, context, CallMemory(host)};
  CachedCall call(sizes_);
  const int64_t packed_heads = key_ ? call.heads : call.heads + 2 * call.kv_heads;
  call.q = ReadRows(running, query_, packed_heads, call);
  if (key_) {
    call.k = ReadRows(running, *key_, call.kv_heads, call);
    call.v = ReadRows(running, *value_, call.kv_heads, call);
  } else {
    call.k = call.v = call.q;
    call.k.data = call.q.At(0, call.heads, 0);
    call.v.data = call.q.At(0, call.heads + call.kv_heads, 0);
  }
  ReadLengths(running, call);
  ReadRotary(running, call);
  call.key_cache = Present(running, past_key_, present_key_, call);
  call.value_cache = Present(running, past_value_, present_value_, call);
  call.y = running.Make(y_, {call.batch, call.queries, call.heads * call.head_dim});
  plan_.Run(host, std::move(call));
}

void CachedAttentionCompute::Write(ContextWriter&) const {
  throw OpError(ErrorText(node_, ": attention with a KV cache cannot be part of a compiled model"));
}

}  // namespace ortolan::provider
