#include "provider/group.h"

#include <algorithm>
#include <map>
#include <set>

#include "match/halves.h"

namespace ortolan::provider {
namespace {

constexpr const char* kActivationNames[] = {"", "relu", "gelu", "gelu by tanh", "silu"};

template <typename List>
bool Contains(const List& list, const Node* node) {
  return std::ranges::find(list, node) != list.end();
}

void AddNodes(const Layer& layer, std::vector<const Node*>& nodes) {
  nodes.insert(nodes.end(), layer.nodes.begin(), layer.nodes.end());
  nodes.insert(nodes.end(), layer.weight_nodes.begin(), layer.weight_nodes.end());
}

class Finder {
 public:
  Finder(const Graph& graph, const QdqPairs& roundings, const LayerRules& rules, bool is_group,
         std::vector<match::Attention> attentions)
      : graph_(graph), qdq_pairs_(roundings), rules_(rules), is_group_(is_group), attentions_(std::move(attentions)) {}

  Claims Find() {
    ReadLayers();
    MakeSteps();
    MakeGroups();
    return std::move(claims_);
  }

 private:
  void ReadLayers() {
    for (const Node& node : graph_.nodes()) {
      try {
        std::optional<Layer> layer = ReadLayer(graph_, qdq_pairs_, node, rules_);
        if (!layer) continue;
        TakeBias(graph_, *layer);
        layers_.push_back(std::move(*layer));
      } catch (const UnfitError& reason) {
        Leave(node, reason.what());
      }
    }
    for (const match::Attention& found : attentions_) {
      if (found.weight == nullptr) continue;
      try {
        ReadAttention(graph_, found);
        for (Layer& layer : ReadPackedLayers(graph_, qdq_pairs_, found, rules_)) layers_.push_back(std::move(layer));
      } catch (const UnfitError& reason) {
        Leave(*found.node, reason.what());
      }
    }
    LeaveWithSharedValues();
  }

  // Reject layers if nodes outside the claimed layers also read their inner values, which are then computed anyway. For
  // layers with fixed ranges, QdqPairs::Place decides about the quantized input.
  void LeaveWithSharedValues() {
    for (bool is_changed = true; is_changed;) {
      std::set<const Node*> inside;
      for (const Layer& layer : layers_) {
        inside.insert(layer.nodes.begin(), layer.nodes.end());
        inside.insert(layer.weight_nodes.begin(), layer.weight_nodes.end());
      }
      const auto is_read_outside = [&](Value value) {
        const auto is_outside = [&](const Graph::Use& use) { return use.index < 0 || inside.count(use.node) == 0; };
        const std::span<const Graph::Use> uses = graph_.Uses(value);
        return graph_.IsOutput(value) || std::ranges::any_of(uses, is_outside);
      };
      const auto is_seen = [&](const Node* node) {
        const std::vector<Value>& values = node->outputs();
        return std::ranges::any_of(values, [&](Value value) { return value != nullptr && is_read_outside(value); });
      };
      const auto last = std::remove_if(layers_.begin(), layers_.end(), [&](const Layer& layer) {
        if (!std::any_of(layer.nodes.begin(), layer.nodes.end() - 1, is_seen) &&
            (layer.quantize == nullptr || layer.is_static || !is_seen(layer.quantize))) {
          return false;
        }
        // Query, key and value layers of one node have one reason.
        const bool is_told = !claims_.left.empty() && claims_.left.back().first == layer.nodes.front();
        if (!is_told) {
          Leave(*layer.nodes.front(), "its quantized input or integer sums are also read outside the claimed layers");
        }
        return true;
      });
      is_changed = last != layers_.end();
      layers_.erase(last, layers_.end());
    }
  }

