#include "provider/attention.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <unordered_map>
#include <unordered_set>
#include <utility>

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT;
constexpr auto kHalf = ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
constexpr auto kInt64 = ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64;
constexpr auto kBool = ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL;

constexpr const char* kMeanings[] = {"query", "key", "value"};
constexpr int kMostSteps = kMostScoreSteps;  // behind a size as well
constexpr size_t kMostNodes = 200;           // that only ask for sizes
constexpr int64_t kMostSizes = 16;           // in a value
constexpr int kMostVisits = 20000;           // of nodes, some more than once
constexpr int64_t kMostHeads = 1 << 16;
constexpr float kPaddingFill = -10000.0f;  // of MultiHeadAttention

using Axes = std::vector<int64_t>;
using Sizes = std::vector<Size>;

Size NumberSize(int64_t number) { return {Size::Kind::kNumber, number, nullptr}; }

Sizes Permuted(const Sizes& sizes, const Axes& axes) {
  Sizes moved;
  for (const int64_t axis : axes) moved.push_back(sizes[static_cast<size_t>(axis)]);
  return moved;
}

class Finder {
 public:
  Finder(const Graph& graph, const Node& softmax, std::span<const Layer> layers)
      : graph_(graph), softmax_(softmax), layers_(layers) {}

  std::optional<Attention> Find() {
    Take(softmax_);
    const Value weights = Weights();
    const Node* const product = weights == nullptr ? nullptr : graph_.OnlyReader(weights);
    const Node* const scores = ScoresBehind(softmax_.Input(0), kMostSteps);
    if (product == nullptr || scores == nullptr) return std::nullopt;
    if (!product->IsStandard("MatMul") || product->Input(0) != weights) return std::nullopt;
    const int64_t axis = softmax_.Whole("axis", 1);  // ONNX Runtime sets what is missing
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

  // query, key, value, bias, key_padding_mask, attention_bias, past_key, past_value, past_sequence_length, …
  Attention FindMultiHeadAttention() {
    const Node& node = softmax_;
    constexpr size_t kBias = 3, kKeyPadding = 4, kScoreBias = 5;
    for (size_t i = kScoreBias + 1; i < node.inputs().size(); ++i) {
      Expect(!node.Has(i), ErrorText("it has input ", i, ", '", node.InputName(i), "'"));
    }
    for (size_t i = 1; i < node.outputs().size(); ++i) Expect(node.Output(i) == nullptr, "it has a cache");
    Take(node);
    for (size_t i = 0; i < 3; ++i) {
      Expect(IsOfLayer(node.Input(i)), What(i) + " comes from no layer that is taken");
      SetLayer(i, node.Input(i));
    }
    CheckLayers();
    const int64_t columns = LayerOf(0).Columns();
    found_.heads = node.Whole("num_heads");
    Expect(found_.heads > 0 && found_.heads <= kMostHeads && columns % found_.heads == 0,
           ErrorText("its num_heads is ", found_.heads, ", expected a number that divides ", columns));
    found_.head_dim = columns / found_.heads;
    found_.causal = node.Whole("unidirectional", 0) == 1;
    found_.scale = node.Number("scale", 0);
    if (found_.scale == 0) found_.scale = 1.0f / std::sqrt(static_cast<float>(found_.head_dim));
    Expect(std::isfinite(found_.scale), "its scale is no finite number");
    if (node.Has(kBias)) ReadBiases(node.ConstantInput(kBias, "bias", {kFloat, kHalf}, {{3 * columns}}));
    if (node.Has(kScoreBias)) ReadMask(node.Input(kScoreBias));
    if (node.Has(kKeyPadding)) ReadKeyPadding(node.Input(kKeyPadding));
    const Sizes wide = {{Size::Kind::kLead, 0, nullptr}, {Size::Kind::kLead, 1, nullptr}};
    for (Target& split : found_.splits) {
      split = {{wide[0], wide[1], NumberSize(found_.heads), NumberSize(found_.head_dim)}, false};
    }
    found_.merge = {{wide[0], wide[1], NumberSize(columns)}, false};
    found_.y = node.Output(0);
    Expect(found_.y != nullptr, "its output is missing");
    TakeWhatReadsSizes();
    CheckInFront();
    return std::move(found_);
  }

 private:
  void Take(const Node& node) {
    if (taken_.insert(&node).second) found_.nodes.push_back(&node);
  }

  // What goes into the second product: the Softmax, perhaps with zeros in the place of NaN.
  Value Weights() {
    const Value weights = softmax_.Output(0);
    if (weights == nullptr) return nullptr;
    const Node* const reader = graph_.OnlyReader(weights);
    if (reader != nullptr && graph_.IsFloatCast(*reader)) {  // a Softmax in float32 between products in float16
      Take(*reader);
      return reader->Output(0);
    }
    const std::span<const Graph::Use> uses = graph_.Uses(weights);
    if (uses.size() != 2 || uses[0].index < 0 || uses[1].index < 0) return weights;
    const size_t first = uses[0].node->IsStandard("IsNaN") ? 0 : 1;
    const Node& is_nan = *uses[first].node;
    const Node& where = *uses[1 - first].node;
    const bool fits = is_nan.IsStandard("IsNaN") && where.IsStandard("Where") && where.Input(2) == weights &&
                      where.Input(0) == is_nan.Output(0) && graph_.NumberOf(where.Input(1)) == 0.0f;
    if (!fits) return weights;
    Take(is_nan);
    Take(where);
    found_.zero_hidden_rows = true;
    return where.Output(0);
  }

  // The product of queries and keys that a value is made of by scales and masks.
  const Node* ScoresBehind(Value value, int steps) const {
    Visit();
    const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
    if (node == nullptr || !node->IsStandard() || steps == 0) return nullptr;
    const std::string& type = node->type();
    if (type == "MatMul") {
      const bool has_constant = graph_.IsConstantValue(node->Input(0)) || graph_.IsConstantValue(node->Input(1));
      return has_constant ? nullptr : node;
    }
    if (graph_.IsFloatCast(*node)) return ScoresBehind(node->Input(0), steps - 1);
    if (type != "Add" && type != "Mul" && type != "Div" && type != "Where" && type != "Identity") return nullptr;
    const Node* found = nullptr;
    for (const Value input : node->inputs()) {
      const Node* const scores = ScoresBehind(input, steps - 1);
      if (scores != nullptr && found != nullptr) return nullptr;
      if (scores != nullptr) found = scores;
    }
    return found;
  }

  // --- queries, keys and values -------------------------------------------------------------------------------------

  // A node between a layer and a product, and which of its inputs comes from there.
  struct Link {
    const Node* node;
    size_t index;
  };

  bool IsFactor(const Node& node) const { return node.IsStandard("Mul") || node.IsStandard("Div"); }

  // The input of a node that may stand between a layer and a product.
  std::optional<size_t> InputFromLayer(const Node& node, int steps) const {
    if (node.IsStandard("Reshape") || node.IsStandard("Transpose") || node.IsStandard("Identity")) return 0;
    if (!IsFactor(node) || node.inputs().size() != 2) return std::nullopt;
    for (const size_t index : {0, 1}) {
      if (LeadsToLayer(node.Input(index), steps)) return index;
    }
    return std::nullopt;
  }

  bool LeadsToLayer(Value value, int steps) const {
    Visit();
    if (IsOfLayer(value)) return true;
    const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
    const std::optional<size_t> index = node == nullptr || steps == 0 ? std::nullopt : InputFromLayer(*node, steps - 1);
    return index && LeadsToLayer(node->Input(*index), steps - 1);
  }

  // Follows an operand of a product back to its layer.
  void ReadOperand(Value value, size_t meaning) {
    std::vector<Link>& chain = chains_[meaning];
    while (!IsOfLayer(value)) {
      const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
      Expect(node != nullptr && chain.size() < kMostSteps, What(meaning) + " comes from no layer that is taken");
      const std::optional<size_t> index = InputFromLayer(*node, kMostSteps);
      Expect(index.has_value(), ErrorText(What(meaning), " goes through ", node->Described(),
                                          ", expected a Reshape and a Transpose behind a layer that is taken"));
      chain.insert(chain.begin(), {node, *index});
      Take(*node);
      if (node->IsStandard("Reshape")) splits_[meaning] = node;
      value = node->Input(*index);
    }
    SetLayer(meaning, value);
    Expect(splits_[meaning] != nullptr, NotSplit(meaning));
  }

  // From the layer on: names sizes, and collects factors. axes: of [batch, rows, heads, head width], those at the end.
  void FollowOperand(size_t meaning, const Axes& axes) {
    const Axes by_heads = {0, 2, 1, 3}, by_columns = {0, 2, 3, 1};
    Sizes wide = WideSizes();
    SetSizes(LayerOf(meaning).y, wide);
    Axes order;              // none: not split yet
    bool is_flat = false;    // [batch x heads, rows, head width], which order stands for
    bool is_turned = false;  // its last two axes
    for (const auto& [node, index] : chains_[meaning]) {
      if (node->IsStandard("Reshape") && order.empty()) {
        order = {0, 1, 2, 3};
      } else if (node->IsStandard("Reshape") && meaning == 1 && order == by_heads && !is_flat) {
        is_flat = true;
        key_views_.push_back(node);
      } else if (node->IsStandard("Reshape")) {
        Expect(is_flat && is_turned && key_views_.size() == 1, NotSplit(meaning));
        order = by_columns;
        is_flat = false;
        key_views_.push_back(node);
      } else if (node->IsStandard("Transpose")) {
        const Axes moved = node->Wholes("perm");
        if (is_flat) {
          Expect(!is_turned && moved == Axes{0, 2, 1}, NotSplit(meaning));
          is_turned = true;
        } else {
          Axes sorted = moved;
          std::sort(sorted.begin(), sorted.end());
          Expect(!order.empty() && sorted == Axes{0, 1, 2, 3}, NotSplit(meaning));
          Axes next;
          for (const int64_t axis : moved) next.push_back(order[static_cast<size_t>(axis)]);
          order = next;
        }
      } else if (IsFactor(*node)) {
        Expect(meaning != 2, "its values are scaled");
        factors_.push_back({node, index});
      }
      if (!is_flat) SetSizes(node->Output(0), order.empty() ? wide : Permuted(HeadSizes(), order));
    }
    Expect(order == axes && !is_flat, NotSplit(meaning));
  }

  // What multiplies queries, keys and scores.
  void ReadFactors() {
    double scale = 1;
    for (const auto& [node, index] : factors_) {
      const bool divides = node->IsStandard("Div");
      const std::optional<float> number = NumberOf(node->Input(1 - index), kMostSteps);
      Expect(number && *number != 0 && std::isfinite(*number) && !(divides && index == 1),
             ErrorText(node->Described(), " scales its scores by a number that is not known"));
      scale = divides ? scale / *number : scale * *number;
    }
    found_.scale = static_cast<float>(scale);
    Expect(std::isfinite(found_.scale) && found_.scale != 0, "the scale of its scores is no finite number");
  }

  static std::string What(size_t meaning) { return ErrorText("its ", kMeanings[meaning]); }

  static std::string NotSplit(size_t meaning) {
    return What(meaning) + " is not split into heads as [batch, rows, heads, head width]";
  }

  bool IsOfLayer(Value value) const {
    return value != nullptr &&
           std::any_of(layers_.begin(), layers_.end(), [&](const Layer& layer) { return layer.y == value; });
  }

  void SetLayer(size_t meaning, Value y) {
    const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const Layer& one) { return one.y == y; });
    found_.layers[meaning] = static_cast<size_t>(found - layers_.begin());
  }

  const Layer& LayerOf(size_t meaning) const { return layers_[found_.layers[meaning]]; }

  void CheckLayers() {
    const Layer& query = LayerOf(0);
    for (size_t i = 1; i < 3; ++i) {
      const Layer& other = LayerOf(i);
      const bool is_again = found_.layers[i] == found_.layers[0] || (i == 2 && found_.layers[1] == found_.layers[2]);
      Expect(!is_again, "one layer makes two of its query, key and value");
      Expect(other.x == query.x && other.quantize == query.quantize,
             ErrorText("its ", kMeanings[i], " is computed from another value than its query"));
      Expect(other.Columns() == query.Columns(),
             ErrorText("its query has ", query.Columns(), " numbers and its ", kMeanings[i], " ", other.Columns()));
    }
  }

  void ReadHeads() {
    const Layer& query = LayerOf(0);
    for (size_t i = 0; i < 3; ++i) ReadHeads(i);
    if (found_.heads == 0) return;
    Expect(found_.heads <= kMostHeads && query.Columns() % found_.heads == 0 &&
               query.Columns() / found_.heads == found_.head_dim,
           ErrorText("its layers of ", query.Columns(), " numbers are not split into ", found_.heads, " heads of ",
                     found_.head_dim));
    heads_ = NumberSize(found_.heads);
    head_dim_ = NumberSize(found_.head_dim);
  }

  // The last two sizes of what a Reshape makes, if they are known.
  void ReadHeads(size_t meaning) {
    const Node& split = *splits_[meaning];
    std::vector<std::optional<Sizes>> parts;  // of at most one number each
    if (const std::optional<Sizes> target = ConstantSizes(split.Input(1))) {
      for (const Size& size : *target) parts.push_back(Sizes{size});
    } else if (const Node* const concat = OwnConcat(split.Input(1))) {
      Take(*concat);
      for (const Value input : concat->inputs()) {
        const std::optional<Sizes> part = ConstantSizes(input);
        for (size_t i = 0; i + 1 < (part ? part->size() : 0); ++i) parts.push_back(Sizes{(*part)[i]});
        parts.push_back(part && !part->empty() ? std::optional(Sizes{part->back()}) : std::nullopt);
      }
    }
    const size_t count = parts.size();
    if (count < 2 || !parts[count - 2] || !parts[count - 1]) return;
    int64_t heads = parts[count - 2]->front().number, head_dim = parts[count - 1]->front().number;
    const int64_t columns = LayerOf(meaning).Columns();
    if (heads == -1 && head_dim > 0) heads = columns / head_dim;
    if (head_dim == -1 && heads > 0) head_dim = columns / heads;
    if (heads < 1 || head_dim < 1) return;
    const bool is_same = found_.heads == 0 || (found_.heads == heads && found_.head_dim == head_dim);
    Expect(is_same, ErrorText("it has ", found_.heads, " heads of ", found_.head_dim, ", but of ", kMeanings[meaning],
                              "s ", heads, " of ", head_dim));
    found_.heads = heads;
    found_.head_dim = head_dim;
  }

  // What joins sizes for its Reshapes alone.
  const Node* OwnConcat(Value value) const {
    const Node* const concat = value == nullptr ? nullptr : graph_.Maker(value);
    if (concat == nullptr || !concat->IsStandard("Concat") || graph_.IsOutput(value)) return nullptr;
    const std::span<const Graph::Use> uses = graph_.Uses(value);
    const auto is_own = [&](const Graph::Use& use) { return use.index >= 0 && taken_.count(use.node) != 0; };
    return std::all_of(uses.begin(), uses.end(), is_own) ? concat : nullptr;
  }

  // --- sizes --------------------------------------------------------------------------------------------------------

  // Of a layer's output; none: its rank is not known.
  Sizes WideSizes() const {
    const std::optional<Shape> x = ShapeOf(graph_.host(), LayerOf(0).x);
    Sizes wide;
    for (size_t axis = 0; x && axis + 1 < x->size(); ++axis) {
      wide.push_back({Size::Kind::kLead, static_cast<int64_t>(axis), nullptr});
    }
    if (!wide.empty()) wide.push_back(NumberSize(LayerOf(0).Columns()));
    return wide;
  }

  Sizes HeadSizes() const { return {batch_, rows_, heads_, head_dim_}; }

  // Of the Softmax, and of what replaces NaN.
  void NameScores() {
    for (const Node* const node : found_.nodes) {
      const bool is_behind = node == &softmax_ || node->IsStandard("Where") || node->IsStandard("IsNaN");
      if (is_behind) SetSizes(node->Output(0), scores_sizes_);
    }
  }

  void SetSizes(Value value, const Sizes& sizes) {
    if (value != nullptr && !sizes.empty()) sizes_[value] = sizes;
  }

  std::optional<Sizes> ConstantSizes(Value value) const {
    const std::optional<Constant> tensor = graph_.ConstantOf(value);
    if (!tensor || tensor->type != kInt64 || tensor->shape.size() > 1 || tensor->Count() > kMostSizes) {
      return std::nullopt;
    }
    Sizes sizes;
    for (int64_t i = 0; i < tensor->Count(); ++i) {
      int64_t number = 0;
      std::memcpy(&number, static_cast<const char*>(tensor->data) + i * 8, sizeof(number));
      sizes.push_back(NumberSize(number));
    }
    return sizes;
  }

  // Whether sizes are made of those of the attention's own values.
  bool IsMadeInside(Value value, int steps) const {
    Visit();
    const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
    if (node == nullptr || !node->IsStandard() || steps == 0) return false;
    if (node->type() == "Shape") return sizes_.count(node->Input(0)) != 0;
    return std::any_of(node->inputs().begin(), node->inputs().end(),
                       [&](Value input) { return IsMadeInside(input, steps - 1); });
  }

  // The numbers of a value of at most one axis; none: not understood.
  std::optional<Sizes> SizesOf(Value value, int steps) const {
    Visit();
    if (value == nullptr || steps == 0) return std::nullopt;
    if (graph_.IsConstantValue(value)) return ConstantSizes(value);
    const Node* const maker = graph_.Maker(value);
    if (!IsMadeInside(value, steps) && taken_.count(maker) == 0) return SizesInFront(value);
    const Node& node = *maker;
    if (node.type() == "Shape") {
      const auto found = sizes_.find(node.Input(0));
      if (found == sizes_.end()) return std::nullopt;
      const Sizes& all = found->second;
      const int64_t rank = static_cast<int64_t>(all.size());
      return Part(all, node.Whole("start", 0), node.Whole("end", rank));
    }
    if (node.type() == "Concat") {
      Sizes joined;
      for (const Value input : node.inputs()) {
        const std::optional<Sizes> part = SizesOf(input, steps - 1);
        if (!part) return std::nullopt;
        joined.insert(joined.end(), part->begin(), part->end());
      }
      return joined;
    }
    const std::optional<Sizes> sizes = SizesOf(node.Input(0), steps - 1);
    if (!sizes) return std::nullopt;
    if (node.type() == "Unsqueeze" || node.type() == "Squeeze" || node.type() == "Identity") return sizes;
    if (node.type() == "Cast" && node.Whole("to", 0) == kInt64) return sizes;
    if (node.type() == "Gather") {
      const std::optional<Sizes> indices = ConstantSizes(node.Input(1));
      if (!indices) return std::nullopt;
      Sizes picked;
      for (const Size& index : *indices) {
        const int64_t count = static_cast<int64_t>(sizes->size());
        if (index.number < -count || index.number >= count) return std::nullopt;
        picked.push_back((*sizes)[static_cast<size_t>(index.number + (index.number < 0 ? count : 0))]);
      }
      return picked;
    }
    if (node.type() == "Slice") {
      std::vector<std::optional<Sizes>> bounds;
      for (size_t i = 1; i < node.inputs().size(); ++i) bounds.push_back(ConstantSizes(node.Input(i)));
      const auto is_one = [](const std::optional<Sizes>& one) { return one && one->size() == 1; };
      if (bounds.size() < 2 || !std::all_of(bounds.begin(), bounds.end(), is_one)) return std::nullopt;
      const bool is_plain = (bounds.size() < 3 || bounds[2]->front().number == 0) &&
                            (bounds.size() < 4 || bounds[3]->front().number == 1);
      return is_plain ? Part(*sizes, bounds[0]->front().number, bounds[1]->front().number) : std::nullopt;
    }
    return std::nullopt;
  }

  static std::optional<Sizes> Part(const Sizes& sizes, int64_t first, int64_t end) {
    const int64_t count = static_cast<int64_t>(sizes.size());
    const auto place = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + count : at, 0, count); };
    if (std::min(first, end) < std::numeric_limits<int64_t>::min() + count) return std::nullopt;
    if (place(first) > place(end)) return Sizes{};
    return Sizes(sizes.begin() + place(first), sizes.begin() + place(end));
  }

  std::optional<Sizes> SizesInFront(Value value) const {
    const std::optional<Shape> shape = ShapeOf(graph_.host(), value);
    if (TypeOf(graph_.host(), value) != kInt64 || !shape || shape->size() > 1) return std::nullopt;
    const int64_t count = shape->empty() ? 1 : shape->front();
    if (count < 0 || count > kMostSizes) return std::nullopt;
    Sizes sizes;
    for (int64_t i = 0; i < count; ++i) sizes.push_back({Size::Kind::kElement, i, value});
    return sizes;
  }

  Target TargetOf(const Node& reshape) const {
    std::optional<Sizes> sizes = SizesOf(reshape.Input(1), kMostSteps);
    Expect(sizes.has_value(), ErrorText("the sizes that ", reshape.Described(), " makes are not understood"));
    return {std::move(*sizes), reshape.Whole("allowzero", 0) == 0};
  }

  // --- scores -------------------------------------------------------------------------------------------------------

  // A number that is known before the model runs: constant, or computed from sizes that are, as ONNX Runtime would.
  std::optional<float> NumberOf(Value value, int steps) const {
    Visit();
    if (value == nullptr || steps == 0) return std::nullopt;
    if (graph_.IsConstantValue(value)) return graph_.NumberOf(value);
    if (!IsMadeInside(value, steps)) return std::nullopt;
    const Node& node = *graph_.Maker(value);
    if (graph_.IsFloatCast(node)) return NumberOf(node.Input(0), steps - 1);
    if (node.type() == "Cast" && IsFloatType(TypeOf(graph_.host(), node.Output(0))) &&
        TypeOf(graph_.host(), node.Input(0)) == kInt64) {
      const std::optional<Sizes> sizes = SizesOf(node.Input(0), steps - 1);
      if (!sizes || sizes->size() != 1 || sizes->front().kind != Size::Kind::kNumber) return std::nullopt;
      return static_cast<float>(sizes->front().number);
    }
    const std::optional<float> first = NumberOf(node.Input(0), steps - 1);
    if (!first) return std::nullopt;
    if (node.type() == "Sqrt") return std::sqrt(*first);
    if (node.type() == "Unsqueeze" || node.type() == "Squeeze" || node.type() == "Identity") return first;
    const std::optional<float> second = NumberOf(node.Input(1), steps - 1);
    if (!second) return std::nullopt;
    if (node.type() == "Div") return *first / *second;
    if (node.type() == "Mul") return *first * *second;
    return std::nullopt;
  }

  // From the Softmax's input back to the product.
  void ReadScores(const Node& scores) {
    bool is_scaled = false;
    Value value = softmax_.Input(0);
    for (const Node* node = graph_.Maker(value); node != &scores; node = graph_.Maker(value)) {
      size_t index = 0;
      while (ScoresBehind(node->Input(index), kMostSteps) != &scores) ++index;
      SetSizes(value, scores_sizes_);
      Take(*node);
      value = node->Input(index);
      if (node->IsStandard("Identity") || graph_.IsFloatCast(*node)) continue;
      if (IsFactor(*node)) {
        factors_.push_back({node, index});
        is_scaled = true;
        continue;
      }
      Expect(!is_scaled, "its scores are scaled after the mask is added");
      if (node->IsStandard("Where")) {
        ReadFill(*node, index);
      } else {
        ReadMask(Other(*node, value));
      }
    }
    SetSizes(value, scores_sizes_);
    std::reverse(found_.masks.begin(), found_.masks.end());
  }

  void ReadMask(Value value) {
    Expect(value != nullptr && graph_.IsFloatOrHalf(value), "its mask is not float");
    if (graph_.NumberOf(value) == 0.0f) return;
    Mask mask;
    mask.value = value;
    found_.masks.push_back(std::move(mask));
  }

  // Of queries, keys and values, one after another.
  void ReadBiases(const Constant& bias) {
    const std::vector<float> numbers = bias.Floats();
    const auto columns = static_cast<std::ptrdiff_t>(numbers.size() / 3);
    for (size_t i = 0; i < 3; ++i) {
      Expect(LayerOf(i).bias.empty(), ErrorText("it has a bias, and the layer of its ", kMeanings[i], " as well"));
      const auto begin = numbers.begin() + static_cast<std::ptrdiff_t>(i) * columns;
      found_.biases[i].assign(begin, begin + columns);
    }
  }

  void ReadKeyPadding(Value value) {
    const std::optional<Shape> shape = ShapeOf(graph_.host(), value);
    const std::string name = NameOf(graph_.host(), value);
    Expect(TypeOf(graph_.host(), value) == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 && !graph_.IsConstantValue(value),
           ErrorText("its key_padding_mask '", name, "' is no int32 that is computed when the model runs"));
    const size_t rank = shape ? shape->size() : 0;
    Expect(rank == 2 || rank == 3,
           ErrorText("its key_padding_mask '", name, "' is not known to be [batch, keys] or ", "[batch, rows, keys]"));
    Expect(!found_.causal, "it is causal and has a key_padding_mask");
    Mask mask;
    mask.value = value;
    mask.is_padding = true;
    mask.fill = softmax_.Number("mask_filter_value", kPaddingFill);
    Expect(std::isfinite(mask.fill), "its mask_filter_value is no finite number");
    found_.masks.push_back(std::move(mask));
  }

  // Of scores that are replaced by a number: as if that were added, since nothing is left of them then.
  void ReadFill(const Node& where, size_t index) {
    float fill = index == 0 ? 0.0f : graph_.NumberOf(where.Input(3 - index)).value_or(0.0f);
    // The lowest number of float16 stands for that of float32.
    if (TypeOf(graph_.host(), where.Output(0)) == kHalf && fill <= -65504.0f) {
      fill = std::numeric_limits<float>::lowest();
    }
    Expect(fill < kHiddenScore,
           ErrorText(where.Described(), " replaces scores by something else than -Inf or the lowest float"));
    const Value condition = where.Input(0);
    Expect(condition != nullptr && TypeOf(graph_.host(), condition) == kBool,
           ErrorText("the condition of ", where.Described(), " is no tensor of truth values"));
    Mask mask;
    mask.value = condition;
    mask.is_condition = true;
    mask.hides = index == 2;
    mask.fill = fill;
    found_.masks.push_back(std::move(mask));
  }

  // Whether its last dimension is 1: it says something of rows.
  bool IsOneARow(Value value) const {
    const std::optional<Shape> shape = ShapeOf(graph_.host(), value);
    return shape && !shape->empty() && shape->back() == 1;
  }

  // --- the answer ---------------------------------------------------------------------------------------------------

  void ReadMerge(const Node& product) {
    const auto only = [&](Value value) {
      const Node* reader = nullptr;
      const std::span<const Graph::Use> uses = graph_.Uses(value);
      for (const Graph::Use& use : uses) {
        if (use.index >= 0 && use.node->IsStandard("Shape")) continue;
        Expect(reader == nullptr && use.index >= 0, "its answer by heads is also used elsewhere");
        reader = use.node;
      }
      return reader;
    };
    Value value = product.Output(0);
    SetSizes(value, Permuted(HeadSizes(), {0, 2, 1, 3}));
    const Node* node = value == nullptr ? nullptr : only(value);
    // Zeros in the place of the rows that see no key, as transformers 5 exports them.
    if (node != nullptr && node->IsStandard("Where") && node->Input(2) == value && node->Output(0) != nullptr &&
        graph_.NumberOf(node->Input(1)) == 0.0f && node->Has(0) && !node->IsConstant(0) && IsOneARow(node->Input(0))) {
      found_.zero_rows = node->Input(0);
      Take(*node);
      value = node->Output(0);
      SetSizes(value, Permuted(HeadSizes(), {0, 2, 1, 3}));
      node = only(value);
    }
    Expect(node != nullptr && node->IsStandard("Transpose") && node->Wholes("perm") == Axes{0, 2, 1, 3} &&
               node->Output(0) != nullptr,
           "its heads are not merged to [batch, rows, width]");
    Take(*node);
    value = node->Output(0);
    SetSizes(value, HeadSizes());
    node = only(value);
    Expect(node != nullptr && node->IsStandard("Reshape") && node->Input(0) == value && node->Output(0) != nullptr,
           "its heads are not merged to [batch, rows, width]");
    Take(*node);
    found_.y = node->Output(0);
    found_.merge = TargetOf(*node);
  }

  // Nothing else may need a value in between. What only asks for sizes, to make those that are needed here, is taken.
  void TakeWhatReadsSizes() {
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
             ErrorText("'", NameOf(graph_.host(), value), "' inside of it is an output of the graph, or makes one"));
      for (const Graph::Use& use : graph_.Uses(value)) {
        if (taken_.count(use.node) != 0) continue;
        Expect(use.index >= 0 && found_.nodes.size() < kMostNodes,
               ErrorText("'", NameOf(graph_.host(), value), "' inside of it is also used by ", use.node->Described()));
        Take(*use.node);
        waiting.insert(waiting.end(), use.node->outputs().begin(), use.node->outputs().end());
      }
    }
  }

  // What it reads must be made in front of it.
  void CheckInFront() {
    const auto is_inside = [&](Value value) {
      const Node* const maker = value == nullptr ? nullptr : graph_.Maker(value);
      return maker != nullptr && taken_.count(maker) != 0;
    };
    for (Mask& mask : found_.masks) {
      for (; !mask.is_padding && is_inside(mask.value); mask.value = graph_.Maker(mask.value)->Input(0)) {
        const Node& node = *graph_.Maker(mask.value);
        // A mask that is made as large as the scores, which broadcasting does as well.
        if (node.IsStandard("Expand")) continue;
        if (!CutsKeys(node)) break;
        mask.is_cut = true;
      }
      Expect(mask.value != nullptr && !is_inside(mask.value), "its mask is computed from what is inside of it");
      if (graph_.IsConstantValue(mask.value)) ReadNumbers(mask);
    }
    for (const Value value : found_.Reads()) {
      Expect(!is_inside(value),
             ErrorText("'", NameOf(graph_.host(), value), "', which it reads, is computed from what is inside of it"));
    }
  }

  void ReadNumbers(Mask& mask) const {
    const std::optional<Constant> tensor = graph_.ConstantOf(mask.value);
    Expect(tensor && IsFloatType(tensor->type) && tensor->Count() > 0, "its mask is constant, and not float");
    mask.own_numbers = std::make_shared<const std::vector<float>>(tensor->Floats());
    mask.numbers = *mask.own_numbers;
    mask.shape = tensor->shape;
    mask.value = nullptr;
  }

  // A Slice that leaves as many keys as there are.
  bool CutsKeys(const Node& slice) const {
    if (!slice.IsStandard("Slice") || slice.inputs().size() < 4) return false;
    const auto is_number = [&](size_t input, std::initializer_list<int64_t> numbers) {
      const std::optional<Sizes> sizes = ConstantSizes(slice.Input(input));
      return sizes && sizes->size() == 1 &&
             std::find(numbers.begin(), numbers.end(), sizes->front().number) != numbers.end();
    };
    const std::optional<Sizes> end = SizesOf(slice.Input(2), kMostSteps);
    return is_number(1, {0}) && is_number(3, {-1, 3}) && (!slice.Has(4) || is_number(4, {1})) && end &&
           end->size() == 1 && end->front().kind == Size::Kind::kRows;
  }

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

}  // namespace

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
  if (node.IsStandard("Softmax")) return Finder(graph, node, layers).Find();
  if (node.Is("com.microsoft", "MultiHeadAttention")) return Finder(graph, node, layers).FindMultiHeadAttention();
  return std::nullopt;
}

}  // namespace ortolan::provider
