#include "provider/attention_compute.h"

#include <algorithm>
#include <limits>

#include "host/broadcast.h"
#include "nomad_attention/decode_rows.h"

namespace ortolan::provider {
namespace {

using match::Layout;

// The attention precision of pass fuse_attention for quantized layers (graph_passes/forms.py). These layers round their
// inputs more coarsely than bfloat16.
constexpr int kPrecision = 16, kPrecise = 32;
constexpr int64_t kFloatBytes = sizeof(float);
constexpr float kLowest = std::numeric_limits<float>::lowest();
constexpr const char* kFeed = "Feed the model inputs of the shapes it was exported for.";
constexpr const char* kRoles[] = {"query", "key", "value"};

// The axes of batch, heads, rows and head width in a value of each layout. For 3-D values heads and head width are one
// axis.
struct Axes {
  size_t rank, batch, heads, rows, head_dim;
};
constexpr Axes kAxes[] = {{3, 0, 2, 1, 2}, {3, 0, 1, 2, 1}, {3, 1, 2, 0, 2},
                          {4, 0, 1, 2, 3}, {4, 0, 2, 1, 3}, {4, 0, 1, 3, 2}};
static_assert(std::size(kAxes) == std::size(match::kLayoutNames));
const Axes& AxesOf(Layout layout) { return kAxes[static_cast<size_t>(layout)]; }

bool CanJoinAll(const std::vector<Layer>& layers) {
  return std::all_of(layers.begin() + 1, layers.end(), [&](const Layer& one) { return CanJoin(layers.front(), one); });
}

CacheForm FormOf(const AttentionSpec& spec) {
  CacheForm form;
  form.precision = spec.is_precise ? kPrecise : kPrecision;
  form.reproducible = spec.reproducible && !spec.is_precise;
  return form;
}

// is_packed: a constant, which is stored.
MaskSpec SpecOf(const Graph& graph, const match::Mask& mask, const NamedInput& input, bool is_packed) {
  MaskSpec spec;
  spec.kind = mask.padding ? MaskSpec::Kind::kPadding : mask.fill ? MaskSpec::Kind::kCondition : MaskSpec::Kind::kAdded;
  spec.hides = mask.hides;
  spec.fill = static_cast<float>(mask.fill.value_or(0));
  spec.scale = static_cast<float>(mask.scale);
  spec.heads = mask.heads;
  spec.windows = mask.windows;
  spec.truncated = mask.truncated;
  spec.input = input;
  if (!is_packed) return spec;
  const std::optional<Constant> constant = graph.ConstantOf(mask.value);
  const std::optional<std::vector<double>> numbers = constant ? constant->Numbers() : std::nullopt;
  Expect(numbers && !numbers->empty(), ErrorText("its mask '", mask.value->name, "' cannot be read"));
  spec.own = std::make_shared<const std::vector<float>>(numbers->begin(), numbers->end());
  spec.values = {constant->shape, *spec.own};
  return spec;
}

}  // namespace

AttentionCompute::Part::Part(std::span<const Layer> layers) : packed(layers), plan(packed.Linear(), ActiveFeatures()) {}

AttentionCompute::Part::Part(ContextReader& reader) : packed(reader), plan(packed.Linear(), ActiveFeatures()) {}

AttentionCompute::AttentionCompute(const Graph& graph, const Step& step, const Node& fused, bool reproducible) {
  const Attention& found = *step.attention;
  const bool has_layers = !step.layers.empty();
  const auto input = [&](Value value) {
    return value == nullptr ? NamedInput{} : NamedInput{InputSlot(fused, value), value->name};
  };
  spec_.node = found.node->Described();
  if (has_layers) {
    spec_.inputs[0] = input(step.X());
    std::vector<Layer> layers = step.layers;
    for (size_t role = 0; role < layers.size(); ++role) {
      if (!found.biases[role].empty()) layers[role].bias = found.biases[role];
    }
    if (CanJoinAll(layers)) {
      parts_.emplace_back(layers);
    } else {
      for (const Layer& layer : layers) parts_.emplace_back(std::span(&layer, 1));
    }
  } else {
    std::transform(found.inputs.begin(), found.inputs.end(), spec_.inputs.begin(), input);
    own_biases_ = found.biases;
    std::copy(own_biases_.begin(), own_biases_.end(), spec_.biases.begin());
  }
  spec_.layouts = found.layouts;
  spec_.heads = found.heads;
  spec_.kv_heads = found.kv_heads;
  spec_.head_dim = found.head_dim;
  spec_.scale = static_cast<float>(found.scale);
  spec_.softcap = static_cast<float>(found.softcap);
  spec_.causal = found.causal;
  spec_.zero_hidden_rows = found.zero_hidden_rows;
  spec_.window = found.window;
  own_sinks_ = found.sinks;
  spec_.sinks = own_sinks_;
  spec_.is_precise = found.precise;
  spec_.is_beside_cache = found.beside_cache;
  spec_.reproducible = reproducible;
  spec_.zero_rows = input(found.zero_rows);
  for (const match::Mask& mask : found.masks) {
    const bool is_packed = has_layers && graph.IsConstantValue(mask.value);
    spec_.masks.push_back(SpecOf(graph, mask, is_packed ? NamedInput{} : input(mask.value), is_packed));
  }
  spec_.output_layout = found.output_layout;
  spec_.y = OutputSlot(fused, step.y);
  spec_.has_cache = found.cache.has_value();
  if (found.cache) {
    const match::KvCache& cache = *found.cache;
    spec_.cache = {input(cache.past_key),
                   input(cache.past_value),
                   input(cache.lengths),
                   input(cache.total),
                   input(cache.cos),
                   input(cache.sin),
                   OutputSlot(fused, cache.present_key),
                   OutputSlot(fused, cache.present_value),
                   cache.interleaved};
  }
  MakePlan();
}

AttentionCompute::AttentionCompute(ContextReader& reader, const IoSlots& slots, bool reproducible) {
  RecordReader record(reader, slots);
  VisitAttention(record, spec_);
  spec_.reproducible = spec_.reproducible || reproducible;
  ReadParts(reader);
  if (reproducible) {
    for (const Part& part : parts_) CheckReproducible(part.packed, spec_.node);
  }
  const bool has_all =
      spec_.inputs[0].slot && (!parts_.empty() || spec_.inputs[1].slot.has_value() == spec_.inputs[2].slot.has_value());
  const AttentionSpec::Cache& cache = spec_.cache;
  const bool is_cache_whole = !spec_.has_cache || (cache.past_key.slot && cache.past_value.slot &&
                                                   cache.cos.slot.has_value() == cache.sin.slot.has_value() &&
                                                   (!cache.cos.slot || spec_.head_dim % 2 == 0));
  if (spec_.heads % spec_.kv_heads != 0 || !has_all || !is_cache_whole || (spec_.has_cache && !parts_.empty()) ||
      (!spec_.has_cache && parts_.empty() && !spec_.inputs[1].slot)) {
    throw Error("its record lacks an input, or has ", spec_.heads, " heads and ", spec_.kv_heads, " key heads");
  }
  if (spec_.window != 0 && !spec_.causal) throw Error("it has a window of ", spec_.window, ", but is not causal");
  const int64_t sinks = static_cast<int64_t>(spec_.sinks.size());
  if (sinks != 0 && sinks != spec_.heads) throw Error("it has ", sinks, " sinks, expected ", spec_.heads);
  if (!IsSoftcap(spec_.softcap)) {
    throw Error("softcap is ", spec_.softcap, ", expected 0, or ", kLeastSoftcap, " to ", kMostSoftcap);
  }
  for (size_t role = 0; role < 3; ++role) {
    const int64_t count = static_cast<int64_t>(spec_.biases[role].size());
    if (count != 0 && count != WidthOf(role)) throw Error("its ", kRoles[role], " bias has ", count, " values");
  }
  MakePlan();
}

void AttentionCompute::MakePlan() {
  if (spec_.has_cache) {
    cached_plan_.emplace(FormOf(spec_));
  } else {
    const bool reproducible = spec_.reproducible && !spec_.is_precise;
    plan_.emplace(spec_.is_precise ? kPrecise : kPrecision, reproducible);
    if (spec_.is_beside_cache && !reproducible) short_plan_.emplace(kPrecise, false);
  }
}

void AttentionCompute::ReadParts(ContextReader& reader) {
  const int64_t count = reader.Int();
  if (count != 0 && count != 1 && count != 3) {
    throw OpError(ErrorText("queries, keys and values have ", count, " weights, expected 0, 1 or 3"));
  }
  for (int64_t i = 0; i < count; ++i) parts_.emplace_back(reader);
  for (size_t i = 0; i < parts_.size(); ++i) {
    const MatMulWeight& first = *parts_.front().plan.layer().w;
    const MatMulWeight& w = *parts_[i].plan.layer().w;
    if (w.k != first.k || w.n != (count == 1 ? WidthOf(0) + 2 * WidthOf(1) : WidthOf(i))) {
      throw OpError(ErrorText("queries, keys and values have ", count, " weights of sizes ", first.k, " x ", first.n,
                              " and ", w.k, " x ", w.n));
    }
  }
}

void AttentionCompute::Write(ContextWriter& writer) const {
  writer.Int(static_cast<int64_t>(StepKind::kAttention));
  RecordWriter record(writer);
  VisitAttention(record, spec_);
  writer.Int(static_cast<int64_t>(parts_.size()));
  for (const Part& part : parts_) part.packed.Write(writer);
}

struct AttentionCompute::Call {
  const OrtApi& ort;
  OrtKernelContext& context;
  Host& host;
  CallMemory memory;
  // The output: computed as [batch, rows, heads x head width], moved if the model has another layout.
  std::optional<FloatOutput> y = std::nullopt;
  float* moved = nullptr;

