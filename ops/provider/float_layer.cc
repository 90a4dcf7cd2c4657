#include "provider/float_layer.h"

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;
constexpr auto kHalf = ElementType::kFloat16;

enum Input : size_t { kX, kWeight, kBias };

// Read Y = alpha X W + beta C with a constant C [n].
void ReadGemm(const Node& node, Layer& layer, RoundedWeight& w) {
  Expect(node.Int("transA", 0) == 0, "transA is 1, expected 0");
  const float alpha = node.Float("alpha", 1.0f), beta = node.Float("beta", 1.0f);
  Expect(alpha == 1.0f && beta == 1.0f, ErrorText("alpha is ", alpha, " and beta ", beta, ", expected 1"));
  if (node.Int("transB", 0) != 0) {
    w.transposed = true;
    std::swap(w.k, w.n);
  }
  if (node.Has(kBias)) layer.bias = node.ConstantInput(kBias, "bias", {kFloat, kHalf}, {{w.n}}).Floats();
}

}  // namespace

bool IsFloatLayer(const Graph& graph, const Node& node) {
  if (!node.IsStandard("MatMul") && !node.IsStandard("Gemm")) return false;
  if (!node.Has(kX) || !graph.IsConstantValue(node.Input(kWeight)) || graph.IsConstantValue(node.Input(kX)))
    return false;
  return node.Output(0) != nullptr;
}

Layer ReadFloatLayer(const Node& node, Precision precision) {
  const Constant tensor = node.ConstantInput(kWeight, "weight", {kFloat, kHalf});
  Expect(tensor.shape.size() == 2,
         ErrorText("its weight '", tensor.name, "' is ", tensor.shape.size(), "-D, expected 2-D"));
  Layer layer;
  layer.nodes = {&node};
  layer.x = node.Input(kX);
  layer.y = node.Output(0);
  RoundedWeight w;
  w.precision = precision;
  w.k = tensor.shape[0];
  w.n = tensor.shape[1];
  w.values = tensor.data;
  w.is_half = tensor.type == kHalf;
  if (node.type() == "Gemm") ReadGemm(node, layer, w);
  const std::string problem = precision == Precision::kBf16 ? WhyNotBf16(w) : WhyNotInt8(w);
  Expect(problem.empty(), problem);
  layer.weight = w;
  return layer;
}

}  // namespace ortolan::provider
