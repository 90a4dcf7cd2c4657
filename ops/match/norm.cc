#include "match/norm.h"

#include <algorithm>
#include <cmath>

#include "add_layer_norm/plan.h"

namespace ortolan::match {
namespace {

// Return the length of a constant float vector; nullopt for other values.
std::optional<int64_t> LengthOf(const Graph& graph, Value value) {
  // Do not read large constants.
  if (value != nullptr && value->constant_shape && value->constant_shape->size() != 1) return std::nullopt;
  const std::optional<Constant> tensor = graph.ConstantOf(value);
  const bool fits = tensor && IsFloatType(tensor->type) && tensor->shape.size() == 1;
  return fits ? std::optional(tensor->shape[0]) : std::nullopt;
}

// Return whether the axis is the last one, for an operator that keeps the rank of its first input.
bool IsLastAxis(const Node& node, int64_t axis) {
  const auto is_last = [&](Value value) {
    return value != nullptr && value->shape && axis == static_cast<int64_t>(value->shape->size()) - 1;
  };
  return axis == -1 || is_last(node.Input(0)) || is_last(node.Output(0));
}

std::optional<Norm> Operator(const Graph& graph, const Node& node) {
  if (!node.IsStandard("LayerNormalization") || node.Output(0) == nullptr) return std::nullopt;
  const auto is_read = [&](Value value) {
    return value != nullptr && (graph.IsOutput(value) || !graph.Uses(value).empty());
  };
  if (std::any_of(node.outputs().begin() + 1, node.outputs().end(), is_read)) return std::nullopt;
  const std::optional<int64_t> n = LengthOf(graph, node.Input(1));
  if (!n || (node.Has(2) && LengthOf(graph, node.Input(2)) != n)) return std::nullopt;
  if (node.Int("stash_type", 1) != 1 || !IsLastAxis(node, node.Int("axis", -1))) return std::nullopt;
  return Norm{node.Input(1), node.Input(2), node.Float("epsilon", 1e-5f), {&node}};
}

// Return whether a node is a ReduceMean over the last axis that keeps it.
bool IsMean(const Graph& graph, const Node& node) {
  if (!node.IsStandard("ReduceMean") || node.Int("keepdims", 1) != 1) return false;
  if (const std::vector<int64_t> axes = node.Ints("axes"); !axes.empty()) {
    return axes.size() == 1 && IsLastAxis(node, axes[0]);
  }
  const std::optional<double> axis = graph.AnyNumberOf(node.Input(1));  // an input from opset 18
  return axis && IsLastAxis(node, static_cast<int64_t>(*axis));
}

bool IsSquare(const Graph& graph, const Node& node, Value x) {
  if (node.IsStandard("Mul")) return node.Input(0) == x && node.Input(1) == x;
  return node.IsStandard("Pow") && node.Input(0) == x && graph.AnyNumberOf(node.Input(1)) == 2;
}

// Return the only consumer of a node's output if it has this type; null otherwise, or without a node.
const Node* Next(const Graph& graph, const Node* node, const char* type) {
  const Node* const next = node == nullptr ? nullptr : graph.OnlyReader(node->Output(0));
  return next != nullptr && next->IsStandard(type) ? next : nullptr;
}

bool IsOnlyReadBy(const Graph& graph, Value value, const std::vector<const Node*>& nodes) {
  const std::span<const Graph::Use> uses = graph.Uses(value);
  return !graph.IsOutput(value) && std::ranges::all_of(uses, [&](const Graph::Use& use) {
    return use.index >= 0 && std::ranges::find(nodes, use.node) != nodes.end();
  });
}

std::optional<Norm> Formula(const Graph& graph, const Node& mean) {
  const Node* const subtract = IsMean(graph, mean) ? Next(graph, &mean, "Sub") : nullptr;
  if (subtract == nullptr || subtract->inputs() != std::vector{mean.Input(0), mean.Output(0)}) return std::nullopt;
  const Value d = subtract->Output(0);
  const Node* square = nullptr;
  for (const Graph::Use& use : graph.Uses(d)) {
    if (square == nullptr && IsSquare(graph, *use.node, d)) square = use.node;
  }
  const Node* const variance = Next(graph, square, "ReduceMean");
  const Node* const add = Next(graph, variance, "Add");
  const Node* const root = Next(graph, add, "Sqrt");
  const Node* const divide = Next(graph, root, "Div");
  const Node* const multiply = Next(graph, divide, "Mul");
  if (multiply == nullptr || !IsMean(graph, *variance)) return std::nullopt;
  const std::optional<double> epsilon = graph.AnyNumberOf(Other(*add, variance->Output(0)));
  const Value weight = Other(*multiply, divide->Output(0));
  const std::optional<int64_t> n = LengthOf(graph, weight);
  // float16 would be rounded after each operation.
  if (!epsilon || !n || graph.ConstantOf(weight)->type != ElementType::kFloat) return std::nullopt;
  if (divide->inputs() != std::vector{d, root->Output(0)} || !IsOnlyReadBy(graph, d, {square, divide})) {
    return std::nullopt;
  }
  Norm norm{weight, nullptr, static_cast<float>(*epsilon), {&mean, subtract, square, variance, add, root, divide}};
  norm.nodes.push_back(multiply);
  const Node* const plus = Next(graph, multiply, "Add");
  if (plus != nullptr && LengthOf(graph, Other(*plus, multiply->Output(0))) == n) {
    norm.bias = Other(*plus, multiply->Output(0));
    norm.nodes.push_back(plus);
  }
  std::ranges::sort(norm.nodes, [](auto* a, auto* b) { return a->index() < b->index(); });
  return norm;
}

// Return the norm that begins at a node. The formula broadcasts a row of one element to the length of the weight, so
// its caller must compare that length with the row's.
std::optional<Norm> NormAt(const Graph& graph, const Node& node) {
  try {
    std::optional<Norm> norm = Operator(graph, node);
    if (!norm) norm = Formula(graph, node);
    const bool fits = norm && norm->epsilon >= 0 && !std::isinf(norm->epsilon) && LengthOf(graph, norm->weight) >= 2;
    return fits ? norm : std::nullopt;
  } catch (const RefusedError&) {  // an attribute of another type
    return std::nullopt;
  }
}

}  // namespace

std::optional<Norm> FindNorm(const Graph& graph, Value x, int64_t n) {
  for (const Graph::Use& use : graph.Uses(x)) {
    if (use.index != 0) continue;
    std::optional<Norm> norm = NormAt(graph, *use.node);
    if (norm && LengthOf(graph, norm->weight) == n && IsOnlyReadBy(graph, x, norm->nodes)) return norm;
  }
  return std::nullopt;
}

std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& first,
                                   const std::function<std::optional<int64_t>(Value)>& columns_of,
                                   const std::function<bool(const Node&)>& may_take) {
  const Value x = first.Input(0);
  std::optional<Norm> norm = x == nullptr || graph.IsConstantValue(x) ? std::nullopt : NormAt(graph, first);
  if (!norm) return std::nullopt;
  const auto can_take = [&](const Node* node) { return may_take(*node); };
  const auto has_rows = [&, n = LengthOf(graph, norm->weight)](Value value) { return columns_of(value) == n; };
  const bool is_formula = norm->nodes.size() > 1;
  if ((is_formula && !has_rows(x)) || !std::ranges::all_of(norm->nodes, can_take)) {
    return std::nullopt;
  }
  SumNorm found{std::move(*norm), {x}, {}};
  // Return the Add that computes an operand, if no other node reads the operand.
  const auto sum_of = [&](Value value) -> const Node* {
    const bool is_free = value == x ? IsOnlyReadBy(graph, x, found.norm.nodes) : graph.OnlyReader(value) != nullptr;
    const Node* const add = is_free ? graph.Maker(value) : nullptr;
    const bool fits = add != nullptr && add->IsStandard("Add") && may_take(*add) && has_rows(value) &&
                      std::ranges::all_of(add->inputs(), has_rows);
    return fits ? add : nullptr;
  };
  while (found.operands.size() < kMostSumOperands) {
    // Addition of the first two operands is commutative, so either may be expanded.
    const auto end = found.operands.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(found.operands.size(), 2));
    const auto sum = std::find_if(found.operands.begin(), end, [&](Value value) { return sum_of(value) != nullptr; });
    if (sum == end) break;
    const Node* const add = sum_of(*sum);
    found.operands.erase(sum);
    found.operands.insert(found.operands.begin(), add->inputs().begin(), add->inputs().end());
    found.sums.push_back(add);
  }
  return found;
}

}  // namespace ortolan::match
