#include "provider/packed_layers.h"

#include <algorithm>

namespace ortolan::provider {
namespace {

enum class Kind : int64_t { kNBits = 0, kInt8 = 1, kBf16 = 2, kBlocks = 3 };

// Concatenate the columns of layers. `codes` owns the joined data.
NBitsWeight Joined(std::span<const Layer> layers, std::vector<uint8_t>& codes) {
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

void WriteNBits(const PackedNBits& packed, ContextWriter& writer) {
  writer.Int(packed.k);
  writer.Int(packed.n);
  writer.Int(packed.bits);
  writer.Int(packed.group);
  writer.Flag(packed.has_half_scales);
  writer.Array(packed.weights);
  writer.Array(packed.scales);
  writer.Array(packed.zero_points);
  writer.Array(packed.minimums);
}

PackedNBits ReadNBits(ContextReader& reader) {
  PackedNBits packed;
  packed.k = reader.Int();
  packed.n = reader.Int();
  packed.bits = reader.Int();
  packed.group = reader.Int();
  packed.has_half_scales = reader.Flag();
  packed.weights = reader.Array<uint8_t>();
  packed.scales = reader.Array<uint8_t>();
  packed.zero_points = reader.Array<uint8_t>();
  packed.minimums = reader.Array<uint8_t>();
  return packed;
}

void WriteStored(const StoredBytes& stored, ContextWriter& writer) {
  writer.Int(stored.k);
  writer.Int(stored.n);
  writer.Array(stored.masks);
  writer.Array(stored.values);
  writer.Array(stored.offsets);
}

StoredBytes ReadStored(ContextReader& reader) {
  StoredBytes stored;
  stored.k = reader.Int();
  stored.n = reader.Int();
  stored.masks = reader.Array<uint8_t>();
  stored.values = reader.Array<uint8_t>();
  stored.offsets = reader.Array<int64_t>();
  return stored;
}

void WriteInt8(const PackedInt8& packed, ContextWriter& writer) {
  WriteStored(packed, writer);
  writer.Array(packed.scales);
  writer.Array(packed.column_sums);
  writer.Array(packed.zero_points);
}

PackedInt8 ReadInt8(ContextReader& reader) {
  PackedInt8 packed{ReadStored(reader), {}, {}, {}};
  packed.scales = reader.Array<float>();
  packed.column_sums = reader.Array<int32_t>();
  packed.zero_points = reader.Array<int32_t>();
  return packed;
}

void WriteBlocks(const PackedBlocks& packed, ContextWriter& writer) {
  writer.Int(packed.k);
  writer.Int(packed.n);
  writer.Array(packed.values);
  writer.Array(packed.indices);
  writer.Array(packed.starts);
  writer.Array(packed.scales);
}

PackedBlocks ReadBlocks(ContextReader& reader) {
  PackedBlocks packed;
  packed.k = reader.Int();
  packed.n = reader.Int();
  packed.values = reader.Array<int8_t>();
  packed.indices = reader.Array<uint16_t>();
  packed.starts = reader.Array<int64_t>();
  packed.scales = reader.Array<float>();
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
  if (std::all_of(layers.begin(), layers.end(), [](const Layer& layer) { return layer.bias.empty(); })) return;
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
    groups_.emplace(Joined(layers, codes));
    return;
  }
  if (std::holds_alternative<Int8Weight>(layers.front().weight)) {
    columns_.emplace(Weights<Int8Weight>(layers));
    return;
  }
  if (std::holds_alternative<BlockInt8Weight>(layers.front().weight)) {
    const std::vector<BlockInt8Weight> blocks = Weights<BlockInt8Weight>(layers);
    blocks_.emplace(std::vector<Int8Weight>(blocks.begin(), blocks.end()));
    return;
  }
  const std::vector<RoundedWeight> floats = Weights<RoundedWeight>(layers);
  if (floats.front().precision == Precision::kBf16) {
    bf16_columns_.emplace(std::vector<FloatWeight>(floats.begin(), floats.end()));
    return;
  }
  std::vector<std::vector<int8_t>> codes(floats.size());
  std::vector<Int8Weight> parts;
  for (size_t i = 0; i < floats.size(); ++i) parts.push_back(RoundedToInt8(floats[i], codes[i]));
  columns_.emplace(parts);
}

PackedLayers::PackedLayers(ContextReader& reader) {
  const int64_t kind = reader.Int();
  if (kind == static_cast<int64_t>(Kind::kNBits)) {
    groups_.emplace(ReadNBits(reader));
  } else if (kind == static_cast<int64_t>(Kind::kInt8)) {
    columns_.emplace(ReadInt8(reader));
  } else if (kind == static_cast<int64_t>(Kind::kBlocks)) {
    blocks_.emplace(ReadBlocks(reader));
  } else if (kind == static_cast<int64_t>(Kind::kBf16)) {
    bf16_columns_.emplace(ReadStored(reader));
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
  if (groups_) {
    writer.Int(static_cast<int64_t>(Kind::kNBits));
    WriteNBits(groups_->Packed(), writer);
  } else if (columns_) {
    writer.Int(static_cast<int64_t>(Kind::kInt8));
    WriteInt8(columns_->Packed(), writer);
  } else if (blocks_) {
    writer.Int(static_cast<int64_t>(Kind::kBlocks));
    WriteBlocks(blocks_->Packed(), writer);
  } else {
    writer.Int(static_cast<int64_t>(Kind::kBf16));
    WriteStored(bf16_columns_->Packed(), writer);
  }
  writer.Array(bias_);
}

LinearLayer PackedLayers::Linear() const {
  if (groups_) return groups_->Layer();
  if (blocks_) return blocks_->Layer();
  return columns_ ? columns_->Layer() : bf16_columns_->Layer();
}

}  // namespace ortolan::provider
