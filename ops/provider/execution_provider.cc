#include "provider/execution_provider.h"

#include <algorithm>
#include <utility>

namespace ortolan::provider {
namespace {

// Before it, what is compiled in a branch and in the graph around it may get one name, and then no session is made.
constexpr uint32_t kNamesBranches = 25;
constexpr uint32_t kTellsOfParents = 24;  // to whoever claims; before it, branches are known by what they read

bool IsBranch(const OrtGraph& ort_graph, const Graph& graph) {
  const HostApi& host = graph.host();
  const OrtApi& ort = *host.ort;
  const OrtNode* parent = nullptr;
  Check(ort, ort.Graph_GetParentNode(&ort_graph, &parent));
  if (parent != nullptr || host.version >= kTellsOfParents) return parent != nullptr;
  size_t inputs = 0;
  Check(ort, ort.Graph_GetNumInputs(&ort_graph, &inputs));
  if (inputs == 0) return true;
  return std::any_of(graph.nodes().begin(), graph.nodes().end(), [](const Node& node) { return node.ReadsOutside(); });
}

}  // namespace

ExecutionProvider::ExecutionProvider(const HostApi& host, ClaimsLog claims, const ProviderOptions& options)
    : OrtEp{}, host_(host), claims_(std::move(claims)), options_(options) {
  ort_version_supported = host.version;
  OrtEp::GetName = [](const OrtEp*) noexcept -> const char* { return kProviderName; };
  OrtEp::GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info) noexcept -> OrtStatus* {
    const ExecutionProvider& provider = *static_cast<ExecutionProvider*>(self);
    return Guarded(*provider.host_.ort, [&] { provider.Claim(*graph, *info); });
  };
  OrtEp::Compile = [](OrtEp* self, const OrtGraph** graphs, const OrtNode** fused, size_t count,
                      OrtNodeComputeInfo** computes, OrtNode**) noexcept -> OrtStatus* {
    const ExecutionProvider& provider = *static_cast<ExecutionProvider*>(self);
    return Guarded(*provider.host_.ort, [&] {
      std::vector<std::unique_ptr<GroupCompute>> made;  // all or, where one fails, none
      for (size_t i = 0; i < count; ++i) made.push_back(provider.CompileGraph(*graphs[i], *fused[i]));
      for (size_t i = 0; i < count; ++i) computes[i] = made[i].release();
    });
  };
  OrtEp::ReleaseNodeComputeInfos = [](OrtEp*, OrtNodeComputeInfo** computes, size_t count) noexcept {
    for (size_t i = 0; i < count; ++i) delete static_cast<GroupCompute*>(computes[i]);
  };
}

void ExecutionProvider::Claim(const OrtGraph& ort_graph, OrtEpGraphSupportInfo& info) const {
  if (options_.claims_nothing) {
    return claims_.Warns("Ortolan claims nothing: it writes no compiled models. Leave out ep.context_enable.");
  }
  const Graph graph(host_, ort_graph);
  const Claims claims = FindGroups(graph, options_.rules);
  const bool has_names = host_.version >= kNamesBranches || claims.groups.empty() || !IsBranch(ort_graph, graph);
  Tell(claims, has_names);
  for (const Group& group : claims.groups) {
    if (has_names) ClaimGroup(group, info);
  }
}

// In the order of the graph.
void ExecutionProvider::Tell(const Claims& claims, bool has_names) const {
  struct Line {
    const Node* node;
    bool is_taken;
    std::string text;
  };
  std::vector<Line> lines;
  for (const auto& [node, reason] : claims.left) lines.push_back({node, false, reason});
  const std::string nameless =
      ErrorText("it is in a branch, for which ONNX Runtime before 1.", kNamesBranches, " has no names");
  for (const Group& group : claims.groups) {
    for (const Step& step : group.steps) {
      for (const Layer& layer : step.layers) {
        lines.push_back({layer.nodes.front(), has_names, has_names ? layer.Numbers() + step.Fused() : nameless});
      }
    }
  }
  std::sort(lines.begin(), lines.end(), [](const Line& a, const Line& b) { return a.node < b.node; });
  for (const Line& line : lines) {
    if (line.is_taken) {
      claims_.Takes(*line.node, line.text);
    } else {
      claims_.Leaves(*line.node, line.text);
    }
  }
}

void ExecutionProvider::ClaimGroup(const Group& group, OrtEpGraphSupportInfo& info) const {
  OrtNodeFusionOptions options{};
  options.ort_version_supported = host_.version;
  options.drop_constant_initializers = true;  // Compile packs them
  std::vector<const OrtNode*> nodes;
  for (const Node* const node : group.nodes) nodes.push_back(&node->ort());
  Check(*host_.ort, host_.ep->EpGraphSupportInfo_AddNodesToFuse(&info, nodes.data(), nodes.size(), &options));
}

std::unique_ptr<GroupCompute> ExecutionProvider::CompileGraph(const OrtGraph& ort_graph, const OrtNode& fused) const {
  const Graph graph(host_, ort_graph);
  const Claims claims = FindGroups(graph, options_.rules);
  if (claims.groups.size() != 1 || claims.groups.front().nodes.size() != graph.nodes().size()) {
    const std::string reason = claims.left.empty() ? "" : ": " + claims.left.front().second;
    throw OpError(ErrorText("a group of ", graph.nodes().size(), " nodes is not what was claimed", reason));
  }
  return std::make_unique<GroupCompute>(host_, claims.groups.front(), Node(host_, fused));
}

}  // namespace ortolan::provider
