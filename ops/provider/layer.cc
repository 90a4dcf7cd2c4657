#include "provider/layer.h"

#include <algorithm>

#include "match/linear.h"

namespace ortolan::provider {
namespace {

using match::Linear;
using match::NotLinear;
using match::WeightForm;

// --- the input ----------------------------------------------------------------------------------------------------

std::string WhyItStays(const QdqPair* rounding) {
  if (rounding != nullptr) return rounding->reason;
  return "its input must be 8-bit quantized with a constant positive scale, and its quantized value must have no other "
         "consumer";
}

// Read an X that is quantized to a fixed range, or not at all.
void ReadFixedX(const Graph& graph, const QdqPairs& roundings, const Linear& linear, Layer& layer) {
  const Value stored = linear.node->StoredInput(0);
  const QdqPair* const rounding = roundings.Of(stored);
  const bool quantizes = rounding != nullptr && rounding->floats != nullptr;
  const bool is_removed = rounding != nullptr && rounding->state != QdqPair::State::kStays;
  if (linear.x_codes != nullptr) {
    Expect(rounding == nullptr || quantizes,
           "its input is the 8-bit output of another layer without a DequantizeLinear in between");
    Expect(is_removed, WhyItStays(rounding));
  }
  if (is_removed) {
    if (quantizes) layer.quantize = rounding->maker;
    if (quantizes && rounding->state == QdqPair::State::kClipped) layer.x_bounds = rounding->range.FromZero();
    layer.x = graph.Seen(quantizes ? rounding->floats : rounding->ends.front()->Output(0));
  } else {
    const Node* const maker = graph.Maker(linear.x);
    Expect(maker == nullptr || !maker->IsStandard("DequantizeLinear"), WhyItStays(rounding));
    layer.x = linear.x;
  }
  Expect(!graph.IsConstantValue(layer.x), "both inputs are constant");
}

// Return the float output of a layer with fixed ranges. An 8-bit output must be dequantized after the layer.
Value OutputOf(const Graph& graph, const QdqPairs& roundings, const Linear& linear) {
  const QdqPair* const rounding = linear.y_scale == nullptr ? nullptr : roundings.MadeBy(*linear.node);
  Expect(linear.y_scale == nullptr || (rounding != nullptr && rounding->state != QdqPair::State::kStays),
         "its 8-bit output must only be read by DequantizeLinear nodes with the same scale and zero point");
  return graph.Seen(linear.node->Output(0));
}

// --- weight and bias ----------------------------------------------------------------------------------------------

Constant Read(const Graph& graph, Value value) {
  std::optional<Constant> tensor = graph.ConstantOf(value);
  Expect(tensor.has_value(), ErrorText("its constant '", value->name, "' cannot be read"));
  return *std::move(tensor);
}

// Expand one value for all columns to n values; return n values unchanged.
template <typename Element>
std::vector<Element> Spread(const std::vector<Element>& values, int64_t n) {
  return values.size() == 1 ? std::vector<Element>(static_cast<size_t>(n), values[0]) : values;
}

// Values of accuracy_level, the lowest precision allowed for X: 0 for any, 4 for int8, which our kernels use. 1 to 3
// are float types.
constexpr int64_t kAnyAccuracy = 0;
constexpr int64_t kInt8Accuracy = 4;

NBitsWeight ReadBlocks(const Graph& graph, const Linear& linear) {
  const int64_t accuracy = linear.node->Int("accuracy_level", kAnyAccuracy);
  Expect(accuracy == kAnyAccuracy || accuracy == kInt8Accuracy,
         ErrorText("its accuracy_level is ", accuracy, ", but kernels quantize inputs to int8 (accuracy_level 4)"));
  NBitsWeight w{linear.k, linear.n, linear.weight.bits, linear.weight.block_size, nullptr, {}, {}};
  const std::string size_problem = WhyNotSizes(w.k, w.n, w.bits, w.block_size);
  Expect(size_problem.empty(), size_problem);
  w.codes = static_cast<const uint8_t*>(Read(graph, linear.weight.codes).data);
  w.scales = Read(graph, linear.weight.scales.front()).Floats();
  if (linear.weight.zero_points != nullptr) {
    const Constant zeros = Read(graph, linear.weight.zero_points);
    if (zeros.type != ElementType::kUint8) {
      w.zero_points = zeros.Floats();
    } else {
      // Two 4-bit values share a byte, low half first.
      const int64_t blocks = w.Blocks(), bytes = w.bits == 8 ? blocks : (blocks + 1) / 2;
      for (int64_t j = 0; j < w.n; ++j) {
        for (int64_t block = 0; block < blocks; ++block) {
          const int64_t code = zeros.CodeAt(j * bytes + (w.bits == 8 ? block : block / 2));
          w.zero_points.push_back(static_cast<float>(w.bits == 8 ? code : code >> block % 2 * 4 & 0xf));
        }
      }
    }
  }
  const std::string problem = NBitsGroups::WhyNot(w);
  Expect(problem.empty(), problem);
  return w;
}

// Read the 4-bit weight of a DequantizeLinear. `codes` gets its integers in the layout of MatMulNBits.
NBitsWeight ReadInt4(const Graph& graph, const Linear& linear, std::vector<uint8_t>& codes) {
  const match::LayerWeight& stored = linear.weight;
  const int64_t k = linear.k, n = linear.n;
  const bool has_blocks = stored.block_size != 0 && stored.block_size < k;
  NBitsWeight w{k, n, 4, has_blocks ? stored.block_size : k + k % 2, nullptr, {}, {}};
  const std::string size_problem = WhyNotSizes(w.k, w.n, w.bits, w.block_size);
  Expect(size_problem.empty(), size_problem);
  const Constant tensor = Read(graph, stored.codes), scales = Read(graph, stored.scales.front());
  // Codes of int4, -8 … 7, become 0 … 15.
  const auto code_at = [flip = tensor.type == ElementType::kInt4 ? 8 : 0](const Constant& one, int64_t index) {
    return (static_cast<const uint8_t*>(one.data)[index / 2] >> index % 2 * 4 & 0xf) ^ flip;
  };
  codes.resize(static_cast<size_t>(n * w.ColumnBytes()));
  for (int64_t j = 0; j < n; ++j) {
    uint8_t* const column = codes.data() + j * w.ColumnBytes();
    for (int64_t l = 0; l < k; ++l) {
      const int code = code_at(tensor, stored.transposed ? j * k + l : l * n + j);
      column[l / 2] = static_cast<uint8_t>(column[l / 2] | code << l % 2 * 4);
    }
  }
  w.codes = codes.data();
  const std::vector<float> floats = scales.Floats();
  const std::optional<Constant> zeros =
      stored.zero_points == nullptr ? std::nullopt : std::optional(Read(graph, stored.zero_points));
  for (int64_t j = 0; j < n; ++j) {
    for (int64_t block = 0; block < w.Blocks(); ++block) {
      const int64_t of_column = stored.transposed ? j * w.Blocks() + block : block * n + j;
      const int64_t index = floats.size() == 1 ? 0 : of_column;
      w.scales.push_back(floats[static_cast<size_t>(index)]);
      if (zeros) w.zero_points.push_back(static_cast<float>(code_at(*zeros, index)));
    }
  }
  if (!zeros && tensor.type == ElementType::kUint4) w.zero_points.resize(w.scales.size());
  const std::string problem = NBitsGroups::WhyNot(w);
  Expect(problem.empty(), problem);
  return w;
}

Int8Weight ReadInt8(const Graph& graph, const Linear& linear) {
  const Constant codes = Read(graph, linear.weight.codes);
  Int8Weight w;
  w.k = linear.k;
  w.n = linear.n;
  w.codes = static_cast<const uint8_t*>(codes.data) + linear.weight.first_column;
  w.row = linear.weight.all_columns;
  w.is_signed = codes.type == ElementType::kInt8;
  w.transposed = linear.weight.transposed;
  w.scales = ScalesOf(graph, linear);
  w.zero_points = ZeroPointsOf(graph, linear);
  const std::string problem = WhyNot(w);
  Expect(problem.empty(), problem);
  return w;
}

RoundedWeight ReadFloats(const Graph& graph, const Linear& linear, Precision precision) {
  const Constant tensor = Read(graph, linear.weight.value);
  Expect(IsFloatType(tensor.type), ErrorText("its weight '", tensor.name, "' is not float or float16"));
  RoundedWeight w;
  w.precision = precision;
  w.k = linear.k;
  w.n = linear.n;
  w.is_half = tensor.type == ElementType::kFloat16;
  w.values = static_cast<const char*>(tensor.data) + linear.weight.first_column * (w.is_half ? 2 : 4);
  w.row = linear.weight.all_columns;
  w.transposed = linear.transposed;
  const std::string problem = precision == Precision::kBf16 ? WhyNotBf16(w) : WhyNotInt8(w);
  Expect(problem.empty(), problem);
  return w;
}

// Read the bias of the layer's node. The Add of a bias that follows belongs to the epilogue (epilogue.h).
std::vector<float> ReadBias(const Graph& graph, const Linear& linear) {
  if (linear.bias == nullptr || linear.add != nullptr) return {};
  const Constant bias = Read(graph, linear.bias);
  if (!linear.bias_in_steps) {
    Expect(IsFloatType(bias.type), ErrorText("its bias '", bias.name, "' is not float or float16"));
    return Spread(bias.Floats(), linear.n);
  }
  std::vector<float> floats = ScalesOf(graph, linear);
  const float x_scale = Read(graph, linear.x_scale).Floats().front();
  for (size_t j = 0; j < floats.size(); ++j) {
    floats[j] =
        static_cast<float>(bias.CodeAt(bias.Count() == 1 ? 0 : static_cast<int64_t>(j))) * (floats[j] * x_scale);
  }
  return floats;
}

}  // namespace

int64_t Layer::Inputs() const {
  return std::visit([](const auto& w) { return w.k; }, weight);
}

int64_t Layer::Columns() const {
  return std::visit([](const auto& w) { return w.n; }, weight);
}

std::string Layer::Numbers() const {
  const std::string sizes = ErrorText(Inputs(), " x ", Columns());
  if (const NBitsWeight* const w = std::get_if<NBitsWeight>(&weight)) {
    return ErrorText(sizes, ", ", w->bits, " bits in blocks of ", w->block_size);
  }
  if (std::holds_alternative<BlockInt8Weight>(weight)) return sizes + ", int8 in blocks of 4 x 1";
  const RoundedWeight* const w = std::get_if<RoundedWeight>(&weight);
  if (w == nullptr) return sizes + ", int8";
  return sizes + (w->precision == Precision::kBf16 ? ", floats as bf16" : ", floats as int8");
}

namespace {

Layer LayerOf(const Graph& graph, const QdqPairs& roundings, const Linear& linear, const LayerRules& rules) {
  const WeightForm form = linear.weight.form;
  if (linear.weight.why_not_kept) throw UnfitError(*linear.weight.why_not_kept);
  Layer layer;
  layer.nodes = linear.nodes;
  layer.nodes.insert(layer.nodes.end() - 1, linear.scale_nodes.begin(), linear.scale_nodes.end());
  layer.weight_nodes = linear.weight.nodes;
  for (const Node* const one : layer.weight_nodes) {
    Expect(graph.OnlyReader(one->Output(0)) != nullptr, "its weight has other consumers");
  }
  layer.is_static = !linear.weight.nodes.empty() || (linear.x_codes != nullptr && linear.quantize == nullptr);
  layer.quantize = linear.quantize;
  layer.x = linear.x;
  if (layer.is_static) ReadFixedX(graph, roundings, linear, layer);
  const bool is_float = form == WeightForm::kInt8 ? graph.IsFloat(layer.x) : graph.IsFloatOrHalf(layer.x);
  Expect(is_float, ErrorText("its input '", linear.node->InputName(0), "' is not float",
                             form == WeightForm::kInt8 ? "" : " or float16"));
  Expect(layer.nodes.back()->Output(0) != nullptr, "its output is missing");
  layer.y = layer.is_static ? OutputOf(graph, roundings, linear) : layer.nodes.back()->Output(0);
  const std::optional<Shape> x_shape = DeclaredShape(layer.x);
  Expect(!linear.scales_have_rows || (x_shape && x_shape->size() >= 2),
         "its scales have two axes, but its input may have fewer");
  layer.bias = ReadBias(graph, linear);
  if (form == WeightForm::kBlocks) {
    layer.weight = ReadBlocks(graph, linear);
  } else if (form == WeightForm::kInt4) {
    const auto codes = std::make_shared<std::vector<uint8_t>>();
    layer.weight = ReadInt4(graph, linear, *codes);
    layer.own_codes = codes;
  } else if (form == WeightForm::kFloat) {
    layer.weight = ReadFloats(graph, linear, rules.precision);
  } else {
    layer.weight = ReadInt8(graph, linear);
    const Int8Weight& w = std::get<Int8Weight>(layer.weight);
    if (!layer.is_static && IsBlockSparse(w)) layer.weight = BlockInt8Weight{w};
  }
  const std::string problem = rules.policy.WhyNotWorth(layer);
  Expect(problem.empty(), problem);
  return layer;
}

}  // namespace

std::optional<Layer> ReadLayer(const Graph& graph, const QdqPairs& roundings, const Node& node,
                               const LayerRules& rules) {
  const bool takes_floats = rules.precision != Precision::kFloat32;
  const std::optional<match::FoundLinear> found = match::MatchLinear(graph, node);
  if (!found) return std::nullopt;
  if (const NotLinear* const refused = std::get_if<NotLinear>(&*found)) {
    if (!refused->form || (*refused->form == WeightForm::kFloat && !takes_floats)) return std::nullopt;
    throw UnfitError(refused->reason);
  }
  const Linear& linear = std::get<Linear>(*found);
  if (linear.weight.form == WeightForm::kFloat && !takes_floats) return std::nullopt;
  return LayerOf(graph, roundings, linear, rules);
}

std::vector<Layer> ReadPackedLayers(const Graph& graph, const QdqPairs& roundings, const match::Attention& attention,
                                    const LayerRules& rules) {
  const int64_t width = attention.heads * attention.head_dim, kv_width = attention.kv_heads * attention.head_dim;
  std::vector<Layer> layers;
  for (const Linear& linear : match::PackedLinears(graph, *attention.node, {width, kv_width, kv_width})) {
    if (linear.weight.form == WeightForm::kFloat && rules.precision == Precision::kFloat32) break;
    layers.push_back(LayerOf(graph, roundings, linear, rules));
    Expect(!layers.back().x_bounds, "its 8-bit input is clipped at 0 and may be negative before it is quantized");
    layers.back().is_inside = true;
  }
  return layers;
}

}  // namespace ortolan::provider
