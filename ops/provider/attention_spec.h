// The sizes, slots and masks of one attention, as compiled models store them.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "match/attention.h"
#include "nomad_attention/nomad_attention.h"
#include "provider/record.h"

namespace ortolan::provider {

inline constexpr int64_t kMostHeads = 1 << 16;
inline constexpr int64_t kMostHeadDim = 1 << 16;
inline constexpr size_t kMostMasks = 64;

// An input of the fused node: its index, nullopt if it is missing, and its name for error messages.
struct NamedInput {
  std::optional<size_t> slot;
  std::string name;
};

struct MaskSpec {
  enum class Kind { kAdded, kCondition, kPadding };
  Kind kind = Kind::kAdded;
  NamedInput input;    // no slot: `values`
  FloatTensor values;  // of a constant mask: its elements as floats
  bool hides = true;   // kCondition: masks scores where it is true; otherwise where it is false
  float fill = 0;      // kCondition and kPadding: score of masked positions
  float scale = 1;     // kAdded: factor
  int64_t heads = 0;   // as in match::Mask
  bool windows = false, truncated = false;
  std::shared_ptr<const std::vector<float>> own;  // owner of `values`, unless they belong to a file
};

struct AttentionSpec {
  std::string node;
  // Query, key, value. A step with layers has only X, as the first; a packed query contains key and value.
  std::array<NamedInput, 3> inputs;
  std::array<match::Layout, 3> layouts{};
  std::array<std::span<const float>, 3> biases;  // of inputs; empty without a bias
  int64_t heads = 0, kv_heads = 0, head_dim = 0;
  float scale = 1;
  float softcap = 0;
  bool causal = false, zero_hidden_rows = false;
  int64_t window = 0;            // as match::Attention::window
  std::span<const float> sinks;  // one a head, or none
  bool is_precise = false;       // as match::Attention::precise
  bool is_beside_cache = false;
  bool reproducible = false;  // the same bits on every CPU, unless is_precise
  NamedInput zero_rows;       // bool: rows set to zero where true
  std::vector<MaskSpec> masks;
  match::Layout output_layout = match::Layout::kByRows;
  std::optional<size_t> y;  // nullopt if no node reads the output

  struct Cache {
    NamedInput past_key, past_value, lengths, total, cos, sin;
    std::optional<size_t> present_key, present_value;
    bool interleaved = false;
  };
  bool has_cache = false;
  Cache cache;
};

// Write or read the fields (record.h).
template <typename Archive, typename Spec>
void VisitAttention(Archive& archive, Spec& spec) {
  constexpr int64_t kLayouts = std::size(match::kLayoutNames);
  const auto input = [&](auto& one, ElementType type = ElementType::kFloat, bool is_exact = false) {
    archive.Input(one.slot, type, is_exact);
    archive.String(one.name);
  };
  archive.String(spec.node);
  for (auto& one : spec.inputs) input(one);
  for (auto& layout : spec.layouts) archive.Choice(layout, kLayouts, "a layout");
  for (auto& bias : spec.biases) archive.Floats(bias);
  archive.Int(spec.heads, 1, kMostHeads, "the number of heads");
  archive.Int(spec.kv_heads, 1, kMostHeads, "the number of key heads");
  archive.Int(spec.head_dim, 1, kMostHeadDim, "the width of a head");
  archive.Float(spec.scale, "the scale");
  archive.Float(spec.softcap, "the softcap");
  archive.Flag(spec.causal);
  archive.Flag(spec.zero_hidden_rows);
  archive.Int(spec.window, 0, kMaxTokens, "the window");
  archive.Floats(spec.sinks);
  archive.Flag(spec.is_precise);
  archive.Flag(spec.is_beside_cache);
  archive.Flag(spec.reproducible);
  input(spec.zero_rows, ElementType::kBool);
  archive.List(spec.masks, kMostMasks, "the number of masks", [&](auto& mask) {
    archive.Choice(mask.kind, 3, "the kind of a mask");
    input(mask.input, mask.kind == MaskSpec::Kind::kAdded       ? ElementType::kFloat
                      : mask.kind == MaskSpec::Kind::kCondition ? ElementType::kBool
                                                                : ElementType::kInt32);
    if (!mask.input.slot) archive.Tensor(mask.values, "a mask");
    archive.Flag(mask.hides);
    archive.Float(mask.fill, "the fill of a mask");
    archive.Float(mask.scale, "the scale of a mask");
    archive.Int(mask.heads, 0, kMostHeads, "the number of a mask's heads");
    archive.Flag(mask.windows);
    archive.Flag(mask.truncated);
  });
  archive.Choice(spec.output_layout, kLayouts, "the output's layout");
  archive.Output(spec.y);
  archive.Flag(spec.has_cache);
  if (!spec.has_cache) return;
  auto& cache = spec.cache;
  for (auto* const one : {&cache.past_key, &cache.past_value, &cache.cos, &cache.sin}) {
    input(*one, ElementType::kFloat, true);
  }
  for (auto* const one : {&cache.lengths, &cache.total}) input(*one, ElementType::kInt32);
  archive.Output(cache.present_key, true);
  archive.Output(cache.present_value, true);
  archive.Flag(cache.interleaved);
}

}  // namespace ortolan::provider
