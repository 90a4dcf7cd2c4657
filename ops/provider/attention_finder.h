// The implementation of FindAttention (attention.h). attention.cc has the main sequence, the steps after the attention,
// and the check that no inner value has other consumers. attention_operands.cc follows query, key and value from the
// linear layers to the MatMuls and reads the sizes of Reshapes. attention_scores.cc reads scales and masks.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "provider/attention.h"

namespace ortolan::provider {

inline constexpr const char* kMeanings[] = {"query", "key", "value"};
inline constexpr int kMostSteps = kMostScoreSteps;  // limit for each search through preceding nodes
inline constexpr int kMostVisits = 20000;           // limit for all node visits of one search, repeated visits included

using Axes = std::vector<int64_t>;
using Sizes = std::vector<Size>;

inline Size ConstantSize(int64_t number) { return {Size::Kind::kNumber, number, nullptr}; }
Sizes Permuted(const Sizes& sizes, const Axes& axes);

class AttentionFinder {
 public:
  AttentionFinder(const Graph& graph, const Node& softmax, std::span<const Layer> layers)
      : graph_(graph), softmax_(softmax), layers_(layers) {}

  std::optional<Attention> Find();

  // The inputs of MultiHeadAttention are query, key, value, bias, key_padding_mask, attention_bias, past_key,
  // past_value, past_sequence_length, …
  Attention FindMultiHeadAttention();

 private:
  void Take(const Node& node);

  // Return the first operand of the second MatMul: the Softmax output, possibly with NaN replaced by zeros.
  Value Weights();

  // Return the MatMul of query and key from which `value` is computed by scales and masks.
  const Node* ScoresBehind(Value value, int steps) const;

  // --- queries, keys and values -------------------------------------------------------------------------------------

  // A node between a linear layer and a MatMul. Its input `index` comes from the linear layer.
  struct Link {
    const Node* node;
    size_t index;
  };

  bool IsFactor(const Node& node) const { return node.IsStandard("Mul") || node.IsStandard("Div"); }

  // Return which input of a node between a linear layer and a MatMul comes from the layer.
  std::optional<size_t> InputFromLayer(const Node& node, int steps) const;

  bool LeadsToLayer(Value value, int steps) const;

  // Follow an operand of a MatMul back to its linear layer. `meaning` is an index into kMeanings.
  void ReadOperand(Value value, size_t meaning);

  // Follow an operand from its linear layer to the MatMul; record the sizes of its values, and its factors. axes: the
  // order in which the MatMul must see the axes of [batch, rows, heads, head width].
  void FollowOperand(size_t meaning, const Axes& axes);

  // Read the constants that multiply query, key and scores.
  void ReadFactors();

  static std::string What(size_t meaning) { return ErrorText("its ", kMeanings[meaning]); }

  static std::string NotSplit(size_t meaning);

  bool IsOfLayer(Value value) const;

  void SetLayer(size_t meaning, Value y);

  const Layer& LayerOf(size_t meaning) const { return layers_[found_.layers[meaning]]; }

  void CheckLayers();

  void ReadHeads();

  // Read the number of heads and the head width from the shape operand of a Reshape, if they are known.
  void ReadHeads(size_t meaning);

  // Return the Concat that computes `value`, if only the attention's Reshapes read it.
  const Node* OwnConcat(Value value) const;

  // --- sizes --------------------------------------------------------------------------------------------------------

  // Return the sizes of a linear layer's output; empty if its rank is unknown.
  Sizes WideSizes() const;

  Sizes HeadSizes() const { return {batch_, rows_, heads_, head_dim_}; }

  // Record the sizes of the Softmax output, and of the nodes that replace NaN.
  void NameScores();

  void SetSizes(Value value, const Sizes& sizes);

  std::optional<Sizes> ConstantSizes(Value value) const;

  // Return whether the value is computed from sizes of the attention's own values.
  bool IsMadeInside(Value value, int steps) const;

  // Return the elements of a shape value with at most one axis; nullopt if they cannot be determined.
  std::optional<Sizes> SizesOf(Value value, int steps) const;

  static std::optional<Sizes> Part(const Sizes& sizes, int64_t first, int64_t end);

  std::optional<Sizes> SizesInFront(Value value) const;

  Target TargetOf(const Node& reshape) const;

  // --- scores -------------------------------------------------------------------------------------------------------

  // Return a number that is known before the model runs: a constant, or one computed from constant sizes with the
  // rounding of ONNX Runtime.
  std::optional<float> NumberOf(Value value, int steps) const;

  // Follow the scores from the Softmax input back to the MatMul of query and key.
  void ReadScores(const Node& scores);

  void ReadMask(Value value);

  // Split the bias of MultiHeadAttention into those of query, key and value.
  void ReadBiases(const Constant& bias);

  void ReadKeyPadding(Value value);

  // Read a Where that replaces scores by a number. It is handled as a mask that adds the number: the scores
  // are masked either way.
  void ReadFill(const Node& where, size_t index);

  // Return whether the last dimension is 1, that is, whether the value has one element per row.
  bool IsOneARow(Value value) const;

  // --- output -------------------------------------------------------------------------------------------------------

  void ReadMerge(const Node& product);

  // Take the nodes that only compute sizes for the attention. Throws if a value inside has another consumer.
  void TakeWhatReadsSizes();

  // Check that everything the attention reads is computed before it.
  void CheckInFront();

  void ReadConstantMask(Mask& mask) const;

  // Return whether the node is a Slice that keeps the first keys, up to the number of keys.
  bool TruncatesKeys(const Node& slice) const;

  void Visit() const { Expect(++visits_ <= kMostVisits, "too many nodes are around it"); }

  const Graph& graph_;
  const Node& softmax_;
  const std::span<const Layer> layers_;
  Attention found_;
  std::unordered_set<const Node*> taken_;
  mutable int visits_ = 0;
  std::array<std::vector<Link>, 3> chains_;  // nodes of query, key and value, from the linear layer to the MatMul
  std::array<const Node*, 3> splits_{};      // the first Reshape after the linear layer, in each chain
  std::vector<const Node*> key_views_;
  std::vector<Link> factors_;
  const Size batch_{Size::Kind::kBatch, 0, nullptr}, rows_{Size::Kind::kRows, 0, nullptr};
  Size heads_{Size::Kind::kHeads, 0, nullptr}, head_dim_{Size::Kind::kHeadDim, 0, nullptr};
  std::unordered_map<Value, Sizes> sizes_;
  Sizes scores_sizes_;
};

}  // namespace ortolan::provider