  float* Floats(int64_t count) { return memory.Floats(count); }
  template <typename Element>
  InputTensor<Element> Read(const NamedInput& input) {
    return memory.AlignedInput(ReadInput<Element>(ort, context, *input.slot));
  }
  FloatInput ReadFloats(const NamedInput& input) { return provider::ReadFloats(ort, context, *input.slot, memory); }
  // Return the memory of an output, or temporary memory if no node reads the output.
  float* Make(std::optional<size_t> slot, const Shape& shape) {
    return slot ? MakeOutput(ort, context, *slot, shape) : Floats(CountOf(shape));
  }
};

OpError AttentionCompute::WrongShape(const NamedInput& input, const Shape& found, const std::string& expected) const {
  return Error("'", input.name, "' has shape ", ShapeText(found), ", expected ", expected, ". ", kFeed);
}

// Compute query, key and value by their layers.
void AttentionCompute::Project(Call& call, AttentionCall& attention) const {
  const NamedInput& input = spec_.inputs[0];
  const FloatInput x = call.ReadFloats(input);
  if (x.shape.size() != 3) throw WrongShape(input, x.shape, "[batch, rows, columns]");
  int64_t m = 0;
  for (const Part& part : parts_) m = part.plan.CountRows(x.shape, spec_.node, input.name);
  attention.batch = x.shape[0];
  attention.queries = attention.keys = x.shape[1];
  const int64_t width = WidthOf(0), kv_width = WidthOf(1), total = width + 2 * kv_width;
  float* const rows = call.Floats(Product(m, total));
  const std::array<int64_t, 3> columns = {0, width, width + kv_width};
  for (size_t i = 0; i < parts_.size() && m != 0; ++i) {
    LinearCall product;
    product.x = x.data;
    product.m = m;
    product.bias = parts_[i].packed.Bias();
    product.y = rows + m * columns[i];
    parts_[i].plan.Run(call.host, product);
  }
  const bool is_joined = parts_.size() == 1;
  const auto heads_of = [&](size_t role) {
    const int64_t row_bytes = (is_joined ? total : WidthOf(role)) * kFloatBytes;
    return HeadRows{rows + (is_joined ? columns[role] : m * columns[role]), attention.queries * row_bytes,
                    attention.head_dim * kFloatBytes, row_bytes};
  };
  attention.q = heads_of(0);
  attention.k = heads_of(1);
  attention.v = heads_of(2);
}

// Return the rows of an input, and check or set the sizes of the call.
HeadRows AttentionCompute::Rows(Call& call, size_t role, int64_t heads, AttentionCall& attention) const {
  const NamedInput& input = spec_.inputs[role];
  const FloatInput read = call.ReadFloats(input);
  const Axes& axes = AxesOf(spec_.layouts[role]);
  Shape shape = read.shape;
  const int64_t head_dim = spec_.head_dim;
  // Batch and heads may be one axis.
  if (spec_.layouts[role] == Layout::kByHeads && shape.size() == 3 && shape[0] % heads == 0) {
    shape = {shape[0] / heads, heads, shape[1], shape[2]};
  }
  const auto expected = [&] {
    const auto size = [](int64_t count, const char* name) { return count < 0 ? name : std::to_string(count); };
    std::array<std::string, 4> names;
    const bool is_query = role == 0;
    names[axes.batch] = size(is_query ? -1 : attention.batch, "batch");
    names[axes.rows] = size(role == 2 ? attention.keys : -1, "rows");
    names[axes.heads] = std::to_string(heads);
    names[axes.head_dim] = std::to_string(axes.rank == 3 ? heads * head_dim : head_dim);
    std::string text = "[" + names[0];
    for (size_t i = 1; i < axes.rank; ++i) text += ", " + names[i];
    return text + "]";
  };
  bool fits = shape.size() == axes.rank;
  if (fits && axes.rank == 3) fits = shape[axes.heads] == heads * head_dim;
  if (fits && axes.rank == 4) fits = shape[axes.heads] == heads && shape[axes.head_dim] == head_dim;
  if (fits && role > 0) fits = shape[axes.batch] == attention.batch;
  if (fits && role == 2) fits = shape[axes.rows] == attention.keys;
  if (!fits) throw WrongShape(input, shape, expected());
  const int64_t batch = shape[axes.batch], rows = shape[axes.rows];
  if (rows > kMaxTokens) throw Error("there are ", rows, " rows, expected at most ", kMaxTokens);
  attention.batch = batch;
  (role == 0 ? attention.queries : attention.keys) = rows;
  std::array<int64_t, 4> strides{};
  int64_t stride = 1;
  for (size_t i = axes.rank; i-- > 0; stride *= shape[i]) strides[i] = stride;
  const int64_t dim_stride = strides[axes.head_dim];
  const int64_t head_stride = axes.rank == 3 ? head_dim * dim_stride : strides[axes.heads];
  const std::span<const float> bias = spec_.biases[role];
  if (dim_stride == 1 && bias.empty()) {
    return {read.data, strides[axes.batch] * kFloatBytes, head_stride * kFloatBytes, strides[axes.rows] * kFloatBytes};
  }
  float* const made = call.Floats(Product(Product(batch, rows), heads * head_dim));
  call.host.ParallelFor(batch * heads, [&](int64_t unit) {
    const int64_t b = unit / heads, head = unit % heads;
    for (int64_t row = 0; row < rows; ++row) {
      float* const to = made + ((b * heads + head) * rows + row) * head_dim;
      const float* const from = read.data + b * strides[axes.batch] + head * head_stride + row * strides[axes.rows];
      for (int64_t i = 0; i < head_dim; ++i) to[i] = from[i * dim_stride];
      for (int64_t i = 0; i < head_dim && !bias.empty(); ++i) to[i] += bias[static_cast<size_t>(head * head_dim + i)];
    }
  });
  return {made, heads * rows * head_dim * kFloatBytes, rows * head_dim * kFloatBytes, head_dim * kFloatBytes};
}

void AttentionCompute::ReadInputs(Call& call, AttentionCall& attention) const {
  if (!parts_.empty()) return Project(call, attention);
  const bool is_packed = !spec_.inputs[1].slot;
  attention.q = Rows(call, 0, is_packed ? spec_.heads + 2 * spec_.kv_heads : spec_.heads, attention);
  if (is_packed) {
    attention.keys = attention.queries;
    attention.k = attention.v = attention.q;
    attention.k.data = attention.q.At(0, spec_.heads, 0);
    attention.v.data = attention.q.At(0, spec_.heads + spec_.kv_heads, 0);
    return;
  }
  attention.k = Rows(call, 1, spec_.kv_heads, attention);
  attention.v = Rows(call, 2, spec_.kv_heads, attention);
}

// Return key padding as floats [batch, 1, rows or 1, keys].
FloatInput AttentionCompute::ReadPadding(const MaskSpec& mask, const Shape& scores, Call& call) const {
  InputTensor<int32_t> given{nullptr, mask.values.shape};
  if (mask.input.slot) given = call.Read<int32_t>(mask.input);
  const auto at = [&](int64_t i) {
    return mask.input.slot ? given.data[i] : static_cast<double>(mask.values.values[static_cast<size_t>(i)]);
  };
  const size_t rank = given.shape.size();
  const int64_t batch = scores[0], queries = scores[2], keys = scores[3];
  const bool has_rows = rank == 3 && given.shape[1] != 1;
  const Shape wanted = rank == 1   ? Shape{batch}
                       : rank == 2 ? Shape{batch, keys}
                                   : Shape{batch, has_rows ? queries : 1, keys};
  if (given.shape != wanted) {
    throw Error("its mask has shape ", ShapeText(given.shape), ", which does not broadcast to ", ShapeText(scores),
                ". ", kFeed);
  }
  const int64_t rows = has_rows || spec_.causal ? queries : 1;
  float* const made = call.Floats(Product(Product(batch, rows), keys));
  for (int64_t i = 0; i < batch * rows; ++i) {
    const int64_t row = (has_rows ? i : i / rows) * keys;
    for (int64_t key = 0; key < keys; ++key) {
      const bool is_shown = rank == 1 ? static_cast<double>(key) < at(i / rows) : at(row + key) > 0;
      made[i * keys + key] = spec_.causal && key > i % rows + keys - queries ? kLowest : is_shown ? 0.0f : mask.fill;
    }
  }
  return {made, {batch, 1, rows, keys}};
}

// Return a mask as floats that are added to the scores [batch, heads, rows, keys].
FloatInput AttentionCompute::ReadMask(const MaskSpec& mask, const Shape& scores, Call& call) const {
  if (mask.kind == MaskSpec::Kind::kPadding) return ReadPadding(mask, scores, call);
  FloatInput floats{mask.values.values.data(), mask.values.shape};
  // Read bool tensors as bytes: a caller may pass bytes other than 0 and 1, which are undefined behaviour as bool.
  InputTensor<uint8_t> bytes;
  Shape shape = floats.shape;
  const bool is_condition = mask.kind == MaskSpec::Kind::kCondition;
  if (is_condition && mask.input.slot) {
    bytes = call.Read<uint8_t>(mask.input);
    shape = bytes.shape;
  } else if (mask.input.slot) {
    floats = call.ReadFloats(mask.input);
    shape = floats.shape;
  }
  const Shape found = shape;
  const int64_t stored_row = shape.empty() ? 1 : shape.back();
  if (mask.truncated && !shape.empty() && stored_row > scores.back()) shape.back() = scores.back();
  const int64_t row = shape.empty() ? 1 : shape.back();
  if (mask.heads != 0 && shape.size() == 3 && shape[0] % mask.heads == 0) {
    shape = {shape[0] / mask.heads, mask.heads, shape[1], shape[2]};
  }
  int64_t windows = 1;
  if (mask.windows && shape.size() == 5 && shape[0] == 1 && shape[1] > 0 && scores[0] % shape[1] == 0) {
    windows = scores[0] / shape[1];
    shape = {shape[1], shape[2], shape[3], shape[4]};
  }
  Shape whole = shape;
  if (windows > 1) whole[0] = scores[0];
  if (whole.size() > scores.size() || BroadcastShape(scores, whole) != scores) {
    throw Error("its mask has shape ", ShapeText(found), ", which does not broadcast to ", ShapeText(scores), ". ",
                kFeed);
  }
  const bool is_plain = !is_condition && mask.scale == 1;
  if (is_plain && row == stored_row && windows == 1) return {floats.data, shape};
  const int64_t count = CountOf(shape);
  float* const made = call.Floats(Product(count, windows));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t at = row == 0 ? i : i / row * stored_row + i % row;
    const bool holds = mask.input.slot && is_condition ? bytes.data[at] != 0 : floats.data[at] != 0;
    made[i] = is_condition ? (holds == mask.hides ? mask.fill : 0.0f) : floats.data[at] * mask.scale;
  }
  for (int64_t i = 1; i < windows; ++i) std::copy_n(made, count, made + i * count);
  return {made, whole};
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
  if (spec_.masks.empty()) return rows;
  FloatInput sum = ReadMask(spec_.masks[0], scores, call);
  for (size_t i = 1; i < spec_.masks.size(); ++i) {
    const FloatInput next = ReadMask(spec_.masks[i], scores, call);
    const Shape shape = *BroadcastShape(sum.shape, next.shape);  // cannot fail: both broadcast to the scores
    float* const total = call.Floats(CountOf(shape));
    BroadcastAdd(sum.data, sum.shape, next.data, next.shape, total, shape);
    if (spec_.masks[i].kind == MaskSpec::Kind::kCondition) Replace(next, shape, total);
    sum = {total, shape};
  }
  rows.data = sum.data;
  const Shape strides = BroadcastStrides(sum.shape, scores);
  std::copy(strides.begin(), strides.end(), rows.strides.begin());
  return rows;
}

