#include "nomad_attention/cached_op.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "attention/kv_cache/kv_cache.h"
#include "isa/kernel_table.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kMaxTokens = int64_t{1} << 24;
constexpr int64_t kMaxWidth = int64_t{1} << 16;  // bytes of a token, where rows are shorter
constexpr size_t kPresentExactKey = 3;           // the output

std::vector<int64_t> ShapeOf(const Ort::KernelContext& context, size_t index) {
  return context.GetInput(index).GetTensorTypeAndShapeInfo().GetShape();
}

}  // namespace

CachedAttention::CachedAttention(const OrtKernelInfo& info, std::string node, CacheInputs inputs, int64_t kv_heads)
    : node_(std::move(node)), inputs_(inputs) {
  const Ort::ConstKernelInfo names(&info);
  if (!HasInput(info, inputs.past_value)) {
    throw OpError(ErrorText(node_, ": past_key is given without past_value, expected both or none"));
  }
  past_key_name_ = names.GetInputName(inputs.past_key);
  past_value_name_ = names.GetInputName(inputs.past_value);
  const auto type_of = [&](size_t index) {
    return names.GetInputTypeInfo(index).GetTensorTypeAndShapeInfo().GetElementType();
  };
  const bool codes = type_of(inputs.past_key) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  int8_values_ = type_of(inputs.past_value) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  if (codes) {
    const ConstantTensor books =
        ConstantInput(info, inputs.codebooks, "codebooks", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
    if (books.shape.size() != 4 || books.shape[0] != kv_heads || books.shape[2] != kCentroids) {
      throw OpError(ErrorText(node_, ": codebooks '", books.name, "' has shape ", ShapeText(books.shape),
                              ", expected [", kv_heads, ", head_dim / d_sub, ", kCentroids,
                              ", d_sub]. Optimize the original model again."));
    }
    layout_ = {books.shape[1] * books.shape[3], books.shape[3]};
    const std::string problem = ValidateKeyCodeLayout(layout_);
    if (!problem.empty()) {
      throw OpError(ErrorText(node_, ": codebooks '", books.name, "' has shape ", ShapeText(books.shape), ": ", problem,
                              ". Optimize the original model again."));
    }
    codebooks_ = static_cast<const float*>(books.data);
    for (int64_t i = 0; i < books.count; ++i) {
      if (std::isfinite(codebooks_[i])) continue;
      throw OpError(ErrorText(node_, ": codebooks '", books.name, "' holds ", codebooks_[i], " at ", i,
                              ", expected finite numbers. Optimize the original model again."));
    }
  }
  for (const size_t output : {size_t{1}, size_t{2}}) {
    if (output < names.GetOutputCount() && !names.GetOutputName(output).empty()) continue;
    throw OpError(ErrorText(node_, ": output ", output, " (", output == 1 ? "present_key" : "present_value",
                            ") is missing, expected one where past_key is given"));
  }
  has_lengths_ = HasInput(info, inputs.lengths) && !IsEmptyConstant(info, inputs.lengths);
  const auto given = [&](size_t input) { return HasInput(info, input) && !IsConstantZero(info, input); };
  has_rotary_ = given(inputs.cos);
  if (has_rotary_ != given(inputs.sin)) {
    throw OpError(ErrorText(node_, ": only one of the inputs cos and sin is given, expected both or none"));
  }
  const int64_t interleaved = IntAttributeOr(info, "rotary_interleaved", 0);
  if (interleaved != 0 && interleaved != 1) {
    throw OpError(ErrorText(node_, ": rotary_interleaved is ", interleaved, ", expected 0 or 1"));
  }
  interleaved_ = interleaved == 1;
  ReadWindow(info, kv_heads);
  prompt_ = CachedPrompt(info, node_, inputs.prompt, kv_heads);
}

void CachedAttention::ReadWindow(const OrtKernelInfo& info, int64_t kv_heads) {
  const auto tokens = [&](const char* name) {
    const int64_t count = IntAttributeOr(info, name, 0);
    if (count >= 0 && count <= kMaxTokens) return count;
    throw OpError(ErrorText(node_, ": ", name, " is ", count, ", expected a number of tokens, 0 to ", kMaxTokens));
  };
  window_ = {tokens("window"), tokens("sinks")};
  const std::string sizes = ErrorText("window is ", window_.window, " and sinks ", window_.sinks);
  const Ort::ConstKernelInfo names(&info);
  const bool has_output = names.GetOutputCount() > kPresentExactKey && !names.GetOutputName(kPresentExactKey).empty();
  if (!window_.Any()) {
    const bool has_input = HasInput(info, inputs_.past_exact_key) && !IsConstantZero(info, inputs_.past_exact_key);
    if (!has_input && !has_output) return;
    throw OpError(ErrorText(node_, ": ", sizes,
                            ", but past_exact_key or present_exact_key is given, expected neither, ",
                            "or a window or sinks of which they hold the keys"));
  }
  if (codebooks_ == nullptr) {
    throw OpError(ErrorText(node_, ": ", sizes, ", but past_key '", past_key_name_,
                            "' holds floats, which are exact, expected 0 for both or a cache of codes"));
  }
  const std::string expected =
      ErrorText("the exact keys, float [B, ", kv_heads, ", ", window_.Slots(), ", ", layout_.head_dim, "]");
  if (!HasInput(info, inputs_.past_exact_key)) {
    throw OpError(ErrorText(node_, ": ", sizes, ", but input ", inputs_.past_exact_key,
                            " (past_exact_key) is missing, expected ", expected));
  }
  if (!has_output) {
    throw OpError(ErrorText(node_, ": ", sizes, ", but output ", kPresentExactKey,
                            " (present_exact_key) is missing, expected ", expected));
  }
  past_exact_key_name_ = names.GetInputName(inputs_.past_exact_key);
}

void CachedAttention::CheckExactKeys(const Ort::KernelContext& context, const AttentionCall& call) const {
  if (!window_.Any()) return;
  const std::vector<int64_t> shape = ShapeOf(context, inputs_.past_exact_key);
  const std::vector<int64_t> expected{call.batch, call.kv_heads, window_.Slots(), call.head_dim};
  if (shape == expected) return;
  throw OpError(ErrorText(node_, ": past_exact_key '", past_exact_key_name_, "' has shape ", ShapeText(shape),
                          ", expected ", ShapeText(expected), " (sinks ", window_.sinks, " and window ", window_.window,
                          "). Feed what the model put out as present, and zeros of that shape at first."));
}

void CachedAttention::CheckHeadDim(int64_t head_dim) const {
  if (codebooks_ != nullptr && layout_.head_dim != head_dim) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, but codebooks are for ", layout_.head_dim,
                            ". Optimize the original model again."));
  }
  if (prompt_.Tokens() > 0 && prompt_.cache().head_dim != head_dim) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, but prompt_head_dim is ",
                            prompt_.cache().head_dim, ". Optimize the original model again."));
  }
  if (has_rotary_ && head_dim % 2 != 0) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, expected an even number for cos and sin"));
  }
}

