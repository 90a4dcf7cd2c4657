// Packed weights of linear layers of one kind that read the same X, concatenated by columns.
#pragma once

#include <span>
#include <string>
#include <variant>
#include <vector>

#include "provider/context_file.h"
#include "provider/layer.h"

namespace ortolan::provider {

class PackedLayers {
 public:
  // Columns of all layers but the last must be a multiple of the panel width. The stored weights may be released after
  // construction.
  explicit PackedLayers(std::span<const Layer> layers);
  // Loads packed weights from a file, which must outlive this object. Throws OpError.
  explicit PackedLayers(ContextReader& reader);
  PackedLayers(const PackedLayers&) = delete;
  PackedLayers& operator=(const PackedLayers&) = delete;

  void Write(ContextWriter& writer) const;

  // Return the linear layer of all columns.
  LinearLayer Linear() const;
  // Return the bias [columns], or null.
  const float* Bias() const { return bias_.empty() ? nullptr : bias_.data(); }
  // True if products depend on the CPU.
  bool IsBf16() const { return std::holds_alternative<Bf16Columns>(packed_); }

 private:
  void Pack(std::span<const Layer> layers);

  // A record has the index of the kind, without the first one.
  std::variant<std::monostate, NBitsGroups, Int8Columns, Bf16Columns, BlockColumns> packed_;
  std::vector<float> own_bias_;
  std::span<const float> bias_;  // points to own_bias_ or into a file
};

// Throws OpError if a layer of a compiled model multiplies in bf16, whose bits depend on the CPU.
void CheckReproducible(const PackedLayers& layers, const std::string& node);

}  // namespace ortolan::provider
