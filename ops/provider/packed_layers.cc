#include "provider/packed_layers.h"

#include <algorithm>
#include <type_traits>

#include "provider/record.h"

namespace ortolan::provider {
namespace {

// Concatenate the columns of layers. `codes` owns the joined data.
NBitsWeight Joined(std::span<const Layer> layers, std::vector<uint8_t>& codes) {
  NBitsWeight whole = std::get<NBitsWeight>(layers.front().weight);
  if (layers.size() == 1) return whole;
  const auto has_zero_points = [](const Layer& layer) {
    return !std::get<NBitsWeight>(layer.weight).zero_points.empty();
  };
  const bool any_zero_points = std::ranges::any_of(layers, has_zero_points);
  whole.n = 0;
  whole.scales.clear();
  whole.zero_points.clear();
  for (const Layer& layer : layers) {
    const NBitsWeight& w = std::get<NBitsWeight>(layer.weight);
    codes.insert(codes.end(), w.codes, w.codes + w.n * w.ColumnBytes());
    whole.n += w.n;
    whole.scales.insert(whole.scales.end(), w.scales.begin(), w.scales.end());
    if (w.zero_points.empty() && any_zero_points) {
      whole.zero_points.resize(whole.scales.size(), w.bits == 4 ? 8.0f : 128.0f);
    } else {
      whole.zero_points.insert(whole.zero_points.end(), w.zero_points.begin(), w.zero_points.end());
    }
  }
  whole.codes = codes.data();
  return whole;
}

// Write or read a packed weight of any kind (record.h).
template <typename Archive, typename Packed>
void VisitPacked(Archive& archive, Packed& packed) {
  archive.Int(packed.k);
  archive.Int(packed.n);
  if constexpr (requires { packed.bits; }) {
    archive.Int(packed.bits);
    archive.Int(packed.group);
    archive.Flag(packed.has_half_scales);
    archive.Arrays(packed.weights, packed.scales, packed.zero_points, packed.minimums);
  } else if constexpr (requires { packed.indices; }) {
    archive.Arrays(packed.values, packed.indices, packed.starts, packed.scales);
  } else {
    archive.Arrays(packed.masks, packed.values, packed.offsets);
    if constexpr (requires { packed.column_sums; }) {
      archive.Arrays(packed.scales, packed.column_sums, packed.zero_points);
    }
  }
}

template <typename Packed>
Packed Read(ContextReader& reader) {
  RecordReader record(reader);
  Packed packed;
  VisitPacked(record, packed);
  return packed;
}

template <typename Weight>
std::vector<Weight> Weights(std::span<const Layer> layers) {
  std::vector<Weight> found;
  for (const Layer& layer : layers) found.push_back(std::get<Weight>(layer.weight));
  return found;
}

}  // namespace

PackedLayers::PackedLayers(std::span<const Layer> layers) {
  Pack(layers);
  if (std::ranges::all_of(layers, [](const Layer& layer) { return layer.bias.empty(); })) return;
  for (const Layer& layer : layers) {
    const size_t end = own_bias_.size() + static_cast<size_t>(layer.Columns());
    own_bias_.insert(own_bias_.end(), layer.bias.begin(), layer.bias.end());
    own_bias_.resize(end);
  }
  bias_ = own_bias_;
}

void PackedLayers::Pack(std::span<const Layer> layers) {
  if (std::holds_alternative<NBitsWeight>(layers.front().weight)) {
    std::vector<uint8_t> codes;
    packed_.emplace<NBitsGroups>(Joined(layers, codes));
    return;
  }
  if (std::holds_alternative<Int8Weight>(layers.front().weight)) {
    packed_.emplace<Int8Columns>(Weights<Int8Weight>(layers));
    return;
  }
  if (std::holds_alternative<BlockInt8Weight>(layers.front().weight)) {
    const std::vector<BlockInt8Weight> blocks = Weights<BlockInt8Weight>(layers);
    packed_.emplace<BlockColumns>(std::vector<Int8Weight>(blocks.begin(), blocks.end()));
    return;
  }
  const std::vector<RoundedWeight> floats = Weights<RoundedWeight>(layers);
  if (floats.front().precision == Precision::kBf16) {
    packed_.emplace<Bf16Columns>(std::vector<FloatWeight>(floats.begin(), floats.end()));
    return;
  }
  std::vector<std::vector<int8_t>> codes(floats.size());
  std::vector<Int8Weight> parts;
  for (size_t i = 0; i < floats.size(); ++i) parts.push_back(RoundedToInt8(floats[i], codes[i]));
  packed_.emplace<Int8Columns>(parts);
}

PackedLayers::PackedLayers(ContextReader& reader) {
  const int64_t kind = reader.Int();
  if (kind == 0) {
    packed_.emplace<NBitsGroups>(Read<PackedNBits>(reader));
  } else if (kind == 1) {
    packed_.emplace<Int8Columns>(Read<PackedInt8>(reader));
  } else if (kind == 2) {
    packed_.emplace<Bf16Columns>(Read<StoredBytes>(reader));
  } else if (kind == 3) {
    packed_.emplace<BlockColumns>(Read<PackedBlocks>(reader));
  } else {
    throw OpError(ErrorText("a weight has kind ", kind, ", expected 0 to 3"));
  }
  bias_ = reader.Array<float>();
  const int64_t n = Linear().w->n;
  if (!bias_.empty() && static_cast<int64_t>(bias_.size()) != n) {
    throw OpError(ErrorText("a bias has ", bias_.size(), " values, expected ", n));
  }
}

void PackedLayers::Write(ContextWriter& writer) const {
  RecordWriter record(writer);
  record.Int(static_cast<int64_t>(packed_.index()) - 1);
  std::visit(
      [&]<typename Columns>(const Columns& columns) {
        if constexpr (!std::is_same_v<Columns, std::monostate>) {
          const auto packed = columns.Packed();
          VisitPacked(record, packed);
        }
      },
      packed_);
  writer.Array(bias_);
}

LinearLayer PackedLayers::Linear() const {
  return std::visit(
      []<typename Columns>(const Columns& columns) {
        if constexpr (std::is_same_v<Columns, std::monostate>) {
          return LinearLayer();
        } else {
          return columns.Layer();
        }
      },
      packed_);
}

void CheckReproducible(const PackedLayers& layers, const std::string& node) {
  if (!layers.IsBf16()) return;
  throw OpError(ErrorText(node, ": the compiled model stores bf16 weights, whose products depend on the CPU; expected ",
                          "int8 or int4 weights with reproducible 'everywhere'. Compile the model with this option"));
}

}  // namespace ortolan::provider
