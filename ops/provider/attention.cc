#include "provider/attention.h"

#include <algorithm>
#include <cmath>

namespace ortolan::provider {
namespace {

// Call visit(value) for each value of an attention, which visit may replace.
template <typename Visit>
void ForEachValue(match::Attention& attention, const Visit& visit) {
  for (Value& value : attention.inputs) visit(value);
  for (match::Mask& mask : attention.masks) visit(mask.value);
  for (Value* const value : {&attention.zero_rows, &attention.weight, &attention.bias, &attention.output}) {
    visit(*value);
  }
  if (!attention.cache) return;
  match::KvCache& cache = *attention.cache;
  for (Value* const value : {&cache.past_key, &cache.past_value, &cache.present_key, &cache.present_value,
                             &cache.lengths, &cache.total, &cache.cos, &cache.sin}) {
    visit(*value);
  }
}

// Return whether two attentions with values of the same names are computed alike.
bool AreAlike(const match::Attention& a, const match::Attention& b) {
  const auto is_alike = [](const match::Mask& one, const match::Mask& other) {
    match::Mask same = one;
    same.value = other.value;
    return same == other;
  };
  return a.heads == b.heads && a.kv_heads == b.kv_heads && a.head_dim == b.head_dim && a.scale == b.scale &&
         a.softcap == b.softcap && a.causal == b.causal && a.window == b.window && a.sinks == b.sinks &&
         a.zero_hidden_rows == b.zero_hidden_rows && a.layouts == b.layouts && a.output_layout == b.output_layout &&
         a.nodes.size() == b.nodes.size() &&
         std::equal(a.masks.begin(), a.masks.end(), b.masks.begin(), b.masks.end(), is_alike);
}

// A rule names a mask before it is expanded to the shape of the scores, and split heads before batch and heads are
// merged. Return the value that the attention's nodes read instead.
Value InputRead(const Graph& graph, const match::Attention& attention, Value value, bool is_mask) {
  constexpr size_t kMostSteps = 16;
  std::vector<Value> waiting = {value};
  for (size_t i = 0; i < waiting.size() && i < kMostSteps; ++i) {
    const std::span<const Graph::Use> uses = graph.Uses(waiting[i]);
    const auto is_inside = [&](const Graph::Use& use) {
      return std::find(attention.nodes.begin(), attention.nodes.end(), use.node) != attention.nodes.end();
    };
    if (std::any_of(uses.begin(), uses.end(), is_inside)) return waiting[i];
    for (const Graph::Use& use : uses) {
      const bool is_moved =
          use.index == 0 &&
          (is_mask ? use.node->IsStandard("Expand") || use.node->IsStandard("Identity") || use.node->IsStandard("Cast")
                   : i == 0 && use.node->IsStandard("Reshape"));
      if (is_moved && use.node->Output(0) != nullptr) waiting.push_back(use.node->Output(0));
    }
  }
  return value;
}

// Return the types of nodes and the names of their inputs and outputs in the original model.
std::string TextOf(const std::vector<const Node*>& nodes) {
  std::string text;
  for (const Node* const node : nodes) {
    text += node->type() + "(";
    for (size_t i = 0; i < node->inputs().size(); ++i) {
      text += (node->StoredInput(i) == nullptr ? "" : node->StoredInput(i)->name) + ",";
    }
    for (const Value output : node->outputs()) text += (output == nullptr ? "" : output->name) + ";";
  }
  return text;
}

}  // namespace

std::vector<Value> Attention::Reads(bool has_layers) const {
  std::vector<Value> reads = {zero_rows};
  if (!has_layers) reads.insert(reads.end(), inputs.begin(), inputs.end());
  for (const match::Mask& mask : masks) reads.push_back(mask.value);
  if (cache) {
    reads.insert(reads.end(),
                 {cache->past_key, cache->past_value, cache->lengths, cache->total, cache->cos, cache->sin});
  }
  std::erase(reads, nullptr);
  return reads;
}

std::string Attention::Described() const {
  return ErrorText("attention of ", heads, " heads of ", head_dim,
                   cache ? ErrorText(" over a cache of ", kv_heads) : "",
                   cache && cache->cos != nullptr ? ", with rotary embedding" : "",
                   window != 0 ? ErrorText(", with a window of ", window) : "", sinks.empty() ? "" : ", with sinks");
}

Attention ReadAttention(const Graph& graph, const match::Attention& found) {
  Attention attention{found, {}};
  Expect(found.zero_rows == nullptr || !graph.IsConstantValue(found.zero_rows), "its condition for rows is constant");
  for (match::Mask& mask : attention.masks) mask.value = InputRead(graph, found, mask.value, true);
  for (size_t role = 0; role < 3; ++role) {
    if (found.layouts[role] != match::Layout::kByHeads || found.inputs[role] == nullptr) continue;
    attention.inputs[role] = InputRead(graph, found, found.inputs[role], false);
  }
  for (const Value value : attention.Reads(found.weight != nullptr)) {
    const std::span<const Graph::Use> uses = graph.Uses(value);
    const bool is_read = std::any_of(uses.begin(), uses.end(), [&](const Graph::Use& use) {
      return std::find(found.nodes.begin(), found.nodes.end(), use.node) != found.nodes.end();
    });
    Expect(is_read, ErrorText("its nodes do not read '", value->name, "' themselves"));
  }
  if (attention.scale == 0) attention.scale = 1 / std::sqrt(static_cast<double>(attention.head_dim));
  Expect(std::isfinite(static_cast<float>(attention.scale)), "its scale is not finite");
  if (found.bias != nullptr) {
    const std::optional<Constant> bias = graph.ConstantOf(found.bias);
    const int64_t width = found.heads * found.head_dim, kv_width = found.kv_heads * found.head_dim;
    Expect(bias && IsFloatType(bias->type) && bias->Count() == width + 2 * kv_width, "its bias is not constant");
    const std::vector<float> all = bias->Floats();
    const auto end = [&](int64_t count) { return all.begin() + count; };
    attention.biases = {std::vector<float>(all.begin(), end(width)),
                        std::vector<float>(end(width), end(width + kv_width)),
                        std::vector<float>(end(width + kv_width), all.end())};
  }
  return attention;
}

void SavedAttentions::Save(const std::shared_ptr<const OrtModelGraph>& model, const match::Attention& attention) {
  std::vector<Saved>& saved = by_output_[attention.output->name];
  const std::string nodes = TextOf(attention.nodes);
  const auto same = std::find_if(saved.begin(), saved.end(), [&](const Saved& one) { return one.nodes == nodes; });
  if (same == saved.end()) {
    saved.push_back({model, attention, nodes});
    return;
  }
  Expect(!model->IsBranch() || AreAlike(same->attention, attention),
         "another branch has an attention of the same names and other constants");
  *same = {model, attention, nodes};
}

std::vector<match::Attention> SavedAttentions::In(const Graph& group) const {
  std::unordered_map<std::string, Value> by_name;
  for (const match::ValueInfo& value : group.values()) by_name[value.name] = &value;
  std::vector<match::Attention> found;
  const auto own_node = [&](const Node* one) -> const Node* {
    for (const Value made : one->outputs()) {
      const auto own = made == nullptr ? by_name.end() : by_name.find(made->name);
      if (own != by_name.end()) return group.Maker(own->second);
    }
    return nullptr;
  };
  const auto add = [&](const Saved& saved) {
    match::Attention attention = saved.attention;
    bool is_whole = true;
    ForEachValue(attention, [&](Value& value) {
      if (value == nullptr) return;
      const auto own = by_name.find(value->name);
      is_whole = is_whole && own != by_name.end();
      value = own == by_name.end() ? nullptr : group.Seen(own->second);
    });
    attention.node = own_node(attention.node);
    std::transform(attention.nodes.begin(), attention.nodes.end(), attention.nodes.begin(), own_node);
    attention.products.clear();
    is_whole = is_whole && attention.node != nullptr &&
               std::count(attention.nodes.begin(), attention.nodes.end(), nullptr) == 0;
    if (is_whole && TextOf(attention.nodes) == saved.nodes) found.push_back(std::move(attention));
  };
  for (const Node& node : group.nodes()) {
    for (const Value output : node.outputs()) {
      const auto saved = output == nullptr ? by_output_.end() : by_output_.find(output->name);
      if (saved != by_output_.end()) std::for_each(saved->second.begin(), saved->second.end(), add);
    }
  }
  return found;
}

}  // namespace ortolan::provider