void AttentionCompute::ZeroRows(const AttentionCall& attention, Call& call) const {
  const InputTensor<uint8_t> input = call.Read<uint8_t>(spec_.zero_rows);
  const Shape rows = {attention.batch, attention.heads, attention.queries, 1};
  if (input.shape.size() > 4 || BroadcastShape(rows, input.shape) != rows) {
    throw WrongShape(spec_.zero_rows, input.shape, "a shape that broadcasts to " + ShapeText(rows));
  }
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

// Move the output to the model's layout, and convert it to the model's type.
void AttentionCompute::Finish(const AttentionCall& attention, Call& call) const {
  if (spec_.zero_rows.slot) ZeroRows(attention, call);
  const int64_t heads = attention.heads, rows = attention.queries, head_dim = attention.head_dim;
  if (call.moved != nullptr) {
    call.host.ParallelFor(attention.batch * heads, [&](int64_t unit) {
      for (int64_t row = 0; row < rows; ++row) {
        std::copy_n(attention.Y(unit / heads, unit % heads, row), head_dim,
                    call.moved + (unit * rows + row) * head_dim);
      }
    });
  }
  if (call.y) call.y->Finish();
}

void AttentionCompute::Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const {
  if (!spec_.y && !spec_.has_cache) return;
  Call call{ort, context, host, CallMemory(host)};
  AttentionCall attention;
  attention.heads = spec_.heads;
  attention.kv_heads = spec_.kv_heads;
  attention.head_dim = spec_.head_dim;
  attention.scale = spec_.scale;
  attention.softcap = spec_.softcap;
  attention.causal = spec_.causal;
  attention.zero_hidden_rows = spec_.zero_hidden_rows;
  attention.window = spec_.window;
  attention.sinks = spec_.sinks.empty() ? nullptr : spec_.sinks.data();
  ReadInputs(call, attention);
  const int64_t batch = attention.batch, rows = attention.queries, heads = spec_.heads, head_dim = spec_.head_dim;
  const bool by_heads = spec_.output_layout == Layout::kByHeads;
  const Shape shape = by_heads                                ? Shape{batch, heads, rows, head_dim}
                      : spec_.output_layout == Layout::kApart ? Shape{batch, rows, heads, head_dim}
                                                              : Shape{batch, rows, heads * head_dim};
  if (spec_.y) call.y.emplace(ort, context, *spec_.y, shape, call.memory);
  attention.y = by_heads || !spec_.y ? call.Floats(CountOf(shape)) : call.y->data();
  if (by_heads && spec_.y) call.moved = call.y->data();
  if (spec_.has_cache) return RunCached(call, attention);
  if (attention.causal && attention.queries != attention.keys) {
    throw Error("it is causal, but has ", attention.queries, " queries and ", attention.keys, " keys. ", kFeed);
  }
  if (CountOf(shape) == 0) return;
  attention.mask = ReadMasks({batch, heads, rows, attention.keys}, call);
  for (const MaskSpec& mask : spec_.masks) attention.causal &= mask.kind != MaskSpec::Kind::kPadding;
  const bool is_short = short_plan_ && attention.queries <= kMostDecodeQueries;
  (is_short ? short_plan_ : plan_)->Run(host, attention);
  Finish(attention, call);
}

int64_t AttentionCompute::ReadRoom(Call& call, const AttentionCall& attention) const {
  const auto tokens_of = [&](const NamedInput& input) {
    const Shape shape = call.Read<float>(input).shape;
    if (shape.size() == 4 && shape == Shape{attention.batch, attention.kv_heads, shape[2], attention.head_dim}) {
      return shape[2];
    }
    throw WrongShape(input, shape,
                     ErrorText("[", attention.batch, ", ", attention.kv_heads, ", tokens, ", attention.head_dim, "]"));
  };
  const NamedInput &key = spec_.cache.past_key, &value = spec_.cache.past_value;
  const int64_t room = tokens_of(key), value_room = tokens_of(value);
  if (room != value_room) {
    throw Error("'", key.name, "' holds ", room, " tokens and '", value.name, "' ", value_room,
                ", expected equal lengths. Feed the present caches that the model returned.");
  }
  if (room > kMaxTokens - attention.queries) {
    throw Error("there are ", room, " tokens in the cache and ", attention.queries, " in the call, expected at most ",
                kMaxTokens);
  }
  return room;
}

void AttentionCompute::ReadLengths(Call& call, CachedCall& cached) const {
  const AttentionSpec::Cache& cache = spec_.cache;
  const int64_t room = ReadRoom(call, cached);
  std::vector<int32_t> lengths(static_cast<size_t>(cached.batch), static_cast<int32_t>(room + cached.queries - 1));
  if (cache.lengths.slot) {
    const InputTensor<int32_t> given = call.Read<int32_t>(cache.lengths);
    if (CountOf(given.shape) != cached.batch) {
      throw WrongShape(cache.lengths, given.shape, ErrorText("[", cached.batch, "], one length for each sequence"));
    }
    std::copy_n(given.data, cached.batch, lengths.begin());
  }
  const std::string problem =
      cached.SetLengths(lengths, room, 0, "'" + cache.lengths.name + "'", "'" + cache.past_key.name + "'");
  if (!problem.empty()) throw Error(problem);
  if (cache.total.slot) {
    const InputTensor<int32_t> total = call.Read<int32_t>(cache.total);
    if (CountOf(total.shape) != 1) throw WrongShape(cache.total, total.shape, "one element");
    if (*total.data > room + cached.queries) {
      throw Error("'", cache.total.name, "' is ", *total.data, ", but '", cache.past_key.name, "' holds ", room,
                  " tokens and the call ", cached.queries, ", expected at most their sum. ", kFeed);
    }
    // The host may expect present caches that are longer than the past and the new tokens.
    cached.room = std::max<int64_t>(cached.room, *total.data);
  }
  cached.keys = cached.room;
}

void AttentionCompute::ReadRotary(Call& call, CachedCall& cached) const {
  const NamedInput &cos_input = spec_.cache.cos, &sin_input = spec_.cache.sin;
  if (!cos_input.slot || cached.batch == 0 || cached.queries == 0) return;
  const FloatInput cos = call.Read<float>(cos_input), sin = call.Read<float>(sin_input);
  const int64_t most = cached.MostTokens();
  const std::string problem =
      RotaryProblem(cos.shape, sin.shape, cached.head_dim, "'" + cos_input.name + "'", "'" + sin_input.name + "'");
  if (!problem.empty()) throw Error(problem);
  if (cos.shape[0] < most) {
    throw Error("a sequence has ", most, " tokens, but '", cos_input.name, "' and '", sin_input.name, "' are for ",
                cos.shape[0], " positions. Feed shorter sequences.");
  }
  cached.rotary = {cos.data, sin.data, 2 * cos.shape[1], spec_.cache.interleaved};
}

CacheRows AttentionCompute::Present(Call& call, const NamedInput& past, std::optional<size_t> present,
                                    const CachedCall& cached) const {
  const FloatInput before = call.Read<float>(past);
  const int64_t room = before.shape[2], row_bytes = cached.head_dim * kFloatBytes;
  float* const data = call.Make(present, {cached.batch, cached.kv_heads, cached.room, cached.head_dim});
  if (before.data == data && room != cached.room && cached.room != 0) {
    throw Error("past and present of '", past.name, "' are one buffer of ", room, " tokens, expected ", cached.room,
                ". Share a buffer for all tokens, or none.");
  }
  return {reinterpret_cast<char*>(data), row_bytes, cached.room * row_bytes, reinterpret_cast<const char*>(before.data),
          room * row_bytes};
}

void AttentionCompute::RunCached(Call& call, const AttentionCall& attention) const {
  if (attention.keys != attention.queries) {
    throw Error("there are ", attention.queries, " queries and ", attention.keys, " new keys, expected equal counts. ",
                kFeed);
  }
  CachedCall cached(attention);
  ReadLengths(call, cached);
  ReadRotary(call, cached);
  cached.key_cache = Present(call, spec_.cache.past_key, spec_.cache.present_key, cached);
  cached.value_cache = Present(call, spec_.cache.past_value, spec_.cache.present_value, cached);
  cached.mask = ReadMasks({cached.batch, cached.heads, cached.queries, cached.keys}, call);
  cached_plan_->Run(call.host, cached);
  Finish(cached, call);
}

}  // namespace ortolan::provider
