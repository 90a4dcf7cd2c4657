#include "provider/attention_compute.h"

#include <algorithm>

#include "host/broadcast.h"
#include "provider/attention_record.h"
#include "provider/call_values.h"

namespace ortolan::provider {
namespace {

// The attention precision of pass fuse_attention for quantized layers (graph_passes/forms.py). These layers round their
// inputs more coarsely than bfloat16.
constexpr int kPrecision = 16;
constexpr int64_t kMostTokens = int64_t{1} << 24;
constexpr int64_t kFloatBytes = sizeof(float);

constexpr const char* kFeed = "Feed the model inputs of the shapes it was exported for.";

void CheckMask(const std::string& node, const Shape& shape, const Shape& scores) {
  if (shape.size() <= scores.size() && BroadcastShape(scores, shape) == scores) return;
  throw OpError(ErrorText(node, ": its mask has shape ", ShapeText(shape), ", which does not broadcast to ",
                          ShapeText(scores), ". ", kFeed));
}

bool CanJoinAll(const std::vector<Layer>& layers) {
  return std::all_of(layers.begin() + 1, layers.end(), [&](const Layer& one) { return CanJoin(layers.front(), one); });
}

}  // namespace

AttentionCompute::Part::Part(std::span<const Layer> layers) : packed(layers), plan(packed.Linear(), ActiveFeatures()) {}

AttentionCompute::Part::Part(ContextReader& reader) : packed(reader), plan(packed.Linear(), ActiveFeatures()) {}

AttentionCompute::AttentionCompute(const Step& step, const Node& fused)
    : node_(step.attention->nodes.front()->Described()),
      x_name_(step.X()->name),
      attention_(*step.attention),
      x_(InputSlot(fused, step.X())),
      y_(OutputSlot(fused, step.y)),
      plan_(kPrecision) {
  if (CanJoinAll(step.layers)) {
    parts_.emplace_back(step.layers);
  } else {
    for (const Layer& layer : step.layers) parts_.emplace_back(std::span(&layer, 1));
  }
  for (const Value value : attention_.Reads()) inputs_.emplace(value, InputSlot(fused, value));
}

AttentionCompute::AttentionCompute(ContextReader& reader, const IoSlots& slots)
    : node_(reader.String()),
      x_name_(reader.String()),
      x_(slots.Input(reader)),
      y_(slots.Output(reader)),
      plan_(kPrecision) {
  ReadParts(reader);
  attention_ = ReadAttention(reader, slots, Width());
  for (const Value value : attention_.Reads()) inputs_.emplace(value, slots.SlotOf(value));
}

void AttentionCompute::ReadParts(ContextReader& reader) {
  const int64_t count = reader.Int();
  if (count != 1 && count != 3) {
    throw OpError(ErrorText("queries, keys and values have ", count, " weights, expected 1 or 3"));
  }
  for (int64_t i = 0; i < count; ++i) parts_.emplace_back(reader);
  const MatMulWeight& first = *parts_.front().plan.layer().w;
  for (const Part& part : parts_) {
    const MatMulWeight& w = *part.plan.layer().w;
    if (w.k != first.k || w.n != first.n || (count == 1 && w.n % 3 != 0)) {
      throw OpError(ErrorText("queries, keys and values have ", count, " weights of sizes ", first.k, " x ", first.n,
                              " and ", w.k, " x ", w.n));
    }
  }
}

struct AttentionCompute::Call {
  const OrtApi& ort;
  OrtKernelContext& context;
  Host& host;
  Shape wide;  // shape of a linear layer's output
  std::optional<Sequences> sequences;
  CallMemory memory;