int64_t CachedAttention::TokensOf(const std::vector<int64_t>& shape, const std::string& name, int64_t row,
                                  bool may_be_wide, const AttentionCall& call) const {
  if (shape.size() == 4 && shape[0] == call.batch && shape[1] == call.kv_heads &&
      (shape[3] == row || (may_be_wide && shape[3] > row && shape[3] <= kMaxWidth))) {
    return shape[2];
  }
  const std::string wide = int8_values_ ? ErrorText(", or both caches of one width of ", ValueRowBytes(call.head_dim),
                                                    " to ", kMaxWidth, " bytes")
                                        : "";
  throw OpError(ErrorText(node_, ": past cache '", name, "' has shape ", ShapeText(shape), ", expected [", call.batch,
                          ", ", call.kv_heads, ", tokens, ", row, "] (", call.kv_heads, " heads of ", call.head_dim,
                          wide, "). Feed the model inputs of the shapes it was exported for."));
}

int64_t CachedAttention::Room(const Ort::KernelContext& context, const AttentionCall& call) const {
  const std::vector<int64_t> key_shape = ShapeOf(context, inputs_.past_key);
  const std::vector<int64_t> value_shape = ShapeOf(context, inputs_.past_value);
  const int64_t key_row = codebooks_ == nullptr ? call.head_dim : layout_.RowBytes();
  const int64_t value_row = int8_values_ ? ValueRowBytes(call.head_dim) : call.head_dim;
  // Of keys alone, rows as wide as those of values are a mistake.
  const bool one_width =
      int8_values_ && !key_shape.empty() && !value_shape.empty() && key_shape.back() == value_shape.back();
  const int64_t room = TokensOf(key_shape, past_key_name_, key_row, one_width, call);
  const int64_t value_room = TokensOf(value_shape, past_value_name_, value_row, one_width, call);
  if (value_room != room) {
    throw OpError(ErrorText(node_, ": past_key '", past_key_name_, "' holds ", room, " tokens and past_value '",
                            past_value_name_, "' ", value_room,
                            ", expected as many. Feed what the model put out as present."));
  }
  const int64_t most = kMaxTokens - prompt_.Tokens();
  if (room > most || call.queries > most - room) {
    throw OpError(ErrorText(node_, ": there are ", room, " tokens in the cache and ", call.queries,
                            " in the call, expected at most ", most));
  }
  return room;
}

