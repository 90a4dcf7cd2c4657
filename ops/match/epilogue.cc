#include "match/epilogue.h"

#include <algorithm>
#include <map>
#include <numbers>
#include <string>

#include "epilogue/formula.h"
#include "formats/float16.h"

namespace ortolan::match {
namespace {

// Return the activation that the node's operator computes; kNone for other operators.
Activation ActivationOf(const Node& node) {
  if (std::ranges::count_if(node.inputs(), [](Value value) { return value != nullptr; }) != 1) {
    return Activation::kNone;  // for example, FastGelu with a bias
  }
  const auto silu_if = [&](float missing) {
    return node.Float("alpha", missing) == 1.0f ? Activation::kSilu : Activation::kNone;
  };
  if (node.IsStandard("Relu")) return Activation::kRelu;
  if (node.IsStandard("Gelu")) {
    const std::string approximate = node.String("approximate", "none");
    if (approximate == "none") return Activation::kGelu;
    return approximate == "tanh" ? Activation::kGeluTanh : Activation::kNone;
  }
  if (node.IsStandard("Swish")) return silu_if(1.0f);
  if (node.Is("com.microsoft", "QuickGelu")) return silu_if(1.702f);
  if (node.Is("com.microsoft", "Gelu")) return Activation::kGelu;
  return node.Is("com.microsoft", "FastGelu") ? Activation::kGeluTanh : Activation::kNone;
}

// The nodes that follow x, converted for formula.h, up to the size limit of a formula.
class Region {
 public:
  Region(const Graph& graph, Value x) : graph_(graph), waiting_{x} {
    for (size_t i = 0; i < waiting_.size(); ++i) Follow(waiting_[i]);
  }

  FoundFormula Find() const { return FindFormula(0, nodes_, values_); }
  const Node& node(int64_t index) const { return *originals_[static_cast<size_t>(index)]; }

 private:
  int64_t IdOf(Value value) {
    const auto [id, is_new] = ids_.try_emplace(value, static_cast<int64_t>(values_.size()));
    if (is_new) {
      FormulaValue& known = values_.emplace_back();
      if (const std::optional<double> number = graph_.AnyNumberOf(value)) known.constant = Unrounded(value, *number);
    }
    return id->second;
  }

  // Undo the float16 rounding of an activation's constants, which would be too inexact for FindFormula.
  static double Unrounded(Value value, double number) {
    if (value->type != ElementType::kFloat16) return number;
    for (const double exact :
         {std::numbers::sqrt2, 1 / std::numbers::sqrt2, std::numbers::sqrt2 * std::numbers::inv_sqrtpi, 0.044715}) {
      if (HalfToFloat(FloatToHalf(static_cast<float>(exact))) == number) return exact;
    }
    return number;
  }

  void Follow(Value value) {
    const size_t id = static_cast<size_t>(IdOf(value));
    bool is_seen = graph_.IsOutput(value);
    for (const Graph::Use& use : graph_.Uses(value)) {
      if (std::ranges::find(originals_, use.node) != originals_.end()) continue;
      const bool has_one = use.node->outputs().size() == 1 && use.node->Output(0) != nullptr;
      if (use.index < 0 || !use.node->IsStandard() || !has_one || nodes_.size() == kMostFormulaNodes) {
        is_seen = true;
        continue;
      }
      FormulaNode node;
      node.type = use.node->type();
      for (const Value input : use.node->inputs()) node.inputs.push_back(input == nullptr ? -1 : IdOf(input));
      node.output = IdOf(use.node->Output(0));
      waiting_.push_back(use.node->Output(0));
      nodes_.push_back(std::move(node));
      originals_.push_back(use.node);
    }
    values_[id].is_seen = is_seen;
  }

  const Graph& graph_;
  std::vector<Value> waiting_;  // x and the outputs of the nodes, to be followed
  std::map<Value, int64_t> ids_;
  std::vector<FormulaNode> nodes_;
  std::vector<const Node*> originals_;
  std::vector<FormulaValue> values_;
};

}  // namespace

Activation TakeActivation(const Graph& graph, Value& x, std::vector<const Node*>& nodes) {
  const Node* const node = graph.OnlyReader(x);
  const Activation activation = node == nullptr ? Activation::kNone : ActivationOf(*node);
  if (activation == Activation::kNone) {
    const Region region(graph, x);
    const FoundFormula found = region.Find();
    for (const int64_t one : found.nodes) nodes.push_back(&region.node(one));
    if (!found.nodes.empty()) x = nodes.back()->Output(0);
    return found.activation;
  }
  if (node->Output(0) == nullptr) return Activation::kNone;
  nodes.push_back(node);
  x = node->Output(0);
  return activation;
}

Value TakeFactor(const Graph& graph, std::span<const Value> factors, Value& x, std::vector<const Node*>& nodes) {
  const Node* const multiply = graph.OnlyReader(x);
  if (multiply == nullptr || !multiply->IsStandard("Mul") || multiply->Output(0) == nullptr) return nullptr;
  const Value other = Other(*multiply, x);
  const bool fits =
      other != nullptr && std::ranges::find(factors, other) != factors.end() && graph.OnlyReader(other) == multiply;
  if (!fits) return nullptr;
  nodes.push_back(multiply);
  x = multiply->Output(0);
  return other;
}

const Node* SumOf(const Graph& graph, Value x) {
  const Node* const add = graph.OnlyReader(x);
  return add != nullptr && add->IsStandard("Add") && add->Output(0) != nullptr ? add : nullptr;
}

Epilogue FindEpilogue(const Graph& graph, Value output, std::span<const Value> factors, int64_t columns,
                      const std::function<bool(const Node&)>& may_take) {
  Epilogue found;
  found.output = output;
  const auto can_take = [&](const std::vector<const Node*>& nodes) {
    return std::ranges::all_of(nodes, [&](const Node* node) { return may_take(*node); });
  };
  Epilogue next = found;
  next.activation = TakeActivation(graph, next.output, next.nodes);
  if (can_take(next.nodes)) found = next;
  next = found;
  next.factor = TakeFactor(graph, factors, next.output, next.nodes);
  if (can_take(next.nodes)) found = next;
  if (const Node* const add = SumOf(graph, found.output); add != nullptr && may_take(*add)) {
    found.residual = Other(*add, found.output);
    found.sum = add;
    found.nodes.push_back(add);
    found.output = add->Output(0);
  }
  std::optional<Norm> norm = FindNorm(graph, found.output, columns);
  if (norm && can_take(norm->nodes)) {
    found.nodes.insert(found.nodes.end(), norm->nodes.begin(), norm->nodes.end());
    found.output = norm->Output();
    found.norm = std::move(norm);
  }
  std::ranges::sort(found.nodes, [](auto* a, auto* b) { return a->index() < b->index(); });
  return found;
}

}  // namespace ortolan::match
