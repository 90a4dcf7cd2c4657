#include "provider/epilogue.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <numbers>
#include <string>

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;

// --- activations --------------------------------------------------------------------------------------------------

// A sum of products: factors, sorted, and their coefficient. x is the layer's value, E, T and S stand for erf, tanh and
// sigmoid of the one argument that activations have; "" is the constant term.
using Polynomial = std::map<std::string, double>;

constexpr size_t kMostDegree = 3;
// Room for the product of a few numbers that were rounded to float, or written with seven digits.
constexpr double kTolerance = 1e-6;

struct Function {
  const char* type;
  const char* name;
  Polynomial argument;
};

const std::vector<Function>& Functions() {
  static const double tanh_scale = std::sqrt(2 / std::numbers::pi);
  static const std::vector<Function> functions = {
      {"Erf", "E", {{"x", std::sqrt(0.5)}}},
      {"Tanh", "T", {{"x", tanh_scale}, {"xxx", 0.044715 * tanh_scale}}},
      {"Sigmoid", "S", {{"x", 1.0}}},
  };
  return functions;
}

struct Formula {
  Activation activation;
  Polynomial polynomial;
};

const std::vector<Formula>& Formulas() {
  static const std::vector<Formula> formulas = {
      {Activation::kGelu, {{"x", 0.5}, {"Ex", 0.5}}},
      {Activation::kGeluTanh, {{"x", 0.5}, {"Tx", 0.5}}},
      {Activation::kSilu, {{"Sx", 1.0}}},
  };
  return formulas;
}

bool IsSame(const Polynomial& a, const Polynomial& b) {
  const auto is_close = [](const auto& one, const auto& other) {
    const double most = std::max(std::abs(one.second), std::abs(other.second));
    return one.first == other.first && std::abs(one.second - other.second) <= kTolerance * most;
  };
  return a.size() == b.size() && std::equal(a.begin(), a.end(), b.begin(), is_close);
}

std::optional<Polynomial> Product(const Polynomial& a, const Polynomial& b) {
  Polynomial product;
  for (const auto& [left, p] : a) {
    for (const auto& [right, q] : b) {
      std::string term = left + right;
      if (term.size() > kMostDegree) return std::nullopt;
      std::sort(term.begin(), term.end());
      product[term] += p * q;
    }
  }
  return product;
}

class Formulation {
 public:
  Formulation(const Graph& graph, Value x) : graph_(graph) { known_[x] = {{"x", 1.0}}; }

  // What the node computes of what is known; none: it is no polynomial, or hangs on what is not known.
  std::optional<Polynomial> Evaluate(const Node& node) const {
    if (!node.IsStandard()) return std::nullopt;
    const std::optional<Polynomial> first = Operand(node.Input(0));
    if (!first) return std::nullopt;
    for (const Function& function : Functions()) {
      if (node.type() != function.type) continue;
      if (!IsSame(*first, function.argument)) return std::nullopt;
      return Polynomial{{function.name, 1.0}};
    }
    if (node.inputs().size() != 2) return std::nullopt;
    const std::optional<Polynomial> second = Operand(node.Input(1));
    if (!second) return std::nullopt;
    return Binary(node.type(), *first, *second);
  }

  void Know(Value value, const Polynomial& polynomial) { known_[value] = polynomial; }

 private:
  static std::optional<Polynomial> Binary(const std::string& type, const Polynomial& a, const Polynomial& b) {
    if (type == "Mul") return Product(a, b);
    if (type == "Add") {
      Polynomial sum = a;
      for (const auto& [term, coefficient] : b) sum[term] += coefficient;
      return sum;
    }
    const bool is_number = b.size() == 1 && b.begin()->first.empty();
    if (!is_number) return std::nullopt;
    const double number = b.begin()->second;
    if (type == "Div") {
      Polynomial quotient = a;
      for (auto& [term, coefficient] : quotient) coefficient /= number;
      return quotient;
    }
    if (type != "Pow" || (number != 2 && number != 3)) return std::nullopt;
    const std::optional<Polynomial> square = Product(a, a);
    return number == 2 || !square ? square : Product(*square, a);
  }

  std::optional<Polynomial> Operand(Value value) const {
    if (value == nullptr) return std::nullopt;
    const auto found = known_.find(value);
    if (found != known_.end()) return found->second;
    const std::optional<float> number = graph_.NumberOf(value);
    // All numbers of activations are positive. Without others nothing can cancel out, and so the order of operations,
    // which polynomials forget, changes results by no more than roundings.
    if (!number || !(*number > 0) || std::isinf(*number)) return std::nullopt;
    return Polynomial{{"", *number}};
  }

  const Graph& graph_;
  std::map<Value, Polynomial> known_;
};