CachedAttention::Lengths CachedAttention::ReadLengths(const Ort::KernelContext& context,
                                                      const AttentionCall& call) const {
  CheckHeadDim(call.head_dim);
  const int64_t room = Room(context, call);
  CheckExactKeys(context, call);
  Lengths lengths;
  if (!has_lengths_) {
    lengths.total = room + call.queries;
    if (lengths.total == 0) return lengths;  // of a batch that need not be in anyone's memory
    lengths.past.assign(static_cast<size_t>(call.batch), room);
    lengths.added.assign(static_cast<size_t>(call.batch), call.queries);
    return lengths;
  }
  const Ort::ConstValue value = context.GetInput(inputs_.lengths);
  const Ort::TensorTypeAndShapeInfo info = value.GetTensorTypeAndShapeInfo();
  if (static_cast<int64_t>(info.GetElementCount()) != call.batch) {
    throw OpError(ErrorText(node_, ": lengths has shape ", ShapeText(info.GetShape()), ", expected [", call.batch,
                            "], one for each sequence. Feed the model inputs of the shapes it was exported for."));
  }
  lengths.total = room;
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t given = value.GetTensorData<int32_t>()[b];
    const int64_t last = given - prompt_.Tokens();
    if (last < 0) {
      throw OpError(ErrorText(node_, ": lengths holds ", given, " for sequence ", b,
                              ", expected its tokens after this call less 1, ", prompt_.Tokens(), " or more",
                              prompt_.Tokens() > 0 ? ": those of the prompt in the model count" : ""));
    }
    // Of a first prompt, a sequence may be shorter than the longest: what follows it is padding.
    const int64_t past = std::max<int64_t>(last + 1 - call.queries, 0);
    if (past > room) {
      throw OpError(ErrorText(node_, ": sequence ", b, " has ", last + 1, " tokens after this call of ", call.queries,
                              ", but past_key '", past_key_name_, "' holds ", room,
                              ". Feed a cache that holds all tokens before."));
    }
    lengths.past.push_back(past);
    lengths.added.push_back(last + 1 - past);
    lengths.total = std::max(lengths.total, past + call.queries);
  }
  return lengths;
}

int64_t CachedAttention::KeyRowBytes(int64_t head_dim) const {
  return codebooks_ == nullptr ? head_dim * kFloat : layout_.RowBytes();
}

int64_t CachedAttention::ValueRowBytesOf(int64_t head_dim) const {
  return int8_values_ ? ValueRowBytes(head_dim) : head_dim * kFloat;
}

