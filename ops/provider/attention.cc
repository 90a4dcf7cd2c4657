#include <algorithm>
#include <cmath>
#include <utility>

#include "provider/attention_finder.h"

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;
constexpr auto kHalf = ElementType::kFloat16;
constexpr size_t kMostNodes = 200;  // limit for nodes that only compute sizes
constexpr int64_t kMostHeads = 1 << 16;

}  // namespace

std::optional<Attention> AttentionFinder::Find() {
  Take(softmax_);
  const Value weights = Weights();
  const Node* const product = weights == nullptr ? nullptr : graph_.OnlyReader(weights);
  const Node* const scores = ScoresBehind(softmax_.Input(0), kMostSteps);
  if (product == nullptr || scores == nullptr) return std::nullopt;
  if (!product->IsStandard("MatMul") || product->Input(0) != weights) return std::nullopt;
  const int64_t axis = softmax_.Int("axis", 1);  // ONNX Runtime sets missing attributes to their defaults
  Expect(axis == -1 || axis == 3, "its Softmax is not over the last axis");
  ReadOperand(scores->Input(0), 0);
  ReadOperand(scores->Input(1), 1);
  ReadOperand(product->Input(1), 2);
  CheckLayers();
  ReadHeads();
  FollowOperand(0, {0, 2, 1, 3});
  FollowOperand(1, {0, 2, 3, 1});
  FollowOperand(2, {0, 2, 1, 3});
  scores_sizes_ = Permuted({batch_, rows_, heads_}, {0, 2, 1, 1});
  NameScores();
  ReadScores(*scores);
  ReadFactors();
  Take(*scores);
  Take(*product);
  ReadMerge(*product);
  for (size_t i = 0; i < 3; ++i) found_.splits[i] = TargetOf(*splits_[i]);
  for (const Node* const view : key_views_) found_.key_views.push_back(TargetOf(*view));
  TakeWhatReadsSizes();
  CheckInFront();
  return std::move(found_);
}

Attention AttentionFinder::FindMultiHeadAttention() {
  const Node& node = softmax_;
  constexpr size_t kBias = 3, kKeyPadding = 4, kScoreBias = 5;
  for (size_t i = kScoreBias + 1; i < node.inputs().size(); ++i) {
    Expect(!node.Has(i), ErrorText("it has input ", i, ", '", node.InputName(i), "'"));
  }
  for (size_t i = 1; i < node.outputs().size(); ++i) Expect(node.Output(i) == nullptr, "it has a cache");
  Take(node);
  for (size_t i = 0; i < 3; ++i) {
    Expect(IsOfLayer(node.Input(i)), What(i) + " is not the output of a claimed linear layer");
    SetLayer(i, node.Input(i));
  }
  CheckLayers();
  const int64_t columns = LayerOf(0).Columns();
  found_.heads = node.Int("num_heads");
  Expect(found_.heads > 0 && found_.heads <= kMostHeads && columns % found_.heads == 0,
         ErrorText("its num_heads is ", found_.heads, ", expected a number that divides ", columns));
  found_.head_dim = columns / found_.heads;
  found_.causal = node.Int("unidirectional", 0) == 1;
  found_.scale = node.Float("scale", 0);
  if (found_.scale == 0) found_.scale = 1.0f / std::sqrt(static_cast<float>(found_.head_dim));
  Expect(std::isfinite(found_.scale), "its scale is not finite");
  if (node.Has(kBias)) ReadBiases(node.ConstantInput(kBias, "bias", {kFloat, kHalf}, {{3 * columns}}));
  if (node.Has(kScoreBias)) ReadMask(node.Input(kScoreBias));
  if (node.Has(kKeyPadding)) ReadKeyPadding(node.Input(kKeyPadding));
  const Sizes wide = {{Size::Kind::kLead, 0, nullptr}, {Size::Kind::kLead, 1, nullptr}};
  for (Target& split : found_.splits) {
    split = {{wide[0], wide[1], ConstantSize(found_.heads), ConstantSize(found_.head_dim)}, false};
  }
  found_.merge = {{wide[0], wide[1], ConstantSize(columns)}, false};
  found_.y = node.Output(0);
  Expect(found_.y != nullptr, "its output is missing");
  TakeWhatReadsSizes();
  CheckInFront();
  return std::move(found_);
}

void AttentionFinder::Take(const Node& node) {
  if (taken_.insert(&node).second) found_.nodes.push_back(&node);
}

