// Layers of one X and one kind, their columns side by side as kernels read them.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "provider/layer.h"

namespace ortolan::provider {

class PackedLayers {
 public:
  // All but the last of whole panels. Their stored numbers may go when this is made.
  explicit PackedLayers(std::span<const Layer> layers);

  // Of all columns.
  LinearLayer Linear() const;
  // [columns], or null.
  const float* Bias() const { return bias_.empty() ? nullptr : bias_.data(); }

 private:
  void PackFloats(const std::vector<RoundedWeight>& weights);

  // One of these.
  std::optional<NBitsGroups> groups_;
  std::optional<Int8Columns> columns_;
  std::optional<Bf16Columns> bf16_columns_;
  std::vector<float> bias_;
};

}  // namespace ortolan::provider
