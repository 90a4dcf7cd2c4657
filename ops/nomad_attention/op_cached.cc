#include "nomad_attention/op_cached.h"

#include <algorithm>
#include <cmath>
#include <cstring>

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

CachedAttention::CachedAttention(const OrtKernelInfo& info, std::string node, CacheInputs inputs, int64_t kv_heads,
                                 int precision)
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
  form_.int8_values = type_of(inputs.past_value) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  if (codes) ReadCodebooks(info, kv_heads);
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
  form_.interleaved = interleaved == 1;
  form_.precision = precision;
  ReadWindow(info, kv_heads);
  prompt_ = CachedPrompt(info, node_, inputs.prompt, kv_heads);
  form_.prompt = prompt_.cache();
  plan_.emplace(form_);
}

void CachedAttention::ReadCodebooks(const OrtKernelInfo& info, int64_t kv_heads) {
  const ConstantTensor books =
      ConstantInput(info, inputs_.codebooks, "codebooks", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_);
  if (books.shape.size() != 4 || books.shape[0] != kv_heads || books.shape[2] != kCentroids) {
    throw OpError(ErrorText(node_, ": codebooks '", books.name, "' has shape ", ShapeText(books.shape), ", expected [",
                            kv_heads, ", head_dim / d_sub, ", kCentroids,
                            ", d_sub]. Optimize the original model again."));
  }
  form_.layout = {books.shape[1] * books.shape[3], books.shape[3]};
  const std::string problem = ValidateKeyCodeLayout(form_.layout);
  if (!problem.empty()) {
    throw OpError(ErrorText(node_, ": codebooks '", books.name, "' has shape ", ShapeText(books.shape), ": ", problem,
                            ". Optimize the original model again."));
  }
  form_.codebooks = static_cast<const float*>(books.data);
  if (reinterpret_cast<uintptr_t>(books.data) % alignof(float) != 0) {
    copied_codebooks_.resize(static_cast<size_t>(books.count));
    std::memcpy(copied_codebooks_.data(), books.data, static_cast<size_t>(books.count * kFloat));
    form_.codebooks = copied_codebooks_.data();
  }
  for (int64_t i = 0; i < books.count; ++i) {
    if (std::isfinite(form_.codebooks[i])) continue;
    throw OpError(ErrorText(node_, ": codebooks '", books.name, "' holds ", form_.codebooks[i], " at ", i,
                            ", expected finite numbers. Optimize the original model again."));
  }
}

void CachedAttention::ReadWindow(const OrtKernelInfo& info, int64_t kv_heads) {
  const auto tokens = [&](const char* name) {
    const int64_t count = IntAttributeOr(info, name, 0);
    if (count >= 0 && count <= kMaxTokens) return count;
    throw OpError(ErrorText(node_, ": ", name, " is ", count, ", expected a number of tokens, 0 to ", kMaxTokens));
  };
  form_.window = {tokens("window"), tokens("sinks")};
  const std::string sizes = ErrorText("window is ", form_.window.window, " and sinks ", form_.window.sinks);
  const Ort::ConstKernelInfo names(&info);
  const bool has_output = names.GetOutputCount() > kPresentExactKey && !names.GetOutputName(kPresentExactKey).empty();
  if (!form_.window.Any()) {
    const bool has_input = HasInput(info, inputs_.past_exact_key) && !IsConstantZero(info, inputs_.past_exact_key);
    if (!has_input && !has_output) return;
    throw OpError(ErrorText(node_, ": ", sizes,
                            ", but past_exact_key or present_exact_key is given, expected neither, ",
                            "or a window or sinks of which they hold the keys"));
  }
  if (form_.codebooks == nullptr) {
    throw OpError(ErrorText(node_, ": ", sizes, ", but past_key '", past_key_name_,
                            "' holds floats, which are exact, expected 0 for both or a cache of codes"));
  }
  const std::string expected =
      ErrorText("the exact keys, float [B, ", kv_heads, ", ", form_.window.Slots(), ", ", form_.layout.head_dim, "]");
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
  if (!form_.window.Any()) return;
  const std::vector<int64_t> shape = ShapeOf(context, inputs_.past_exact_key);
  const std::vector<int64_t> expected{call.batch, call.kv_heads, form_.window.Slots(), call.head_dim};
  if (shape == expected) return;
  throw OpError(ErrorText(node_, ": past_exact_key '", past_exact_key_name_, "' has shape ", ShapeText(shape),
                          ", expected ", ShapeText(expected), " (sinks ", form_.window.sinks, " and window ",
                          form_.window.window,
                          "). Feed what the model put out as present, and zeros of that shape at first."));
}

