#include "nomad_attention/cached_op.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>

#include "isa/kernel_table.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr int64_t kAlignment = 64;
constexpr int64_t kMaxTokens = int64_t{1} << 24;
// So few queries are computed one by one, on the cache as it is.
constexpr int64_t kMostDecodeQueries = 4;
// Tokens of a sequence that one thread goes through at least: more than building a query's tables costs.
constexpr int64_t kMinPartTokens = 4096;
// Enough pieces of work for the threads of a server.
constexpr int64_t kPieces = 64;
constexpr float kHidden = -1e4f;  // exporters' masks hold this or less

int64_t Aligned(int64_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

char* AlignedData(const Scratch& scratch) {
  return reinterpret_cast<char*>(Aligned(static_cast<int64_t>(reinterpret_cast<uintptr_t>(scratch.data()))));
}

// Runs body(item, scratch of bytes) on ORT's threads, each with scratch of its own.
template <typename Body>
void ForEachWithScratch(const Ort::KernelContext& context, const std::string& node, int64_t items, int64_t bytes,
                        const Body& body) {
  std::atomic<bool> no_memory{false};
  ParallelFor(context, items, [&](int64_t item) {
    try {
      const Scratch scratch(context, static_cast<size_t>(bytes + kAlignment));
      body(item, AlignedData(scratch));
    } catch (...) {  // of getting memory
      no_memory = true;
    }
  });
  if (no_memory) throw OpError(ErrorText(node, ": no memory for ", bytes, " bytes of scratch a thread"));
}

std::vector<int64_t> ShapeOf(const Ort::KernelContext& context, size_t index) {
  return context.GetInput(index).GetTensorTypeAndShapeInfo().GetShape();
}

// Pairs (i, i + D / 2), or (2 i, 2 i + 1) if interleaved. The compiler makes vectors of the former.
void RotateRow(const float* __restrict from, const float* cos, const float* sin, int64_t head_dim, bool interleaved,
               float* __restrict to) {
  const int64_t half = head_dim / 2;
  if (!interleaved) {
    for (int64_t i = 0; i < half; ++i) {
      to[i] = from[i] * cos[i] - from[i + half] * sin[i];
      to[i + half] = from[i + half] * cos[i] + from[i] * sin[i];
    }
    return;
  }
  for (int64_t i = 0; i < half; ++i) {
    const float x = from[2 * i], y = from[2 * i + 1];
    to[2 * i] = x * cos[i] - y * sin[i];
    to[2 * i + 1] = y * cos[i] + x * sin[i];
  }
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
  has_rotary_ = HasInput(info, inputs.cos);
  if (has_rotary_ != HasInput(info, inputs.sin)) {
    throw OpError(ErrorText(node_, ": only one of the inputs cos and sin is given, expected both or none"));
  }
  const int64_t interleaved = IntAttributeOr(info, "rotary_interleaved", 0);
  if (interleaved != 0 && interleaved != 1) {
    throw OpError(ErrorText(node_, ": rotary_interleaved is ", interleaved, ", expected 0 or 1"));
  }
  interleaved_ = interleaved == 1;
}

void CachedAttention::CheckHeadDim(int64_t head_dim) const {
  if (codebooks_ != nullptr && layout_.head_dim != head_dim) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, but codebooks are for ", layout_.head_dim,
                            ". Optimize the original model again."));
  }
  if (has_rotary_ && head_dim % 2 != 0) {
    throw OpError(ErrorText(node_, ": heads are of ", head_dim, " numbers, expected an even number for cos and sin"));
  }
}

