#include "provider/epilogue.h"

#include <algorithm>
#include <string>

namespace ortolan::provider {
namespace {

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

Norm ReadNorm(const Graph& graph, const match::Norm& norm) {
  Norm read{norm.nodes.back(), graph.ConstantOf(norm.weight)->Floats(), {}, norm.epsilon};
  read.bias = norm.bias == nullptr ? std::vector<float>(read.weight.size()) : graph.ConstantOf(norm.bias)->Floats();
  return read;
}

std::string SumNorm::Described() const {
  std::string text = ErrorText(norm.weight.size(), " numbers");
  if (operands.size() > 1) {
    text += ErrorText(", with ", operands.size() - 1, operands.size() > 2 ? " additions" : " addition", " in front");
  }
  return text;
}

std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& node, const std::set<const Node*>& taken) {
  const auto columns_of = [](Value value) -> std::optional<int64_t> {
    const std::optional<Shape> shape = value == nullptr ? std::nullopt : DeclaredShape(value);
    const bool has_rows = shape && !shape->empty() && std::ranges::find(*shape, 0) == shape->end();
    return has_rows ? std::optional(shape->back()) : std::nullopt;
  };
  std::optional<match::SumNorm> found =
      match::FindSumNorm(graph, node, columns_of, [&](const Node& one) { return taken.count(&one) == 0; });
  if (!found) return std::nullopt;
  SumNorm norm{ReadNorm(graph, found->norm), std::move(found->operands), found->norm.nodes, found->norm.Output()};
  norm.nodes.insert(norm.nodes.end(), found->sums.begin(), found->sums.end());
  return norm;
}

}  // namespace ortolan::provider
