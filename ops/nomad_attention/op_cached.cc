#include "nomad_attention/op_cached.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kMaxWidth = int64_t{1} << 16;  // widest u8 cache, in bytes a token

}  // namespace

CachedAttention::CachedAttention(const OrtKernelInfo& info, const AttentionNode& node) : node_(node) {
  if (!node_.HasInput(kPastValue)) {
    throw node_.Error("past_key is given without past_value, expected both or neither");
  }
  const auto is_bytes = [&](size_t input) { return InputType(info, input) == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8; };
  form_.int8_values = is_bytes(kPastValue);
  if (is_bytes(kPastKey)) ReadCodebooks(info);
  for (const size_t output : {kPresentKey, kPresentValue}) {
    if (node_.HasOutput(output)) continue;
    throw node_.Error("output ", output, " (", output == kPresentKey ? "present_key" : "present_value",
                      ") is missing; it is required with past_key");
  }
  lengths_ = AlignedConstant<int32_t>(info, kLengths);
  cos_ = AlignedConstant<float>(info, kCos);
  sin_ = AlignedConstant<float>(info, kSin);
  has_lengths_ = node_.HasInput(kLengths) && !IsEmptyConstant(info, kLengths);
  has_rotary_ = node_.HasValues(info, kCos);
  if (has_rotary_ != node_.HasValues(info, kSin)) {
    throw node_.Error("only one of the inputs cos and sin is given, expected both or neither");
  }
  interleaved_ = node_.Flag(info, "rotary_interleaved");
  form_.precision = node_.precision;
  form_.reproducible = node_.reproducible;
  ReadWindow(info);
  ReadPrompt(info);
  plan_.emplace(form_);
}

void CachedAttention::ReadCodebooks(const OrtKernelInfo& info) {
  const ConstantTensor books =
      ConstantInput(info, kCodebooks, "codebooks", {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT}, node_.text);
  const auto wrong = [&](const auto&... parts) {
    return node_.Error("codebooks '", books.name, "' ", parts..., ". ", kOptimizeAgain);
  };
  const std::string shape = ShapeText(books.shape);
  if (books.shape.size() != 4 || books.shape[0] != node_.kv_heads || books.shape[2] != kCentroids) {
    throw wrong("has shape ", shape, ", expected [", node_.kv_heads, ", head_dim / d_sub, ", kCentroids, ", d_sub]");
  }
  form_.layout = {books.shape[1] * books.shape[3], books.shape[3]};
  const std::string problem = ValidateKeyCodeLayout(form_.layout);
  if (!problem.empty()) throw wrong("has shape ", shape, ": ", problem);
  codebooks_ = AlignedConstant<float>(books);
  form_.codebooks = codebooks_.data();
  for (int64_t i = 0; i < books.count; ++i) {
    if (std::isfinite(form_.codebooks[i])) continue;
    throw wrong("contains ", form_.codebooks[i], " at index ", i, ", expected finite values");
  }
}

void CachedAttention::ReadWindow(const OrtKernelInfo& info) {
  form_.window = {node_.Tokens(info, "window"), node_.Tokens(info, "sinks")};
  const std::string sizes = ErrorText("window is ", form_.window.window, " and sinks ", form_.window.sinks);
  if (!form_.window.Any()) {
    if (!node_.HasValues(info, kPastExactKey) && !node_.HasOutput(kPresentExactKey)) return;
    throw node_.Error(sizes,
                      ", but past_exact_key or present_exact_key is given: they require a window or sinks above 0");
  }
  if (form_.codebooks == nullptr) {
    throw node_.Error(sizes, ", but past_key '", node_.inputs[kPastKey],
                      "' is float, which is exact: use a cache of codes, or 0 for both");
  }
  const auto missing = [&](const char* what, size_t index, const char* name) {
    return node_.Error(sizes, ", but ", what, index, " (", name, ") is missing, expected float [B, ", node_.kv_heads,
                       ", ", form_.window.Slots(), ", ", form_.layout.head_dim, "]");
  };
  if (!node_.HasInput(kPastExactKey)) throw missing("input ", kPastExactKey, "past_exact_key");
  if (!node_.HasOutput(kPresentExactKey)) throw missing("output ", kPresentExactKey, "present_exact_key");
}

