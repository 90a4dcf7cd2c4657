#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <utility>

#include "provider/attention_finder.h"

namespace ortolan::provider {
namespace {

constexpr auto kHalf = ElementType::kFloat16;
constexpr auto kInt64 = ElementType::kInt64;
constexpr auto kBool = ElementType::kBool;
constexpr float kPaddingFill = -10000.0f;  // default mask_filter_value of MultiHeadAttention

}  // namespace

Value AttentionFinder::Weights() {
  const Value weights = softmax_.Output(0);
  if (weights == nullptr) return nullptr;
  const Node* const reader = graph_.OnlyReader(weights);
  if (reader != nullptr && graph_.IsFloatCast(*reader)) {  // a float32 Softmax between float16 MatMuls
    Take(*reader);
    return reader->Output(0);
  }
  const std::span<const Graph::Use> uses = graph_.Uses(weights);
  if (uses.size() != 2 || uses[0].index < 0 || uses[1].index < 0) return weights;
  const size_t first = uses[0].node->IsStandard("IsNaN") ? 0 : 1;
  const Node& is_nan = *uses[first].node;
  const Node& where = *uses[1 - first].node;
  const bool fits = is_nan.IsStandard("IsNaN") && where.IsStandard("Where") && where.Input(2) == weights &&
                    where.Input(0) == is_nan.Output(0) && graph_.NumberOf(where.Input(1)) == 0.0f;
  if (!fits) return weights;
  Take(is_nan);
  Take(where);
  found_.zero_hidden_rows = true;
  return where.Output(0);
}

const Node* AttentionFinder::ScoresBehind(Value value, int steps) const {
  Visit();
  const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
  if (node == nullptr || !node->IsStandard() || steps == 0) return nullptr;
  const std::string& type = node->type();
  if (type == "MatMul") {
    const bool has_constant = graph_.IsConstantValue(node->Input(0)) || graph_.IsConstantValue(node->Input(1));
    return has_constant ? nullptr : node;
  }
  if (graph_.IsFloatCast(*node)) return ScoresBehind(node->Input(0), steps - 1);
  if (type != "Add" && type != "Mul" && type != "Div" && type != "Where" && type != "Identity") return nullptr;
  const Node* found = nullptr;
  for (const Value input : node->inputs()) {
    const Node* const scores = ScoresBehind(input, steps - 1);
    if (scores != nullptr && found != nullptr) return nullptr;
    if (scores != nullptr) found = scores;
  }
  return found;
}

std::optional<float> AttentionFinder::NumberOf(Value value, int steps) const {
  Visit();
  if (value == nullptr || steps == 0) return std::nullopt;
  if (graph_.IsConstantValue(value)) return graph_.NumberOf(value);
  if (!IsMadeInside(value, steps)) return std::nullopt;
  const Node& node = *graph_.Maker(value);
  if (graph_.IsFloatCast(node)) return NumberOf(node.Input(0), steps - 1);
  if (node.type() == "Cast" && IsFloatType(node.Output(0)->type) && node.Input(0)->type == kInt64) {
    const std::optional<Sizes> sizes = SizesOf(node.Input(0), steps - 1);
    if (!sizes || sizes->size() != 1 || sizes->front().kind != Size::Kind::kNumber) return std::nullopt;
    return static_cast<float>(sizes->front().number);
  }
  const std::optional<float> first = NumberOf(node.Input(0), steps - 1);
  if (!first) return std::nullopt;
  if (node.type() == "Sqrt") return std::sqrt(*first);
  if (node.type() == "Unsqueeze" || node.type() == "Squeeze" || node.type() == "Identity") return first;
  const std::optional<float> second = NumberOf(node.Input(1), steps - 1);
  if (!second) return std::nullopt;
  if (node.type() == "Div") return *first / *second;
  if (node.type() == "Mul") return *first * *second;
  return std::nullopt;
}

void AttentionFinder::ReadScores(const Node& scores) {
  bool is_scaled = false;
  Value value = softmax_.Input(0);
  for (const Node* node = graph_.Maker(value); node != &scores; node = graph_.Maker(value)) {
    size_t index = 0;
    while (ScoresBehind(node->Input(index), kMostSteps) != &scores) ++index;
    SetSizes(value, scores_sizes_);
    Take(*node);
    value = node->Input(index);
    if (node->IsStandard("Identity") || graph_.IsFloatCast(*node)) continue;
    if (IsFactor(*node)) {
      factors_.push_back({node, index});
      is_scaled = true;
      continue;
    }
    Expect(!is_scaled, "its scores are scaled after the mask is added");
    if (node->IsStandard("Where")) {
      ReadFill(*node, index);
    } else {
      ReadMask(Other(*node, value));
    }
  }
  SetSizes(value, scores_sizes_);
  std::reverse(found_.masks.begin(), found_.masks.end());
}

void AttentionFinder::ReadMask(Value value) {
  Expect(value != nullptr && graph_.IsFloatOrHalf(value), "its mask is not float");
  if (graph_.NumberOf(value) == 0.0f) return;
  Mask mask;
  mask.value = value;
  found_.masks.push_back(std::move(mask));
}

void AttentionFinder::ReadBiases(const Constant& bias) {
  const std::vector<float> values = bias.Floats();
  const auto columns = static_cast<std::ptrdiff_t>(values.size() / 3);
  for (size_t i = 0; i < 3; ++i) {
    Expect(LayerOf(i).bias.empty(), ErrorText("it has a bias, and so has the linear layer of its ", kMeanings[i]));
    const auto begin = values.begin() + static_cast<std::ptrdiff_t>(i) * columns;
    found_.biases[i].assign(begin, begin + columns);
  }
}

void AttentionFinder::ReadKeyPadding(Value value) {
  const std::optional<Shape> shape = DeclaredShape(value);
  const std::string name = value->name;
  Expect(value->type == ElementType::kInt32 && !graph_.IsConstantValue(value),
         ErrorText("its key_padding_mask '", name, "' is not an int32 value computed at run time"));
  const size_t rank = shape ? shape->size() : 0;
  Expect(rank == 2 || rank == 3,
         ErrorText("its key_padding_mask '", name, "' must have the shape [batch, keys] or [batch, rows, keys]"));
  Expect(!found_.causal, "it is causal and has a key_padding_mask");
  Mask mask;
  mask.value = value;
  mask.is_padding = true;
  mask.fill = softmax_.Float("mask_filter_value", kPaddingFill);
  Expect(std::isfinite(mask.fill), "its mask_filter_value is not finite");
  found_.masks.push_back(std::move(mask));
}

void AttentionFinder::ReadFill(const Node& where, size_t index) {
  float fill = index == 0 ? 0.0f : graph_.NumberOf(where.Input(3 - index)).value_or(0.0f);
  // The lowest float16 marks hidden scores as the lowest float32 does.
  if (where.Output(0)->type == kHalf && fill <= -65504.0f) {
    fill = std::numeric_limits<float>::lowest();
  }
  Expect(fill < kHiddenScore,
         ErrorText(where.Described(), " replaces scores by a value other than -Inf or the lowest float"));
  const Value condition = where.Input(0);
  Expect(condition != nullptr && condition->type == kBool,
         ErrorText("the condition of ", where.Described(), " is not a bool tensor"));
  Mask mask;
  mask.value = condition;
  mask.is_condition = true;
  mask.hides = index == 2;
  mask.fill = fill;
  found_.masks.push_back(std::move(mask));
}

bool AttentionFinder::IsOneARow(Value value) const {
  const std::optional<Shape> shape = DeclaredShape(value);
  return shape && !shape->empty() && shape->back() == 1;
}

void AttentionFinder::ReadConstantMask(Mask& mask) const {
  const std::optional<Constant> tensor = graph_.ConstantOf(mask.value);
  Expect(tensor && IsFloatType(tensor->type) && tensor->Count() > 0, "its constant mask is not a float tensor");
  mask.own_values = std::make_shared<const std::vector<float>>(tensor->Floats());
  mask.values = *mask.own_values;
  mask.shape = tensor->shape;
  mask.value = nullptr;
}

bool AttentionFinder::TruncatesKeys(const Node& slice) const {
  if (!slice.IsStandard("Slice") || slice.inputs().size() < 4) return false;
  const auto is_constant = [&](size_t input, std::initializer_list<int64_t> values) {
    const std::optional<Sizes> sizes = ConstantSizes(slice.Input(input));
    return sizes && sizes->size() == 1 &&
           std::find(values.begin(), values.end(), sizes->front().number) != values.end();
  };
  const std::optional<Sizes> end = SizesOf(slice.Input(2), kMostSteps);
  return is_constant(1, {0}) && is_constant(3, {-1, 3}) && (!slice.Has(4) || is_constant(4, {1})) && end &&
         end->size() == 1 && end->front().kind == Size::Kind::kRows;
}

}  // namespace ortolan::provider
