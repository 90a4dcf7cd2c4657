#include "provider/static_layer.h"

#include <cstring>

#include "provider/int8_constants.h"

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;
constexpr auto kInt32 = ElementType::kInt32;
constexpr const char* kMicrosoft = "com.microsoft";
constexpr const char* kOthersRead = "its weight has other consumers";

// --- the input ----------------------------------------------------------------------------------------------------

void SetX(const Graph& graph, const QdqPair& rounding, Layer& layer) {
  const bool is_clipped = rounding.state == QdqPair::State::kClipped, quantizes = rounding.floats != nullptr;
  if (quantizes) layer.quantize = rounding.maker;
  if (quantizes && is_clipped) layer.x_bounds = rounding.range.FromZero();
  layer.x = graph.Seen(quantizes ? rounding.floats : rounding.ends.front()->Output(0));
}

std::string WhyItStays(const QdqPair* rounding) {
  if (rounding != nullptr) return rounding->reason;
  return "its input must be 8-bit quantized with a constant positive scale, and its quantized value must have no other "
         "consumer";
}

// Read an X that is float in the original model or after a DequantizeLinear.
void ReadX(const Graph& graph, const QdqPairs& roundings, const Node& node, Layer& layer) {
  Expect(node.Has(0), "its first input is missing");
  const QdqPair* const rounding = roundings.Of(node.StoredInput(0));
  if (rounding != nullptr && rounding->state != QdqPair::State::kStays) {
    SetX(graph, *rounding, layer);
  } else {
    const Node* const maker = graph.Maker(node.Input(0));
    Expect(maker == nullptr || !maker->IsStandard("DequantizeLinear"), WhyItStays(rounding));
    layer.x = node.Input(0);
  }
  Expect(!graph.IsConstantValue(layer.x), "both inputs are constant");
  Expect(graph.IsFloat(layer.x), ErrorText("its input '", node.InputName(0), "' is not float"));
}

// Read an X that is stored as 8-bit codes.
const QdqPair& ReadQuantizedX(const Graph& graph, const QdqPairs& roundings, const Node& node, Layer& layer) {
  Expect(node.StoredInput(0) != nullptr, "its first input is missing");
  const QdqPair* const rounding = roundings.Of(node.StoredInput(0));
  Expect(rounding == nullptr || rounding->floats != nullptr,
         "its input is the 8-bit output of another layer without a DequantizeLinear in between");
  Expect(rounding != nullptr && rounding->state != QdqPair::State::kStays, WhyItStays(rounding));
  SetX(graph, *rounding, layer);
  return *rounding;
}

// --- the bias -----------------------------------------------------------------------------------------------------

// Read a float bias with one value for each column or one for all.
void ReadBias(const Graph& graph, Value value, Layer& layer, int64_t n) {
  const std::optional<Constant> bias = graph.ConstantOf(value);
  Expect(bias.has_value(), "its bias is computed at run time");
  const bool is_row = bias->shape == Shape{n} || bias->shape == Shape{1, n};
  const bool is_one = bias->shape == Shape{} || bias->shape == Shape{1} || bias->shape == Shape{1, 1};
  Expect(bias->type == kFloat && (is_row || is_one),
         ErrorText("its bias '", bias->name, "' has shape ", ShapeText(bias->shape), ", expected ", n, " floats"));
  layer.bias = Spread(bias->Floats(), n);
}

// The bias is stored in integer steps of the input's scale times the weight's scale.
void ReadBiasInSteps(const Node& node, size_t index, float x_scale, Layer& layer, const Int8Weight& w) {
  const Constant bias = node.ConstantInput(index, "bias", {kInt32}, {{w.n}, {1, w.n}, {}, {1}, {1, 1}});
  std::vector<int32_t> steps(static_cast<size_t>(bias.Count()));
  std::memcpy(steps.data(), bias.data, steps.size() * sizeof(int32_t));
  steps = Spread(steps, w.n);
  for (size_t j = 0; j < steps.size(); ++j) {
    layer.bias.push_back(static_cast<float>(steps[j]) * (w.scales[j] * x_scale));
  }
}

