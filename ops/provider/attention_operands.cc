#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <utility>

#include "provider/attention_finder.h"

namespace ortolan::provider {
namespace {

constexpr auto kInt64 = ElementType::kInt64;
constexpr int64_t kMostSizes = 16;  // limit for the sizes in one shape value
constexpr int64_t kMostHeads = 1 << 16;

}  // namespace

Sizes Permuted(const Sizes& sizes, const Axes& axes) {
  Sizes moved;
  for (const int64_t axis : axes) moved.push_back(sizes[static_cast<size_t>(axis)]);
  return moved;
}

std::optional<size_t> AttentionFinder::InputFromLayer(const Node& node, int steps) const {
  if (node.IsStandard("Reshape") || node.IsStandard("Transpose") || node.IsStandard("Identity")) return 0;
  if (!IsFactor(node) || node.inputs().size() != 2) return std::nullopt;
  for (const size_t index : {0, 1}) {
    if (LeadsToLayer(node.Input(index), steps)) return index;
  }
  return std::nullopt;
}

bool AttentionFinder::LeadsToLayer(Value value, int steps) const {
  Visit();
  if (IsOfLayer(value)) return true;
  const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
  const std::optional<size_t> index = node == nullptr || steps == 0 ? std::nullopt : InputFromLayer(*node, steps - 1);
  return index && LeadsToLayer(node->Input(*index), steps - 1);
}

void AttentionFinder::ReadOperand(Value value, size_t meaning) {
  std::vector<Link>& chain = chains_[meaning];
  while (!IsOfLayer(value)) {
    const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
    Expect(node != nullptr && chain.size() < kMostSteps,
           What(meaning) + " is not the output of a claimed linear layer");
    const std::optional<size_t> index = InputFromLayer(*node, kMostSteps);
    Expect(index.has_value(), ErrorText(What(meaning), " goes through ", node->Described(),
                                        ", expected only a Reshape and a Transpose after a claimed linear layer"));
    chain.insert(chain.begin(), {node, *index});
    Take(*node);
    if (node->IsStandard("Reshape")) splits_[meaning] = node;
    value = node->Input(*index);
  }
  SetLayer(meaning, value);
  Expect(splits_[meaning] != nullptr, NotSplit(meaning));
}

void AttentionFinder::FollowOperand(size_t meaning, const Axes& axes) {
  const Axes by_heads = {0, 2, 1, 3}, by_columns = {0, 2, 3, 1};
  Sizes wide = WideSizes();
  SetSizes(LayerOf(meaning).y, wide);
  Axes order;              // order of the axes; empty before the first Reshape
  bool is_flat = false;    // the shape is [batch x heads, rows, head width], a view of the axes in `order`
  bool is_turned = false;  // the last two axes of the flat shape are transposed
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
      const Axes moved = node->Ints("perm");
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

void AttentionFinder::ReadFactors() {
  double scale = 1;
  for (const auto& [node, index] : factors_) {
    const bool divides = node->IsStandard("Div");
    const std::optional<float> number = NumberOf(node->Input(1 - index), kMostSteps);
    Expect(number && *number != 0 && std::isfinite(*number) && !(divides && index == 1),
           ErrorText(node->Described(), " scales its scores by a value that is not constant"));
    scale = divides ? scale / *number : scale * *number;
  }
  found_.scale = static_cast<float>(scale);
  Expect(std::isfinite(found_.scale) && found_.scale != 0, "the scale of its scores is 0 or not finite");
}

std::string AttentionFinder::NotSplit(size_t meaning) {
  return What(meaning) + " is not split into heads as [batch, rows, heads, head width]";
}

bool AttentionFinder::IsOfLayer(Value value) const {
  return value != nullptr &&
         std::any_of(layers_.begin(), layers_.end(), [&](const Layer& layer) { return layer.y == value; });
}

void AttentionFinder::SetLayer(size_t meaning, Value y) {
  const auto found = std::find_if(layers_.begin(), layers_.end(), [&](const Layer& one) { return one.y == y; });
  found_.layers[meaning] = static_cast<size_t>(found - layers_.begin());
}

void AttentionFinder::CheckLayers() {
  const Layer& query = LayerOf(0);
  for (size_t i = 1; i < 3; ++i) {
    const Layer& other = LayerOf(i);
    const bool is_again = found_.layers[i] == found_.layers[0] || (i == 2 && found_.layers[1] == found_.layers[2]);
    Expect(!is_again, "two of its query, key and value are the output of one linear layer");
    Expect(other.x == query.x && other.quantize == query.quantize,
           ErrorText("its ", kMeanings[i], " is not computed from the same input as its query"));
    Expect(other.Columns() == query.Columns(),
           ErrorText("its query has ", query.Columns(), " columns and its ", kMeanings[i], " ", other.Columns()));
  }
}

void AttentionFinder::ReadHeads() {
  const Layer& query = LayerOf(0);
  for (size_t i = 0; i < 3; ++i) ReadHeads(i);
  if (found_.heads == 0) return;
  Expect(found_.heads <= kMostHeads && query.Columns() % found_.heads == 0 &&
             query.Columns() / found_.heads == found_.head_dim,
         ErrorText("its linear layers of ", query.Columns(), " columns are not split into ", found_.heads, " heads of ",
                   found_.head_dim));
  heads_ = ConstantSize(found_.heads);
  head_dim_ = ConstantSize(found_.head_dim);
}

void AttentionFinder::ReadHeads(size_t meaning) {
  const Node& split = *splits_[meaning];
  std::vector<std::optional<Sizes>> parts;  // each has at most one size
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
  Expect(is_same, ErrorText("it has ", found_.heads, " heads of ", found_.head_dim, ", but its ", kMeanings[meaning],
                            " has ", heads, " of ", head_dim));
  found_.heads = heads;
  found_.head_dim = head_dim;
}

const Node* AttentionFinder::OwnConcat(Value value) const {
  const Node* const concat = value == nullptr ? nullptr : graph_.Maker(value);
  if (concat == nullptr || !concat->IsStandard("Concat") || graph_.IsOutput(value)) return nullptr;
  const std::span<const Graph::Use> uses = graph_.Uses(value);
  const auto is_own = [&](const Graph::Use& use) { return use.index >= 0 && taken_.count(use.node) != 0; };
  return std::all_of(uses.begin(), uses.end(), is_own) ? concat : nullptr;
}

Sizes AttentionFinder::WideSizes() const {
  const std::optional<Shape> x = DeclaredShape(LayerOf(0).x);
  Sizes wide;
  for (size_t axis = 0; x && axis + 1 < x->size(); ++axis) {
    wide.push_back({Size::Kind::kLead, static_cast<int64_t>(axis), nullptr});
  }
  if (!wide.empty()) wide.push_back(ConstantSize(LayerOf(0).Columns()));
  return wide;
}

void AttentionFinder::NameScores() {
  for (const Node* const node : found_.nodes) {
    const bool is_behind = node == &softmax_ || node->IsStandard("Where") || node->IsStandard("IsNaN");
    if (is_behind) SetSizes(node->Output(0), scores_sizes_);
  }
}

void AttentionFinder::SetSizes(Value value, const Sizes& sizes) {
  if (value != nullptr && !sizes.empty()) sizes_[value] = sizes;
}

std::optional<Sizes> AttentionFinder::ConstantSizes(Value value) const {
  const std::optional<Constant> tensor = graph_.ConstantOf(value);
  if (!tensor || tensor->type != kInt64 || tensor->shape.size() > 1 || tensor->Count() > kMostSizes) {
    return std::nullopt;
  }
  Sizes sizes;
  for (int64_t i = 0; i < tensor->Count(); ++i) {
    int64_t number = 0;
    std::memcpy(&number, static_cast<const char*>(tensor->data) + i * 8, sizeof(number));
    sizes.push_back(ConstantSize(number));
  }
  return sizes;
}

bool AttentionFinder::IsMadeInside(Value value, int steps) const {
  Visit();
  const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
  if (node == nullptr || !node->IsStandard() || steps == 0) return false;
  if (node->type() == "Shape") return sizes_.count(node->Input(0)) != 0;
  return std::any_of(node->inputs().begin(), node->inputs().end(),
                     [&](Value input) { return IsMadeInside(input, steps - 1); });
}

std::optional<Sizes> AttentionFinder::SizesOf(Value value, int steps) const {
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
    return Part(all, node.Int("start", 0), node.Int("end", rank));
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
  if (node.type() == "Cast" && static_cast<ElementType>(node.Int("to", 0)) == kInt64) return sizes;
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
    const bool is_plain =
        (bounds.size() < 3 || bounds[2]->front().number == 0) && (bounds.size() < 4 || bounds[3]->front().number == 1);
    return is_plain ? Part(*sizes, bounds[0]->front().number, bounds[1]->front().number) : std::nullopt;
  }
  return std::nullopt;
}

std::optional<Sizes> AttentionFinder::Part(const Sizes& sizes, int64_t first, int64_t end) {
  const int64_t count = static_cast<int64_t>(sizes.size());
  const auto place = [&](int64_t at) { return std::clamp<int64_t>(at < 0 ? at + count : at, 0, count); };
  if (std::min(first, end) < std::numeric_limits<int64_t>::min() + count) return std::nullopt;
  if (place(first) > place(end)) return Sizes{};
  return Sizes(sizes.begin() + place(first), sizes.begin() + place(end));
}

std::optional<Sizes> AttentionFinder::SizesInFront(Value value) const {
  const std::optional<Shape> shape = DeclaredShape(value);
  if (value->type != kInt64 || !shape || shape->size() > 1) return std::nullopt;
  const int64_t count = shape->empty() ? 1 : shape->front();
  if (count < 0 || count > kMostSizes) return std::nullopt;
  Sizes sizes;
  for (int64_t i = 0; i < count; ++i) sizes.push_back({Size::Kind::kElement, i, value});
  return sizes;
}

Target AttentionFinder::TargetOf(const Node& reshape) const {
  std::optional<Sizes> sizes = SizesOf(reshape.Input(1), kMostSteps);
  Expect(sizes.has_value(), ErrorText("the sizes that ", reshape.Described(), " uses cannot be determined"));
  return {std::move(*sizes), reshape.Int("allowzero", 0) == 0};
}

}  // namespace ortolan::provider
