#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

#include "match/attention.h"
#include "match/decomposed.h"

namespace ortolan::match {
namespace {

constexpr int64_t kMostHeads = 1 << 16;
constexpr int64_t kMostHeadDim = 1 << 16;
constexpr int64_t kMostWindow = 1 << 24;
constexpr std::string_view kViews[] = {"Reshape", "Transpose", "Identity", "Unsqueeze", "Expand"};
constexpr const char* kRoles[] = {"query", "key", "value"};

// ---- attributes ----------------------------------------------------------------------------------------------------

// Attributes of GroupQueryAttention that are read, and those of normalizations, which have no effect without further
// inputs. ONNX Runtime writes default attributes into nodes.
constexpr std::string_view kRead[] = {"num_heads",      "kv_num_heads",    "do_rotary",      "rotary_interleaved",
                                      "scale",          "softcap",         "causal",         "local_window_size",
                                      "smooth_softmax", "qk_norm_epsilon", "q_norm_epsilon", "k_norm_epsilon"};
// Attributes of features that NoMADAttention lacks, with the two values that disable the feature.
constexpr struct {
  std::string_view name;
  double off[2];
} kFeatures[] = {{"sliding_window_cache", {0, 0}},
                 {"qk_output", {0, 0}},
                 {"qk_matmul_output_mode", {0, 0}},
                 {"softmax_precision", {0, 1}},
                 {"kv_cache_bit_width", {0, 0}}};

std::optional<double> NumberIn(const Attribute& attribute) {
  if (const auto* whole = std::get_if<int64_t>(&attribute)) return static_cast<double>(*whole);
  if (const auto* real = std::get_if<float>(&attribute)) return *real;
  return std::nullopt;
}

bool IsOff(std::string_view name, const Attribute& attribute) {
  if (const auto* text = std::get_if<std::string>(&attribute)) {
    return *text == "NONE" && (name == "k_quant_type" || name == "v_quant_type");
  }
  const std::optional<double> number = NumberIn(attribute);
  return number && std::any_of(std::begin(kFeatures), std::end(kFeatures), [&](const auto& feature) {
           return feature.name == name && (*number == feature.off[0] || *number == feature.off[1]);
         });
}

std::string TextOf(const Attribute& attribute) {
  if (const auto* text = std::get_if<std::string>(&attribute)) return "'" + *text + "'";
  if (const auto* whole = std::get_if<int64_t>(&attribute)) return std::to_string(*whole);
  const auto* real = std::get_if<float>(&attribute);
  if (real == nullptr) return "with a list";
  const std::string text = internal::OperandText(static_cast<double>(*real));
  return text.find_first_not_of("-0123456789") == std::string::npos ? text + ".0" : text;
}

void CheckOff(const Node& node, std::string_view name) {
  const auto found = node.attributes().find(name);
  if (found == node.attributes().end() || IsOff(name, found->second)) return;
  Refuse(ReasonCode::kCachedAttribute, found->first, TextOf(found->second));
}

// ---- operators -----------------------------------------------------------------------------------------------------

std::optional<int64_t> SizeAt(const std::optional<DimShape>& shape, size_t axis) {
  return shape && axis < shape->size() ? (*shape)[axis].Number() : std::nullopt;
}

KvCache CacheOf(Value past_key, Value past_value, Value present_key, Value present_value) {
  Expect(past_key && past_value && present_key && present_value, ReasonCode::kNoCache);
  KvCache cache;
  cache.past_key = past_key;
  cache.past_value = past_value;
  cache.present_key = present_key;
  cache.present_value = present_value;
  return cache;
}

int64_t HeadDimOf(const Dimensions& dims, const KvCache& cache) {
  for (const Value past : {cache.past_key, cache.past_value}) {
    if (dims.Rank(past).value_or(4) != 4) continue;
    if (const auto width = SizeAt(dims.ShapeOf(past), 3)) return *width;
    if (const auto width = HeadSize(dims, past)) return *width;
  }
  Refuse(ReasonCode::kCachedHeadWidth, Quoted(cache.past_key), dims.ShapeText(cache.past_key));
}

// Read the window and the sinks of a GroupQueryAttention.
void ReadVisible(const Dimensions& dims, const Node& node, size_t sinks, Attention& found) {
  const int64_t causal = node.Int("causal", 1), window = node.Int("local_window_size", -1);
  Expect(causal == 1, ReasonCode::kCachedAttribute, "causal", causal);
  Expect(window == -1 || (window > 0 && window <= kMostWindow), ReasonCode::kCachedAttribute, "local_window_size",
         window);
  found.causal = true;
  found.window = std::max<int64_t>(window, 0);
  const int64_t smooth = node.Int("smooth_softmax", 0);
  Expect(smooth >= -1 && smooth <= 1, ReasonCode::kCachedAttribute, "smooth_softmax", smooth);
  if (node.Has(sinks)) {
    found.sinks = SinksOf(dims, node.Input(sinks), found.heads);
  } else if (smooth == 1 && found.heads > 0 && found.heads <= kMostHeads) {
    found.sinks.assign(static_cast<size_t>(found.heads), 0.0f);
  }
}

Attention GroupQuery(const Dimensions& dims, const Node& node) {
  for (const auto& [name, attribute] : node.attributes()) {
    if (std::find(std::begin(kRead), std::end(kRead), name) == std::end(kRead)) CheckOff(node, name);
  }
  static constexpr size_t kFirst = 9, kHeadSink = 11;
  static constexpr std::array kOthers = {"position_ids", "attention_bias", "head_sink",     "k_scale",
                                         "v_scale",      "q_norm_weight",  "k_norm_weight", "query_seqlens"};
  for (size_t i = kFirst; i < node.inputs().size(); ++i) {
    if (!node.Has(i) || i == kHeadSink) continue;
    Refuse(ReasonCode::kHasInput, i < kFirst + kOthers.size() ? kOthers[i - kFirst] : std::to_string(i));
  }
  Attention found;
  found.softcap = CheckedSoftcap(node.Float("softcap", 0));
  found.cache = CacheOf(node.Input(3), node.Input(4), node.Output(1), node.Output(2));
  KvCache& cache = *found.cache;
  cache.lengths = node.Input(5);
  cache.total = node.Input(6);
  Expect(node.Has(0) && cache.lengths != nullptr && node.Has(1) == node.Has(2), ReasonCode::kCachedMissing);
  Expect(node.Output(3) == nullptr, ReasonCode::kCachedScores);
  found.inputs = {node.Input(0), node.Input(1), node.Input(2)};
  found.heads = node.Int("num_heads", 0);
  found.kv_heads = node.Int("kv_num_heads", 0);
  found.head_dim = HeadDimOf(dims, cache);
  ReadVisible(dims, node, kHeadSink, found);
  found.scale = ScaleAttribute(node);
  if (node.Int("do_rotary", 0) == 1) {
    cache.cos = node.Input(7);
    cache.sin = node.Input(8);
    cache.interleaved = node.Int("rotary_interleaved", 0) == 1;
    for (const Value table : {cache.cos, cache.sin}) {
      const int64_t columns = SizeAt(dims.ShapeOf(table), 1).value_or(0);
      const bool fits =
          found.head_dim % 2 == 0 && dims.Rank(table) == 2 && columns > 0 && columns <= found.head_dim / 2;
      Expect(fits && columns == SizeAt(dims.ShapeOf(cache.cos), 1), ReasonCode::kCachedTables,
             dims.ShapeText(cache.cos), dims.ShapeText(cache.sin), found.head_dim / 2);
    }
  }
  return found;
}

Attention MultiHead(const Dimensions& dims, const Node& node) {
  Attention found;
  found.cache = CacheOf(node.Input(6), node.Input(7), node.Output(1), node.Output(2));
  static constexpr std::pair<size_t, const char*> kOthers[] = {
      {3, "bias"}, {4, "key_padding_mask"}, {8, "past_sequence_length"}, {9, "cache_indirection"}};
  for (const auto& [index, meaning] : kOthers) Expect(!node.Has(index), ReasonCode::kHasInput, meaning);
  Expect(node.Output(3) == nullptr, ReasonCode::kCachedScores);
  for (size_t i = 0; i < 3; ++i) {
    found.inputs[i] = node.Input(i);
    Expect(dims.Rank(node.Input(i)) == 3, ReasonCode::kCachedNot3D);
  }
  found.heads = found.kv_heads = node.Int("num_heads", 0);
  found.head_dim = HeadDimOf(dims, *found.cache);
  found.scale = ScaleAttribute(node);
  if (node.Has(5)) found.masks.push_back({.value = node.Input(5)});
  found.causal = node.Int("unidirectional", 0) == 1;
  return found;
}

// Keys or values: the cache with the new ones appended, repeated to `heads` for grouped queries.
struct PastOperand {
  Value past, added, present;
  int64_t heads, kv_heads, head_dim;
  double scale;
};

// Follow [batch, heads, tokens, head width] back to the Concat of the cache and new keys or values. transposed: the
// value is [batch, heads, head width, tokens].
PastOperand ReadPast(const Dimensions& dims, Value value, const char* meaning, NodeSet& nodes,
                     bool transposed = false) {
  const Chain chain = ThroughViews(dims, value, kViews);
  const Node* const concat = MakerOf(dims.graph(), chain.value, "Concat");
  const Value past = concat == nullptr ? nullptr : concat->Input(0);
  Expect(past != nullptr && past->is_input, ReasonCode::kNotFromCache, meaning, Quoted(chain.value));
  Value present = concat->Output(0);
  for (auto node = chain.nodes.rbegin(); node != chain.nodes.rend(); ++node) {
    if (dims.graph().IsOutput(present) || !dims.ChangesNothing(**node)) break;
    present = (*node)->Output(0);
  }
  const std::optional<DimShape> shape = dims.ShapeOf(present);
  Expect(concat->inputs().size() == 2 && concat->Has(1) && shape && shape->size() == 4, ReasonCode::kCachedConcat,
         Described(*concat), meaning);
  const int64_t axis = concat->Int("axis", 0);
  Expect(axis == 2 || axis == -2, ReasonCode::kCachedAxis, Described(*concat), meaning);
  const std::optional<int64_t> kv_heads = SizeAt(shape, 1), head_dim = SizeAt(shape, 3);
  Expect(kv_heads.value_or(0) > 0 && head_dim, ReasonCode::kHeadsUnknown, meaning);
  TensorView view(*shape);
  for (auto node = chain.nodes.rbegin(); node != chain.nodes.rend(); ++node) {
    const bool is_factor = (*node)->IsStandard("Mul") || (*node)->IsStandard("Div") || dims.ChangesNothing(**node);
    Expect(is_factor || view.Apply(**node, dims), ReasonCode::kOperandView, Described(**node), meaning);
  }
  view.SplitSequences();
  const std::optional<int64_t> heads = view.rank() == 4 ? view.Size(1) : std::nullopt;
  Expect(heads && *heads % *kv_heads == 0, ReasonCode::kHeadsUnknown, meaning);
  TensorView expected(*shape);
  expected.Repeat(1, *heads / *kv_heads);
  if (transposed) expected.Permute(std::array<size_t, 4>{0, 1, 3, 2});
  Expect(view.Sources() == expected.Sources(), ReasonCode::kCachedOrder, meaning);
  nodes.insert(concat);
  nodes.insert(chain.nodes.begin(), chain.nodes.end());
  return {past, concat->Input(1), present, *heads, *kv_heads, *head_dim, chain.scale};
}

Attention OnnxAttention(const Dimensions& dims, const Node& node, NodeSet& nodes, Executor executor) {
  Attention found;
  found.inputs = {node.Input(0), node.Input(1), node.Input(2)};
  if (!node.Has(4) && node.Output(1) == nullptr && dims.Rank(node.Input(1)) == 4) {
    const PastOperand key = ReadPast(dims, node.Input(1), "key", nodes);
    const PastOperand value = ReadPast(dims, node.Input(2), "value", nodes);
    Expect(key.scale == 1 && value.scale == 1, ReasonCode::kScaledInputs);
    found.inputs = {node.Input(0), key.added, value.added};
    found.cache = CacheOf(key.past, value.past, key.present, value.present);
  } else {
    found.cache = CacheOf(node.Input(4), node.Input(5), node.Output(1), node.Output(2));
  }
  CheckOff(node, "qk_matmul_output_mode");
  found.softcap = CheckedSoftcap(node.Float("softcap", 0));
  Expect(node.Output(3) == nullptr, ReasonCode::kCachedScores);
  Expect(!node.Has(6), ReasonCode::kHasInput, "nonpad_kv_seqlen");
  const std::optional<DimShape> shape = dims.ShapeOf(node.Input(0));
  const size_t rank = shape ? shape->size() : 0;
  for (const Value input : found.inputs) {
    Expect((rank == 3 || rank == 4) && dims.Rank(input) == rank, ReasonCode::kCachedRanks);
  }
  found.head_dim = HeadDimOf(dims, *found.cache);
  found.scale = ScaleAttribute(node);
  found.causal = node.Int("is_causal", 0) == 1;
  Visible visible{node.Output(0), {}};
  if (node.Has(3)) {
    const bool is_bool = dims.TypeOf(node.Input(3)) == ElementType::kBool;
    visible.masks.push_back(is_bool ? VisibleMask(node.Input(3)) : Mask{node.Input(3)});
  }
  if (!found.causal) visible = WithoutHiddenRows(dims, visible.product, std::move(visible.masks), nodes, executor);
  found.masks = std::move(visible.masks);
  found.zero_hidden_rows = visible.zeroed;
  found.zero_rows = visible.zero_rows;
  found.output = visible.product;
  if (rank == 3) {
    found.heads = node.Int("q_num_heads", 0);
    found.kv_heads = node.Int("kv_num_heads", 0);
  } else {
    const auto heads = SizeAt(shape, 1), kv_heads = SizeAt(dims.ShapeOf(found.cache->past_key), 1);
    Expect(heads && kv_heads, ReasonCode::kCachedHeadsUnknown);
    found.heads = *heads;
    found.kv_heads = *kv_heads;
    const Operand query{node.Input(0), (*shape)[0], (*shape)[2], found.heads, found.head_dim};
    SetContext(MergedHeads(dims, visible.product, query, nodes), found);
  }
  return found;
}

// ---- decomposed attention ------------------------------------------------------------------------------------------

// Return the output of the query projection, or the split heads if another operation changes them.
Operand ReadQuery(const Dimensions& dims, Value value, NodeSet& nodes) {
  try {
    return SplitOperand(dims, value, kRoles[0], nodes);
  } catch (const RefusedError&) {
    Chain chain = ThroughViews(dims, value, {});
    value = chain.value;
    if (const Node* const merge = MakerOf(dims.graph(), value, "Reshape")) {  // merges batch and heads to one axis
      const auto before = dims.ShapeOf(merge->Input(0)), after = dims.ShapeOf(value);
      const bool merges = before && before->size() == 4 && after && after->size() == 3 &&
                          std::equal(before->begin() + 2, before->end(), after->begin() + 1);
      if (merges) {
        chain.nodes.push_back(merge);
        value = merge->Input(0);
      }
    }
    const std::optional<DimShape> shape = dims.ShapeOf(value);
    if (!shape || shape->size() != 4) throw;
    const auto heads = SizeAt(shape, 1), head_dim = SizeAt(shape, 3);
    Expect(heads && head_dim, ReasonCode::kCachedHeadsUnknown);
    nodes.insert(chain.nodes.begin(), chain.nodes.end());
    return {value, (*shape)[0], (*shape)[2], *heads, *head_dim, chain.scale};
  }
}

// Return the output of the projection if `value` is only its split heads, else `value`.
Value Folded(const Dimensions& dims, Value value, const char* meaning, NodeSet& nodes) {
  NodeSet passed;
  Operand operand;
  try {
    operand = SplitOperand(dims, value, meaning, passed);
  } catch (const RefusedError&) {
    return value;
  }
  const auto is_read_inside = [&](const Node* node) {
    const auto uses = dims.graph().Uses(node->Output(0));
    return std::all_of(uses.begin(), uses.end(),
                       [&](const Graph::Use& use) { return nodes.count(use.node) + passed.count(use.node) > 0; });
  };
  if (operand.scale != 1 || !std::all_of(passed.begin(), passed.end(), is_read_inside)) return value;
  nodes.merge(passed);
  return operand.base;
}

std::optional<Attention> FromSoftmax(const Dimensions& dims, const Node& softmax, NodeSet& nodes, Executor executor) {
  Decomposed rule(dims, softmax);
  const std::optional<Decomposed::Products> products = rule.FindProducts();
  if (!products) return std::nullopt;
  Decomposed::Scores scores = rule.ReadScores(*products);
  Visible visible =
      WithoutHiddenRows(dims, products->context->Output(0), std::move(scores.masks), rule.nodes(), executor);
  nodes.merge(rule.nodes());
  const PastOperand key = ReadPast(dims, products->scores->Input(1), kRoles[1], nodes, true);
  const PastOperand value = ReadPast(dims, products->context->Input(1), kRoles[2], nodes);
  const Operand query = ReadQuery(dims, products->scores->Input(0), nodes);
  for (const PastOperand* one : {&key, &value}) {
    Expect(one->heads == query.heads || one->heads == 1, ReasonCode::kCachedRepeated, query.heads, key.heads,
           value.heads);
  }
  Expect(value.scale == 1, ReasonCode::kScaledValues);
  Attention found;
  found.inputs[0] = query.base;
  found.inputs[1] = Folded(dims, key.added, kRoles[1], nodes);
  found.inputs[2] = Folded(dims, value.added, kRoles[2], nodes);
  found.cache = CacheOf(key.past, value.past, key.present, value.present);
  found.heads = query.heads;
  found.kv_heads = key.kv_heads;
  found.head_dim = key.head_dim;
  SetContext(MergedHeads(dims, visible.product, query, nodes), found);
  found.scale = scores.scale * query.scale * key.scale;
  found.softcap = scores.softcap;
  if (scores.sinks != nullptr) found.sinks = SinksOf(dims, scores.sinks, query.heads);
  found.masks = std::move(visible.masks);
  found.zero_hidden_rows = products->zero_hidden_rows || visible.zeroed;
  found.zero_rows = visible.zero_rows;
  found.products = {products->scores, products->context};
  return found;
}

// ---- shared by all forms -------------------------------------------------------------------------------------------

// Known sizes must be those of the heads; the others are checked when the model runs.
void CheckSizes(const Dimensions& dims, Attention& found) {
  const KvCache& cache = *found.cache;
  const int64_t heads = found.heads, kv_heads = found.kv_heads, head_dim = found.head_dim;
  Expect(heads > 0 && heads <= kMostHeads && kv_heads > 0 && heads % kv_heads == 0, ReasonCode::kCachedHeads, heads,
         kv_heads);
  Expect(head_dim > 0 && head_dim <= kMostHeadDim, ReasonCode::kCachedSizes, head_dim, kMostHeadDim);
  Expect(std::isfinite(found.scale), ReasonCode::kCachedScale);
  const auto check_type = [&](Value value, const char* what, ElementType expected, bool must_be_known = false) {
    const ElementType type = dims.TypeOf(value);
    if (value == nullptr || type == expected || (type == ElementType::kUndefined && !must_be_known)) return;
    Refuse(ReasonCode::kCachedType, what, Quoted(value), NameOf(type), NameOf(expected));
  };
  const auto check_sizes = [&](Value value, const char* what, size_t rank, int64_t second, int64_t last) {
    const std::optional<DimShape> shape = dims.ShapeOf(value);
    if (!shape) return;
    const bool fits = shape->size() == rank && (rank != 4 || SizeAt(shape, 1).value_or(second) == second) &&
                      SizeAt(shape, rank - 1).value_or(last) == last;
    Expect(fits, ReasonCode::kCachedShape, what, Quoted(value), dims.ShapeText(value),
           rank == 4 ? "[batch, " + std::to_string(second) + ", tokens, " + std::to_string(last) + "]"
                     : "[batch, rows, " + std::to_string(last) + "]");
  };
  for (const Value past : {cache.past_key, cache.past_value}) {
    check_type(past, "cache", ElementType::kFloat, true);
    check_sizes(past, "cache", 4, kv_heads, head_dim);
  }
  for (size_t i = 0; i < found.inputs.size(); ++i) {
    const Value input = found.inputs[i];
    const bool splits = found.node->type() != "GroupQueryAttention" && dims.Rank(input) == 4;
    const int64_t count = i > 0 ? kv_heads : found.inputs[1] != nullptr ? heads : heads + 2 * kv_heads;
    check_type(input, kRoles[i], ElementType::kFloat);
    check_sizes(input, kRoles[i], splits ? 4 : 3, count, splits ? head_dim : count * head_dim);
    found.layouts[i] = splits ? Layout::kByHeads : Layout::kByRows;
  }
  for (const Value table : {cache.cos, cache.sin}) check_type(table, "rotary table", ElementType::kFloat);
  for (const Value length : {cache.lengths, cache.total}) check_type(length, "length", ElementType::kInt32);
}

// Exports cut the mask of all layers to the length of the present keys, which it has already, so that it depends on the
// attention that reads it. Return the mask before the Slice, or the mask itself.
Mask Uncut(const Dimensions& dims, const Mask& mask) {
  Mask found = mask, uncut = mask;
  for (int step = 0; step < kMostSteps && mask.heads == 0 && !mask.windows; ++step) {
    const Node* const node = dims.graph().Maker(found.value);
    if (node == nullptr) break;
    if (node->IsStandard("Where") && !found.fill) {
      const std::optional<double> chosen = dims.NumberOf(node->Input(1)), other = dims.NumberOf(node->Input(2));
      if (!chosen || !other || !((*chosen == 0) ^ (*other == 0))) break;
      const double fill = (*chosen + *other) * found.scale;
      if (!(fill < kHiddenScore)) break;
      found = {.value = node->Input(0), .fill = fill, .hides = *other == 0};
    } else if (IsWholeSlice(dims, *node) || dims.ChangesNothing(*node)) {
      found.value = node->Input(0);
      if (!dims.ChangesNothing(*node)) uncut = found;
    } else {
      break;
    }
  }
  return uncut;
}

void CheckMasks(const Dimensions& dims, const Attention& found) {
  if (found.masks.empty()) return;
  const std::optional<DimShape> query = dims.ShapeOf(found.inputs[0]), past = dims.ShapeOf(found.cache->past_key);
  Expect(query.has_value(), ReasonCode::kCachedRanks);
  const Dim rows = (*query)[query->size() - 2];
  const std::optional<Dim> tokens = past ? Plus((*past)[2], rows) : std::nullopt;
  const DimShape scores{(*query)[0], found.heads, rows, tokens.value_or(1)};
  for (const Mask& mask : found.masks) CheckMask(dims, mask, scores);
}

// Return whether a node is a Shape whose last dimension, the only one that a pass changes, is not read.
bool AsksForLength(const Dimensions& dims, const Node& node) {
  const auto place = [](int64_t index, int64_t count) {
    return std::clamp<int64_t>(index < 0 ? index + count : index, 0, count);
  };
  if (!node.IsStandard("Shape")) return false;
  const int64_t start = place(node.Int("start", 0), 4), end = place(node.Int("end", 4), 4), count = end - start;
  if (end < 4 || count < 1) return true;
  const auto reads_last = [&](const Graph::Use& use) {
    const Node& user = *use.node;
    const auto numbers = dims.ElementsOf(user.Input(1)), ends = dims.ElementsOf(user.Input(2));
    if (use.index == 0 && user.IsStandard("Gather") && numbers) {
      return std::any_of(numbers->begin(), numbers->end(), [&](const Element& one) {
        const std::optional<int64_t> index = one.AsInt();
        return !index || *index == count - 1 || *index == -1;
      });
    }
    const bool slices = use.index == 0 && user.IsStandard("Slice") && user.inputs().size() < 5 && numbers && ends &&
                        numbers->size() == 1 && ends->size() == 1 && (*numbers)[0].AsInt() && (*ends)[0].AsInt();
    return !slices || (place(*(*ends)[0].AsInt(), count) == count && place(*(*numbers)[0].AsInt(), count) < count);
  };
  const auto uses = dims.graph().Uses(node.Output(0));
  return !dims.graph().IsOutput(node.Output(0)) && std::none_of(uses.begin(), uses.end(), reads_last);
}

// Refuse caches whose type a pass cannot change.
void CheckKept(const Dimensions& dims, const Attention& found, const NodeSet& nodes) {
  const Graph& graph = dims.graph();
  const KvCache& cache = *found.cache;
  for (const Value past : {cache.past_key, cache.past_value}) {
    Expect(past->is_input && !graph.IsOutput(past), ReasonCode::kCachedNotInput, Quoted(past));
    const std::optional<DimShape> shape = dims.ShapeOf(past);
    Expect(SizeAt(shape, 1).has_value(), ReasonCode::kCachedShape, "cache", Quoted(past), dims.ShapeText(past),
           "[batch, " + std::to_string(found.kv_heads) + ", tokens, " + std::to_string(found.head_dim) + "]");
  }
  for (const Value present : {cache.present_key, cache.present_value}) {
    Expect(graph.IsOutput(present), ReasonCode::kCachedNotOutput, Quoted(present));
  }
  for (const Value value : {cache.present_key, cache.present_value, cache.past_key, cache.past_value}) {
    const bool is_past = value == cache.past_key || value == cache.past_value;
    for (const Graph::Use& use : graph.Uses(value)) {
      Expect(nodes.contains(use.node) || (is_past && AsksForLength(dims, *use.node)), ReasonCode::kCachedUsed,
             Quoted(value), Described(*use.node));
    }
  }
}

void Check(const Dimensions& dims, const Node& node, Attention& found, NodeSet& nodes) {
  found.node = &node;
  if (found.output == nullptr) found.output = node.Output(0);
  Expect(found.output != nullptr, ReasonCode::kCachedMissing);
  KvCache& cache = *found.cache;
  CheckSizes(dims, found);
  CheckMasks(dims, found);
  const NodeSet matched = nodes;
  std::vector<Mask> masks = found.masks;
  try {
    CheckUses(dims, nodes, found);
  } catch (const RefusedError& refusal) {
    if (refusal.reason().code != ReasonCode::kMaskInside) throw;
    for (Mask& mask : masks) mask = Uncut(dims, mask);
    found.masks = std::move(masks);
    CheckMasks(dims, found);
    nodes = matched;
    CheckUses(dims, nodes, found);
  }
  try {
    CheckKept(dims, found, nodes);
  } catch (const RefusedError& refusal) {
    cache.why_kept = refusal.reason();
  }
}

}  // namespace

std::optional<int64_t> HeadSize(const Dimensions& dims, Value past) {
  const auto count_of = [](const Node& node, std::string_view name) -> int64_t {
    const auto found = node.attributes().find(name);
    const auto* const count = found == node.attributes().end() ? nullptr : std::get_if<int64_t>(&found->second);
    return count != nullptr && *count > 0 && *count <= kMostHeads ? *count : 0;
  };
  // The last dimension of a value: declared, or that of the weight or bias it is computed with.
  const auto width_of = [&](Value value) -> std::optional<int64_t> {
    const std::optional<DimShape> shape = dims.ShapeOf(value);
    if (shape && !shape->empty() && shape->back().IsNumber()) return shape->back().number();
    const Node* const maker = dims.graph().Maker(value);
    if (maker == nullptr) return std::nullopt;
    if (maker->IsStandard("MatMul") || maker->IsStandard("Add")) {
      for (const Value input : maker->inputs()) {
        if (input != nullptr && input->constant_shape && !input->constant_shape->empty()) {
          return input->constant_shape->back();
        }
      }
    }
    const auto columns = maker->attributes().find("N");  // MatMulNBits
    const auto* const n = columns == maker->attributes().end() ? nullptr : std::get_if<int64_t>(&columns->second);
    return n == nullptr ? std::nullopt : std::optional(*n);
  };
  for (const Graph::Use& use : dims.graph().Uses(past)) {
    const Node& node = *use.node;
    if (node.type() != "GroupQueryAttention" || !node.Has(0)) continue;
    const int64_t heads = count_of(node, "num_heads"), kv_heads = count_of(node, "kv_num_heads");
    const std::optional<int64_t> width = width_of(node.Input(0));
    if (heads == 0 || kv_heads == 0 || width.value_or(0) < 1) continue;
    return *width / (node.Has(1) || node.Has(2) ? heads : heads + 2 * kv_heads);
  }
  return std::nullopt;
}

std::vector<FoundAttention> FindCachedAttentions(const Dimensions& dims, Executor executor) {
  std::vector<FoundAttention> all;
  for (const Node& node : dims.graph().nodes()) {
    std::optional<Attention> found;
    NodeSet nodes{&node};
    try {
      if (node.Is("com.microsoft", "GroupQueryAttention")) found = GroupQuery(dims, node);
      if (node.Is("com.microsoft", "MultiHeadAttention")) found = MultiHead(dims, node);
      if (node.IsStandard("Attention")) found = OnnxAttention(dims, node, nodes, executor);
      if (node.IsStandard("Softmax")) found = FromSoftmax(dims, node, nodes, executor);
      if (!found) continue;
      Check(dims, node, *found, nodes);
      all.emplace_back(std::move(*found));
    } catch (const RefusedError& refusal) {
      const ReasonCode code = refusal.reason().code;
      const bool has_cache = code != ReasonCode::kNoCache && code != ReasonCode::kNotFromCache;
      all.emplace_back(NotAttention{&node, refusal.reason(), has_cache});
    }
  }
  return all;
}

}  // namespace ortolan::match
