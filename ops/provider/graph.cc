#include "provider/graph.h"

#include <algorithm>
#include <utility>

namespace ortolan::provider {

Graph::Graph(const HostApi& host, const OrtGraph& graph) : host_(host) {
  const OrtApi& ort = *host.ort;
  size_t count = 0;
  Check(ort, ort.Graph_GetNumNodes(&graph, &count));
  std::vector<const OrtNode*> found(count);
  Check(ort, ort.Graph_GetNodes(&graph, found.data(), count));
  nodes_.reserve(count);
  for (const OrtNode* const node : found) nodes_.emplace_back(host, *node);
  Check(ort, ort.Graph_GetNumOutputs(&graph, &count));
  outputs_.resize(count);
  Check(ort, ort.Graph_GetOutputs(&graph, outputs_.data(), count));
  FindUses();
}

void Graph::FindUses() {
  uses_.clear();
  for (const Node& node : nodes_) {
    if (view_.hidden.count(&node) != 0) continue;
    for (size_t i = 0; i < node.inputs().size(); ++i) {
      if (node.Has(i)) uses_[node.Input(i)].uses.push_back({&node, static_cast<int64_t>(i)});
    }
    for (const Value value : node.implicit_inputs()) {
      if (value != nullptr) uses_[value].uses.push_back({&node, -1});
    }
    for (const Value value : node.outputs()) {
      if (value != nullptr) uses_[Seen(value)].maker = &node;
    }
  }
  for (const Value value : outputs_) uses_[Seen(value)].is_output = true;
}

void Graph::See(View view) {
  view_ = std::move(view);
  for (Node& node : nodes_) node.See(view_.instead);
  FindUses();
}

std::optional<Constant> Graph::ConstantOf(Value value) const {
  if (value == nullptr) return std::nullopt;
  const auto found = view_.constants.find(value);
  return found != view_.constants.end() ? found->second : ReadConstant(host_, value);
}

std::optional<float> Graph::NumberOf(Value value) const {
  const std::optional<Constant> tensor = ConstantOf(value);
  return tensor ? tensor->Scalar() : std::nullopt;
}

bool Graph::IsConstantValue(Value value) const {
  return value != nullptr && (view_.constants.count(value) != 0 || IsConstant(host_, value));
}

bool Graph::IsFloatCast(const Node& node) const {
  return node.IsStandard("Cast") && IsFloatOrHalf(node.Input(0)) && node.Output(0) != nullptr &&
         IsFloatOrHalf(node.Output(0));
}

const Graph::ValueUses& Graph::Of(Value value) const {
  static const ValueUses kUnknown;
  const auto found = uses_.find(Seen(value));
  return found == uses_.end() ? kUnknown : found->second;
}

const Node* Graph::Maker(Value value) const { return Of(value).maker; }

std::span<const Graph::Use> Graph::Uses(Value value) const { return Of(value).uses; }

bool Graph::IsOutput(Value value) const { return Of(value).is_output; }

const Node* Graph::OnlyReader(Value value) const {
  const ValueUses& uses = Of(value);
  if (uses.is_output || uses.uses.size() != 1 || uses.uses[0].index < 0) return nullptr;
  return uses.uses[0].node;
}

bool Graph::CanBeOne(std::span<const Node* const> nodes, std::span<const Node* const> behind) const {
  std::vector<bool> is_inside(nodes_.size()), is_behind(nodes_.size()), is_seen(nodes_.size());
  for (const Node* const node : behind) is_behind[IndexOf(*node)] = true;
  size_t first = nodes_.size();
  for (const Node* const node : nodes) {
    is_inside[IndexOf(*node)] = true;
    first = std::min(first, IndexOf(*node));
  }
  std::vector<const Node*> waiting;
  // A reader outside the set that can only run after the set: `nodes` must not read its outputs.
  const auto wait_for = [&](const Node& reader, Value value) {
    const Node* const maker = value == nullptr ? nullptr : Maker(value);
    if (maker == nullptr) return true;
    const size_t index = IndexOf(*maker);
    if (is_inside[index]) return static_cast<bool>(is_inside[IndexOf(reader)]);
    if (is_behind[index]) return false;
    if (index > first && !is_seen[index]) {
      is_seen[index] = true;
      waiting.push_back(maker);
    }
    return true;
  };
  const auto follow = [&](const Node& node) {
    const auto wait = [&](Value value) { return wait_for(node, value); };
    return std::all_of(node.inputs().begin(), node.inputs().end(), wait) &&
           std::all_of(node.implicit_inputs().begin(), node.implicit_inputs().end(), wait);
  };
  for (const Node* const node : nodes) {
    if (!follow(*node)) return false;
  }
  while (!waiting.empty()) {
    const Node& node = *waiting.back();
    waiting.pop_back();
    if (!follow(node)) return false;
  }
  return true;
}

}  // namespace ortolan::provider