CachedAttention::Rows CachedAttention::Present(Ort::KernelContext& context, size_t input, size_t output,
                                               const AttentionCall& call, const Lengths& lengths,
                                               int64_t row_bytes) const {
  const Ort::ConstValue past = context.GetInput(input);
  const Ort::TensorTypeAndShapeInfo info = past.GetTensorTypeAndShapeInfo();
  const bool bytes = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  const std::vector<int64_t> shape = info.GetShape();
  const int64_t room = shape[2], width = shape[3];
  const int64_t width_bytes = bytes ? width : width * kFloat;
  Ort::UnownedValue present = context.GetOutput(output, {call.batch, call.kv_heads, lengths.total, width});
  Rows cache;
  cache.data = static_cast<char*>(present.GetTensorMutableRawData());
  cache.row_bytes = row_bytes;
  cache.head_bytes = lengths.total * width_bytes;
  const char* from = static_cast<const char*>(past.GetTensorRawData());
  if (from == cache.data && room != lengths.total && lengths.total != 0) {
    throw OpError(ErrorText(node_, ": past and present of '",
                            input == inputs_.past_key ? past_key_name_ : past_value_name_, "' are one buffer of ", room,
                            " tokens, expected ", lengths.total, ". Share a buffer for all tokens, or none."));
  }
  if (from == cache.data || lengths.total == 0) return cache;
  ParallelFor(context, call.batch * call.kv_heads, [&](int64_t i) {
    const int64_t tokens = lengths.past[static_cast<size_t>(i / call.kv_heads)];
    char* to = cache.data + i * cache.head_bytes;
    if (tokens > 0) std::memcpy(to, from + i * room * width_bytes, static_cast<size_t>(tokens * row_bytes));
    // What is not filled is no one's memory.
    std::memset(to + tokens * row_bytes, 0, static_cast<size_t>(cache.head_bytes - tokens * row_bytes));
  });
  return cache;
}

CachedAttention::Rows CachedAttention::PresentExactKeys(Ort::KernelContext& context, const AttentionCall& call) const {
  if (!window_.Any()) return {};
  const int64_t row_bytes = call.head_dim * kFloat;
  Ort::UnownedValue present =
      context.GetOutput(kPresentExactKey, {call.batch, call.kv_heads, window_.Slots(), call.head_dim});
  const Rows rows{static_cast<char*>(present.GetTensorMutableRawData()), row_bytes, window_.Slots() * row_bytes};
  const char* from = static_cast<const char*>(context.GetInput(inputs_.past_exact_key).GetTensorRawData());
  const int64_t bytes = call.batch * call.kv_heads * rows.head_bytes;
  if (from != rows.data && bytes > 0) std::memcpy(rows.data, from, static_cast<size_t>(bytes));
  return rows;
}

void CachedAttention::Rotate(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
                             float* q, float* k) const {
  const std::vector<int64_t> shape = ShapeOf(context, inputs_.cos);
  const int64_t half = call.head_dim / 2;
  if (shape.size() != 2 || shape[1] != half || ShapeOf(context, inputs_.sin) != shape) {
    throw OpError(ErrorText(node_, ": cos has shape ", ShapeText(shape), " and sin ",
                            ShapeText(ShapeOf(context, inputs_.sin)), ", expected [positions, ", half, "] for both"));
  }
  const float* cos = context.GetInput(inputs_.cos).GetTensorData<float>();
  const float* sin = context.GetInput(inputs_.sin).GetTensorData<float>();
  const int64_t prompt = prompt_.Tokens();
  const int64_t most = prompt + *std::max_element(lengths.past.begin(), lengths.past.end()) + call.queries;
  if (most > shape[0]) {
    throw OpError(ErrorText(node_, ": a sequence has ", most, " tokens, but cos and sin are for ", shape[0],
                            " positions. Feed shorter sequences."));
  }
  const auto rotate = [&](const HeadRows& rows, int64_t heads, float* to) {
    ParallelFor(context, call.batch * call.queries, [&](int64_t i) {
      const int64_t batch = i / call.queries, row = i % call.queries;
      const int64_t position = prompt + lengths.past[static_cast<size_t>(batch)] + row;
      for (int64_t head = 0; head < heads; ++head) {
        SelectKernel(KvCacheKernels(), ActiveFeatures())
            .rotate(rows.At(batch, head, row), cos + position * half, sin + position * half, call.head_dim,
                    interleaved_, to + (i * heads + head) * call.head_dim);
      }
    });
  };
  rotate(call.q, call.heads, q);
  rotate(call.k, call.kv_heads, k);
}

