#include "provider/epilogue.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <string>

#include "epilogue/formula.h"
#include "formats/float16.h"

namespace ortolan::provider {
namespace {

// --- activations --------------------------------------------------------------------------------------------------

// Return the activation that the node's operator computes; kNone for other operators.
Activation ActivationOf(const Node& node) {
  if (std::count_if(node.inputs().begin(), node.inputs().end(), [](Value value) { return value != nullptr; }) != 1) {
    return Activation::kNone;  // FastGelu with a bias
  }
  if (node.IsStandard("Relu")) return Activation::kRelu;
  if (node.IsStandard("Gelu")) {
    const std::string approximate = node.String("approximate", "none");
    if (approximate == "none") return Activation::kGelu;
    return approximate == "tanh" ? Activation::kGeluTanh : Activation::kNone;
  }
  if (node.IsStandard("Swish")) return node.Float("alpha", 1.0f) == 1.0f ? Activation::kSilu : Activation::kNone;
  if (node.Is("com.microsoft", "QuickGelu")) {
    return node.Float("alpha", 1.702f) == 1.0f ? Activation::kSilu : Activation::kNone;
  }
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
      if (const std::optional<float> number = graph_.NumberOf(value)) known.constant = Unrounded(value, *number);
    }
    return id->second;
  }

  // Undo the float16 rounding of an activation's constants, which would be too inexact for FindFormula.
  double Unrounded(Value value, float number) const {
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
      if (std::find(originals_.begin(), originals_.end(), use.node) != originals_.end()) continue;
      const bool fits = use.index >= 0 && use.node->IsStandard() && use.node->Output(0) != nullptr;
      if (!fits || nodes_.size() == kMostFormulaNodes) {
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

// --- LayerNormalization -------------------------------------------------------------------------------------------

// Return the floats of a constant with at most `axes` axes; only its last axis may be larger than 1. n: required
// number of elements.
std::optional<std::vector<float>> VectorOf(const Graph& graph, Value value, std::optional<int64_t> n = std::nullopt,
                                           size_t axes = 1) {
  const std::optional<Constant> tensor = graph.ConstantOf(value);
  if (!tensor || !IsFloatType(tensor->type) || tensor->shape.empty() || tensor->shape.size() > axes)
    return std::nullopt;
  Shape expected(tensor->shape.size(), 1);
  expected.back() = n.value_or(tensor->shape.back());
  if (tensor->shape != expected) return std::nullopt;
  return tensor->Floats();
}

bool IsLastAxis(const Node& node) {
  const int64_t axis = node.Int("axis", -1);
  if (axis == -1) return true;
  const std::optional<Shape> shape = DeclaredShape(node.Input(0));
  return shape && axis == static_cast<int64_t>(shape->size()) - 1;
}

}  // namespace

void TakeBias(const Graph& graph, Layer& layer) {
  if (!layer.bias.empty()) return;
  const Node* const add = graph.OnlyReader(layer.y);
  if (add == nullptr || !add->IsStandard("Add") || add->Output(0) == nullptr) return;
  const std::optional<Shape> shape = DeclaredShape(layer.y);  // the bias must not have more axes than this
  const size_t axes = shape ? std::max<size_t>(shape->size(), 1) : 1;
  std::optional<std::vector<float>> bias = VectorOf(graph, Other(*add, layer.y), layer.Columns(), axes);
  if (!bias) return;
  layer.bias = std::move(*bias);
  layer.nodes.push_back(add);
  layer.y = add->Output(0);
}

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

std::optional<Norm> ReadNorm(const Graph& graph, const Node& node) {
  if (!node.IsStandard("LayerNormalization") || node.Output(0) == nullptr) return std::nullopt;
  for (size_t i = 1; i < node.outputs().size(); ++i) {
    const Value other = node.Output(i);
    if (other != nullptr && (graph.IsOutput(other) || !graph.Uses(other).empty())) return std::nullopt;
  }
  if (node.Int("stash_type", 1) != 1 || !IsLastAxis(node)) return std::nullopt;
  std::optional<std::vector<float>> weight = VectorOf(graph, node.Input(1));
  if (!weight || weight->size() < 2) return std::nullopt;
  std::optional<std::vector<float>> bias = std::vector<float>(weight->size());
  if (node.Has(2)) bias = VectorOf(graph, node.Input(2), static_cast<int64_t>(weight->size()));
  const float epsilon = node.Float("epsilon", 1e-5f);
  if (!bias || !(epsilon >= 0) || std::isinf(epsilon)) return std::nullopt;
  return Norm{&node, std::move(*weight), std::move(*bias), epsilon};
}

std::optional<Norm> FindNorm(const Graph& graph, Value x, int64_t n) {
  const Node* const node = graph.OnlyReader(x);
  if (node == nullptr || node->Input(0) != x) return std::nullopt;
  std::optional<Norm> norm = ReadNorm(graph, *node);
  return norm && static_cast<int64_t>(norm->weight.size()) == n ? std::move(norm) : std::nullopt;
}

}  // namespace ortolan::provider