int64_t CachedAttention::Room(const Ort::KernelContext& context, const AttentionCall& call) const {
  const auto tokens_of = [&](size_t input, const std::string& name, int64_t row) {
    const std::vector<int64_t> shape = ShapeOf(context, input);
    if (shape.size() == 4 && shape[0] == call.batch && shape[1] == call.kv_heads && shape[3] == row) return shape[2];
    throw OpError(ErrorText(node_, ": past cache '", name, "' has shape ", ShapeText(shape), ", expected [", call.batch,
                            ", ", call.kv_heads, ", tokens, ", row, "] (", call.kv_heads, " heads of ", call.head_dim,
                            "). Feed the model inputs of the shapes it was exported for."));
  };
  const int64_t key_row = codebooks_ == nullptr ? call.head_dim : layout_.RowBytes();
  const int64_t value_row = int8_values_ ? ValueRowBytes(call.head_dim) : call.head_dim;
  const int64_t room = tokens_of(inputs_.past_key, past_key_name_, key_row);
  const int64_t value_room = tokens_of(inputs_.past_value, past_value_name_, value_row);
  if (value_room != room) {
    throw OpError(ErrorText(node_, ": past_key '", past_key_name_, "' holds ", room, " tokens and past_value '",
                            past_value_name_, "' ", value_room,
                            ", expected as many. Feed what the model put out as present."));
  }
  if (room > kMaxTokens || call.queries > kMaxTokens - room) {
    throw OpError(ErrorText(node_, ": there are ", room, " tokens in the cache and ", call.queries,
                            " in the call, expected at most ", kMaxTokens));
  }
  return room;
}

CachedAttention::Lengths CachedAttention::ReadLengths(const Ort::KernelContext& context,
                                                      const AttentionCall& call) const {
  CheckHeadDim(call.head_dim);
  const int64_t room = Room(context, call);
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
    const int64_t last = value.GetTensorData<int32_t>()[b];
    if (last < 0) {
      throw OpError(ErrorText(node_, ": lengths holds ", last, " for sequence ", b,
                              ", expected its tokens after this call less 1, 0 or more"));
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

CachedAttention::Cache CachedAttention::Present(Ort::KernelContext& context, size_t input, size_t output,
                                                const AttentionCall& call, const Lengths& lengths,
                                                int64_t row_bytes) const {
  const Ort::ConstValue past = context.GetInput(input);
  const Ort::TensorTypeAndShapeInfo info = past.GetTensorTypeAndShapeInfo();
  const bool bytes = info.GetElementType() == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8;
  const int64_t row = bytes ? row_bytes : row_bytes / kFloat;
  const int64_t room = info.GetShape()[2];
  Ort::UnownedValue present = context.GetOutput(output, {call.batch, call.kv_heads, lengths.total, row});
  Cache cache;
  cache.data = static_cast<char*>(present.GetTensorMutableRawData());
  cache.row_bytes = row_bytes;
  cache.head_bytes = lengths.total * row_bytes;
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
    if (tokens > 0) std::memcpy(to, from + i * room * row_bytes, static_cast<size_t>(tokens * row_bytes));
    // What is not filled is no one's memory.
    std::memset(to + tokens * row_bytes, 0, static_cast<size_t>(cache.head_bytes - tokens * row_bytes));
  });
  return cache;
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
  const int64_t most = *std::max_element(lengths.past.begin(), lengths.past.end()) + call.queries;
  if (most > shape[0]) {
    throw OpError(ErrorText(node_, ": a sequence has ", most, " tokens, but cos and sin are for ", shape[0],
                            " positions. Feed shorter sequences."));
  }
  const auto rotate = [&](const HeadRows& rows, int64_t heads, float* to) {
    ParallelFor(context, call.batch * call.queries, [&](int64_t i) {
      const int64_t batch = i / call.queries, row = i % call.queries;
      const int64_t position = lengths.past[static_cast<size_t>(batch)] + row;
      for (int64_t head = 0; head < heads; ++head) {
        RotateRow(rows.At(batch, head, row), cos + position * half, sin + position * half, call.head_dim, interleaved_,
                  to + (i * heads + head) * call.head_dim);
      }
    });
  };
  rotate(call.q, call.heads, q);
  rotate(call.k, call.kv_heads, k);
}

