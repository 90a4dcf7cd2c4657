#include "provider/layer.h"

#include "provider/float_layer.h"
#include "provider/int8_layer.h"
#include "provider/mat_mul_nbits.h"
#include "provider/static_layer.h"

namespace ortolan::provider {
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

std::optional<Layer> ReadLayer(const Graph& graph, const QdqPairs& roundings, const Node& node,
                               const LayerRules& rules) {
  std::optional<Layer> layer;
  if (IsMatMulNBits(node)) {
    layer = ReadMatMulNBits(node);
  } else if (rules.precision != Precision::kFloat32 && IsFloatLayer(graph, node)) {
    layer = ReadFloatLayer(node, rules.precision);
  } else if (!(layer = ReadStaticLayer(graph, roundings, node))) {
    layer = ReadInt8Layer(graph, node);
  }
  if (!layer) return std::nullopt;
  const std::string problem = rules.policy.WhyNotWorth(*layer);
  Expect(problem.empty(), problem);
  return layer;
}

}  // namespace ortolan::provider