BitmapView CachedAttention::ReadMatrix(const OrtKernelInfo& info, size_t first, const std::string& meaning, int64_t k,
                                       int64_t n, AlignedConstant<int64_t>& offsets) const {
  const auto read = [&](size_t index, const char* part, ONNXTensorElementDataType type) {
    return ConstantInput(info, first + index, (meaning + part).c_str(), {type}, node_.text);
  };
  const ConstantTensor masks = read(0, "_masks", ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8);
  const ConstantTensor values = read(1, "_values", ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
  const ConstantTensor starts = read(2, "_offsets", ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
  offsets = AlignedConstant<int64_t>(starts);
  const BitmapClaim claim{
      k, n, static_cast<const uint8_t*>(masks.data), masks.count, values.count, offsets.data(), starts.count};
  const std::string problem = ValidateBitmap(claim);
  if (!problem.empty()) {
    throw node_.Error("malformed ", meaning, " in tensors '", masks.name, "', '", values.name, "', '", starts.name,
                      "': ", problem, ". ", kOptimizeAgain);
  }
  for (int64_t i = 0; i < values.count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, static_cast<const char*>(values.data) + i * kValueBytes, sizeof bits);
    if ((bits & 0x7f80) != 0x7f80) continue;
    throw node_.Error(meaning, " '", values.name, "' contains NaN or infinity at index ", i,
                      ", expected finite values. ", kOptimizeAgain);
  }
  return claim.View(static_cast<const uint8_t*>(values.data));
}

void CachedAttention::ReadPrompt(const OrtKernelInfo& info) {
  PromptCache& prompt = form_.prompt;
  prompt.tokens = node_.Tokens(info, "prompt_tokens");
  if (prompt.tokens == 0) {
    for (size_t i = kPromptKeyMasks; i < kInputCount; ++i) {
      if (!node_.HasInput(i)) continue;
      throw node_.Error("input ", i, " '", node_.inputs[i],
                        "' belongs to a prompt, but prompt_tokens is 0, expected the number of its tokens");
    }
    return;
  }
  prompt.head_dim = IntAttribute(info, "prompt_head_dim", node_.text);
  if (!ValidateKeyCodeLayout({prompt.head_dim, 1}).empty()) {
    throw node_.Error("prompt_head_dim is ", prompt.head_dim, ", expected a multiple of 16 from 16 to ", kMaxHeadDim);
  }
  prompt.kv_heads = node_.kv_heads;
  prompt.keys =
      ReadMatrix(info, kPromptKeyMasks, "prompt_key", prompt.head_dim, prompt.KeyColumns(), prompt_key_offsets_);
  prompt.values = ReadMatrix(info, kPromptValueMasks, "prompt_value", prompt.ChunkTokens(), prompt.ValueColumns(),
                             prompt_value_offsets_);
}

void CachedAttention::CheckExactKeys(const KernelContext& context, const AttentionCall& call) const {
  if (!form_.window.Any()) return;
  const Shape shape = ShapeOf(context, kPastExactKey);
  const Shape expected{call.batch, call.kv_heads, form_.window.Slots(), call.head_dim};
  if (shape == expected) return;
  throw node_.Error("past_exact_key '", node_.inputs[kPastExactKey], "' has shape ", ShapeText(shape), ", expected ",
                    ShapeText(expected), " (sinks ", form_.window.sinks, " and window ", form_.window.window,
                    "). Pass present_exact_key of the previous call, or zeros in the first call.");
}

void CachedAttention::CheckHeadDim(int64_t head_dim) const {
  const auto check = [&](bool fits, const auto&... expected) {
    if (!fits) throw node_.Error("head size is ", head_dim, ", ", expected...);
  };
  check(form_.codebooks == nullptr || form_.layout.head_dim == head_dim, "but codebooks have ", form_.layout.head_dim,
        ". ", kOptimizeAgain);
  check(form_.prompt.tokens == 0 || form_.prompt.head_dim == head_dim, "but prompt_head_dim is ", form_.prompt.head_dim,
        ". ", kOptimizeAgain);
  check(!has_rotary_ || head_dim % 2 == 0, "expected an even size for rotary embedding (cos and sin)");
}

int64_t CachedAttention::Room(const KernelContext& context, const AttentionCall& call) const {
  const Shape key_shape = ShapeOf(context, kPastKey), value_shape = ShapeOf(context, kPastValue);
  // If only keys were u8, rows as wide as those of values would be a mistake.
  const bool one_width =
      form_.int8_values && !key_shape.empty() && !value_shape.empty() && key_shape.back() == value_shape.back();
  const auto tokens_of = [&](size_t input, const Shape& shape, int64_t row) {
    if (shape.size() == 4 && shape[0] == call.batch && shape[1] == call.kv_heads &&
        (shape[3] == row || (one_width && shape[3] > row && shape[3] <= kMaxWidth))) {
      return shape[2];
    }
    const std::string wide = form_.int8_values ? ErrorText(", or both caches with the same width, ",
                                                           ValueRowBytes(call.head_dim), " to ", kMaxWidth, " bytes")
                                               : "";
    throw node_.WrongShape(context, input, "past cache",
                           ErrorText("[", call.batch, ", ", call.kv_heads, ", tokens, ", row, "] (", call.kv_heads,
                                     " heads of ", call.head_dim, wide, ")"));
  };
  const int64_t room = tokens_of(kPastKey, key_shape, form_.KeyRow(call.head_dim));
  const int64_t value_room = tokens_of(kPastValue, value_shape, form_.ValueRow(call.head_dim));
  if (value_room != room) {
    throw node_.Error("past_key '", node_.inputs[kPastKey], "' holds ", room, " tokens and past_value '",
                      node_.inputs[kPastValue], "' ", value_room,
                      ", expected the same number. Pass present_key and present_value of the previous call.");
  }
  const int64_t most = kMaxTokens - form_.prompt.tokens;
  if (room > most || call.queries > most - room) {
    throw node_.Error("cache has ", room, " tokens and the call ", call.queries, ", expected at most ", most,
                      " together");
  }
  return room;
}

void CachedAttention::ReadLengths(const KernelContext& context, CachedCall& call) const {
  CheckHeadDim(call.head_dim);
  const int64_t room = Room(context, call);
  CheckExactKeys(context, call);
  if (!has_lengths_) {
    call.room = room + call.queries;
    call.keys = form_.prompt.tokens + call.room;
    if (call.room == 0) return;  // nothing to compute, and the batch size may exceed memory
    call.past.assign(static_cast<size_t>(call.batch), room);
    call.added.assign(static_cast<size_t>(call.batch), call.queries);
    return;
  }
  const Tensor value = context.Input(kLengths);
  if (value.Count() != call.batch) {
    throw node_.Error("lengths has shape ", ShapeText(value.Shape()), ", expected [", call.batch,
                      "], one element a sequence. Feed the model inputs of the shapes it was exported for.");
  }
  const std::span<const int32_t> lengths(lengths_.In(value), static_cast<size_t>(call.batch));
  const std::string problem = call.SetLengths(lengths, room, form_.prompt.tokens, "lengths",
                                              ErrorText("past_key '", node_.inputs[kPastKey], "'"));
  if (!problem.empty()) throw node_.Error(problem);
}

CacheRows CachedAttention::Present(KernelContext& context, size_t input, size_t output, const CachedCall& call,
                                   int64_t row) const {
  const Tensor past = context.Input(input);
  const int64_t element_bytes = past.Type() == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 ? 1 : kFloat;
  const Shape shape = past.Shape();
  const int64_t room = shape[2], width = shape[3];
  char* const present = context.Output(output, {call.batch, call.kv_heads, call.room, width});
  const CacheRows cache{present, row * element_bytes, call.room * width * element_bytes, past.Data<char>(),
                        room * width * element_bytes};
  if (cache.past == cache.data && room != call.room && call.room != 0) {
    throw node_.Error("past and present of '", node_.inputs[input], "' share a buffer of ", room, " tokens, expected ",
                      call.room, ". Share a buffer that has room for all tokens, or use separate buffers.");
  }
  return cache;
}

CacheRows CachedAttention::PresentExactKeys(KernelContext& context, const AttentionCall& call) const {
  if (!form_.window.Any()) return {};
  const int64_t row_bytes = call.head_dim * kFloat, head_bytes = form_.window.Slots() * row_bytes;
  char* const present =
      context.Output(kPresentExactKey, {call.batch, call.kv_heads, form_.window.Slots(), call.head_dim});
  return {present, row_bytes, head_bytes, context.Input(kPastExactKey).Data<char>(), head_bytes};
}

void CachedAttention::ReadRotary(const KernelContext& context, CachedCall& call) const {
  const Shape shape = ShapeOf(context, kCos), sin_shape = ShapeOf(context, kSin);
  const std::string problem = RotaryProblem(shape, sin_shape, call.head_dim);
  if (!problem.empty()) throw node_.Error(problem);
  call.rotary = {cos_.In(context.Input(kCos)), sin_.In(context.Input(kSin)), 2 * shape[1], interleaved_};
  const int64_t most = form_.prompt.tokens + call.MostTokens();
  if (most > shape[0]) {
    throw node_.Error("longest sequence has ", most, " tokens, but cos and sin have ", shape[0],
                      " positions. Pass shorter sequences.");
  }
}

void CachedAttention::Run(KernelContext& context, Host& host, CachedCall& call) const {
  call.key_cache = Present(context, kPastKey, kPresentKey, call, form_.KeyRow(call.head_dim));
  call.value_cache = Present(context, kPastValue, kPresentValue, call, form_.ValueRow(call.head_dim));
  call.exact_keys = PresentExactKeys(context, call);
  if (has_rotary_ && call.batch > 0 && call.queries > 0) ReadRotary(context, call);
  plan_->Run(host, call);
}

}  // namespace ortolan
