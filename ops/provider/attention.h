// Finds scaled dot-product attention between its query, key and value layers and the consumers of its output. Two forms
// are found. The first is the one that exporters write:
//
//     Reshape to [batch, rows, heads, head width] and Transpose of query, key and value; MatMul; a scale; a mask that
//     is added to the scores or replaces them; Softmax; MatMul; Transpose and Reshape back
//
// The second is a com.microsoft.MultiHeadAttention without a cache; its biases are moved into the linear layers.
//
// The rules are those of graph_passes/find/attention.py and attention_operands.py, restricted to a query, key and value
// computed from one X. Nodes that only compute sizes for these Reshapes belong to the attention.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "provider/layer.h"

namespace ortolan::provider {

inline constexpr float kHiddenScore = -1e30f;  // a mask value below this masks its score
inline constexpr int kMostScoreSteps = 16;     // limit for the nodes between MatMul(Q, K) and Softmax

// One size in the shape operand of a Reshape. As in ONNX, 0 copies the input's size and -1 is inferred.
struct Size {
  enum class Kind {
    kNumber,
    kElement,  // element `number` of `value`, which is computed before the attention
    kLead,     // size of axis `number` of the linear layers' output
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
  bool copies = true;  // a size of 0 copies the input's size (allowzero = 0)
};

// An attention mask. Its shape broadcasts to the shape of the scores.
struct Mask {
  Value value = nullptr;  // the mask tensor: added floats, a bool condition, or key padding; null if it is constant
  bool is_condition = false;
  bool hides = true;  // a condition masks scores where it is true; otherwise where it is false
  float fill = 0;     // score of masked positions

  // True for a key padding mask, int32 [batch, keys] or [batch, rows, keys]: `fill` is added to the scores of all keys
  // whose value is 0 or negative.
  bool is_padding = false;
  bool is_truncated = false;      // only the first columns are used, one for each key
  std::span<const float> values;  // the values of a constant mask
  Shape shape;                    // the shape of `values`

  // Owner of `values`, unless they belong to the file of a compiled model.
  std::shared_ptr<const std::vector<float>> own_values;
};

struct Attention {
  std::array<size_t, 3> layers{};  // indices of the query, key and value layers in the `layers` of FindAttention
  int64_t heads = 0;               // 0: read at run time
  int64_t head_dim = 0;
  float scale = 1;
  bool causal = false;
  std::array<std::vector<float>, 3>
      biases;                     // biases of MultiHeadAttention for the layers of query, key and value; or empty
  std::vector<Mask> masks;        // in the order in which the model adds them
  bool zero_hidden_rows = false;  // rows whose keys are all masked give zeros, not NaN
  Value zero_rows = nullptr;      // bool, broadcasts to [batch, heads, rows, 1]: rows set to zero where true
  std::array<Target, 3> splits;
  // Shapes of the two Reshapes around a Transpose of the keys: [batch x heads, rows, head width], then [batch, heads,
  // head width, rows]. Empty if the keys are transposed in four dimensions.
  std::vector<Target> key_views;
  Target merge;
  Value y = nullptr;
  std::vector<const Node*> nodes;  // all nodes except those of the linear layers

  // Return the values that are read at run time in addition to the linear layers' X.
  std::vector<Value> Reads() const;
};

// Return the attention around a Softmax, or a MultiHeadAttention node; nullopt for other nodes. Throws UnfitError if
// the attention is not supported.
std::optional<Attention> FindAttention(const Graph& graph, const Node& node, std::span<const Layer> layers);

}  // namespace ortolan::provider
