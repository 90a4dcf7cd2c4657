#include "provider/layer.h"

#include "provider/float_layer.h"
#include "provider/int8_layer.h"
#include "provider/mat_mul_nbits.h"

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
  const RoundedWeight* const w = std::get_if<RoundedWeight>(&weight);
  if (w == nullptr) return sizes + ", int8";
  return sizes + (w->precision == Precision::kBf16 ? ", floats as bf16" : ", floats as int8");
}

std::optional<Layer> ReadLayer(const Graph& graph, const Node& node, const LayerRules& rules) {
  if (IsMatMulNBits(node)) return ReadMatMulNBits(node);
  if (rules.precision != Precision::kFloat32 && IsFloatLayer(graph, node)) {
    return ReadFloatLayer(node, rules.precision);
  }
  std::optional<Layer> layer = ReadInt8Layer(graph, node);
  Expect(!layer || rules.may_take_int8, "without VNNI instructions ONNX Runtime's int8 layers are faster");
  return layer;
}

}  // namespace ortolan::provider
