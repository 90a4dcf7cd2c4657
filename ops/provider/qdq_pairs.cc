#include "provider/qdq_pairs.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "provider/group.h"

namespace ortolan::provider {
namespace {

constexpr auto kFloat = ElementType::kFloat;

// Operators across which ONNX Runtime moves a QuantizeLinear.
constexpr const char* kMovedAcross[] = {"MaxPool", "Reshape", "Slice", "Squeeze", "Transpose", "Unsqueeze"};
constexpr size_t kMostVisits = 64;

template <typename Types>
bool IsOneOf(const Node& node, const Types& types) {
  return node.IsStandard() && std::ranges::any_of(types, [&](const char* type) { return node.type() == type; });
}

}  // namespace

QdqPairs::QdqPairs(const Graph& graph, ClippedRanges& clipped_ranges, bool is_group) {
  for (const Node& node : graph.nodes()) {
    if (node.IsStandard("DequantizeLinear")) Fold(graph, node);
    Find(graph, node);
  }
  for (QdqPair& rounding : qdq_pairs_) {
    by_maker_[rounding.maker] = &rounding;
    by_value_[rounding.maker->Output(0)] = &rounding;
    for (const Node* const end : rounding.ends) by_value_[end->Output(0)] = &rounding;
  }
  for (QdqPair& rounding : qdq_pairs_) LookAbove(graph, rounding, clipped_ranges, is_group);
}

void QdqPairs::Find(const Graph& graph, const Node& maker) {
  QdqPair rounding;
  try {
    std::optional<match::QdqPair> found = match::FindQdqPair(graph, maker);
    if (!found || !found->moves.empty()) return;
    static_cast<match::QdqPair&>(rounding) = std::move(*found);
  } catch (const UnfitError&) {
    return;
  }
  const bool quantizes = rounding.floats != nullptr;
  // Quantized constants are weights or masks.
  if (quantizes && (graph.IsConstantValue(rounding.floats) || !graph.IsFloat(rounding.floats))) return;
  if (rounding.range.floats != kFloat || (!quantizes && rounding.ends.empty())) return;  // it would have no float value
  for (const Graph::Use& use : graph.Uses(maker.Output(0))) {
    if (!use.node->IsStandard("DequantizeLinear")) {
      rounding.readers.push_back({use, nullptr});
      continue;
    }
    const Value floats = use.node->Output(0);
    for (const Graph::Use& other : graph.Uses(floats)) rounding.readers.push_back({other, use.node});
    if (graph.IsOutput(floats)) rounding.last.push_back(use.node);
  }
  if (rounding.readers.empty() && rounding.last.empty()) return;
  rounding.is_alone =
      graph.OnlyReader(rounding.Source()) != nullptr && rounding.layers.empty() && rounding.ends.size() == 1;
  qdq_pairs_.push_back(std::move(rounding));
}

// Dequantize constants with at most one axis, such as biases, norm weights and constants of activations.
void QdqPairs::Fold(const Graph& graph, const Node& node) {
  const std::optional<Constant> codes = graph.ConstantOf(node.Input(0)), scale = graph.ConstantOf(node.Input(1));
  const Node* const reader = node.Output(0) == nullptr ? nullptr : graph.OnlyReader(node.Output(0));
  if (!codes || !scale || !IsPlain(node) || reader == nullptr) return;
  const bool is_known = IsCode(codes->type);
  const bool has_one = scale->type == kFloat && scale->shape.size() <= 1 && scale->Count() == 1;
  const bool has_each = scale->type == kFloat && scale->shape == codes->shape;
  if (!is_known || codes->shape.size() > 1 || (!has_one && !has_each)) return;
  std::optional<Constant> zeros;
  if (node.Has(2)) {
    zeros = graph.ConstantOf(node.Input(2));
    if (!zeros || zeros->type != codes->type || zeros->Count() != scale->Count()) return;
  }
  const std::vector<float> scales = scale->Floats();
  Folded folded{&node, reader, {node.Output(0)->name, kFloat, codes->shape, nullptr, nullptr}, {}};
  for (int64_t i = 0; i < codes->Count(); ++i) {
    const int64_t own = has_one ? 0 : i;
    const int64_t number = codes->CodeAt(i) - (zeros ? zeros->CodeAt(own) : 0);
    folded.values.push_back(static_cast<float>(number) * scales[static_cast<size_t>(own)]);
  }
  folded_.push_back(std::move(folded));
  folded_.back().constant.data = folded_.back().values.data();
}

// clipped_ranges is written for a whole graph and read for the graph of a group.
void QdqPairs::LookAbove(const Graph& graph, QdqPair& rounding, ClippedRanges& clipped_ranges, bool is_group) const {
  if (!rounding.range.BeginsAtZero()) return;
  const std::string name = rounding.maker->Output(0)->name;
  if (is_group) {
    const auto found = clipped_ranges.find(name);
    if (found == clipped_ranges.end() || found->second) rounding.state = QdqPair::State::kClipped;
    return;
  }
  // Values in two branches may have the same name. Then both are clipped if one of them must be.
  bool& is_clipped = clipped_ranges[name];
  is_clipped = is_clipped || rounding.floats == nullptr || !match::IsNeverNegative(graph, rounding.floats);
  if (is_clipped) rounding.state = QdqPair::State::kClipped;
}

View QdqPairs::Seen() const {
  View view;
  for (const QdqPair& rounding : qdq_pairs_) {
    if (rounding.state == QdqPair::State::kStays) continue;
    const bool is_gone = rounding.state == QdqPair::State::kGone, quantizes = rounding.floats != nullptr;
    const Value codes = rounding.maker->Output(0);
    const Value first = rounding.ends.empty() ? codes : rounding.ends.front()->Output(0);
    const Value seen = is_gone && quantizes ? rounding.floats : first;
    const auto see = [&](Value value) {
      if (value != seen) view.instead[value] = seen;
    };
    for (const Node* const end : rounding.ends) see(end->Output(0));
    if (is_gone || quantizes) see(codes);
    // If the pair clips, one node stays in the view as the producer of the floats: the QuantizeLinear or, for codes of
    // a layer, the first DequantizeLinear.
    if (is_gone && quantizes) view.hidden.insert(rounding.maker);
    const bool shows_end = !is_gone && !quantizes;
    view.hidden.insert(rounding.ends.begin() + (shows_end ? 1 : 0), rounding.ends.end());
  }
  for (const Folded& folded : folded_) {
    if (!folded.is_seen) continue;
    view.constants[folded.node->Output(0)] = folded.constant;
    view.hidden.insert(folded.node);
  }
  return view;
}

const QdqPair* QdqPairs::Of(Value stored) const {
  const auto found = by_value_.find(stored);
  return found == by_value_.end() ? nullptr : found->second;
}

const QdqPair* QdqPairs::MadeBy(const Node& layer) const {
  const auto found = by_maker_.find(&layer);
  return found == by_maker_.end() ? nullptr : found->second;
}

// The groups found so far and the group index of each node.
struct QdqPairs::Groups {
  explicit Groups(Claims& claims) : claims(claims) {
    for (size_t i = 0; i < claims.groups.size(); ++i) {
      for (const Node* const node : claims.groups[i].nodes) of[node] = i;
    }
  }