// --- MatMul and Gemm ----------------------------------------------------------------------------------------------

// Return the DequantizeLinear that computes the node's second input, and the nodes between the two; null if there is no
// such node or its input is not constant.
const Node* FindWeight(const Graph& graph, const Node& node, std::vector<const Node*>& nodes, bool& transposed) {
  constexpr size_t kMost = 4;
  Value value = node.Input(1);
  while (value != nullptr && nodes.size() < kMost) {
    const Node* const maker = graph.Maker(value);
    if (maker == nullptr) return nullptr;
    nodes.push_back(maker);
    if (maker->IsStandard("DequantizeLinear")) return maker->IsConstant(0) ? maker : nullptr;
    if (maker->IsStandard("Transpose")) {
      const std::vector<int64_t> order = maker->Ints("perm");
      if (!order.empty() && order != std::vector<int64_t>{0, 1} && order != std::vector<int64_t>{1, 0}) return nullptr;
      transposed ^= order != std::vector<int64_t>{0, 1};
    } else if (!maker->IsStandard("Identity")) {
      return nullptr;
    }
    value = maker->Input(0);
  }
  return nullptr;
}

Int8Weight ReadDequantized(const Node& node, bool transposed) {
  const int64_t axis = node.Int("axis", 1), block_size = node.Int("block_size", 0);
  Expect(block_size == 0,
         ErrorText("its scales are for blocks of ", block_size, " inputs, expected one scale or one per column"));
  Expect(axis >= -2 && axis < 2, ErrorText("axis of its DequantizeLinear is ", axis, ", expected 0 or 1"));
  const int64_t made = node.Int("output_dtype", 0);
  Expect(made == 0 || static_cast<ElementType>(made) == kFloat,
         "the output type of its DequantizeLinear differs from its scales' type");
  const Constant scales = node.ConstantInput(1, "weight's scales", {kFloat});
  const bool is_of_inputs = (axis + 2) % 2 == (transposed ? 1 : 0);
  Expect(scales.Count() == 1 || !is_of_inputs, "its scales are per input, expected one scale or one per output");
  Int8Weight w = ReadInt8Weight(node, 0, 2, transposed);
  w.scales = ReadScales(node, 1, w.n);
  return w;
}

// Return nullopt if the weight is not the output of a DequantizeLinear.
std::optional<Layer> ReadProduct(const Graph& graph, const QdqPairs& roundings, const Node& node) {
  const bool is_gemm = node.type() == "Gemm";
  Layer layer;
  bool transposed = false;
  const Node* const dequantize = FindWeight(graph, node, layer.weight_nodes, transposed);
  if (dequantize == nullptr) return std::nullopt;
  if (is_gemm && node.Int("transB", 0) != 0) transposed = !transposed;
  for (const Node* const one : layer.weight_nodes) Expect(graph.OnlyReader(one->Output(0)) != nullptr, kOthersRead);
  ReadX(graph, roundings, node, layer);
  Int8Weight w = ReadDequantized(*dequantize, transposed);
  if (is_gemm) {
    Expect(node.Int("transA", 0) == 0, "transA is 1, expected 0");
    const float alpha = node.Float("alpha", 1.0f), beta = node.Float("beta", 1.0f);
    Expect(alpha == 1.0f, ErrorText("alpha is ", alpha, ", expected 1"));
    Expect(beta == 1.0f || !node.Has(2), ErrorText("beta is ", beta, ", expected 1"));
    if (node.Has(2)) ReadBias(graph, node.Input(2), layer, w.n);
  }
  layer.weight = std::move(w);
  return layer;
}

// --- operators with 8-bit inputs ----------------------------------------------------------------------------------