  float* Floats(int64_t count) { return memory.Floats(count); }
};

int64_t AttentionCompute::NumberOf(const Size& size, const Call& call) const {
  constexpr int64_t kNone = -2;
  switch (size.kind) {
    case Size::Kind::kNumber:
      return size.number;
    case Size::Kind::kElement: {
      const InputTensor<int64_t> input = ReadInput<int64_t>(call.ort, call.context, inputs_.at(size.value));
      const int64_t count = input.shape.empty() ? 1 : input.shape.front();
      return input.shape.size() <= 1 && size.number < count ? input.data[size.number] : kNone;
    }
    case Size::Kind::kLead:
      return size.number < static_cast<int64_t>(call.wide.size()) ? call.wide[static_cast<size_t>(size.number)] : kNone;
    case Size::Kind::kBatch:
      return call.sequences->batch;
    case Size::Kind::kRows:
      return call.sequences->rows;
    case Size::Kind::kHeads:
      return call.sequences->heads;
    case Size::Kind::kHeadDim:
      return call.sequences->head_dim;
  }
  return kNone;
}

// Return the output shape of an ONNX Reshape.
Shape AttentionCompute::Reshaped(const Shape& shape, const Target& target, const Call& call) const {
  Shape made;
  for (const Size& size : target.sizes) made.push_back(NumberOf(size, call));
  const Shape wanted = made;
  int64_t count = 1, rest = 1;
  for (const int64_t size : shape) count *= size;  // cannot overflow: the tensor exists
  size_t left = made.size();
  bool fits = true;
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i] == 0 && target.copies) {
      fits = fits && i < shape.size();
      made[i] = i < shape.size() ? shape[i] : 0;
    }
    if (made[i] == -1 && left == made.size()) {
      left = i;
    } else if (made[i] < 0 || __builtin_mul_overflow(rest, made[i], &rest)) {
      fits = false;
    }
  }
  if (fits && left < made.size()) {
    fits = rest != 0 && count % rest == 0;
    if (fits) made[left] = count / rest;
  } else {
    fits = fits && rest == count;
  }
  if (!fits) {
    throw OpError(ErrorText(node_, ": ", ShapeText(shape), " cannot be reshaped to ", ShapeText(wanted), ". ", kFeed));
  }
  return made;
}

AttentionCompute::Sequences AttentionCompute::SplitRows(Call& call) const {
  // A Reshape of query, key or value may use sizes of another of the three.
  const auto depends = [](const Target& target) {
    return std::any_of(target.sizes.begin(), target.sizes.end(),
                       [](const Size& size) { return size.kind >= Size::Kind::kBatch; });
  };
  const int64_t width = call.wide.back();
  for (const bool are_dependent : {false, true}) {
    for (const Target& target : attention_.splits) {
      if (depends(target) != are_dependent) continue;
      if (are_dependent && !call.sequences)
        throw OpError(ErrorText(node_, ": the number of heads or their width is missing"));
      const Shape split = Reshaped(call.wide, target, call);
      const bool fits = split.size() == 4 && split[2] > 0 && split[3] > 0 && width % split[2] == 0 &&
                        width / split[2] == split[3] && (attention_.heads == 0 || split[2] == attention_.heads);
      const bool is_same = !call.sequences || (fits && split == Shape{call.sequences->batch, call.sequences->rows,
                                                                      call.sequences->heads, call.sequences->head_dim});
      if (!fits || !is_same) {
        throw OpError(ErrorText(node_, ": queries, keys or values of shape ", ShapeText(call.wide), " are reshaped to ",
                                ShapeText(split), ", expected [batch, rows, heads, head width] of ", width,
                                " columns and equal shapes. ", kFeed));
      }
      call.sequences = {split[0], split[1], split[2], split[3]};
    }
  }
  return *call.sequences;
}

void AttentionCompute::CheckKeyViews(const Call& call) const {
  if (attention_.key_views.empty()) return;
  const auto [batch, rows, heads, head_dim] = *call.sequences;
  const Shape flat = Reshaped({batch, heads, rows, head_dim}, attention_.key_views[0], call);
  const bool fits =
      flat == Shape{batch * heads, rows, head_dim} &&
      Reshaped({batch * heads, head_dim, rows}, attention_.key_views[1], call) == Shape{batch, heads, head_dim, rows};
  if (!fits) {
    throw OpError(ErrorText(node_, ": keys of ", batch, " x ", heads, " x ", rows, " x ", head_dim, " are reshaped to ",
                            ShapeText(flat), ", which mixes sequences. ", kFeed));
  }
}

