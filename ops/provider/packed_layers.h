// Layers of one X and one kind, their columns side by side as kernels read them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "provider/context_file.h"
#include "provider/layer.h"

namespace ortolan::provider {

class PackedLayers {
 public:
  // All but the last of whole panels. Their stored numbers may go when this is made.
  explicit PackedLayers(std::span<const Layer> layers);
  // As they were written to a file, which stays longer than this. Throws OpError.
  explicit PackedLayers(ContextReader& reader);
  PackedLayers(const PackedLayers&) = delete;
  PackedLayers& operator=(const PackedLayers&) = delete;

  void Write(ContextWriter& writer) const;

  // Of all columns.
  LinearLayer Linear() const;
  // [columns], or null.
  const float* Bias() const { return bias_.empty() ? nullptr : bias_.data(); }

 private:
  void Pack(std::span<const Layer> layers);

  std::optional<NBitsGroups> groups_;
  std::optional<Int8Columns> columns_;
  std::optional<BlockColumns> blocks_;
  std::optional<Bf16Columns> bf16_columns_;
  std::vector<float> own_bias_;
  std::span<const float> bias_;  // that, or a file's
};

}  // namespace ortolan::provider
