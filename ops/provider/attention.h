// Scaled dot-product attention between three layers and the consumers of its output, as exporters decompose it:
//
//     Reshape to [batch, rows, heads, head width] and Transpose of queries, keys and values; MatMul; a scale; a mask,
//     added or replacing scores; Softmax; MatMul; Transpose and Reshape back
//
// or a com.microsoft.MultiHeadAttention without a cache, whose biases become those of the layers.
//
// The rules are those of graph_passes/find/attention.py and attention_operands.py, for queries, keys and values
// computed from one X. Nodes that only compute the sizes of these Reshapes belong to the attention.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "provider/layer.h"

namespace ortolan::provider {

inline constexpr float kHiddenScore = -1e30f;  // scores with a mask value below this have no weight
inline constexpr int kMostScoreSteps = 16;     // nodes between the scores and the Softmax

// A size in the shape operand of a Reshape, as in ONNX: 0 copies the input's size, -1 is inferred.
struct Size {
  enum class Kind {
    kNumber,
    kElement,  // number `number` of a value that is computed in front
    kLead,     // axis `number` of a layer's output
    kBatch,
    kRows,
    kHeads,
    kHeadDim,
  };
  Kind kind = Kind::kNumber;
  int64_t number = 0;
  Value value = nullptr;  // int64
};

struct Target {
  std::vector<Size> sizes;
  bool copies = true;  // 0 is no size (allowzero 0)
};

// Of a shape that broadcasts to that of the scores.
struct Mask {
  Value value = nullptr;  // float, added; or truth values; or key padding; null: it is constant
  bool is_condition = false;
  bool hides = true;  // scores where it is true; else where it is false
  float fill = 0;     // in their place
  // int32 [batch, keys] or [batch, rows, keys], above 0 where keys are seen: the fill is added to the other scores.
  bool is_padding = false;
  bool is_truncated = false;      // to the number of keys
  std::span<const float> values;  // of a constant one
  Shape shape;                    // of these
  // They lie here, or in the file of a compiled model.
  std::shared_ptr<const std::vector<float>> own_values;
};

struct Attention {
  std::array<size_t, 3> layers{};  // of queries, keys and values: indices into the given layers
  int64_t heads = 0;               // 0: known when it runs
  int64_t head_dim = 0;
  float scale = 1;
  bool causal = false;
  std::array<std::vector<float>, 3> biases;  // of the layers, which have none then; or none
  std::vector<Mask> masks;                   // in the order in which they are added
  bool zero_hidden_rows = false;             // rows that see no key give zeros, not NaN
  Value zero_rows = nullptr;  // truth values [batch, heads, rows, 1] or what broadcasts to it: where there are zeros
  std::array<Target, 3> splits;
  // Of keys that are transposed as [batch x heads, rows, head width]: that shape, and [batch, heads, head width, rows].
  std::vector<Target> key_views;
  Target merge;
  Value y = nullptr;
  std::vector<const Node*> nodes;  // but for those of the layers

  // What it reads when it runs, besides its layers.
  std::vector<Value> Reads() const;
};

// The attention that has this Softmax, or is this MultiHeadAttention. None: the node is something else. Throws
// UnfitError for one that is not taken.
std::optional<Attention> FindAttention(const Graph& graph, const Node& node, std::span<const Layer> layers);

}  // namespace ortolan::provider