  void MakeSteps() {
    std::vector<bool> is_used(layers_.size());
    for (const match::Attention& found : attentions_) {
      const auto is_own = [&](const Layer& layer) { return layer.is_inside && layer.nodes.front() == found.node; };
      if (found.weight != nullptr && std::none_of(layers_.begin(), layers_.end(), is_own)) continue;
      try {
        // Passes fuse attention only in models with layers that they replace.
        const bool is_wanted = is_group_ || found.cache || !layers_.empty() || rules_.precision != Precision::kFloat32;
        if (is_wanted) steps_.push_back(AttentionStep(found, is_used));
      } catch (const UnfitError& reason) {
        Leave(*found.node, reason.what());
      }
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
      const std::optional<size_t> up = is_used[i] ? std::nullopt : UpOf(i, is_used);
      if (!up) continue;
      is_used[i] = is_used[*up] = true;
      steps_.push_back(GatedStep(layers_[i], layers_[*up]));
    }
    for (size_t i = 0; i < layers_.size(); ++i) {
      if (is_used[i]) continue;
      std::optional<Step> halved = HalvedStep(layers_[i]);
      steps_.push_back(halved ? std::move(*halved) : LayerStep(layers_[i]));
    }
    // Process steps in graph order, so that the sum of two layers' outputs is fused with the first layer.
    std::ranges::sort(steps_, [](const Step& a, const Step& b) { return a.First().index() < b.First().index(); });
  }

  Step LayerStep(const Layer& layer) const {
    Step step;
    step.layers = {layer};
    AddNodes(layer, step.nodes);
    step.y = layer.y;
    step.activation = match::TakeActivation(graph_, step.y, step.nodes);
    return step;
  }

  // Return the step of an attention, together with its query, key and value layers if they read the same X and nothing
  // else reads their outputs.
  Step AttentionStep(const match::Attention& found, std::vector<bool>& is_used) {
    Step step;
    step.attention = ReadAttention(graph_, found);
    if (!is_group_) {
      step.attention->precise =
          (found.cache || found.beside_cache) && layers_.empty() && rules_.precision == Precision::kFloat32;
    }
    if (found.cache) {
      const std::string problem = rules_.policy.WhyNotWorthCachedAttention();
      Expect(problem.empty(), problem);
    }
    const auto is_taken = [&](const Node* one) { return taken_.count(one) != 0; };
    Expect(std::ranges::none_of(found.nodes, is_taken), "some of its nodes belong to another attention");
    // Keep other layers from fusing an addition inside this attention as their residual.
    taken_.insert(found.nodes.begin(), found.nodes.end());
    step.y = found.output;
    step.nodes = found.nodes;
    for (const size_t layer : LayersOf(*step.attention, is_used)) {
      is_used[layer] = true;
      step.layers.push_back(layers_[layer]);
      AddNodes(layers_[layer], step.nodes);
    }
    return step;
  }

  // Return the indices of the three layers of an attention; empty if it is computed without them.
  std::vector<size_t> LayersOf(const Attention& attention, const std::vector<bool>& is_used) const {
    std::vector<size_t> found;
    for (size_t i = 0; i < layers_.size() && attention.weight != nullptr; ++i) {
      if (layers_[i].is_inside && layers_[i].nodes.front() == attention.node) found.push_back(i);
    }
    if (attention.weight != nullptr) return found;
    if (attention.cache || attention.heads != attention.kv_heads) return found;
    const auto is_inside = [&](const Graph::Use& use) { return use.index >= 0 && Contains(attention.nodes, use.node); };
    for (size_t role = 0; role < 3; ++role) {
      const Value y = attention.inputs[role];
      const std::span<const Graph::Use> uses = graph_.Uses(y);
      const auto layer = std::ranges::find_if(layers_, [&](const Layer& one) { return one.y == y; });
      if (layer == layers_.end() || attention.layouts[role] != match::Layout::kByRows || graph_.IsOutput(y) ||
          !std::ranges::all_of(uses, is_inside)) {
        return {};
      }
      found.push_back(static_cast<size_t>(layer - layers_.begin()));
      const Layer& first = layers_[found.front()];
      const bool is_alike = layer->x == first.x && layer->quantize == first.quantize && !layer->x_bounds &&
                            layer->Columns() == attention.heads * attention.head_dim &&
                            (attention.biases[role].empty() || layer->bias.empty());
      const bool is_free = !is_used[found.back()] && std::ranges::count(found, found.back()) == 1;
      if (!is_alike || !is_free || DeclaredShape(layer->x).value_or(Shape{}).size() != 3) return {};
    }
    return found;
  }

