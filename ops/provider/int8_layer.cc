#include "provider/int8_layer.h"

#include <algorithm>
#include <functional>

#include "provider/int8_constants.h"

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;
constexpr const char* kMicrosoft = "com.microsoft";

// Output indices of DynamicQuantizeLinear.
enum Quantized : size_t { kCodes, kScale, kZeroPoint };

std::vector<float> ReadBias(const Node& node, size_t bias, int64_t n) {
  return node.Has(bias) ? node.ConstantInput(bias, "bias", {kFloat}, {{n}}).Floats() : std::vector<float>{};
}

// Return the DynamicQuantizeLinear that computes X's codes. It must also compute the node's zero point.
const Node& ReadQuantize(const Graph& graph, const Node& node, size_t zero_point) {
  Expect(node.Has(0), "its first input is missing");
  Expect(!node.IsConstant(0), "the constant is the first input (W x, not x W)");
  const Node* const quantize = graph.Maker(node.Input(0));
  Expect(quantize != nullptr && quantize->IsStandard("DynamicQuantizeLinear") &&
             quantize->Output(kCodes) == node.Input(0) && quantize->Has(0),
         "its input is not the output of a DynamicQuantizeLinear");
  Expect(node.Has(zero_point) && quantize->Output(kZeroPoint) == node.Input(zero_point),
         "the zero point of its input is not that of its DynamicQuantizeLinear");
  return *quantize;
}

void SetQuantize(Layer& layer, const Node& quantize) {
  layer.quantize = &quantize;
  layer.x = quantize.Input(0);
}

// --- MatMulInteger ------------------------------------------------------------------------------------------------

const Node& NextOf(const Graph& graph, Value sums) {
  const Node* const next = graph.OnlyReader(sums);
  Expect(next != nullptr,
         ErrorText("its sums '", sums->name, "' have other consumers, expected only a Cast and a Mul by the scales"));
  Expect(next->IsStandard(), ErrorText(next->Described(), " follows its sums"));
  return *next;
}

// Multiply the scales by a constant. has_rows: X has at least two axes, so a factor with two axes adds no axis to the
// output.
void MultiplyBy(const Graph& graph, Value factor, bool has_rows, std::vector<float>& scales) {
  const std::optional<Constant> tensor = graph.ConstantOf(factor);
  const std::vector<Shape> shapes = ShapesOfColumns(static_cast<int64_t>(scales.size()));
  const bool fits =
      tensor && tensor->type == kFloat &&
      (tensor->shape == Shape{1, 1} || std::find(shapes.begin(), shapes.end(), tensor->shape) != shapes.end());
  Expect(!fits || has_rows || tensor->shape.size() < 2, "its scales have two axes, but its input may have fewer");
  Expect(fits, ErrorText("its scales are not a constant of 1 or ", scales.size(), " floats"));
  const std::vector<float> values = Spread(tensor->Floats(), static_cast<int64_t>(scales.size()));
  std::transform(scales.begin(), scales.end(), values.begin(), scales.begin(), std::multiplies<>());
}

// Add the Muls between the Cast to float and Y to the layer. One factor must be the scale of the quantized input.
void ReadMultiplications(const Graph& graph, Layer& layer, Value input_scale) {
  std::vector<float>& scales = std::get<Int8Weight>(layer.weight).scales;
  bool has_input_scale = false, has_scales = false;
  const std::optional<Shape> x_shape = DeclaredShape(layer.x);
  const bool has_rows = x_shape && x_shape->size() >= 2;
  while (!has_input_scale || !has_scales) {
    const Value sums = layer.nodes.back()->Output(0);
    const Node& multiply = NextOf(graph, sums);
    Expect(multiply.IsStandard("Mul") && multiply.inputs().size() == 2,
           ErrorText(multiply.Described(), " follows its sums, expected a Mul by the scales"));
    const Value other = Other(multiply, sums);
    const Node* const product = other == nullptr ? nullptr : graph.Maker(other);
    std::vector<Value> factors = {other};
    if (product != nullptr && product->IsStandard("Mul") && product->inputs().size() == 2) {
      factors = product->inputs();
      layer.nodes.push_back(product);
    }
    for (const Value factor : factors) {
      if (factor == input_scale && !has_input_scale) {
        has_input_scale = true;
      } else {
        MultiplyBy(graph, factor, has_rows, scales);
        has_scales = true;
      }
    }
    layer.nodes.push_back(&multiply);
  }
}

