#include "provider/layer.h"

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
  return sizes + ", int8";
}

std::optional<Layer> ReadLayer(const Graph& graph, const Node& node) {
  if (IsMatMulNBits(node)) return ReadMatMulNBits(node);
  return ReadInt8Layer(graph, node);
}

}  // namespace ortolan::provider
