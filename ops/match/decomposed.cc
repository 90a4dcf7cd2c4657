#include "match/decomposed.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

namespace ortolan::match {
namespace {

constexpr double kLowestHalf = -65504;

size_t RankOf(const Dimensions& dims, Value value) { return dims.Rank(value).value_or(0); }

bool HasSequences(const Dimensions& dims, const Mask& mask) {
  const std::optional<DimShape> shape = dims.ShapeOf(mask.value);
  return shape && shape->size() == 3 && !shape->front().Is(1);
}

// Return the boolean `visible` if the mask is float(not visible) * lowest; null otherwise.
Value VisibleOf(const Dimensions& dims, const Mask& mask) {
  const Node* const product = mask.fill ? nullptr : MakerOf(dims.graph(), mask.value, "Mul");
  if (product == nullptr) return nullptr;
  const size_t index = dims.NumberOf(product->Input(0)) ? 0 : 1;
  const std::optional<double> lowest = dims.NumberOf(product->Input(index));
  if (!lowest || !(*lowest < kHiddenScore)) return nullptr;
  const Node* const opposite = MakerOf(dims.graph(), product->Input(1 - index), "Cast");
  const Node* const negated = opposite == nullptr ? nullptr : MakerOf(dims.graph(), opposite->Input(0), "Not");
  return negated == nullptr ? nullptr : negated->Input(0);
}

// Return the boolean `visible` if the value is sum(float(visible), last axis) < 1; null otherwise.
Value CountedIn(const Dimensions& dims, Value value) {
  const Node* const less = MakerOf(dims.graph(), value, "Less");
  const std::optional<double> limit = less == nullptr ? std::nullopt : dims.NumberOf(less->Input(1));
  if (!limit || !(0 < *limit && *limit <= 1)) return nullptr;
  const Node* const count = MakerOf(dims.graph(), less->Input(0), "ReduceSum");
  if (count == nullptr || count->Int("keepdims", 1) != 1 || count->inputs().size() != 2) return nullptr;
  const Node* const cast = MakerOf(dims.graph(), count->Input(0), "Cast");
  const Value visible = cast == nullptr ? nullptr : cast->Input(0);
  const std::optional<Elements> axes = dims.ElementsOf(count->Input(1));
  if (!axes || axes->size() != 1 || dims.TypeOf(visible) != ElementType::kBool) return nullptr;
  const std::optional<int64_t> axis = axes->front().AsInt();
  const auto last = static_cast<int64_t>(RankOf(dims, visible)) - 1;
  return axis == -1 || axis == last ? visible : nullptr;
}

// Return whether the shape is that of a 4-D value, with columns of size 1, and broadcasts to it.
bool IsColumnOf(const Dimensions& dims, Value value, Value whole) {
  const std::optional<DimShape> shape = dims.ShapeOf(value), wanted = dims.ShapeOf(whole);
  if (!shape || !wanted || shape->size() != 4 || wanted->size() != 4 || !shape->back().Is(1)) return false;
  return std::equal(shape->begin(), shape->end() - 1, wanted->begin(),
                    [&](const Dim& size, const Dim& full) { return size.Is(1) || SameNumber(dims, size, full); });
}

}  // namespace

std::optional<Decomposed::Products> Decomposed::FindProducts() {
  const Graph& graph = dims_.graph();
  Products found;
  Value weights = Beyond(softmax_.Output(0), false);
  if (const Value kept = WithoutLast(weights)) {
    drops_last_ = true;
    weights = Beyond(kept, false);
  }
  const Node *is_nan = nullptr, *where = nullptr;
  for (const Graph::Use& use : graph.Uses(weights)) {
    if (use.index == 0 && use.node->IsStandard("IsNaN") && is_nan == nullptr) is_nan = use.node;
    if (use.index == 2 && use.node->IsStandard("Where") && where == nullptr) where = use.node;
  }
  // If the weights have several IsNaN nodes, only the one that the Where reads counts. (The order of consumers is not
  // the same in both front ends.)
  if (where != nullptr) {
    const Node* const condition = MakerOf(graph, where->Input(0), "IsNaN");
    if (condition != nullptr && condition->Input(0) == weights) is_nan = condition;
  }
  if (is_nan != nullptr) {
    const bool fits =
        where != nullptr && where->Input(0) == is_nan->Output(0) && dims_.NumberOf(where->Input(1)) == 0.0;
    Expect(fits, ReasonCode::kNanReplaced);
    nodes_.insert({is_nan, where});
    weights = where->Output(0);
    found.zero_hidden_rows = true;
  }
  weights = Beyond(weights, true);
  for (const Graph::Use& use : graph.Uses(weights)) {
    const Value last = found.context == nullptr ? nullptr : found.context->Output(0);
    const bool is_unread = graph.Uses(last).empty() && !graph.IsOutput(last);
    if (use.index == 0 && use.node->IsStandard("MatMul") && is_unread) found.context = use.node;
  }
  found.scores = FindScores(softmax_.Input(0));
  if (found.context == nullptr || found.scores == nullptr) return std::nullopt;
  const int64_t axis = softmax_.Int("axis", graph.opset() == 0 || graph.opset() >= 13 ? -1 : 1);
  const auto last = static_cast<int64_t>(RankOf(dims_, softmax_.Output(0))) - 1;
  Expect(axis == -1 || axis == last, ReasonCode::kSoftmaxAxis);
  nodes_.insert({found.context, found.scores});
  return found;
}

// Follow a value through Identity, Casts to the same type and, if `reshapes`, Reshapes that keep queries and keys.
// Nodes that only read its shape do not count as consumers.
Value Decomposed::Beyond(Value value, bool reshapes) {
  for (int step = 0; step < kMostSteps; ++step) {
    const Node* only = nullptr;
    size_t count = 0;
    for (const Graph::Use& use : dims_.graph().Uses(value)) {
      if (use.index == 0 && use.node->IsStandard("Shape")) continue;
      ++count;
      only = use.index < 0 ? nullptr : use.node;
    }
    if (count != 1 || only == nullptr) break;
    const Node& node = *only;
    const bool keeps = dims_.ChangesNothing(node) || dims_.graph().IsFloatCast(node);
    if (!keeps && !(reshapes && node.IsStandard("Reshape") && KeepsRows(node))) break;
    nodes_.insert(&node);
    value = node.Output(0);
  }
  return value;
}

// Return the weights without the last of each row, if their only consumer is a Slice that drops it; null otherwise.
Value Decomposed::WithoutLast(Value weights) {
  const Node* const slice = dims_.graph().OnlyReader(weights);
  if (slice == nullptr || !slice->IsStandard("Slice") || slice->Input(0) != weights) return nullptr;
  const auto is = [&](size_t input, std::initializer_list<int64_t> choices) {
    const std::optional<Elements> found = dims_.ElementsOf(slice->Input(input));
    const std::optional<int64_t> number = found && found->size() == 1 ? found->front().AsInt() : std::nullopt;
    return number && std::find(choices.begin(), choices.end(), *number) != choices.end();
  };
  const auto last = static_cast<int64_t>(RankOf(dims_, weights)) - 1;
  const bool drops = is(1, {0}) && is(2, {-1}) && is(3, {-1, last}) && (!slice->Has(4) || is(4, {1}));
  if (!drops) return nullptr;
  nodes_.insert(slice);
  return slice->Output(0);
}

// Return the ReduceMax of a Sub that subtracts the largest score of each row, which does not change the Softmax; null
// if the Sub does something else.
const Node* Decomposed::LargestOfRows(const Node& subtract) const {
  const Node* const largest = MakerOf(dims_.graph(), subtract.Input(1), "ReduceMax");
  if (largest == nullptr || largest->Input(0) != subtract.Input(0) || largest->Int("keepdims", 1) != 1) return nullptr;
  std::vector<int64_t> axes = largest->Ints("axes");
  if (const std::optional<Elements> given = dims_.ElementsOf(largest->Input(1))) {
    for (const Element& axis : *given) axes.push_back(axis.AsInt().value_or(0));
  }
  const auto last = static_cast<int64_t>(RankOf(dims_, subtract.Input(0))) - 1;
  return axes.size() == 1 && (axes[0] == -1 || axes[0] == last) ? largest : nullptr;
}

// Return the MatMul of queries and keys to which scales and masks are applied to compute a value; null otherwise.
const Node* Decomposed::FindScores(Value value, int steps) {
  if (value == nullptr || steps == 0) return nullptr;
  const auto found = found_.find(value);
  return found != found_.end() ? found->second : found_[value] = ScoresBehind(value, steps);
}

const Node* Decomposed::ScoresBehind(Value value, int steps) {
  const Graph& graph = dims_.graph();
  const Node* const node = graph.Maker(value);
  if (node == nullptr || !node->IsStandard()) return nullptr;
  const std::string& type = node->type();
  if (type == "MatMul") return node->IsConstant(0) || node->IsConstant(1) ? nullptr : node;
  if (type == "Reshape" || type == "Cast") {
    const bool keeps = type == "Reshape" || dims_.ChangesNothing(*node) || graph.IsFloatCast(*node);
    return keeps ? FindScores(node->Input(0), steps - 1) : nullptr;
  }
  if ((type == "Concat" && drops_last_) || (type == "Sub" && LargestOfRows(*node) != nullptr)) {
    return FindScores(node->Input(0), steps - 1);
  }
  constexpr std::string_view kTypes[] = {"Add", "Mul", "Div", "Where", "Identity", "Tanh"};
  if (std::find(std::begin(kTypes), std::end(kTypes), type) == std::end(kTypes)) return nullptr;
  const Node* scores = nullptr;
  for (const Value input : node->inputs()) {
    const Node* const one = FindScores(input, steps - 1);
    if (one != nullptr && scores != nullptr) return nullptr;
    if (one != nullptr) scores = one;
  }
  return scores;
}

Decomposed::Scores Decomposed::ReadScores(const Products& products) {
  const Graph& graph = dims_.graph();
  Scores read;
  int64_t heads = 0;
  Value value = softmax_.Input(0);
  for (const Node* node = graph.Maker(value); node != nullptr && node != products.scores; node = graph.Maker(value)) {
    nodes_.insert(node);
    size_t index = 0;
    while (index + 1 < node->inputs().size() && FindScores(node->Input(index)) != products.scores) ++index;
    value = node->Input(index);
    const std::string& type = node->type();
    if (type == "Identity" || type == "Cast") continue;
    if (type == "Sub") {
      nodes_.insert(LargestOfRows(*node));
    } else if (type == "Concat") {
      const int64_t axis = node->Int("axis"), last = static_cast<int64_t>(RankOf(dims_, value)) - 1;
      const bool is_first = read.masks.empty() && read.scale == 1 && read.softcap == 0 && read.sinks == nullptr;
      Expect(is_first && node->inputs().size() == 2 && (axis == -1 || axis == last), ReasonCode::kSinksPlace,
             Described(*node));
      read.sinks = node->Input(1);
    } else if (type == "Tanh") {
      Expect(read.softcap == 0, ReasonCode::kSoftcapTwice);
      read.softcap = CheckedSoftcap(read.scale);
      read.scale = 1;
    } else if (type == "Reshape") {
      const size_t before = RankOf(dims_, value), after = RankOf(dims_, node->Output(0));
      const bool splits = before == 3 && after == 4;
      const std::optional<int64_t> split = splits ? (*dims_.ShapeOf(node->Output(0)))[1].Number() : 0;
      const bool is_known = (before == 4 && (after == 5 || after == 3)) || (before == 5 && after == 4) || splits;
      if (!is_known || !split || !KeepsRows(*node)) Refuse(ReasonCode::kScoresView, Described(*node));
      if (splits) heads = *split;
      if (after == 5) {
        for (Mask& mask : read.masks) mask.windows = RankOf(dims_, mask.value) == 5;
      }
    } else if (type == "Mul" || type == "Div") {
      read.scale *= Factor(*node, index);
      if (static_cast<float>(read.scale) == 0) Refuse(ReasonCode::kScoresFactor, Described(*node));
    } else {
      Expect(read.softcap == 0, ReasonCode::kSoftcapMask);
      Mask mask = type == "Where" ? Fill(*node, index) : Mask{Other(*node, value)};
      if (mask.fill) {
        *mask.fill *= read.scale;
        Expect(*mask.fill < kHiddenScore, ReasonCode::kScaledMask);
      } else if (dims_.NumberOf(mask.value) == 0.0) {
        continue;
      } else {
        mask.scale = read.scale;
      }
      if (HasSequences(dims_, mask)) mask.heads = heads;
      read.masks.insert(read.masks.begin(), mask);
    }
  }
  Expect((read.sinks != nullptr) == drops_last_, ReasonCode::kWeightDropped);
  // The model divides the scores by the cap. The operator does that itself.
  if (read.softcap != 0) read.scale *= read.softcap;
  return read;
}

// Return whether a Reshape of scores keeps the axes of queries and keys, and of heads if a shape is 5-D.
bool Decomposed::KeepsRows(const Node& reshape) {
  const DimShape before = dims_.ShapeOf(reshape.Input(0)).value_or(DimShape{});
  const DimShape after = dims_.ShapeOf(reshape.Output(0)).value_or(DimShape{});
  const auto same = [&](const DimShape& one, size_t count) {
    return one.size() >= count && after.size() >= count &&
           std::equal(one.end() - static_cast<std::ptrdiff_t>(count), one.end(),
                      after.end() - static_cast<std::ptrdiff_t>(count));
  };
  if (before.size() == 5 || after.size() == 5) return same(before, 3);
  if (std::min(before.size(), after.size()) < 3) return false;
  // Adding a mask can lose symbolic dimensions, so the shape of the MatMul is compared as well.
  const Node* const product = FindScores(softmax_.Input(0));
  const DimShape scores = product == nullptr ? DimShape{} : dims_.ShapeOf(product->Output(0)).value_or(DimShape{});
  return same(before, 2) || (scores.size() > 2 && same(scores, 2));
}

double Decomposed::Factor(const Node& node, size_t index) const {
  const std::optional<double> number = dims_.Scalar(node.Input(1 - index));
  const bool divides = node.type() == "Div";
  const double factor = divides ? 1 / number.value_or(0) : number.value_or(0);
  const bool is_real = std::isfinite(factor) && static_cast<float>(factor) != 0;
  if (!is_real || (divides && index == 1)) Refuse(ReasonCode::kScoresFactor, Described(node));
  return factor;
}

// Return the mask of a Where that replaces masked scores by -Inf or the lowest float.
Mask Decomposed::Fill(const Node& where, size_t index) const {
  std::optional<double> fill = index == 0 ? std::nullopt : dims_.NumberOf(where.Input(3 - index));
  // The lowest float16 hides scores as the lowest float32 does.
  if (fill && *fill <= kLowestHalf && dims_.TypeOf(where.Output(0)) == ElementType::kFloat16) {
    fill = std::numeric_limits<float>::lowest();
  }
  if (!fill || !(*fill < kHiddenScore) || !where.Has(0)) Refuse(ReasonCode::kScoresFill, Described(where));
  return {BeforeExpand(dims_, where.Input(0)), *fill, index == 2};
}

Visible WithoutHiddenRows(const Dimensions& dims, Value product, std::vector<Mask> masks, NodeSet& nodes,
                          Executor executor) {
  Visible found{product, std::move(masks)};
  const Node* where = nullptr;
  size_t count = 0;
  for (const Graph::Use& use : dims.graph().Uses(found.product)) {
    if (use.index < 0 || !use.node->IsStandard("Where")) continue;
    where = use.index == 2 ? use.node : nullptr;
    ++count;
  }
  if (count != 1 || where == nullptr || dims.NumberOf(where->Input(1)) != 0.0) return found;
  if (!IsColumnOf(dims, where->Input(0), product)) return found;
  const Value hidden = where->Input(0), visible = found.masks.size() == 1 ? VisibleOf(dims, found.masks[0]) : nullptr;
  // The provider cannot remove the nodes that compute the mask, so it reads the values that they return.
  if (executor == Executor::kProvider) {
    found.zero_rows = hidden;
  } else if (visible != nullptr && CountedIn(dims, hidden) == visible) {
    found.masks = {VisibleMask(BeforeExpand(dims, visible))};
    found.zeroed = true;
  } else {
    return found;
  }
  nodes.insert(where);
  found.product = where->Output(0);
  return found;
}

}  // namespace ortolan::match