  Group* Of(const Node* node) const {
    const auto found = of.find(node);
    return found == of.end() ? nullptr : &claims.groups[found->second];
  }
  void Add(Group& group, const Node* node) {
    if (!of.try_emplace(node, static_cast<size_t>(&group - claims.groups.data())).second) return;
    group.nodes.push_back(node);
  }
  void Add(Group& group, const QdqPair& rounding) {
    Add(group, rounding.maker);
    for (const Node* const end : rounding.ends) Add(group, end);
  }

  // Return whether groups that are valid alone depend on each other: a copy that one group outputs leads back to it.
  bool HangOnEachOther(const Graph& graph) const;

  Claims& claims;
  std::unordered_map<const Node*, size_t> of;
};

bool QdqPairs::Groups::HangOnEachOther(const Graph& graph) const {
  const auto has_copies = [](const Group& group) { return !group.copies.empty(); };
  if (std::ranges::none_of(claims.groups, has_copies)) return false;
  const std::deque<Node>& nodes = graph.nodes();
  const size_t group_count = claims.groups.size();
  const auto part_of = [&](const Node& node) {
    const auto found = of.find(&node);
    return found != of.end() ? found->second : group_count + node.index();
  };
  std::unordered_map<Value, size_t> makers;
  for (const Node& node : nodes) {
    for (const Value value : node.outputs()) {
      if (value != nullptr) makers[value] = part_of(node);
    }
  }
  std::vector<std::vector<size_t>> readers(group_count + nodes.size());
  std::vector<size_t> waits_for(readers.size());
  for (const Node& node : nodes) {
    for (const Value value : node.StoredReads()) {
      const auto maker = makers.find(value);
      if (maker == makers.end() || maker->second == part_of(node)) continue;
      readers[maker->second].push_back(part_of(node));
      ++waits_for[part_of(node)];
    }
  }
  std::vector<size_t> ready;
  for (size_t part = 0; part < readers.size(); ++part) {
    if (waits_for[part] == 0) ready.push_back(part);
  }
  size_t done = 0;
  for (; done < ready.size(); ++done) {
    for (const size_t reader : readers[ready[done]]) {
      if (--waits_for[reader] == 0) ready.push_back(reader);
    }
  }
  return done != readers.size();
}

namespace {

template <typename Holds>
bool AnyLayer(const Group& group, const Holds& holds) {
  return std::ranges::any_of(group.steps, [&](const Step& step) { return std::ranges::any_of(step.layers, holds); });
}

// Attention that is computed alone may include pairs too: an optimized file has none.
bool IsStatic(const Group& group) {
  return AnyLayer(group, [](const Layer& layer) { return layer.is_static; }) ||
         std::ranges::any_of(group.steps, [](const Step& step) { return step.layers.empty(); });
}

// Return whether a layer of the group reads the pair's quantized value as X.
bool IsInputOf(const Group& group, const QdqPair& rounding) {
  return AnyLayer(group, [&](const Layer& layer) { return layer.quantize == rounding.maker; });
}

// Return whether this use of the pair is the X of a layer.
bool IsInput(const Group& group, const QdqPair& rounding, const Graph::Use& use) {
  return use.index == 0 && AnyLayer(group, [&](const Layer& layer) {
           return layer.nodes.front() == use.node && layer.quantize == rounding.maker;
         });
}

// Return whether the group reads the value at run time.
bool ReadsAtRunTime(const Group& group, Value value) {
  return std::ranges::any_of(group.steps, [&](const Step& step) {
    if (step.residual == value || (!step.layers.empty() && step.X() == value)) return true;
    const std::vector<Value> read = step.attention ? step.attention->Reads(!step.layers.empty()) : std::vector<Value>{};
    return std::ranges::find(read, value) != read.end();
  });
}

}  // namespace

bool QdqPairs::Place(const Graph& graph, Claims& claims) {
  Groups groups(claims);
  bool are_placed = true;
  // Go backwards: if one pair follows another, the first pair's readers include the second.
  for (auto rounding = qdq_pairs_.rbegin(); rounding != qdq_pairs_.rend(); ++rounding) {
    if (rounding->state == QdqPair::State::kStays || PlaceOne(graph, *rounding, groups)) continue;
    LetStay(*rounding);
    are_placed = false;
  }
  for (Folded& folded : folded_) {
    Group* const group = folded.is_seen ? groups.Of(folded.reader) : nullptr;
    if (group == nullptr) continue;
    if (IsStatic(*group) && !ReadsAtRunTime(*group, folded.node->Output(0))) {
      groups.Add(*group, folded.node);
    } else {
      folded.is_seen = are_placed = false;
    }
  }
  if (are_placed && groups.HangOnEachOther(graph)) {
    for (QdqPair& rounding : qdq_pairs_) {
      const Group* const group = groups.Of(rounding.maker);
      if (rounding.state != QdqPair::State::kStays && group != nullptr && !group->copies.empty()) LetStay(rounding);
    }
    return false;
  }
  return are_placed;
}

// Add the pair to the group that reads it as X, or else to the group of its readers.
bool QdqPairs::PlaceInFront(const Graph& graph, const QdqPair& rounding, Groups& groups) const {
  const bool is_clipped = rounding.state == QdqPair::State::kClipped, quantizes = rounding.floats != nullptr;
  Group* group = nullptr;
  for (const QdqPair::Reader& reader : rounding.readers) {
    Group* const own = groups.Of(reader.use.node);
    if (own != nullptr && (group == nullptr || IsInputOf(*own, rounding))) group = own;
  }
  if (group == nullptr || !IsStatic(*group) || !(quantizes || groups.Of(rounding.maker) == group)) return false;
  std::vector<const Node*> outside = rounding.last;
  for (const auto& [use, end] : rounding.readers) {
    if (use.index >= 0 && groups.Of(use.node) == group) {
      if (is_clipped && !IsInput(*group, rounding, use)) return false;
    } else {
      outside.push_back(end);
    }
  }
  if (!outside.empty()) {
    const Node* const maker = graph.Maker(rounding.Source());
    const bool is_made_inside = maker != nullptr && groups.Of(maker) == group;
    const bool are_floats = std::ranges::find(outside, nullptr) == outside.end();
    if (!IsInputOf(*group, rounding) || is_made_inside || !are_floats) return false;
  }
  groups.Add(*group, rounding);
  for (const Node* const end : rounding.ends) {
    if (std::ranges::find(outside, end) == outside.end()) continue;
    Copy& copy = group->copies.emplace_back();
    copy.from = graph.Seen(rounding.floats);
    copy.to = end->Output(0);
    if (is_clipped) copy.bounds = rounding.range.FromZero();
  }
  return true;
}

// Return whether nodes outside all groups move the dequantized value, for example by a Transpose, and quantize it
// again. In a session on a compiled model, ONNX Runtime would move that QuantizeLinear directly after the EPContext
// node, whose output type it does not know. If the first pair stays, results are equal and just as fast.
bool QdqPairs::IsRoundedAgain(const Graph& graph, const QdqPair& rounding, const Groups& groups) const {
  std::vector<Value> waiting;
  const auto move = [&](const Node& node) {
    if (groups.Of(&node) == nullptr && IsOneOf(node, kMovedAcross)) waiting.push_back(node.Output(0));
  };
  for (const QdqPair::Reader& reader : rounding.readers) {
    if (reader.use.index == 0) move(*reader.use.node);
  }
  for (size_t i = 0; i < waiting.size() && i < kMostVisits; ++i) {
    const auto is_rounded = [&](const QdqPair& other) {
      return other.floats == waiting[i] && groups.Of(other.maker) == nullptr;
    };
    if (std::ranges::any_of(qdq_pairs_, is_rounded)) return true;
    for (const Graph::Use& use : graph.Uses(waiting[i])) {
      if (use.index != 0) continue;
      if (use.node->IsStandard("QuantizeLinear")) return true;
      move(*use.node);
    }
  }
  return false;
}

// Add the pair to the group that computes its source, if the source has no other consumer. The group then outputs the
// value after the pair.
bool QdqPairs::PlaceBehind(const Graph& graph, const QdqPair& rounding, Groups& groups) const {
  const bool is_clipped = rounding.state == QdqPair::State::kClipped;
  const Node* const source = graph.Maker(rounding.Source());
  Group* const group = source == nullptr ? nullptr : groups.Of(source);
  if (group == nullptr || !rounding.is_alone || !IsStatic(*group)) return false;
  if (rounding.floats != nullptr && IsRoundedAgain(graph, rounding, groups)) return false;
  for (const QdqPair::Reader& reader : rounding.readers) {
    const Group* const own = groups.Of(reader.use.node);
    if (own != nullptr && IsInputOf(*own, rounding)) return false;
  }
  for (Step& step : group->steps) {
    if (graph.Seen(step.y) != graph.Seen(rounding.Source()) || step.y_bounds || (is_clipped && step.attention))
      continue;
    step.y = rounding.ends.front()->Output(0);
    if (is_clipped) step.y_bounds = rounding.range.FromZero();
    groups.Add(*group, rounding);
    return true;
  }
  return false;
}

bool QdqPairs::PlaceOne(const Graph& graph, const QdqPair& rounding, Groups& groups) const {
  const bool is_read =
      std::ranges::any_of(rounding.readers, [&](const auto& reader) { return groups.Of(reader.use.node) != nullptr; });
  if (is_read && PlaceInFront(graph, rounding, groups)) return true;
  if (PlaceBehind(graph, rounding, groups)) return true;
  // A pair outside all groups may stay in the graph. Codes that a group's layer computes may not.
  return !is_read && (rounding.floats != nullptr || groups.Of(rounding.maker) == nullptr);
}

void QdqPairs::LetStay(QdqPair& rounding) const {
  rounding.state = QdqPair::State::kStays;
  rounding.reason = "its input is quantized to a fixed range and is also read outside the claimed layers";
}

}  // namespace ortolan::provider