// Convert key padding to a float mask that is added to scores [batch, heads, rows, keys].
FloatInput AttentionCompute::ReadPadding(const Mask& mask, const InputTensor<int32_t>& input, const Shape& scores,
                                         Call& call) const {
  Shape shape = input.shape;
  shape.insert(shape.begin() + std::min<std::ptrdiff_t>(1, std::ssize(shape)), input.shape.size() == 2 ? 2 : 1, 1);
  CheckMask(node_, shape, scores);
  const int64_t count = CountOf(shape);
  float* const made = call.Floats(count);
  for (int64_t i = 0; i < count; ++i) made[i] = input.data[i] > 0 ? 0.0f : mask.fill;
  return {made, shape};
}

FloatInput AttentionCompute::ReadMask(size_t index, const Shape& scores, Call& call) const {
  const Mask& mask = attention_.masks[index];
  if (mask.is_padding) {
    return ReadPadding(mask, ReadInput<int32_t>(call.ort, call.context, inputs_.at(mask.value)), scores, call);
  }
  FloatInput floats{mask.values.data(), mask.shape};
  // Read bool tensors as bytes: a caller may pass bytes other than 0 and 1, which are undefined behaviour as bool.
  InputTensor<uint8_t> bytes;
  if (mask.is_condition) {
    bytes = ReadInput<uint8_t>(call.ort, call.context, inputs_.at(mask.value));
  } else if (mask.value != nullptr) {
    floats = ReadFloats(call.ort, call.context, inputs_.at(mask.value), call.memory);
  }
  const Shape& stored = mask.is_condition ? bytes.shape : floats.shape;
  FloatInput read{floats.data, stored};
  const bool is_longer = mask.is_truncated && !stored.empty() && stored.back() > scores.back();
  if (is_longer) read.shape.back() = scores.back();
  CheckMask(node_, read.shape, scores);
  if (!is_longer && !mask.is_condition) return read;
  const int64_t count = CountOf(read.shape), row = read.shape.empty() ? 1 : read.shape.back();
  const int64_t input_row = read.shape.empty() ? 1 : stored.back();
  float* const made = call.Floats(count);
  for (int64_t i = 0; i < count; ++i) {
    const int64_t slot = i / row * input_row + i % row;
    const bool is_hidden = mask.is_condition && (bytes.data[slot] != 0) == mask.hides;
    made[i] = mask.is_condition ? (is_hidden ? mask.fill : 0.0f) : read.data[slot];
  }
  read.data = made;
  return read;
}

// Replace the scores that a condition hides by its fill. Adding would give -Inf for the sum of two lowest floats.
void Replace(const FloatInput& fills, const Shape& shape, float* total) {
  const Shape strides = BroadcastStrides(fills.shape, shape);
  for (int64_t i = 0; i < CountOf(shape); ++i) {
    const float fill = fills.data[OffsetOf(i, shape, strides)];
    if (fill != 0) total[i] = fill;
  }
}

// Return the sum of all masks.
MaskRows AttentionCompute::ReadMasks(const Shape& scores, Call& call) const {
  MaskRows rows;
  if (attention_.masks.empty()) return rows;
  FloatInput sum = ReadMask(0, scores, call);
  for (size_t i = 1; i < attention_.masks.size(); ++i) {
    const FloatInput next = ReadMask(i, scores, call);
    const Shape shape =
        *BroadcastShape(sum.shape, next.shape);  // cannot fail: both broadcast to the shape of the scores
    float* const total = call.Floats(CountOf(shape));
    BroadcastAdd(sum.data, sum.shape, next.data, next.shape, total, shape);
    if (attention_.masks[i].is_condition) Replace(next, shape, total);
    sum = {total, shape};
  }
  rows.data = sum.data;
  const Shape strides = BroadcastStrides(sum.shape, scores);
  std::copy(strides.begin(), strides.end(), rows.strides.begin());
  return rows;
}