void CachedAttention::CheckHeadDim(int64_t head_dim) const {
  if (form_.codebooks != nullptr && form_.layout.head_dim != head_dim) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, but codebooks are for ",
                            form_.layout.head_dim, ". Optimize the original model again."));
  }
  if (form_.prompt.tokens > 0 && form_.prompt.head_dim != head_dim) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, but prompt_head_dim is ",
                            form_.prompt.head_dim, ". Optimize the original model again."));
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
  const std::string wide = form_.int8_values ? ErrorText(", or both caches of one width of ",
                                                         ValueRowBytes(call.head_dim), " to ", kMaxWidth, " bytes")
                                             : "";
  throw OpError(ErrorText(node_, ": past cache '", name, "' has shape ", ShapeText(shape), ", expected [", call.batch,
                          ", ", call.kv_heads, ", tokens, ", row, "] (", call.kv_heads, " heads of ", call.head_dim,
                          wide, "). Feed the model inputs of the shapes it was exported for."));
}

int64_t CachedAttention::Room(const Ort::KernelContext& context, const AttentionCall& call) const {
  const std::vector<int64_t> key_shape = ShapeOf(context, inputs_.past_key);
  const std::vector<int64_t> value_shape = ShapeOf(context, inputs_.past_value);
  const int64_t key_row = form_.codebooks == nullptr ? call.head_dim : form_.layout.RowBytes();
  const int64_t value_row = form_.int8_values ? ValueRowBytes(call.head_dim) : call.head_dim;
  // Of keys alone, rows as wide as those of values are a mistake.
  const bool one_width =
      form_.int8_values && !key_shape.empty() && !value_shape.empty() && key_shape.back() == value_shape.back();
  const int64_t room = TokensOf(key_shape, past_key_name_, key_row, one_width, call);
  const int64_t value_room = TokensOf(value_shape, past_value_name_, value_row, one_width, call);
  if (value_room != room) {
    throw OpError(ErrorText(node_, ": past_key '", past_key_name_, "' holds ", room, " tokens and past_value '",
                            past_value_name_, "' ", value_room,
                            ", expected as many. Feed what the model put out as present."));
  }
  const int64_t most = kMaxTokens - form_.prompt.tokens;
  if (room > most || call.queries > most - room) {
    throw OpError(ErrorText(node_, ": there are ", room, " tokens in the cache and ", call.queries,
                            " in the call, expected at most ", most));
  }
  return room;
}

void CachedAttention::ReadLengths(const Ort::KernelContext& context, CachedCall& call) const {
  CheckHeadDim(call.head_dim);
  const int64_t room = Room(context, call);
  CheckExactKeys(context, call);
  if (!has_lengths_) {
    call.room = room + call.queries;
    call.keys = form_.prompt.tokens + call.room;
    if (call.room == 0) return;  // of a batch that need not be in anyone's memory
    call.past.assign(static_cast<size_t>(call.batch), room);
    call.added.assign(static_cast<size_t>(call.batch), call.queries);
    return;
  }
  const Ort::ConstValue value = context.GetInput(inputs_.lengths);
  const Ort::TensorTypeAndShapeInfo info = value.GetTensorTypeAndShapeInfo();
  if (static_cast<int64_t>(info.GetElementCount()) != call.batch) {
    throw OpError(ErrorText(node_, ": lengths has shape ", ShapeText(info.GetShape()), ", expected [", call.batch,
                            "], one for each sequence. Feed the model inputs of the shapes it was exported for."));
  }
  call.room = room;
  for (int64_t b = 0; b < call.batch; ++b) {
    const int64_t given = value.GetTensorData<int32_t>()[b];
    const int64_t last = given - form_.prompt.tokens;
    if (last < 0) {
      throw OpError(ErrorText(node_, ": lengths holds ", given, " for sequence ", b,
                              ", expected its tokens after this call less 1, ", form_.prompt.tokens, " or more",
                              form_.prompt.tokens > 0 ? ": those of the prompt in the model count" : ""));
    }
    // Of a first prompt, a sequence may be shorter than the longest: what follows it is padding.
    const int64_t past = std::max<int64_t>(last + 1 - call.queries, 0);
    if (past > room) {
      throw OpError(ErrorText(node_, ": sequence ", b, " has ", last + 1, " tokens after this call of ", call.queries,
                              ", but past_key '", past_key_name_, "' holds ", room,
                              ". Feed a cache that holds all tokens before."));
    }
    call.past.push_back(past);
    call.added.push_back(last + 1 - past);
    call.room = std::max(call.room, past + call.queries);
  }
  call.keys = form_.prompt.tokens + call.room;
}