// Inputs: a, a_scale, a_zero_point, b, b_scale, b_zero_point, y_scale, y_zero_point.
Layer ReadQLinearMatMul(const Graph& graph, const QdqPairs& roundings, const Node& node) {
  Layer layer;
  Int8Weight w = ReadInt8Weight(node, 3, 5);
  w.scales = ReadScales(node, 4, w.n);
  ReadQuantizedX(graph, roundings, node, layer);
  layer.weight = std::move(w);
  return layer;
}

// Inputs: A, a_scale, a_zero_point, B, b_scale, b_zero_point, C, y_scale, y_zero_point.
Layer ReadQGemm(const Graph& graph, const QdqPairs& roundings, const Node& node) {
  Layer layer;
  Expect(node.Int("transA", 0) == 0, "transA is 1, expected 0");
  const float alpha = node.Float("alpha", 1.0f);
  Expect(alpha == 1.0f, ErrorText("alpha is ", alpha, ", expected 1"));
  Int8Weight w = ReadInt8Weight(node, 3, 5, node.Int("transB", 0) != 0);
  w.scales = ReadScales(node, 4, w.n);
  const QdqPair& rounding = ReadQuantizedX(graph, roundings, node, layer);
  if (node.Has(6)) ReadBiasInSteps(node, 6, rounding.range.scale, layer, w);
  layer.weight = std::move(w);
  return layer;
}

// Inputs: A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias.
Layer ReadMatMulIntegerToFloat(const Graph& graph, const QdqPairs& roundings, const Node& node) {
  Layer layer;
  Int8Weight w = ReadInt8Weight(node, 1, 5);
  w.scales = ReadScales(node, 3, w.n);
  ReadQuantizedX(graph, roundings, node, layer);
  if (node.Has(6)) layer.bias = node.ConstantInput(6, "bias", {kFloat}, {{w.n}}).Floats();
  layer.weight = std::move(w);
  return layer;
}

// Return the float output of the layer. An 8-bit output must be dequantized after the layer.
Value OutputOf(const Graph& graph, const QdqPairs& roundings, const Node& node) {
  const bool makes_floats = node.IsStandard("MatMul") || node.IsStandard("Gemm") ||
                            node.Is(kMicrosoft, "MatMulIntegerToFloat") ||
                            (node.Is(kMicrosoft, "QGemm") && !node.Has(7));
  const QdqPair* const rounding = makes_floats ? nullptr : roundings.MadeBy(node);
  Expect(makes_floats || (rounding != nullptr && rounding->state != QdqPair::State::kStays),
         "its 8-bit output must only be read by DequantizeLinear nodes with the same scale and zero point");
  return graph.Seen(node.Output(0));
}

}  // namespace

std::optional<Layer> ReadStaticLayer(const Graph& graph, const QdqPairs& roundings, const Node& node) {
  std::optional<Layer> layer;
  if (node.IsStandard("MatMul") || node.IsStandard("Gemm")) {
    layer = ReadProduct(graph, roundings, node);
  } else if (node.IsStandard("QLinearMatMul")) {
    // If both inputs are computed, the node belongs to attention.
    if (node.IsConstant(3)) layer = ReadQLinearMatMul(graph, roundings, node);
  } else if (node.Is(kMicrosoft, "QGemm")) {
    layer = ReadQGemm(graph, roundings, node);
  } else if (node.Is(kMicrosoft, "MatMulIntegerToFloat") && roundings.Of(node.StoredInput(0)) != nullptr) {
    layer = ReadMatMulIntegerToFloat(graph, roundings, node);
  }
  if (!layer) return std::nullopt;
  Expect(node.Output(0) != nullptr, "its output is missing");
  layer->is_static = true;
  layer->nodes = {&node};
  layer->y = OutputOf(graph, roundings, node);
  const std::string problem = WhyNot(std::get<Int8Weight>(layer->weight));
  Expect(problem.empty(), problem);
  return layer;
}

}  // namespace ortolan::provider