void CachedAttention::Append(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head,
                             const Cache& keys, const Cache& values) const {
  const int64_t past = lengths.past[static_cast<size_t>(batch)];
  const int64_t added = lengths.added[static_cast<size_t>(batch)];
  const int64_t head = batch * call.kv_heads + kv_head;
  const float* k = call.k.At(batch, kv_head, 0);
  const float* v = call.v.At(batch, kv_head, 0);
  char* key_cache = keys.data + head * keys.head_bytes;
  char* value_cache = values.data + head * values.head_bytes;
  const auto copy = [&](const HeadRows& rows, char* to, int64_t row_bytes) {
    for (int64_t i = 0; i < added; ++i) {
      std::memcpy(to + (past + i) * row_bytes, rows.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
    }
  };
  if (codebooks_ == nullptr) {
    copy(call.k, key_cache, keys.row_bytes);
  } else {
    const auto& kernel = SelectKernel<DecodeAttentionKernel>(DecodeAttentionKernels(), ActiveIsa());
    AppendKeys(layout_, codebooks_ + kv_head * layout_.CodebookFloats(), k, call.k.row_bytes, added, past,
               reinterpret_cast<uint8_t*>(key_cache), kernel.encode);
  }
  if (int8_values_) {
    AppendValues(call.head_dim, v, call.v.row_bytes, added, past, reinterpret_cast<uint8_t*>(value_cache));
  } else {
    copy(call.v, value_cache, values.row_bytes);
  }
}

// The tokens that a query sees, and whether that is all there is to say: the mask only hides, and leaves tokens without
// a gap.
bool CachedAttention::VisibleRange(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t head,
                                   int64_t query, int64_t* begin, int64_t* end) const {
  const int64_t past = lengths.past[static_cast<size_t>(batch)];
  *begin = 0;
  *end = past + lengths.added[static_cast<size_t>(batch)];
  if (call.causal) *end = std::min(*end, past + query + 1);
  if (call.mask.data == nullptr) return true;
  const std::vector<int64_t>& strides = call.mask.strides;
  const float* row = call.mask.data + batch * strides[0] + head * strides[1] + query * strides[2];
  const auto at = [&](int64_t j) { return row[j * strides[3]]; };
  while (*begin < *end && at(*begin) <= kHidden) ++*begin;
  while (*end > *begin && at(*end - 1) <= kHidden) --*end;
  if (*begin == *end) return false;  // what a row of hidden keys gives is the exact kernel's to say
  for (int64_t j = *begin; j < *end; ++j) {
    if (at(j) != at(*begin)) return false;
  }
  return at(*begin) == 0.0f;
}

void CachedAttention::Run(Ort::KernelContext& context, AttentionCall call, const Lengths& lengths) const {
  const Cache keys = Present(context, inputs_.past_key, 1, call, lengths, KeyRowBytes(call.head_dim));
  const Cache values = Present(context, inputs_.past_value, 2, call, lengths, ValueRowBytesOf(call.head_dim));
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
              [&](int64_t i) { Append(call, lengths, i / call.kv_heads, i % call.kv_heads, keys, values); });
  bool ranges = call.queries <= kMostDecodeQueries && ValidateKeyCodeLayout({call.head_dim, 1}).empty();
  const int64_t mask_heads = call.mask.data != nullptr && call.mask.strides[1] != 0 ? call.heads : 1;
  for (int64_t i = 0; ranges && i < call.batch * mask_heads * call.queries; ++i) {
    const int64_t batch = i / (mask_heads * call.queries), query = i % call.queries;
    int64_t begin, end, first_begin, first_end;
    const int64_t head = i / call.queries % mask_heads;
    ranges = VisibleRange(call, lengths, batch, 0, query, &first_begin, &first_end) &&
             VisibleRange(call, lengths, batch, head, query, &begin, &end) && begin == first_begin && end == first_end;
  }
  if (ranges) return Decode(context, call, lengths, keys, values);
  Prompt(context, call, lengths, keys, values);
}