  // Return the layer whose output is multiplied with that of `gate`, after an optional activation of the gate.
  std::optional<size_t> UpOf(size_t gate, const std::vector<bool>& is_used) const {
    Value y = layers_[gate].y;
    std::vector<const Node*> nodes;
    match::TakeActivation(graph_, y, nodes);
    for (size_t up = 0; up < layers_.size(); ++up) {
      if (up == gate || is_used[up] || !CanJoin(layers_[gate], layers_[up])) continue;
      if (match::TakeFactor(graph_, {&layers_[up].y, 1}, y, nodes) != nullptr) return up;
    }
    return std::nullopt;
  }

  Step GatedStep(const Layer& gate, const Layer& up) const {
    Step step;
    step.layers = {gate, up};
    step.gated_columns = gate.Columns();
    AddNodes(gate, step.nodes);
    AddNodes(up, step.nodes);
    step.y = gate.y;
    step.activation = match::TakeActivation(graph_, step.y, step.nodes);
    match::TakeFactor(graph_, {&up.y, 1}, step.y, step.nodes);
    return step;
  }

  // Return the step of a layer whose first half, after an optional activation, is multiplied with its second half;
  // nullopt if the layer is no such pair. The halves must be whole panels, because the weight is packed as one.
  std::optional<Step> HalvedStep(const Layer& layer) const {
    const std::optional<match::Halves> halves = match::FindHalves(graph_, layer.y, layer.Columns());
    if (!halves || layer.Columns() % (2 * kPanelColumns) != 0) return std::nullopt;
    Step step;
    step.layers = {layer};
    step.gated_columns = layer.Columns() / 2;
    AddNodes(layer, step.nodes);
    step.nodes.insert(step.nodes.end(), halves->nodes.begin(), halves->nodes.end());
    step.y = halves->values[0];
    step.activation = match::TakeActivation(graph_, step.y, step.nodes);
    if (match::TakeFactor(graph_, {&halves->values[1], 1}, step.y, step.nodes) == nullptr) return std::nullopt;
    return step;
  }

  // Make a group of all layers that read one quantized X, together with the node that quantizes X.
  void MakeGroups() {
    std::map<const Node*, std::vector<Step>> by_quantize;
    std::vector<const Node*> quantizes;  // in the order of each group's first step
    for (Step& step : steps_) {
      const Node* const quantize = step.layers.empty() ? nullptr : step.layers.front().quantize;
      if (quantize == nullptr) {
        AddGroup({std::move(step)}, nullptr);
      } else {
        if (by_quantize[quantize].empty()) quantizes.push_back(quantize);
        by_quantize[quantize].push_back(std::move(step));
      }
    }
    for (const Node* const quantize : quantizes) AddGroup(std::move(by_quantize[quantize]), quantize);
  }

  static Group GroupOf(std::vector<Step> steps, const Node* quantize) {
    Group group;
    group.steps = std::move(steps);
    if (quantize != nullptr) group.nodes.push_back(quantize);
    for (const Step& step : group.steps) {
      for (const Node* const node : step.nodes) {
        if (!Contains(group.nodes, node)) group.nodes.push_back(node);
      }
    }
    return group;
  }

  // Return whether an output has consumers. A fused node without outputs would be invalid in a compiled model.
  bool IsRead(const Group& group) const {
    const auto is_read = [&](Value value) { return graph_.IsOutput(value) || !graph_.Uses(value).empty(); };
    return std::ranges::any_of(group.steps, [&](const Step& step) {
      const match::KvCache* const cache = step.attention && step.attention->cache ? &*step.attention->cache : nullptr;
      return is_read(step.y) || (cache != nullptr && (is_read(cache->present_key) || is_read(cache->present_value)));
    });
  }