// An operator that is an activation by itself.
Activation ActivationOf(const Node& node) {
  if (std::count_if(node.inputs().begin(), node.inputs().end(), [](Value value) { return value != nullptr; }) != 1) {
    return Activation::kNone;  // FastGelu with a bias
  }
  if (node.IsStandard("Relu")) return Activation::kRelu;
  if (node.IsStandard("Gelu")) {
    const std::string approximate = node.Text("approximate", "none");
    if (approximate == "none") return Activation::kGelu;
    return approximate == "tanh" ? Activation::kGeluTanh : Activation::kNone;
  }
  if (node.IsStandard("Swish")) return node.Number("alpha", 1.0f) == 1.0f ? Activation::kSilu : Activation::kNone;
  if (node.Is("com.microsoft", "QuickGelu")) {
    return node.Number("alpha", 1.702f) == 1.0f ? Activation::kSilu : Activation::kNone;
  }
  if (node.Is("com.microsoft", "Gelu")) return Activation::kGelu;
  return node.Is("com.microsoft", "FastGelu") ? Activation::kGeluTanh : Activation::kNone;
}

// Grows a region of nodes from x until one value is all that leaves it and that value is an activation of x.
Activation TakeFormula(const Graph& graph, Value& x, std::vector<const Node*>& nodes) {
  Formulation known(graph, x);
  std::vector<const Node*> region, waiting;
  Value newest = x;
  while (newest != nullptr && !graph.IsOutput(newest)) {
    for (const Graph::Use& use : graph.Uses(newest)) {
      if (use.index < 0) return Activation::kNone;
      if (std::find(waiting.begin(), waiting.end(), use.node) == waiting.end()) waiting.push_back(use.node);
    }
    std::optional<Polynomial> polynomial;
    const auto next = std::find_if(waiting.begin(), waiting.end(), [&](const Node* node) {
      polynomial = known.Evaluate(*node);
      return polynomial.has_value();
    });
    if (next == waiting.end()) break;
    const Node& node = **next;
    waiting.erase(next);
    region.push_back(&node);
    newest = node.Output(0);
    if (waiting.empty() && newest != nullptr) {
      for (const Formula& formula : Formulas()) {
        if (!IsSame(*polynomial, formula.polynomial)) continue;
        nodes.insert(nodes.end(), region.begin(), region.end());
        x = newest;
        return formula.activation;
      }
    }
    known.Know(newest, *polynomial);
  }
  return Activation::kNone;
}

// --- LayerNormalization -------------------------------------------------------------------------------------------

std::optional<std::vector<float>> VectorOf(const Graph& graph, Value value, int64_t n) {
  const std::optional<Constant> tensor = graph.ConstantOf(value);
  if (!tensor || tensor->type != kFloat || tensor->shape != Shape{n}) return std::nullopt;
  return tensor->Floats();
}

bool IsLastAxis(const Graph& graph, const Node& node) {
  const int64_t axis = node.Whole("axis", -1);
  if (axis == -1) return true;
  const std::optional<Shape> shape = ShapeOf(graph.host(), node.Input(0));
  return shape && axis == static_cast<int64_t>(shape->size()) - 1;
}

}  // namespace

void TakeBias(const Graph& graph, Layer& layer) {
  if (!layer.bias.empty()) return;
  const Node* const add = graph.OnlyReader(layer.y);
  if (add == nullptr || !add->IsStandard("Add") || add->Output(0) == nullptr) return;
  std::optional<std::vector<float>> bias = VectorOf(graph, Other(*add, layer.y), layer.Columns());
  if (!bias) return;
  layer.bias = std::move(*bias);
  layer.nodes.push_back(add);
  layer.y = add->Output(0);
}

Activation TakeActivation(const Graph& graph, Value& x, std::vector<const Node*>& nodes) {
  const Node* const node = graph.OnlyReader(x);
  const Activation activation = node == nullptr ? Activation::kNone : ActivationOf(*node);
  if (activation == Activation::kNone) return TakeFormula(graph, x, nodes);
  if (node->Output(0) == nullptr) return Activation::kNone;
  nodes.push_back(node);
  x = node->Output(0);
  return activation;
}

std::optional<Norm> FindNorm(const Graph& graph, Value x, int64_t n) {
  // With one column, x could be broadcast to more by what was added to it.
  const Node* const node = n < 2 ? nullptr : graph.OnlyReader(x);
  if (node == nullptr || !node->IsStandard("LayerNormalization") || node->Input(0) != x) return std::nullopt;
  for (size_t i = 1; i < node->outputs().size(); ++i) {
    const Value other = node->Output(i);
    if (other != nullptr && (graph.IsOutput(other) || !graph.Uses(other).empty())) return std::nullopt;
  }
  if (node->Whole("stash_type", 1) != 1 || !IsLastAxis(graph, *node) || node->Output(0) == nullptr) return std::nullopt;
  std::optional<std::vector<float>> weight = VectorOf(graph, node->Input(1), n);
  std::optional<std::vector<float>> bias = std::vector<float>(static_cast<size_t>(n));
  if (node->Has(2)) bias = VectorOf(graph, node->Input(2), n);
  const float epsilon = node->Number("epsilon", 1e-5f);
  if (!weight || !bias || !(epsilon >= 0) || std::isinf(epsilon)) return std::nullopt;
  return Norm{node, std::move(*weight), std::move(*bias), epsilon};
}

}  // namespace ortolan::provider