void CachedAttention::Decode(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
                             const Cache& keys, const Cache& values) const {
  const DecodeAttentionKernel& kernel = SelectKernel<DecodeAttentionKernel>(DecodeAttentionKernels(), ActiveIsa());
  const int64_t group = call.heads / call.kv_heads;
  const int64_t rows = call.batch * call.kv_heads * call.queries;
  const int64_t most = *std::max_element(lengths.past.begin(), lengths.past.end()) + call.queries;
  const int64_t parts = std::clamp<int64_t>(std::min((kPieces + rows - 1) / rows, most / kMinPartTokens), 1, kPieces);
  const int64_t partial_floats = Aligned(group * (2 + call.head_dim) * kFloat) / kFloat;
  const Scratch partials(context, static_cast<size_t>(rows * parts * partial_floats * kFloat));
  const auto partial_of = [&](int64_t item) {
    float* at = static_cast<float*>(partials.data()) + item * partial_floats;
    return DecodePartial{at, at + group, at + 2 * group};
  };
  ForEachWithScratch(context, node_, rows * parts, kernel.scratch_bytes(group, call.head_dim),
                     [&](int64_t item, char* scratch) {
                       const int64_t row = item / parts, part = item % parts;
                       const int64_t query = row % call.queries, kv_head = row / call.queries % call.kv_heads;
                       const int64_t batch = row / call.queries / call.kv_heads;
                       const int64_t past = lengths.past[static_cast<size_t>(batch)];
                       int64_t begin, end;
                       VisibleRange(call, lengths, batch, 0, query, &begin, &end);
                       const int64_t head = batch * call.kv_heads + kv_head;
                       DecodeAttentionArgs args;
                       args.heads = group;
                       args.head_dim = call.head_dim;
                       args.q = call.q.At(batch, kv_head * group, query);
                       args.q_head_bytes = call.q.head_bytes;
                       args.scale = call.scale;
                       args.tokens = past + lengths.added[static_cast<size_t>(batch)];
                       const char* key_rows = keys.data + head * keys.head_bytes;
                       const char* value_rows = values.data + head * values.head_bytes;
                       if (codebooks_ != nullptr) {
                         args.key_codes = reinterpret_cast<const uint8_t*>(key_rows);
                         args.d_sub = layout_.d_sub;
                         args.codebook = codebooks_ + kv_head * layout_.CodebookFloats();
                       } else {
                         args.keys = reinterpret_cast<const float*>(key_rows);
                         args.key_row_bytes = keys.row_bytes;
                       }
                       if (int8_values_) {
                         args.int8_values = reinterpret_cast<const uint8_t*>(value_rows);
                       } else {
                         args.values = reinterpret_cast<const float*>(value_rows);
                         args.value_row_bytes = values.row_bytes;
                       }
                       // Parts end with whole blocks.
                       const int64_t step = ((end - begin + parts - 1) / parts + kKeyBlock - 1) / kKeyBlock * kKeyBlock;
                       const int64_t from = std::min(end, begin + part * step);
                       kernel.run(args, from, std::min(end, from + step), partial_of(item), scratch);
                     });
  for (int64_t row = 0; row < rows; ++row) {
    const DecodePartial whole = partial_of(row * parts);
    for (int64_t part = 1; part < parts; ++part) {
      MergeDecodePartial(group, call.head_dim, partial_of(row * parts + part), whole);
    }
    const int64_t query = row % call.queries, kv_head = row / call.queries % call.kv_heads;
    const int64_t batch = row / call.queries / call.kv_heads;
    FinishDecode(group, call.head_dim, whole,
                 call.y + ((batch * call.queries + query) * call.heads + kv_head * group) * call.head_dim,
                 call.head_dim * kFloat);
  }
}