CacheRows CachedAttention::Present(Ort::KernelContext& context, size_t input, size_t output, const CachedCall& call,
                                   int64_t row_bytes) const {
  const Ort::ConstValue past = context.GetInput(input);
  const Ort::TensorTypeAndShapeInfo info = past.GetTensorTypeAndShapeInfo();
  const bool bytes = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  const std::vector<int64_t> shape = info.GetShape();
  const int64_t room = shape[2], width = shape[3];
  const int64_t width_bytes = bytes ? width : width * kFloat;
  Ort::UnownedValue present = context.GetOutput(output, {call.batch, call.kv_heads, call.room, width});
  const CacheRows cache{static_cast<char*>(present.GetTensorMutableRawData()), row_bytes, call.room * width_bytes,
                        static_cast<const char*>(past.GetTensorRawData()), room * width_bytes};
  if (cache.past == cache.data && room != call.room && call.room != 0) {
    throw OpError(ErrorText(node_, ": past and present of '",
                            input == inputs_.past_key ? past_key_name_ : past_value_name_, "' are one buffer of ", room,
                            " tokens, expected ", call.room, ". Share a buffer for all tokens, or none."));
  }
  return cache;
}

CacheRows CachedAttention::PresentExactKeys(Ort::KernelContext& context, const AttentionCall& call) const {
  if (!form_.window.Any()) return {};
  const int64_t row_bytes = call.head_dim * kFloat, head_bytes = form_.window.Slots() * row_bytes;
  Ort::UnownedValue present =
      context.GetOutput(kPresentExactKey, {call.batch, call.kv_heads, form_.window.Slots(), call.head_dim});
  return {static_cast<char*>(present.GetTensorMutableRawData()), row_bytes, head_bytes,
          static_cast<const char*>(context.GetInput(inputs_.past_exact_key).GetTensorRawData()), head_bytes};
}

void CachedAttention::ReadRotary(const Ort::KernelContext& context, CachedCall& call) const {
  const std::vector<int64_t> shape = ShapeOf(context, inputs_.cos);
  const int64_t half = call.head_dim / 2;
  if (shape.size() != 2 || shape[1] != half || ShapeOf(context, inputs_.sin) != shape) {
    throw OpError(ErrorText(node_, ": cos has shape ", ShapeText(shape), " and sin ",
                            ShapeText(ShapeOf(context, inputs_.sin)), ", expected [positions, ", half, "] for both"));
  }
  call.cos = context.GetInput(inputs_.cos).GetTensorData<float>();
  call.sin = context.GetInput(inputs_.sin).GetTensorData<float>();
  const int64_t most = form_.prompt.tokens + call.MostTokens();
  if (most > shape[0]) {
    throw OpError(ErrorText(node_, ": a sequence has ", most, " tokens, but cos and sin are for ", shape[0],
                            " positions. Feed shorter sequences."));
  }
}

void CachedAttention::Run(Ort::KernelContext& context, Host& host, CachedCall& call) const {
  call.key_cache = Present(context, inputs_.past_key, 1, call, form_.KeyRowBytes(call.head_dim));
  call.value_cache = Present(context, inputs_.past_value, 2, call, form_.ValueRowBytes(call.head_dim));
  call.exact_keys = PresentExactKeys(context, call);
  if (has_rotary_ && call.batch > 0 && call.queries > 0) ReadRotary(context, call);
  plan_->Run(host, call);
}

}  // namespace ortolan