Layer ReadMatMulInteger(const Graph& graph, const Node& node) {
  const Node& quantize = ReadQuantize(graph, node, 2);
  Layer layer;
  SetQuantize(layer, quantize);
  Int8Weight w = ReadInt8Weight(node, 1, 3);
  w.scales.assign(static_cast<size_t>(w.n), 1.0f);
  layer.weight = std::move(w);
  const Node& cast = NextOf(graph, node.Output(0));
  Expect(cast.IsStandard("Cast") && static_cast<ElementType>(cast.Int("to", 0)) == kFloat,
         ErrorText("its sums go into ", cast.Described(), ", expected a Cast to float and a Mul by the scales"));
  layer.nodes = {&node, &cast};
  ReadMultiplications(graph, layer, quantize.Output(kScale));
  return layer;
}

// --- operators of com.microsoft -----------------------------------------------------------------------------------

// Inputs: A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias.
Layer ReadMatMulIntegerToFloat(const Graph& graph, const Node& node) {
  const Node& quantize = ReadQuantize(graph, node, 4);
  Expect(node.Input(2) != nullptr && node.Input(2) == quantize.Output(kScale),
         "its a_scale is not that of its DynamicQuantizeLinear");
  Layer layer;
  SetQuantize(layer, quantize);
  Int8Weight w = ReadInt8Weight(node, 1, 5);
  w.scales = ReadScales(node, 3, w.n);
  layer.bias = ReadBias(node, 6, w.n);
  layer.weight = std::move(w);
  layer.nodes = {&node};
  return layer;
}

// Inputs: A, B, b_scale, b_zero_point, bias.
Layer ReadDynamicQuantizeMatMul(const Graph& graph, const Node& node) {
  Expect(node.Has(0), "its input A is missing");
  Expect(graph.IsFloat(node.Input(0)), ErrorText("its input '", node.InputName(0), "' is not float"));
  Expect(!node.IsConstant(0), "both inputs are constant");
  Layer layer;
  layer.x = node.Input(0);
  Int8Weight w = ReadInt8Weight(node, 1, 3);
  w.scales = ReadScales(node, 2, w.n);
  layer.bias = ReadBias(node, 4, w.n);
  layer.weight = std::move(w);
  layer.nodes = {&node};
  return layer;
}

}  // namespace

std::optional<Layer> ReadInt8Layer(const Graph& graph, const Node& node) {
  std::optional<Layer> layer;
  if (node.IsStandard("MatMulInteger")) {
    layer = ReadMatMulInteger(graph, node);
  } else if (node.Is(kMicrosoft, "MatMulIntegerToFloat")) {
    layer = ReadMatMulIntegerToFloat(graph, node);
  } else if (node.Is(kMicrosoft, "DynamicQuantizeMatMul")) {
    layer = ReadDynamicQuantizeMatMul(graph, node);
  } else {
    return std::nullopt;
  }
  layer->y = layer->nodes.back()->Output(0);
  Expect(layer->y != nullptr, "its output is missing");
  const Int8Weight& w = std::get<Int8Weight>(layer->weight);
  const std::string problem = WhyNot(w);
  Expect(problem.empty(), problem);
  if (IsBlockSparse(w)) layer->weight = BlockInt8Weight{w};
  return layer;
}

}  // namespace ortolan::provider
