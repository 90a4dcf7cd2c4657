#include "provider/packed_layers.h"

#include <algorithm>

namespace ortolan::provider {
namespace {

// Columns side by side, whose numbers are put into `numbers`.
NBitsWeight Joined(std::span<const Layer> layers, std::vector<uint8_t>& numbers) {
  NBitsWeight whole = std::get<NBitsWeight>(layers.front().weight);
  if (layers.size() == 1) return whole;
  const auto has_zero_points = [](const Layer& layer) {
    return !std::get<NBitsWeight>(layer.weight).zero_points.empty();
  };
  const bool any_zero_points = std::any_of(layers.begin(), layers.end(), has_zero_points);
  whole.n = 0;
  whole.scales.clear();
  whole.zero_points.clear();
  for (const Layer& layer : layers) {
    const NBitsWeight& w = std::get<NBitsWeight>(layer.weight);
    numbers.insert(numbers.end(), w.numbers, w.numbers + w.n * w.ColumnBytes());
    whole.n += w.n;
    whole.scales.insert(whole.scales.end(), w.scales.begin(), w.scales.end());
    if (w.zero_points.empty() && any_zero_points) {
      whole.zero_points.resize(whole.scales.size(), w.bits == 4 ? 8.0f : 128.0f);
    } else {
      whole.zero_points.insert(whole.zero_points.end(), w.zero_points.begin(), w.zero_points.end());
    }
  }
  whole.numbers = numbers.data();
  return whole;
}

template <typename Weight>
std::vector<Weight> WeightsOf(std::span<const Layer> layers) {
  std::vector<Weight> weights;
  for (const Layer& layer : layers) weights.push_back(std::get<Weight>(layer.weight));
  return weights;
}

}  // namespace

PackedLayers::PackedLayers(std::span<const Layer> layers) {
  if (std::holds_alternative<NBitsWeight>(layers.front().weight)) {
    std::vector<uint8_t> numbers;
    groups_.emplace(Joined(layers, numbers));
  } else if (std::holds_alternative<Int8Weight>(layers.front().weight)) {
    columns_.emplace(WeightsOf<Int8Weight>(layers));
  } else {
    PackFloats(WeightsOf<RoundedWeight>(layers));
  }
  if (std::all_of(layers.begin(), layers.end(), [](const auto& layer) { return layer.bias.empty(); })) return;
  for (const Layer& layer : layers) {
    const size_t end = bias_.size() + static_cast<size_t>(layer.Columns());
    bias_.insert(bias_.end(), layer.bias.begin(), layer.bias.end());
    bias_.resize(end);
  }
}

void PackedLayers::PackFloats(const std::vector<RoundedWeight>& weights) {
  if (weights.front().precision == Precision::kBf16) {
    bf16_columns_.emplace(std::vector<FloatWeight>(weights.begin(), weights.end()));
    return;
  }
  std::vector<std::vector<int8_t>> codes(weights.size());
  std::vector<Int8Weight> parts;
  for (size_t i = 0; i < weights.size(); ++i) parts.push_back(RoundedToInt8(weights[i], codes[i]));
  columns_.emplace(parts);
}

LinearLayer PackedLayers::Linear() const {
  if (groups_) return groups_->Layer();
  return columns_ ? columns_->Layer() : bf16_columns_->Layer();
}

}  // namespace ortolan::provider
