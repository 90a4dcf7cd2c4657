#include "provider/execution_provider.h"

#include <algorithm>
#include <array>
#include <map>
#include <set>
#include <utility>

namespace ortolan::provider {
namespace {

// First version that gives fused nodes of a branch unique names. With older versions a name may also occur in the
// parent graph, and then creating the session fails.
constexpr uint32_t kNamesBranches = 25;

// Return the attention of a graph, and append the reasons against similar nodes.
std::vector<match::Attention> AttentionsOf(const Graph& graph, Claims& claims) {
  const match::Dimensions dims(graph);
  std::vector<match::Attention> found;
  std::set<const Node*> decided;
  std::map<const Node*, match::Reason> refused;  // with a cache
  for (const match::FoundAttention& one : match::FindCachedAttentions(dims, match::Executor::kProvider)) {
    if (const auto* const attention = std::get_if<match::Attention>(&one)) {
      decided.insert(attention->node);
      found.push_back(*attention);
    } else if (const auto& reason = std::get<match::NotAttention>(one);
               reason.cached || reason.node->type() == "GroupQueryAttention") {
      refused.emplace(reason.node, reason.reason);
    }
  }
  for (const match::FoundAttention& one : match::FindAttentions(dims, match::Executor::kProvider)) {
    const auto* const attention = std::get_if<match::Attention>(&one);
    const match::NotAttention* const reason = std::get_if<match::NotAttention>(&one);
    const Node* const node = attention == nullptr ? reason->node : attention->node;
    if (!decided.insert(node).second) continue;
    const auto of_cache = refused.find(node);
    if (attention != nullptr) {
      found.push_back(*attention);
      found.back().beside_cache = of_cache != refused.end();
    } else {
      claims.left.emplace_back(node, (of_cache == refused.end() ? reason->reason : of_cache->second).Text());
    }
  }
  for (const auto& [node, reason] : refused) {
    if (decided.insert(node).second) claims.left.emplace_back(node, reason.Text());
  }
  std::ranges::sort(
      found, [](const match::Attention& a, const match::Attention& b) { return a.node->index() < b.node->index(); });
  return found;
}

}  // namespace

ExecutionProvider::ExecutionProvider(const HostApi& host, ClaimsLog claims, const ProviderOptions& options)
    : OrtEp{}, host_(host), claims_(std::move(claims)), options_(options), context_(host, options.context) {
  ort_version_supported = host.version;
  OrtEp::GetName = [](const OrtEp*) noexcept -> const char* { return kProviderName; };
  OrtEp::GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info) noexcept -> OrtStatus* {
    ExecutionProvider& provider = *static_cast<ExecutionProvider*>(self);
    return Guarded(*provider.host_.ort, [&] { provider.Claim(*graph, *info); });
  };
  OrtEp::Compile = [](OrtEp* self, const OrtGraph** graphs, const OrtNode** fused, size_t count,
                      OrtNodeComputeInfo** computes, OrtNode** context_nodes) noexcept -> OrtStatus* {
    ExecutionProvider& provider = *static_cast<ExecutionProvider*>(self);
    return Guarded(*provider.host_.ort, [&] {
      provider.CompileAll(std::span(graphs, count), std::span(fused, count), computes, context_nodes);
    });
  };
  OrtEp::GetCompiledModelCompatibilityInfo = [](OrtEp* self, const OrtGraph*) noexcept -> const char* {
    return static_cast<ExecutionProvider*>(self)->has_compiled_ ? CompatibilityInfo() : "";
  };
  OrtEp::ReleaseNodeComputeInfos = [](OrtEp*, OrtNodeComputeInfo** computes, size_t count) noexcept {
    for (size_t i = 0; i < count; ++i) delete static_cast<GroupCompute*>(computes[i]);
  };
}

std::string ExecutionProvider::WhyNot(const OrtModelGraph& model) const {
  if (options_.context.enabled && has_compiled_) {
    return "it is in a function, whose nodes ONNX Runtime does not put into compiled models";
  }
  if (host_.version >= kNamesBranches && !options_.context.enabled) return {};
  if (!model.IsBranch()) return {};
  if (options_.context.enabled) return "it is in a branch, which ONNX Runtime does not put into compiled models";
  return ErrorText("it is in a branch, where ONNX Runtime before 1.", kNamesBranches, " may give two nodes one name");
}

void ExecutionProvider::Claim(const OrtGraph& ort_graph, OrtEpGraphSupportInfo& info) {
  const auto model = std::make_shared<OrtModelGraph>(host_, ort_graph);
  Graph& graph = model->graph();
  for (const Node& node : graph.nodes()) {
    if (!IsContextNode(node)) continue;
    claims_.Takes(node, "compiled");
    ClaimNodes(*model, std::array{&node}, false, info);
  }
  claims_.Finds(graph);
  Claims claims = FindGroups(graph, options_.rules, clipped_ranges_, false,
                             [&](Claims& left) { return AttentionsOf(graph, left); });
  const std::string why_not = claims.groups.empty() ? "" : WhyNot(*model);
  if (why_not.empty()) SaveAttentions(model, claims);
  Tell(claims, why_not);
  for (const Group& group : claims.groups) {
    // Inputs of an attention that is computed alone, such as sin and cos tables, are not packed: all attention nodes
    // share them.
    const bool packs = group.steps.empty() || !group.steps.front().layers.empty();
    if (why_not.empty()) ClaimNodes(*model, group.nodes, packs, info);
  }
}