void CachedAttention::Prompt(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
                             const Cache& keys, const Cache& values) const {
  const AttentionKernel& kernel = SelectAttention(ActiveIsa(), call.precision);
  const int64_t group = call.heads / call.kv_heads;
  const int64_t most = *std::max_element(lengths.past.begin(), lengths.past.end()) + call.queries;
  const int64_t row_bytes = call.head_dim * kFloat;
  // A short call reads all from the cache, whatever its masks are.
  const bool own_cached = call.queries <= kMostDecodeQueries && (codebooks_ != nullptr || int8_values_);
  const bool as_given = most == call.queries && !own_cached;  // nothing is in the past
  const int64_t row_count = group * call.queries;
  const int64_t chunks = (row_count + kAttentionRows - 1) / kAttentionRows;
  const int64_t heads = call.batch * call.kv_heads;
  // Keys and values of the past, then this call's, as floats.
  std::optional<Scratch> floats;
  float* all = nullptr;
  if (!as_given) {
    floats.emplace(context, static_cast<size_t>(2 * heads * most * row_bytes));
    all = static_cast<float*>(floats->data());
    ParallelFor(context, heads, [&](int64_t head) {
      const int64_t batch = head / call.kv_heads, kv_head = head % call.kv_heads;
      const int64_t past = lengths.past[static_cast<size_t>(batch)];
      float* k = all + 2 * head * most * call.head_dim;
      float* v = k + most * call.head_dim;
      const char* key_rows = keys.data + head * keys.head_bytes;
      const char* value_rows = values.data + head * values.head_bytes;
      const int64_t added = lengths.added[static_cast<size_t>(batch)];
      const int64_t from_cache = own_cached ? past + added : past;
      if (codebooks_ != nullptr) {
        DecodeKeys(layout_, codebooks_ + kv_head * layout_.CodebookFloats(), reinterpret_cast<const uint8_t*>(key_rows),
                   past + added, 0, from_cache, k, row_bytes);
      } else {
        std::memcpy(k, key_rows, static_cast<size_t>(from_cache * row_bytes));
      }
      if (int8_values_) {
        DecodeValues(call.head_dim, reinterpret_cast<const uint8_t*>(value_rows), past + added, 0, from_cache, v,
                     row_bytes);
      } else {
        std::memcpy(v, value_rows, static_cast<size_t>(from_cache * row_bytes));
      }
      for (int64_t i = from_cache - past; i < call.queries; ++i) {
        std::memcpy(k + (past + i) * call.head_dim, call.k.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
        std::memcpy(v + (past + i) * call.head_dim, call.v.At(batch, kv_head, i), static_cast<size_t>(row_bytes));
      }
    });
  }
  const int64_t bytes = kernel.scratch_bytes(most, call.head_dim);
  ForEachWithScratch(context, node_, heads * chunks, bytes, [&](int64_t item, char* scratch) {
    const int64_t head = item / chunks, batch = head / call.kv_heads, kv_head = head % call.kv_heads;
    AttentionArgs args;
    args.heads = group;
    args.queries = call.queries;
    // Causality hides padding, whose keys are the last ones. Without it they are left out.
    args.keys = lengths.past[static_cast<size_t>(batch)] +
                (call.causal ? call.queries : lengths.added[static_cast<size_t>(batch)]);
    args.head_dim = call.head_dim;
    args.q = call.q.At(batch, kv_head * group, 0);
    args.q_head_bytes = call.q.head_bytes;
    args.q_row_bytes = call.q.row_bytes;
    if (as_given) {
      args.k = call.k.At(batch, kv_head, 0);
      args.k_row_bytes = call.k.row_bytes;
      args.v = call.v.At(batch, kv_head, 0);
      args.v_row_bytes = call.v.row_bytes;
    } else {
      args.k = all + 2 * head * most * call.head_dim;
      args.v = args.k + most * call.head_dim;
      args.k_row_bytes = args.v_row_bytes = row_bytes;
    }
    if (call.mask.data != nullptr) {
      const std::vector<int64_t>& strides = call.mask.strides;
      args.mask = call.mask.data + batch * strides[0] + kv_head * group * strides[1];
      args.mask_head_stride = group > 1 ? strides[1] : 0;
      args.mask_query_stride = strides[2];
      args.mask_key_stride = strides[3];
    }
    args.scale = call.scale;
    args.causal = call.causal;
    args.zero_hidden_rows = call.zero_hidden_rows;
    args.y = call.y + (batch * call.queries * call.heads + kv_head * group) * call.head_dim;
    args.y_head_bytes = row_bytes;
    args.y_row_bytes = call.heads * row_bytes;
    const int64_t row = item % chunks * kAttentionRows;
    kernel.run(args, row, std::min(row_count, row + kAttentionRows), scratch);
  });
}

}  // namespace ortolan
