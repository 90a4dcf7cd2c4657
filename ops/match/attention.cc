#include "match/attention.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>
#include <utility>

#include "host/op_error.h"
#include "match/decomposed.h"

namespace ortolan::match {
namespace {

constexpr const char* kRoles[] = {"query", "key", "value"};
using Operands = std::array<Operand, 3>;
constexpr std::string_view kMicrosoft = "com.microsoft";

// Operands that are taken as split heads instead of the output of their projection. kSingle: batch and heads stay one
// axis. Tried in this order: with the first set the operator replaces most nodes, with the last one fewest.
enum : unsigned { kQuery = 1, kKey = 2, kValue = 4, kOutput = 8, kSingle = 16 };
constexpr unsigned kByHeads[] = {0, kKey | kValue, kQuery | kKey | kValue, kQuery | kKey | kValue | kOutput,
                                 kQuery | kKey | kValue | kOutput | kSingle};

std::string ListOf(const Operands& operands, int64_t Operand::* number) {
  return ErrorText("[", operands[0].*number, ", ", operands[1].*number, ", ", operands[2].*number, "]");
}

// Check that the shapes of queries, keys, values and masks fit, and return the attention.
Attention Joined(const Dimensions& dims, const Node& node, const Operands& operands, std::vector<Mask> masks,
                 bool causal, Executor executor) {
  const auto& [query, key, value] = operands;
  Expect(query.head_dim == key.head_dim && key.head_dim == value.head_dim, ReasonCode::kHeadDims,
         ListOf(operands, &Operand::head_dim));
  Expect(key.heads == value.heads && key.heads > 0 && query.heads % key.heads == 0, ReasonCode::kHeadCounts,
         ListOf(operands, &Operand::heads));
  // The second MatMul guarantees equal numbers of keys and values.
  Expect(SameNumber(dims, query.batch, key.batch) && SameNumber(dims, query.batch, value.batch), ReasonCode::kBatches);
  Expect(!causal || query.rows == key.rows, ReasonCode::kCausalRows);
  const ElementType type = executor == Executor::kProvider ? dims.TypeOf(query.base) : ElementType::kFloat;
  for (size_t i = 0; i < 3; ++i) {
    const ElementType other = dims.TypeOf(operands[i].base);
    Expect(other == type, ReasonCode::kOperandType, kRoles[i], Quoted(operands[i].base), NameOf(other));
  }
  for (const Mask& mask : masks) CheckMask(dims, mask, {query.batch, query.heads, query.rows, key.rows}, executor);
  Attention found;
  found.node = &node;
  for (size_t i = 0; i < 3; ++i) {
    found.inputs[i] = operands[i].base;
    found.layouts[i] = operands[i].layout;
  }
  found.heads = query.heads;
  found.kv_heads = key.heads;
  found.head_dim = query.head_dim;
  found.masks = std::move(masks);
  found.causal = causal;
  return found;
}

// Return whether the mask hides exactly the keys after each query: Where(tril(ones) == 0, -Inf, 0).
bool IsCausal(const Dimensions& dims, const Mask& mask) {
  const Graph& graph = dims.graph();
  const auto input_of = [](const Node* node) { return node == nullptr ? nullptr : node->Input(0); };
  const Node* const where = mask.fill ? nullptr : MakerOf(graph, mask.value, "Where");
  const Node* const equal = MakerOf(graph, input_of(where), "Equal");
  if (equal == nullptr) return false;
  const std::optional<double> hidden = dims.NumberOf(where->Input(1));
  if (!hidden || !(*hidden < kHiddenScore) || dims.NumberOf(where->Input(2)) != 0.0) return false;
  const Node* const trilu = MakerOf(graph, equal->Input(0), "Trilu");
  if (dims.NumberOf(equal->Input(1)) != 0.0 || trilu == nullptr) return false;
  if (trilu->Int("upper", 1) != 0 || trilu->inputs().size() > 1) return false;
  return dims.NumberOf(input_of(MakerOf(graph, trilu->Input(0), "Expand"))) == 1.0;
}

Operand ReadOperand(const Dimensions& dims, Value value, size_t role, unsigned by_heads, NodeSet& nodes,
                    bool transposed = false) {
  const bool single = (by_heads & kSingle) != 0;
  const auto heads = [&] { return HeadsOperand(dims, value, kRoles[role], nodes, transposed, single); };
  if ((by_heads >> role & 1) != 0) return heads();
  try {
    return SplitOperand(dims, value, kRoles[role], nodes, transposed);
  } catch (const RefusedError& refusal) {
    try {
      return heads();
    } catch (const RefusedError&) {
    }
    throw RefusedError(refusal.reason());
  }
}

// Set the output: merged heads, or split heads if the model does not merge them.
void SetOutput(const Dimensions& dims, Value product, const Operand& query, unsigned by_heads, NodeSet& nodes,
               Attention& found) {
  try {
    Expect((by_heads & kOutput) == 0, ReasonCode::kOneAxisOutput, Quoted(product));
    SetContext(MergedHeads(dims, product, query, nodes), found);
  } catch (const RefusedError&) {
    found.output = product;
    if (dims.Rank(product) == 4u) {
      found.output_layout = Layout::kByHeads;
    } else if (query.heads != 1) {
      throw;
    }
  }
}

// Call `read` with each set of kByHeads until one fits. The reason of a refusal is that against the first set.
template <typename Read>
auto WithSplitHeads(const Read& read) {
  std::optional<Reason> first;
  for (const unsigned by_heads : kByHeads) {
    try {
      return read(by_heads);
    } catch (const RefusedError& refusal) {
      if (!first) first = refusal.reason();
    }
  }
  throw RefusedError(*first);
}

// Match decomposed attention with one set of kByHeads; nullopt if the Softmax has another purpose.
std::optional<Attention> ReadDecomposed(const Dimensions& dims, const Node& softmax, unsigned by_heads,
                                        Executor executor) {
  Decomposed rule(dims, softmax);
  NodeSet& nodes = rule.nodes();
  const std::optional<Decomposed::Products> products = rule.FindProducts();
  if (!products) return std::nullopt;
  auto [masks, scale, softcap, sinks] = rule.ReadScores(*products);
  const Operands operands = {ReadOperand(dims, products->scores->Input(0), 0, by_heads, nodes),
                             ReadOperand(dims, products->scores->Input(1), 1, by_heads, nodes, true),
                             ReadOperand(dims, products->context->Input(1), 2, by_heads, nodes)};
  const auto& [query, key, value] = operands;
  const bool one_axis = dims.Rank(products->scores->Output(0)) == 3u;
  for (Mask& mask : masks) {
    const DimShape shape = dims.ShapeOf(mask.value).value_or(DimShape{});
    Expect((by_heads & kSingle) == 0 || shape.size() < 4 || shape[0].Is(1) || shape[0] == query.batch,
           ReasonCode::kOneAxisMask, Quoted(mask.value));
    if (one_axis && mask.heads == 0 && shape.size() == 3 && !shape[0].Is(1)) mask.heads = query.heads;
  }
  Visible visible = WithoutHiddenRows(dims, products->context->Output(0), std::move(masks), nodes, executor);
  // With a second mask, a row may be fully masked. Its result then depends on the values of both masks, so the causal
  // mask is kept as a mask.
  const bool causal = visible.masks.size() == 1 && IsCausal(dims, visible.masks[0]);
  if (causal) visible.masks.clear();
  Attention found = Joined(dims, softmax, operands, std::move(visible.masks), causal, executor);
  // All query heads may share one key head.
  Expect(key.heads == 1 || key.heads == query.heads, ReasonCode::kKeyHeads, query.heads, key.heads);
  found.scale = scale * query.scale * key.scale;
  found.softcap = softcap;
  if (sinks != nullptr) found.sinks = SinksOf(dims, sinks, query.heads);
  Expect(value.scale == 1, ReasonCode::kScaledValues);
  found.zero_hidden_rows = products->zero_hidden_rows || visible.zeroed;
  found.zero_rows = visible.zero_rows;
  found.products = {products->scores, products->context};
  SetOutput(dims, visible.product, query, by_heads, nodes, found);
  CheckUses(dims, nodes, found, executor);
  return found;
}

void ExpectNoCache(const Dimensions& dims, const Node& node, size_t first, size_t end) {
  for (size_t i = first; i < end; ++i) Expect(!node.Has(i), ReasonCode::kHasCache);
  for (size_t i = 1; i < node.outputs().size(); ++i) {
    const Value value = node.Output(i);
    Expect(value == nullptr || (dims.graph().Uses(value).empty() && !dims.graph().IsOutput(value)),
           ReasonCode::kHasCache);
  }
}

// Match ONNX's Attention with one set of kByHeads.
Attention OnnxAttention(const Dimensions& dims, const Node& node, unsigned by_heads, Executor executor) {
  ExpectNoCache(dims, node, 4, 7);
  NodeSet nodes = {&node};
  const bool split = dims.Rank(node.Input(0)) == 4u;
  Operands operands;
  for (size_t i = 0; i < 3; ++i) {
    operands[i] =
        split ? ReadOperand(dims, node.Input(i), i, by_heads, nodes)
              : WholeOperand(dims, node.Input(i), kRoles[i], node.Int(i == 0 ? "q_num_heads" : "kv_num_heads", 0));
  }
  std::vector<Mask> masks;
  if (node.Has(3)) {
    const bool is_bool = dims.TypeOf(node.Input(3)) == ElementType::kBool;
    masks.push_back(is_bool ? VisibleMask(node.Input(3)) : Mask{node.Input(3)});
  }
  const bool causal = node.Int("is_causal", 0) == 1;
  Visible visible{node.Output(0), std::move(masks)};
  if (!causal) visible = WithoutHiddenRows(dims, visible.product, std::move(visible.masks), nodes, executor);
  Attention found = Joined(dims, node, operands, std::move(visible.masks), causal, executor);
  const double factor = operands[0].scale * operands[1].scale;
  found.scale = ScaleAttribute(node) * factor;
  found.softcap = CheckedSoftcap(node.Float("softcap", 0));
  Expect(operands[2].scale == 1 && (found.scale != 0 || factor == 1), ReasonCode::kScaledInputs);
  found.zero_hidden_rows = visible.zeroed;
  found.zero_rows = visible.zero_rows;
  if (split) {
    SetOutput(dims, visible.product, operands[0], by_heads, nodes, found);
  } else {
    found.output = visible.product;
  }
  CheckUses(dims, nodes, found, executor);
  return found;
}

// Inputs of the operators of com.microsoft; 0 for inputs that an operator lacks.
struct FusedInputs {
  size_t bias, padding, score_bias;
  std::array<size_t, 4> caches;
};
FusedInputs InputsOf(const Node& node) {
  if (node.type() == "Attention") return {2, 3, 5, {4, 6}};
  if (node.type() == "QAttention") return {2, 5, 0, {8}};
  return {3, 4, 5, {6, 7, 8, 9}};
}

constexpr std::string_view kFusedAttributes[] = {"num_heads",
                                                 "unidirectional",
                                                 "scale",
                                                 "mask_filter_value",
                                                 "do_rotary",
                                                 "qkv_hidden_sizes",
                                                 "rotary_embedding_dim",
                                                 "past_present_share_buffer"};

// Read the weights of Attention or QAttention, and set the widths.
void ReadPackedWeight(const Dimensions& dims, const Node& node, Executor executor, FusedAttention& found) {
  const bool is_int8 = node.type() == "QAttention";
  const std::optional<DimShape> x = dims.ShapeOf(node.Input(0));
  Expect(x && x->size() == 3, ReasonCode::kOperandRank, "input", Quoted(node.Input(0)),
         x ? std::to_string(x->size()) : "unknown", 3);
  using Types = std::initializer_list<ElementType>;
  const Types bytes = {ElementType::kInt8, ElementType::kUint8}, floats = {ElementType::kFloat},
              both = {ElementType::kFloat, ElementType::kFloat16};
  const Constant weights = node.ConstantHeader(1, "weights",
                                               is_int8                           ? bytes
                                               : executor == Executor::kOperator ? floats
                                                                                 : both);
  const std::optional<int64_t> columns = x->back().Number();
  Expect(weights.shape.size() == 2 && (!columns || weights.shape[0] == *columns), ReasonCode::kPackedWeights,
         Quoted(node.Input(1)), ShapeText(weights.shape));
  found.weight = node.Input(1);
  const int64_t all = weights.shape[1];
  std::vector<int64_t> widths = node.Ints("qkv_hidden_sizes");
  if (widths.empty()) widths.assign(3, all / 3);
  int64_t left = widths.size() == 3 ? all : -1;
  for (size_t i = 0; i < 3 && left >= 0; ++i) {
    const bool fits = widths[i] > 0 && widths[i] % found.heads == 0 && widths[i] <= left;
    found.widths[i] = widths[i];
    left = fits ? left - widths[i] : -1;
  }
  Expect(left == 0, ReasonCode::kPackedWidths, all, ShapeText(widths), found.heads);
  if (!is_int8) return;
  node.ConstantHeader(4, "weight_scale", {ElementType::kFloat}, {{}, {1}, {all}});
  if (node.Has(7)) node.ConstantHeader(7, "weight_zero_point", {weights.type}, {{}, {1}, {all}});
}

// Read key padding; `x` is [batch, rows, …].
Mask PaddingMask(const Dimensions& dims, const Node& node, Value value, Value x) {
  constexpr float kDefaultFill = -10000.0f;  // default of mask_filter_value
  const std::optional<DimShape> shape = dims.ShapeOf(value), rows = dims.ShapeOf(x);
  const size_t rank = shape ? shape->size() : 0;
  Expect(dims.TypeOf(value) == ElementType::kInt32 && rank > 0 && rank < 4, ReasonCode::kPaddingMask, Quoted(value),
         NameOf(dims.TypeOf(value)), dims.ShapeText(value));
  Expect(rank > 1 || (rows && !rows->empty() && rows->front() == shape->front()), ReasonCode::kPaddingCounts,
         Quoted(value));
  Expect(rank == 1 || !shape->back().Is(1), ReasonCode::kPaddingColumn, Quoted(value));
  const float fill = node.Float("mask_filter_value", kDefaultFill);
  Expect(std::isfinite(fill), ReasonCode::kPaddingFill);
  return {.value = value, .fill = fill, .padding = true};
}

Attention MicrosoftAttention(const Dimensions& dims, const Node& node, Executor executor) {
  const FusedInputs at = InputsOf(node);
  const FusedAttention fused = ReadFused(dims, node, executor);
  for (const auto& [index, meaning] : {std::pair(at.bias, "bias"), std::pair(at.padding, "key_padding_mask")}) {
    Expect(executor == Executor::kProvider || !node.Has(index), ReasonCode::kHasInput, meaning);
  }
  Operands operands;
  for (size_t i = 0; i < 3; ++i) {
    const Value value = node.Input(fused.weight == nullptr ? i : 0);
    const DimShape shape = *dims.ShapeOf(value);
    operands[i] = {value, shape[0], shape[1], fused.heads, fused.widths[i] / fused.heads};
  }
  std::vector<Mask> masks;
  if (fused.score_bias != nullptr) masks.push_back({BeforeExpand(dims, fused.score_bias)});
  Attention found = Joined(dims, node, operands, std::move(masks), fused.causal, executor);
  if (fused.weight != nullptr) found.inputs = {node.Input(0), nullptr, nullptr};
  found.weight = fused.weight;
  found.bias = fused.bias;
  found.scale = fused.scale;
  found.output = node.Output(0);
  if (fused.padding) found.masks.push_back(*fused.padding);
  NodeSet nodes = {&node};
  CheckUses(dims, nodes, found, executor);
  return found;
}

std::string TextOf(const Attention& found) {
  std::string text = ErrorText(found.heads, " heads, ", found.kv_heads, " of keys, of ", found.head_dim, ", scale ",
                               internal::OperandText(found.scale), ", softcap ", internal::OperandText(found.softcap));
  const auto flag = [&](const char* name, bool holds) { text += holds ? ErrorText(", ", name) : ""; };
  const auto value = [&](const char* name, Value value) {
    if (value != nullptr) text += ErrorText(", ", name, " ", Quoted(value));
  };
  for (size_t i = 0; i < 3; ++i) {
    value(kRoles[i], found.inputs[i]);
    text += ErrorText(" ", kLayoutNames[static_cast<size_t>(found.layouts[i])]);
  }
  for (const Mask& mask : found.masks) {
    value("mask", mask.value);
    text += ErrorText(" x ", internal::OperandText(mask.scale));
    if (mask.fill) text += (mask.hides ? " hides by " : " shows by ") + internal::OperandText(*mask.fill);
    if (mask.heads != 0) text += ErrorText(" of ", mask.heads, " heads");
    text += std::string(mask.windows ? " windows" : "") + (mask.padding ? " padding" : "");
    text += mask.truncated ? " truncated" : "";
  }
  flag("causal", found.causal);
  if (found.window != 0) text += ErrorText(", window ", found.window);
  for (const float sink : found.sinks) text += ErrorText(", sink ", internal::OperandText(static_cast<double>(sink)));
  flag("zeros for hidden rows", found.zero_hidden_rows);
  value("zero rows", found.zero_rows);
  value("weight", found.weight);
  value("bias", found.bias);
  if (found.cache) {
    const KvCache& cache = *found.cache;
    value("past key", cache.past_key);
    value("past value", cache.past_value);
    value("present key", cache.present_key);
    value("present value", cache.present_value);
    value("lengths", cache.lengths);
    value("total", cache.total);
    value("cos", cache.cos);
    value("sin", cache.sin);
    flag("interleaved", cache.interleaved);
    if (cache.why_kept) text += ", keeps its cache: " + cache.why_kept->Text();
  }
  value("output", found.output);
  text += ErrorText(" ", kLayoutNames[static_cast<size_t>(found.output_layout)], ", nodes");
  std::set<std::string> names;  // ONNX Runtime has another order, and makes initializers of Constant nodes
  for (const Node* const node : found.nodes) {
    if (!node->IsStandard("Constant")) names.insert(Quoted(node->Output(0)));
  }
  for (const std::string& name : names) text += " " + name;
  return text;
}

}  // namespace

// Inputs of Attention: input, weights, bias, mask_index, past, attention_bias, past_sequence_length. QAttention: input,
// weight, bias, input_scale, weight_scale, mask_index, input_zero_point, weight_zero_point, past. MultiHeadAttention:
// query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value, …
FusedAttention ReadFused(const Dimensions& dims, const Node& node, Executor executor) {
  const FusedInputs at = InputsOf(node);
  for (const auto& [name, attribute] : node.attributes()) {
    const bool is_known =
        std::find(std::begin(kFusedAttributes), std::end(kFusedAttributes), name) != std::end(kFusedAttributes);
    Expect(is_known, ReasonCode::kUnknownAttribute, name);
  }
  for (const size_t cache : at.caches) {
    if (cache != 0) ExpectNoCache(dims, node, cache, cache + 1);
  }
  Expect(node.Int("do_rotary", 0) == 0, ReasonCode::kRotary);
  FusedAttention found;
  found.heads = node.Int("num_heads");
  Expect(found.heads > 0, ReasonCode::kNoHeads, found.heads);
  const auto expect_type = [&](size_t index, const char* meaning) {
    const ElementType type = dims.TypeOf(node.Input(index));
    Expect(type == ElementType::kFloat || (executor == Executor::kProvider && IsFloatType(type)),
           ReasonCode::kOperandType, meaning, Quoted(node.Input(index)), NameOf(type));
  };
  if (node.type() == "MultiHeadAttention") {
    for (size_t i = 0; i < 3; ++i) {
      expect_type(i, kRoles[i]);
      const Operand operand = WholeOperand(dims, node.Input(i), kRoles[i], found.heads);
      found.widths[i] = operand.heads * operand.head_dim;
    }
  } else {
    if (node.type() == "Attention") expect_type(0, "input");
    ReadPackedWeight(dims, node, executor, found);
  }
  found.scale = ScaleAttribute(node);
  found.causal = node.Int("unidirectional", 0) == 1;
  if (node.Has(at.padding)) found.padding = PaddingMask(dims, node, node.Input(at.padding), node.Input(0));
  if (at.score_bias != 0) found.score_bias = node.Input(at.score_bias);
  found.bias = node.Input(at.bias);
  if (found.bias != nullptr) {
    const int64_t width = found.widths[0] + found.widths[1] + found.widths[2];
    const bool takes_half = executor == Executor::kProvider;
    node.ConstantHeader(at.bias, "bias",
                        {ElementType::kFloat, takes_half ? ElementType::kFloat16 : ElementType::kFloat}, {{width}});
  }
  return found;
}

std::vector<FoundAttention> FindAttentions(const Dimensions& dims, Executor executor) {
  std::vector<FoundAttention> all;
  for (const Node& node : dims.graph().nodes()) {
    try {
      std::optional<Attention> found;
      if (node.IsStandard("Softmax")) {
        found = WithSplitHeads([&](unsigned by_heads) { return ReadDecomposed(dims, node, by_heads, executor); });
      } else if (node.IsStandard("Attention")) {
        found = WithSplitHeads([&](unsigned by_heads) { return OnnxAttention(dims, node, by_heads, executor); });
      }
      // Passes split Attention and QAttention into their linear layers and a MultiHeadAttention.
      const bool is_packed = node.Is(kMicrosoft, "Attention") || node.Is(kMicrosoft, "QAttention");
      if ((is_packed && executor == Executor::kProvider) || node.Is(kMicrosoft, "MultiHeadAttention")) {
        found = MicrosoftAttention(dims, node, executor);
      }
      if (!found || found->output == nullptr) continue;
      Expect(std::isfinite(static_cast<float>(found->scale)), ReasonCode::kCachedScale);
      all.emplace_back(std::move(*found));
    } catch (const RefusedError& refusal) {
      all.emplace_back(NotAttention{&node, refusal.reason()});
    }
  }
  return all;
}

std::vector<std::string> AttentionTexts(const Dimensions& dims) {
  std::vector<std::string> texts;
  for (const bool cached : {true, false}) {
    for (const FoundAttention& one : cached ? FindCachedAttentions(dims) : FindAttentions(dims, Executor::kProvider)) {
      const auto* const found = std::get_if<Attention>(&one);
      const auto* const refused = std::get_if<NotAttention>(&one);
      const Node& node = found != nullptr ? *found->node : *refused->node;
      texts.push_back(ErrorText(node.type(), " of ", Quoted(node.Output(0)), cached ? ", cached: " : ": ",
                                found != nullptr ? TextOf(*found) : refused->reason.Text()));
    }
  }
  return texts;
}

}  // namespace ortolan::match