  // Return whether an attention reads an output of its own group, for example as a mask.
  bool ReadsItself(const Group& group) const {
    return std::ranges::any_of(group.steps, [&](const Step& step) {
      const std::vector<Value> read =
          step.attention ? step.attention->Reads(!step.layers.empty()) : std::vector<Value>{};
      return std::ranges::any_of(read, [&](Value value) { return Contains(group.nodes, graph_.Maker(value)); });
    });
  }

  // Separate attention steps from their linear layers.
  std::vector<Step> WithoutAttention(const std::vector<Step>& steps) {
    std::vector<Step> without;
    for (const Step& step : steps) {
      if (!step.attention) {
        without.push_back(step);
        continue;
      }
      for (const Layer& layer : step.layers) {
        if (!layer.is_inside) without.push_back(LayerStep(layer));
      }
      Leave(*step.attention->node, "its operand depends on a layer of the same input");
    }
    return without;
  }

  void AddGroup(std::vector<Step> steps, const Node* quantize) {
    Group group = GroupOf(std::move(steps), quantize);
    if (!graph_.CanBeOne(group.nodes) || ReadsItself(group)) {
      group = GroupOf(WithoutAttention(group.steps), quantize);
    }
    if (quantize == nullptr && group.steps.size() > 1) {  // the layers share no quantized input
      for (Step& step : group.steps) AddGroup({std::move(step)}, nullptr);
      return;
    }
    if (!graph_.CanBeOne(group.nodes)) {
      for (const Step& step : group.steps) {
        for (const Layer& layer : step.layers) Leave(*layer.nodes.front(), "a layer of the same input depends on it");
      }
      return;
    }
    taken_.insert(group.nodes.begin(), group.nodes.end());
    for (Step& step : group.steps) {
      if (!step.attention) TakeResidualAndNorm(step, group);
    }
    if (IsRead(group)) {
      claims_.groups.push_back(std::move(group));
    } else {
      for (const Step& step : group.steps) Leave(step.First(), "its output has no consumer");
    }
  }

  // Return the consumers outside the group of QDQ pairs in the group. They read their values from the group.
  std::vector<const Node*> ReadersOfRoundings(const Group& group) const {
    std::vector<const Node*> readers;
    for (const Node* const node : group.nodes) {
      const QdqPair* const rounding = qdq_pairs_.MadeBy(*node);
      if (rounding == nullptr || rounding->state == QdqPair::State::kStays) continue;
      for (const QdqPair::Reader& reader : rounding->readers) {
        if (!Contains(group.nodes, reader.use.node)) readers.push_back(reader.use.node);
      }
    }
    return readers;
  }

  void TakeResidualAndNorm(Step& step, Group& group) {
    const auto take = [&](const std::vector<const Node*>& nodes) {
      const auto is_taken = [&](const Node* node) { return taken_.count(node) != 0; };
      if (std::ranges::any_of(nodes, is_taken) || nodes.back()->Output(0) == nullptr) return false;
      const size_t before = group.nodes.size();
      group.nodes.insert(group.nodes.end(), nodes.begin(), nodes.end());
      if (!graph_.CanBeOne(group.nodes, ReadersOfRoundings(group))) {
        group.nodes.resize(before);
        return false;
      }
      taken_.insert(nodes.begin(), nodes.end());
      step.nodes.insert(step.nodes.end(), nodes.begin(), nodes.end());
      step.y = nodes.back()->Output(0);
      return true;
    };
    // Include a Cast of the output, because groups compute float32 and write either float type.
    const auto take_cast = [&] {
      const Node* const cast = graph_.OnlyReader(step.y);
      if (cast != nullptr && graph_.IsFloatCast(*cast)) take({cast});
    };
    take_cast();
    if (const Node* const add = match::SumOf(graph_, step.y)) {
      const Value residual = Other(*add, step.y);
      const Node* const maker = residual == nullptr ? nullptr : graph_.Maker(residual);
      const bool is_free = residual != nullptr && !graph_.IsConstantValue(residual) && !Contains(group.nodes, maker);
      if (is_free && graph_.IsFloatOrHalf(residual) && take({add})) step.residual = residual;
    }
    const std::optional<match::Norm> norm = match::FindNorm(graph_, step.y, step.Columns());
    if (norm && take(norm->nodes)) step.norm = ReadNorm(graph_, *norm);
    if (step.norm || step.residual != nullptr) take_cast();
  }

