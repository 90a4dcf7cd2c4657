// Finds an attention in a graph: the parts of FindAttention (attention.h). attention.cc has the sequence, what becomes
// of the output, and what must not be used elsewhere; attention_operands.cc the way from the layers to the products,
// and the sizes of Reshapes; attention_scores.cc scales and masks.
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
inline constexpr int kMostSteps = kMostScoreSteps;  // behind a size as well
inline constexpr int kMostVisits = 20000;           // of nodes, some more than once

using Axes = std::vector<int64_t>;
using Sizes = std::vector<Size>;

inline Size ConstantSize(int64_t number) { return {Size::Kind::kNumber, number, nullptr}; }
Sizes Permuted(const Sizes& sizes, const Axes& axes);

class AttentionFinder {
 public:
  AttentionFinder(const Graph& graph, const Node& softmax, std::span<const Layer> layers)
      : graph_(graph), softmax_(softmax), layers_(layers) {}

  std::optional<Attention> Find();

  // query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value, past_sequence_length, …
  Attention FindMultiHeadAttention();

 private:
  void Take(const Node& node);

  // The operand of the second product: the Softmax, possibly with NaN replaced by zeros.
  Value Weights();

  // The product of queries and keys that a value is made of by scales and masks.
  const Node* ScoresBehind(Value value, int steps) const;

  // --- queries, keys and values -------------------------------------------------------------------------------------

  // A node between a layer and a product, and which of its inputs comes from there.
  struct Link {
    const Node* node;
    size_t index;
  };

  bool IsFactor(const Node& node) const { return node.IsStandard("Mul") || node.IsStandard("Div"); }

  // The input of a node that may stand between a layer and a product.
  std::optional<size_t> InputFromLayer(const Node& node, int steps) const;

  bool LeadsToLayer(Value value, int steps) const;

  // Follows an operand of a product back to its layer.
  void ReadOperand(Value value, size_t meaning);

  // From the layer on: names sizes, and collects factors. axes: of [batch, rows, heads, head width], those at the end.
  void FollowOperand(size_t meaning, const Axes& axes);

  // What multiplies queries, keys and scores.
  void ReadFactors();

  static std::string What(size_t meaning) { return ErrorText("its ", kMeanings[meaning]); }

  static std::string NotSplit(size_t meaning);

  bool IsOfLayer(Value value) const;

  void SetLayer(size_t meaning, Value y);

  const Layer& LayerOf(size_t meaning) const { return layers_[found_.layers[meaning]]; }

  void CheckLayers();

  void ReadHeads();

  // The last two sizes of what a Reshape makes, if they are known.
  void ReadHeads(size_t meaning);

  // What joins sizes for its Reshapes alone.
  const Node* OwnConcat(Value value) const;

  // --- sizes --------------------------------------------------------------------------------------------------------

  // Of a layer's output; none: its rank is not known.
  Sizes WideSizes() const;

  Sizes HeadSizes() const { return {batch_, rows_, heads_, head_dim_}; }

  // Of the Softmax, and of what replaces NaN.
  void NameScores();

  void SetSizes(Value value, const Sizes& sizes);

  std::optional<Sizes> ConstantSizes(Value value) const;

  // Return whether the value is computed from sizes of the attention's own values.
  bool IsMadeInside(Value value, int steps) const;

  // The numbers of a value of at most one axis; none: not understood.
  std::optional<Sizes> SizesOf(Value value, int steps) const;

  static std::optional<Sizes> Part(const Sizes& sizes, int64_t first, int64_t end);

  std::optional<Sizes> SizesInFront(Value value) const;

  Target TargetOf(const Node& reshape) const;

  // --- scores -------------------------------------------------------------------------------------------------------

  // A number that is known before the model runs: constant, or computed from sizes that are, as ONNX Runtime would.
  std::optional<float> NumberOf(Value value, int steps) const;

  // From the Softmax's input back to the product.
  void ReadScores(const Node& scores);

  void ReadMask(Value value);

  // Of queries, keys and values, one after another.
  void ReadBiases(const Constant& bias);

  void ReadKeyPadding(Value value);

  // Of scores that are replaced by a number: as if that were added, since nothing is left of them then.
  void ReadFill(const Node& where, size_t index);

  // Whether its last dimension is 1: it says something of rows.
  bool IsOneARow(Value value) const;

  // --- the answer ---------------------------------------------------------------------------------------------------

  void ReadMerge(const Node& product);

  // Take the nodes that only compute sizes for the attention. Throws if a value inside has another consumer.
  void TakeWhatReadsSizes();

  // What it reads must be made in front of it.
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
  std::array<std::vector<Link>, 3> chains_;  // of queries, keys and values, from the layer to the product
  std::array<const Node*, 3> splits_{};      // among them, the Reshape behind the layer
  std::vector<const Node*> key_views_;
  std::vector<Link> factors_;
  const Size batch_{Size::Kind::kBatch, 0, nullptr}, rows_{Size::Kind::kRows, 0, nullptr};
  Size heads_{Size::Kind::kHeads, 0, nullptr}, head_dim_{Size::Kind::kHeadDim, 0, nullptr};
  std::unordered_map<Value, Sizes> sizes_;
  Sizes scores_sizes_;
};

}  // namespace ortolan::provider
