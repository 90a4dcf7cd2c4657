#include "provider/sum_norm.h"

#include <algorithm>

#include "add_layer_norm/plan.h"

namespace ortolan::provider {
namespace {

// Return whether the node adds two values whose rows have n elements, as those of the sum.
bool IsSumOfRows(const Node& node, int64_t n) {
  if (!node.IsStandard("Add") || node.Output(0) == nullptr) return false;
  return std::all_of(node.inputs().begin(), node.inputs().end(), [&](Value value) {
    const std::optional<Shape> shape = DeclaredShape(value);
    const bool has_rows = shape && std::find(shape->begin(), shape->end(), 0) == shape->end();
    return has_rows && !shape->empty() && shape->back() == n;
  });
}

}  // namespace

std::string SumNorm::Described() const {
  std::string text = ErrorText(norm.weight.size(), " numbers");
  if (operands.size() > 1) {
    text += ErrorText(", with ", operands.size() - 1, operands.size() > 2 ? " additions" : " addition", " in front");
  }
  return text;
}

std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& node, const std::set<const Node*>& taken) {
  std::optional<Norm> norm = taken.count(&node) == 0 ? ReadNorm(graph, node) : std::nullopt;
  if (!norm || !graph.IsFloatOrHalf(node.Input(0)) || graph.IsConstantValue(node.Input(0))) return std::nullopt;
  SumNorm found{std::move(*norm), {node.Input(0)}, {&node}, node.Output(0)};
  const int64_t n = static_cast<int64_t>(found.norm.weight.size());
  // Return the Add that computes the value, if the value has no other consumer.
  const auto sum_of = [&](Value value) -> const Node* {
    const Node* const add = graph.OnlyReader(value) == nullptr ? nullptr : graph.Maker(value);
    return add != nullptr && taken.count(add) == 0 && IsSumOfRows(*add, n) ? add : nullptr;
  };
  while (found.operands.size() < kMostSumOperands) {
    // Addition of the first two operands is commutative, so either may be expanded.
    const auto end = found.operands.begin() + static_cast<std::ptrdiff_t>(std::min<size_t>(found.operands.size(), 2));
    const auto sum = std::find_if(found.operands.begin(), end, [&](Value value) { return sum_of(value) != nullptr; });
    if (sum == end) break;
    const Node* const add = sum_of(*sum);
    found.operands.erase(sum);
    found.operands.insert(found.operands.begin(), add->inputs().begin(), add->inputs().end());
    found.nodes.push_back(add);
  }
  return found;
}

}  // namespace ortolan::provider