void ExecutionProvider::SaveAttentions(const std::shared_ptr<const OrtModelGraph>& model, Claims& claims) {
  std::erase_if(claims.groups, [&](const Group& group) {
    for (const Step& step : group.steps) {
      if (!step.attention) continue;
      try {
        attentions_.Save(model, *step.attention);
      } catch (const UnfitError& reason) {
        claims.left.emplace_back(&step.First(), reason.what());
        return true;
      }
    }
    return false;
  });
}

// Log claimed and rejected nodes in graph order.
void ExecutionProvider::Tell(const Claims& claims, const std::string& why_not) const {
  struct Line {
    const Node* node;
    bool is_taken;
    std::string text;
  };
  std::vector<Line> lines;
  for (const auto& [node, reason] : claims.left) lines.push_back({node, false, reason});
  for (const Group& group : claims.groups) {
    const auto add = [&](const Node* node, const std::string& text) {
      lines.push_back({node, why_not.empty(), why_not.empty() ? text : why_not});
    };
    if (group.sum_norm) add(group.sum_norm->norm.node, group.sum_norm->Described());
    for (const Step& step : group.steps) {
      for (const Layer& layer : step.layers) {
        if (lines.empty() || lines.back().node != layer.nodes.front())
          add(layer.nodes.front(), layer.Numbers() + step.Fused());
      }
      if (step.layers.empty()) add(&step.First(), step.attention->Described());
    }
  }
  std::ranges::sort(lines, [](const Line& a, const Line& b) { return a.node->index() < b.node->index(); });
  for (const Line& line : lines) {
    if (line.is_taken) {
      claims_.Takes(*line.node, line.text);
    } else {
      claims_.Leaves(*line.node, line.text);
    }
  }
}

void ExecutionProvider::ClaimNodes(const OrtModelGraph& model, std::span<const Node* const> nodes, bool packs,
                                   OrtEpGraphSupportInfo& info) const {
  OrtNodeFusionOptions options{};
  options.ort_version_supported = host_.version;
  options.drop_constant_initializers = packs;
  std::vector<const OrtNode*> claimed;
  for (const Node* const node : nodes) claimed.push_back(&model.OrtNodeOf(*node));
  Check(*host_.ort, host_.ep->EpGraphSupportInfo_AddNodesToFuse(&info, claimed.data(), claimed.size(), &options));
}

void ExecutionProvider::CompileAll(std::span<const OrtGraph* const> graphs, std::span<const OrtNode* const> fused,
                                   OrtNodeComputeInfo** computes, OrtNode** context_nodes) {
  std::vector<std::unique_ptr<GroupCompute>> made;  // assigned to `computes` only if all succeed
  for (size_t i = 0; i < graphs.size(); ++i) made.push_back(CompileGraph(*graphs[i], *fused[i]));
  if (options_.context.enabled) {
    const std::vector<OrtNode*> nodes = context_.Write(made, fused, PathOf(*graphs.front()));
    std::ranges::copy(nodes, context_nodes);
  }
  for (size_t i = 0; i < made.size(); ++i) computes[i] = made[i].release();
  has_compiled_ = true;
}

std::unique_ptr<GroupCompute> ExecutionProvider::CompileGraph(const OrtGraph& ort_graph, const OrtNode& fused) {
  OrtModelGraph model(host_, ort_graph);
  const OrtModelGraph fused_model(host_, fused);
  Graph& graph = model.graph();
  if (graph.nodes().size() == 1 && IsContextNode(model.node())) {
    return context_.Read(model, fused_model.node(), PathOf(ort_graph), options_.reproducible);
  }
  const Claims claims =
      FindGroups(graph, options_.rules, clipped_ranges_, true, [&](Claims&) { return attentions_.In(graph); });
  if (claims.groups.size() != 1 || claims.groups.front().nodes.size() != graph.nodes().size()) {
    const std::string reason = claims.left.empty() ? "" : ": " + claims.left.front().second;
    const size_t count = claims.groups.empty() ? 0 : claims.groups.front().nodes.size();
    throw OpError(ErrorText("a group of ", graph.nodes().size(), " nodes, the first of them ",
                            graph.nodes().front().Described(), ", differs from the claimed group: ",
                            claims.groups.size(), " groups found, the first with ", count, " nodes", reason));
  }
  return std::make_unique<GroupCompute>(host_, graph, claims.groups.front(), fused_model.node(), options_.reproducible);
}

std::string ExecutionProvider::PathOf(const OrtGraph& graph) const {
  const ORTCHAR_T* path = nullptr;
  Check(*host_.ort, host_.ort->Graph_GetModelPath(&graph, &path));
  return path == nullptr ? "" : path;
}

}  // namespace ortolan::provider
