#include "epilogue/formula.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numbers>

namespace ortolan {
namespace {

// A sum of products: the sorted factors of each product, and its coefficient. x is the layer's output; E, T and S are
// erf, tanh and sigmoid of the argument that activations use; "" is the constant term.
using Polynomial = std::map<std::string, double>;

constexpr size_t kMostDegree = 3;
// Tolerance for products of constants that were rounded to float or written with seven digits.
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

std::optional<Polynomial> Binary(const std::string& type, const Polynomial& a, const Polynomial& b) {
  if (type == "Mul") return Product(a, b);
  if (type == "Add") {
    Polynomial sum = a;
    for (const auto& [term, coefficient] : b) sum[term] += coefficient;
    return sum;
  }
  const bool is_constant = b.size() == 1 && b.begin()->first.empty();
  if (!is_constant) return std::nullopt;
  const double constant = b.begin()->second;
  if (type == "Div") {
    Polynomial quotient = a;
    for (auto& [term, coefficient] : quotient) coefficient /= constant;
    return quotient;
  }
  if (type != "Pow" || (constant != 2 && constant != 3)) return std::nullopt;
  const std::optional<Polynomial> square = Product(a, a);
  return constant == 2 || !square ? square : Product(*square, a);
}

class Formulation {
 public:
  Formulation(int64_t x, const std::vector<FormulaNode>& nodes, const std::vector<FormulaValue>& values)
      : x_(x), nodes_(nodes), values_(values) {
    known_[x] = {{"x", 1.0}};
  }

  FoundFormula Find() {
    FoundFormula found;
    std::vector<int64_t> waiting;  // nodes outside the region that read its values
    int64_t newest = x_;
    while (newest >= 0 && !values_[static_cast<size_t>(newest)].is_seen) {
      for (size_t i = 0; i < nodes_.size(); ++i) {
        const auto& inputs = nodes_[i].inputs;
        const bool reads = std::find(inputs.begin(), inputs.end(), newest) != inputs.end();
        const int64_t node = static_cast<int64_t>(i);
        if (reads && std::find(waiting.begin(), waiting.end(), node) == waiting.end()) waiting.push_back(node);
      }
      std::optional<Polynomial> polynomial;
      const auto next = std::find_if(waiting.begin(), waiting.end(), [&](int64_t node) {
        polynomial = Evaluate(nodes_[static_cast<size_t>(node)]);
        return polynomial.has_value();
      });
      if (next == waiting.end()) break;
      const int64_t node = *next;
      waiting.erase(next);
      found.nodes.push_back(node);
      newest = nodes_[static_cast<size_t>(node)].output;
      if (waiting.empty()) {
        for (const Formula& formula : Formulas()) {
          if (!IsSame(*polynomial, formula.polynomial)) continue;
          found.activation = formula.activation;
          return found;
        }
      }
      known_[newest] = *polynomial;
    }
    return {};
  }

 private:
  // Evaluates a node. No value if it is not a polynomial, or if an input is unknown.
  std::optional<Polynomial> Evaluate(const FormulaNode& node) const {
    if (node.inputs.empty()) return std::nullopt;
    const std::optional<Polynomial> first = Operand(node.inputs[0]);
    if (!first) return std::nullopt;
    for (const Function& function : Functions()) {
      if (node.type != function.type) continue;
      if (!IsSame(*first, function.argument)) return std::nullopt;
      return Polynomial{{function.name, 1.0}};
    }
    if (node.inputs.size() != 2) return std::nullopt;
    const std::optional<Polynomial> second = Operand(node.inputs[1]);
    return second ? Binary(node.type, *first, *second) : std::nullopt;
  }

  std::optional<Polynomial> Operand(int64_t value) const {
    const auto found = known_.find(value);
    if (found != known_.end()) return found->second;
    if (value < 0) return std::nullopt;
    const std::optional<double> constant = values_[static_cast<size_t>(value)].constant;
    // All constants of activations are positive. Then nothing can cancel, so reordering operations, which polynomials
    // ignore, changes results only by rounding.
    if (!constant || !(*constant > 0) || std::isinf(*constant)) return std::nullopt;
    return Polynomial{{"", *constant}};
  }

  const int64_t x_;
  const std::vector<FormulaNode>& nodes_;
  const std::vector<FormulaValue>& values_;
  std::map<int64_t, Polynomial> known_;
};

}  // namespace

FoundFormula FindFormula(int64_t x, const std::vector<FormulaNode>& nodes, const std::vector<FormulaValue>& values) {
  return Formulation(x, nodes, values).Find();
}

}  // namespace ortolan