void AttentionCompute::ZeroRows(const AttentionCall& attention, const Call& call) const {
  const InputTensor<uint8_t> input = ReadInput<uint8_t>(call.ort, call.context, inputs_.at(attention_.zero_rows));
  const Shape rows = {attention.batch, attention.heads, attention.queries, 1};
  CheckMask(node_, input.shape, rows);
  const Shape strides = BroadcastStrides(input.shape, rows);
  for (int64_t batch = 0; batch < attention.batch; ++batch) {
    for (int64_t head = 0; head < attention.heads; ++head) {
      for (int64_t query = 0; query < attention.queries; ++query) {
        if (input.data[batch * strides[0] + head * strides[1] + query * strides[2]] == 0) continue;
        std::fill_n(attention.Y(batch, head, query), attention.head_dim, 0.0f);
      }
    }
  }
}

void AttentionCompute::Write(ContextWriter& writer) const {
  writer.Int(static_cast<int64_t>(StepKind::kAttention));
  writer.String(node_);
  writer.String(x_name_);
  WriteSlot(writer, x_);
  WriteSlot(writer, y_);
  writer.Int(static_cast<int64_t>(parts_.size()));
  for (const Part& part : parts_) part.packed.Write(writer);
  WriteAttention(attention_, inputs_, writer);
}

void AttentionCompute::Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const {
  if (!y_) return;
  Call call{ort, context, host, {}, std::nullopt, CallMemory(host)};
  const FloatInput x = ReadFloats(ort, context, x_, call.memory);
  int64_t m = 0;
  for (const Part& part : parts_) m = part.plan.CountRows(x.shape, node_, x_name_);
  call.wide = x.shape;
  const int64_t width = Width();
  call.wide.back() = width;
  const Sequences sequences = SplitRows(call);
  CheckKeyViews(call);
  if (sequences.rows > kMostTokens) {
    throw OpError(ErrorText(node_, ": there are ", sequences.rows, " keys, expected at most ", kMostTokens));
  }
  AttentionCall attention;
  attention.batch = sequences.batch;
  attention.heads = attention.kv_heads = sequences.heads;
  attention.queries = attention.keys = sequences.rows;
  attention.head_dim = sequences.head_dim;
  attention.scale = attention_.scale;
  attention.causal = attention_.causal;
  attention.zero_hidden_rows = attention_.zero_hidden_rows;
  const Shape by_rows = {sequences.batch, sequences.rows, sequences.heads, sequences.head_dim};
  const FloatOutput y(ort, context, *y_, Reshaped(by_rows, attention_.merge, call), call.memory);
  if (m == 0) return;
  attention.y = y.data();
  attention.mask = ReadMasks({sequences.batch, sequences.heads, sequences.rows, sequences.rows}, call);
  float* const rows = call.Floats(Product(Product(m, 3), width));
  for (size_t i = 0; i < parts_.size(); ++i) {
    LinearCall product;
    product.x = x.data;
    product.m = m;
    product.bias = parts_[i].packed.Bias();
    product.y = rows + static_cast<int64_t>(i) * m * width;
    parts_[i].plan.Run(host, product);
  }
  // Query, key and value are columns of one tensor, or three separate tensors.
  const bool is_joined = parts_.size() == 1;
  const int64_t row_bytes = (is_joined ? 3 : 1) * width * kFloatBytes;
  const auto heads_at = [&](int64_t index) {
    return HeadRows{rows + index * (is_joined ? width : m * width), attention.queries * row_bytes,
                    attention.head_dim * kFloatBytes, row_bytes};
  };
  attention.q = heads_at(0);
  attention.k = heads_at(1);
  attention.v = heads_at(2);
  plan_.Run(host, attention);
  if (attention_.zero_rows != nullptr) ZeroRows(attention, call);
  y.Finish();
}

}  // namespace ortolan::provider