void CachedAttention::Append(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head,
                             const Cache& cache) const {
  const int64_t past = lengths.past[static_cast<size_t>(batch)];
  const int64_t added = lengths.added[static_cast<size_t>(batch)];
  const int64_t head = batch * call.kv_heads + kv_head;
  const float* k = call.k.At(batch, kv_head, 0);
  const float* v = call.v.At(batch, kv_head, 0);
  char* key_cache = cache.keys.At(head, 0);
  char* value_cache = cache.values.At(head, 0);
  const auto copy = [&](const HeadRows& rows, char* to, int64_t row_bytes) {
    for (int64_t i = 0; i < added; ++i) {
      std::memcpy(to + (past + i) * row_bytes, rows.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
    }
  };
  if (codebooks_ == nullptr) {
    copy(call.k, key_cache, cache.keys.row_bytes);
  } else {
    AppendKeys(SelectKernel(KvCacheKernels(), ActiveFeatures()), layout_,
               codebooks_ + kv_head * layout_.CodebookFloats(), k, call.k.row_bytes, added, past,
               reinterpret_cast<uint8_t*>(key_cache));
  }
  if (int8_values_) {
    AppendValues(SelectKernel(KvCacheKernels(), ActiveFeatures()), call.head_dim, v, call.v.row_bytes, added, past,
                 reinterpret_cast<uint8_t*>(value_cache));
  } else {
    copy(call.v, value_cache, cache.values.row_bytes);
  }
  if (window_.Any() && call.queries == 1) AppendExactKeys(call, lengths, batch, kv_head, cache.exact_keys);
}

void CachedAttention::AppendExactKeys(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head,
                                      const Rows& exact_keys) const {
  const int64_t past = lengths.past[static_cast<size_t>(batch)];
  const int64_t tokens = past + lengths.added[static_cast<size_t>(batch)];
  for (int64_t token = past; token < tokens; ++token) {
    if (!window_.Holds(token, tokens)) continue;
    std::memcpy(exact_keys.At(batch * call.kv_heads + kv_head, window_.Slot(token)),
                call.k.At(batch, kv_head, token - past), static_cast<size_t>(exact_keys.row_bytes));
  }
}

void CachedAttention::Run(Ort::KernelContext& context, AttentionCall call, const Lengths& lengths) const {
  const Cache cache{Present(context, inputs_.past_key, 1, call, lengths, KeyRowBytes(call.head_dim)),
                    Present(context, inputs_.past_value, 2, call, lengths, ValueRowBytesOf(call.head_dim)),
                    PresentExactKeys(context, call)};
  if (call.batch == 0 || call.queries == 0) return;
  std::optional<Scratch> rotated;
  if (has_rotary_) {
    const int64_t rows = call.batch * call.queries;
    rotated.emplace(context, static_cast<size_t>(rows * (call.heads + call.kv_heads) * call.head_dim * kFloat));
    float* q = static_cast<float*>(rotated->data());
    float* k = q + rows * call.heads * call.head_dim;
    Rotate(context, call, lengths, q, k);
    const int64_t head_bytes = call.head_dim * kFloat;
    call.q = {q, call.queries * call.heads * head_bytes, head_bytes, call.heads * head_bytes};
    call.k = {k, call.queries * call.kv_heads * head_bytes, head_bytes, call.kv_heads * head_bytes};
  }
  ParallelFor(context, call.batch * call.kv_heads,
              [&](int64_t i) { Append(call, lengths, i / call.kv_heads, i % call.kv_heads, cache); });
  Attend(context, call, lengths, cache);
  if (!window_.Any() || call.queries == 1) return;
  // Not before: queries read what these take the place of.
  ParallelFor(context, call.batch * call.kv_heads, [&](int64_t i) {
    AppendExactKeys(call, lengths, i / call.kv_heads, i % call.kv_heads, cache.exact_keys);
  });
}

}  // namespace ortolan
