#include "provider/layer.h"

#include "provider/float_layer.h"
#include "provider/int8_layer.h"
#include "provider/mat_mul_nbits.h"
#include "provider/static_layer.h"

namespace ortolan::provider {
namespace {

// Return the reason why ONNX Runtime is faster for this layer; empty if it is not.
std::string WhyNotFaster(const Layer& layer, double least_zero_blocks) {
  if (least_zero_blocks <= 0) return {};
  const std::string reason = "without VNNI instructions ONNX Runtime's int8 layers are faster";
  if (least_zero_blocks > 1 || layer.is_static) return reason;  // layers with fixed ranges are never stored as blocks
  const BlockInt8Weight* const blocks = std::get_if<BlockInt8Weight>(&layer.weight);
  if (blocks != nullptr && IsBlockSparse(*blocks, least_zero_blocks)) return {};
  return ErrorText(reason, ", unless ", 100 * least_zero_blocks, " % of the weights are in zero blocks of 4 x 1");
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

std::optional<Layer> ReadLayer(const Graph& graph, const QdqPairs& roundings, const Node& node,
                               const LayerRules& rules) {
  if (IsMatMulNBits(node)) return ReadMatMulNBits(node);
  if (rules.precision != Precision::kFloat32 && IsFloatLayer(graph, node)) {
    return ReadFloatLayer(node, rules.precision);
  }
  std::optional<Layer> layer = ReadStaticLayer(graph, roundings, node);
  if (!layer) layer = ReadInt8Layer(graph, node);
  if (!layer) return std::nullopt;
  const std::string problem = WhyNotFaster(*layer, rules.least_zero_blocks);
  Expect(problem.empty(), problem);
  return layer;
}

}  // namespace ortolan::provider
