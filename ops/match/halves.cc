#include "match/halves.h"

#include <algorithm>

namespace ortolan::match {
namespace {

using Numbers = std::vector<int64_t>;

std::optional<Numbers> NumbersOf(const Graph& graph, Value value) {
  const std::optional<Constant> constant = value == nullptr ? std::nullopt : graph.ConstantOf(value);
  const bool is_integer = constant && (constant->type == ElementType::kInt64 || constant->type == ElementType::kInt32);
  const std::optional<std::vector<double>> numbers = is_integer ? constant->Numbers() : std::nullopt;
  if (!numbers) return std::nullopt;
  Numbers found;
  // int64's limits stand for the end of an axis, and do not fit all conversions.
  for (const double number : *numbers) found.push_back(static_cast<int64_t>(std::clamp(number, -1e15, 1e15)));
  return found;
}

// Return whether the axis is the last one, for an operator that keeps the rank of its first input.
bool IsLastAxis(const Node& node, int64_t axis) {
  const auto is_last_of = [&](Value value) {
    return value != nullptr && value->shape && axis == static_cast<int64_t>(value->shape->size()) - 1;
  };
  return axis == -1 || is_last_of(node.Input(0)) || is_last_of(node.Output(0));
}

bool SplitsInHalves(const Graph& graph, const Node& node, int64_t columns) {
  if (!node.IsStandard("Split") || node.outputs().size() != 2 || !IsLastAxis(node, node.Int("axis", 0))) return false;
  return !node.Has(1) || NumbersOf(graph, node.Input(1)) == Numbers(2, columns / 2);
}

// Return whether the node is a Slice of the columns from `first` to `end`.
bool Slices(const Graph& graph, const Node& node, int64_t first, int64_t end, int64_t columns) {
  if (!node.IsStandard("Slice") || node.Output(0) == nullptr) return false;
  const auto starts = NumbersOf(graph, node.Input(1)), ends = NumbersOf(graph, node.Input(2)),
             axes = NumbersOf(graph, node.Input(3));
  if (!starts || !ends || !axes || starts->size() != 1 || ends->size() != 1 || axes->size() != 1) return false;
  if (node.Has(4) && NumbersOf(graph, node.Input(4)) != Numbers{1}) return false;
  const auto place = [&](int64_t index) {
    return std::clamp<int64_t>(index < 0 ? index + columns : index, 0, columns);
  };
  return IsLastAxis(node, axes->front()) && place(starts->front()) == first && place(ends->front()) == end;
}

}  // namespace

std::optional<Halves> FindHalves(const Graph& graph, Value value, int64_t columns) {
  const std::span<const Graph::Use> uses = graph.Uses(value);
  const auto is_first_input = [](const Graph::Use& use) { return use.index == 0; };
  if (columns < 2 || columns % 2 != 0 || graph.IsOutput(value) || !std::ranges::all_of(uses, is_first_input)) {
    return std::nullopt;
  }
  if (uses.size() == 1) {
    const Node& node = *uses[0].node;
    if (!SplitsInHalves(graph, node, columns) || !node.Output(0) || !node.Output(1)) return std::nullopt;
    return Halves{{node.Output(0), node.Output(1)}, {&node}};
  }
  if (uses.size() != 2) return std::nullopt;
  const Node *first = uses[0].node, *second = uses[1].node;
  if (Slices(graph, *second, 0, columns / 2, columns)) std::swap(first, second);
  if (!Slices(graph, *first, 0, columns / 2, columns) || !Slices(graph, *second, columns / 2, columns, columns)) {
    return std::nullopt;
  }
  Halves found{{first->Output(0), second->Output(0)}, {first, second}};
  std::ranges::sort(found.nodes, [](const Node* a, const Node* b) { return a->index() < b->index(); });
  return found;
}

}  // namespace ortolan::match