void AttentionFinder::ReadMerge(const Node& product) {
  const auto only = [&](Value value) {
    const Node* reader = nullptr;
    const std::span<const Graph::Use> uses = graph_.Uses(value);
    for (const Graph::Use& use : uses) {
      if (use.index >= 0 && use.node->IsStandard("Shape")) continue;
      Expect(reader == nullptr && use.index >= 0, "its output before the heads are merged has another consumer");
      reader = use.node;
    }
    return reader;
  };
  Value value = product.Output(0);
  SetSizes(value, Permuted(HeadSizes(), {0, 2, 1, 3}));
  const Node* node = value == nullptr ? nullptr : only(value);
  // transformers 5 exports a Where that replaces fully masked rows by zeros.
  if (node != nullptr && node->IsStandard("Where") && node->Input(2) == value && node->Output(0) != nullptr &&
      graph_.NumberOf(node->Input(1)) == 0.0f && node->Has(0) && !node->IsConstant(0) && IsOneARow(node->Input(0))) {
    found_.zero_rows = node->Input(0);
    Take(*node);
    value = node->Output(0);
    SetSizes(value, Permuted(HeadSizes(), {0, 2, 1, 3}));
    node = only(value);
  }
  Expect(node != nullptr && node->IsStandard("Transpose") && node->Ints("perm") == Axes{0, 2, 1, 3} &&
             node->Output(0) != nullptr,
         "its output is not transposed and reshaped to [batch, rows, width]");
  Take(*node);
  value = node->Output(0);
  SetSizes(value, HeadSizes());
  node = only(value);
  Expect(node != nullptr && node->IsStandard("Reshape") && node->Input(0) == value && node->Output(0) != nullptr,
         "its output is not transposed and reshaped to [batch, rows, width]");
  Take(*node);
  found_.y = node->Output(0);
  found_.merge = TargetOf(*node);
}

void AttentionFinder::TakeWhatReadsSizes() {
  std::vector<Value> waiting;
  for (size_t i = 0; i < 3; ++i) waiting.push_back(LayerOf(i).y);
  for (const Node* const node : found_.nodes) {
    for (const Value value : node->outputs()) {
      if (value != found_.y) waiting.push_back(value);
    }
  }
  while (!waiting.empty()) {
    const Value value = waiting.back();
    waiting.pop_back();
    if (value == nullptr) continue;
    Expect(!graph_.IsOutput(value),
           ErrorText("'", value->name, "' inside it is an output of the graph, or only leads to one"));
    for (const Graph::Use& use : graph_.Uses(value)) {
      if (taken_.count(use.node) != 0) continue;
      Expect(use.index >= 0 && found_.nodes.size() < kMostNodes,
             ErrorText("'", value->name, "' inside it is also read by ", use.node->Described()));
      Take(*use.node);
      waiting.insert(waiting.end(), use.node->outputs().begin(), use.node->outputs().end());
    }
  }
}

void AttentionFinder::CheckInFront() {
  const auto is_inside = [&](Value value) {
    const Node* const maker = value == nullptr ? nullptr : graph_.Maker(value);
    return maker != nullptr && taken_.count(maker) != 0;
  };
  for (Mask& mask : found_.masks) {
    for (; !mask.is_padding && is_inside(mask.value); mask.value = graph_.Maker(mask.value)->Input(0)) {
      const Node& node = *graph_.Maker(mask.value);
      // An Expand to the shape of the scores; broadcasting has the same effect.
      if (node.IsStandard("Expand")) continue;
      if (!TruncatesKeys(node)) break;
      mask.is_truncated = true;
    }
    Expect(mask.value != nullptr && !is_inside(mask.value), "its mask is computed from values inside it");
    if (graph_.IsConstantValue(mask.value)) ReadConstantMask(mask);
  }
  for (const Value value : found_.Reads()) {
    Expect(!is_inside(value), ErrorText("'", value->name, "', which it reads, is computed from values inside it"));
  }
}
std::vector<Value> Attention::Reads() const {
  std::vector<Value> read = {zero_rows};
  for (const Mask& mask : masks) read.push_back(mask.value);
  const auto add_sizes = [&](const Target& target) {
    for (const Size& size : target.sizes) read.push_back(size.value);
  };
  std::for_each(splits.begin(), splits.end(), add_sizes);
  std::for_each(key_views.begin(), key_views.end(), add_sizes);
  add_sizes(merge);
  read.erase(std::remove(read.begin(), read.end(), nullptr), read.end());
  return read;
}

std::optional<Attention> FindAttention(const Graph& graph, const Node& node, std::span<const Layer> layers) {
  if (node.IsStandard("Softmax")) return AttentionFinder(graph, node, layers).Find();
  if (node.Is("com.microsoft", "MultiHeadAttention"))
    return AttentionFinder(graph, node, layers).FindMultiHeadAttention();
  return std::nullopt;
}

}  // namespace ortolan::provider