  void Leave(const Node& node, const std::string& reason) { claims_.left.emplace_back(&node, reason); }

  const Graph& graph_;
  const QdqPairs& qdq_pairs_;
  const LayerRules rules_;
  const bool is_group_;
  const std::vector<match::Attention> attentions_;
  std::vector<Layer> layers_;
  std::vector<Step> steps_;
  std::set<const Node*> taken_;
  Claims claims_;
};

bool HasIntegers(const Layer& layer) {
  const RoundedWeight* const rounded = std::get_if<RoundedWeight>(&layer.weight);
  return rounded == nullptr || rounded->precision == Precision::kInt8;
}

bool HasIntegers(const Claims& claims) {
  return std::ranges::any_of(claims.groups, [](const Group& group) {
    return std::ranges::any_of(group.steps, [](const Step& step) {
      return std::ranges::any_of(step.layers, [](const Layer& layer) { return HasIntegers(layer); });
    });
  });
}

// Find norms after all other groups, because a norm that follows a linear layer belongs to the layer's step.
void TakeSumNorms(const Graph& graph, Claims& claims) {
  std::set<const Node*> taken;
  for (const Group& group : claims.groups) taken.insert(group.nodes.begin(), group.nodes.end());
  for (const Node& node : graph.nodes()) {
    std::optional<SumNorm> norm = FindSumNorm(graph, node, taken);
    if (!norm || (!graph.IsOutput(norm->y) && graph.Uses(norm->y).empty())) continue;
    taken.insert(norm->nodes.begin(), norm->nodes.end());
    Group& group = claims.groups.emplace_back();
    group.nodes = norm->nodes;
    group.sum_norm = std::move(norm);
  }
}

}  // namespace

bool CanJoin(const Layer& a, const Layer& b) {
  if (a.x != b.x || a.quantize != b.quantize || a.weight.index() != b.weight.index()) return false;
  if (a.Columns() != b.Columns() || a.Columns() % kPanelColumns != 0) return false;
  const NBitsWeight* const first = std::get_if<NBitsWeight>(&a.weight);
  if (first == nullptr) return true;
  const NBitsWeight& second = std::get<NBitsWeight>(b.weight);
  return first->bits == second.bits && first->block_size == second.block_size;
}

std::string Step::Fused() const {
  std::vector<std::string> parts;
  if (activation != Activation::kNone) parts.push_back(kActivationNames[static_cast<size_t>(activation)]);
  if (gated_columns != 0) parts.push_back("gate");
  if (residual != nullptr) parts.push_back("residual");
  if (norm) parts.push_back("layer norm");
  if (attention) parts.push_back(ErrorText("attention of ", attention->heads, " heads"));
  std::string text;
  for (size_t i = 0; i < parts.size(); ++i) text += (i == 0 ? ", with " : ", ") + parts[i];
  return text;
}

Claims FindGroups(Graph& graph, const LayerRules& rules, ClippedRanges& clipped_ranges, bool is_group,
                  const FindAttentions& find_attentions) {
  QdqPairs roundings(graph, clipped_ranges, is_group);
  for (;;) {
    graph.See(roundings.Seen());
    Claims claims;
    std::vector<match::Attention> attentions = find_attentions(claims);
    Claims found = Finder(graph, roundings, rules, is_group, std::move(attentions)).Find();
    if (!roundings.Place(graph, found)) continue;
    // Models without claimed layers keep attention without a cache, so its reasons are of no use.
    for (auto& left : claims.left) {
      const bool is_told = is_group || !found.groups.empty() || left.first->type() == "GroupQueryAttention";
      if (is_told) found.left.push_back(std::move(left));
    }
    if (is_group || HasIntegers(found)) {
      graph.See({});
      TakeSumNorms(graph, found);
      graph.See(roundings.Seen());
    }
    return found;
  }
}

}  // namespace ortolan::provider
