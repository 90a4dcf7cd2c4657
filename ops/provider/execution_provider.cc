#include "provider/execution_provider.h"

#include <algorithm>
#include <utility>

#include "provider/mat_mul_nbits.h"

namespace ortolan::provider {
namespace {

// Before it, what is compiled in a branch and in the graph around it may get one name, and then no session is made.
constexpr uint32_t kNamesBranches = 25;
constexpr uint32_t kTellsOfParents = 24;  // to whoever claims; before it, branches are known by what they read

bool IsBranch(const HostApi& host, const OrtGraph& graph) {
  const OrtApi& ort = *host.ort;
  const OrtNode* parent = nullptr;
  Check(ort, ort.Graph_GetParentNode(&graph, &parent));
  if (parent != nullptr || host.version >= kTellsOfParents) return parent != nullptr;
  size_t inputs = 0;
  Check(ort, ort.Graph_GetNumInputs(&graph, &inputs));
  if (inputs == 0) return true;
  const std::vector<const OrtNode*> nodes = NodesOf(host, graph);
  return std::any_of(nodes.begin(), nodes.end(), [&](const OrtNode* node) { return Node(host, *node).ReadsOutside(); });
}

}  // namespace

ExecutionProvider::ExecutionProvider(const HostApi& host, ClaimsLog claims, bool claims_nothing)
    : OrtEp{}, host_(host), claims_(std::move(claims)), claims_nothing_(claims_nothing) {
  ort_version_supported = host.version;
  OrtEp::GetName = [](const OrtEp*) noexcept -> const char* { return kProviderName; };
  OrtEp::GetCapability = [](OrtEp* self, const OrtGraph* graph, OrtEpGraphSupportInfo* info) noexcept -> OrtStatus* {
    const ExecutionProvider& provider = *static_cast<ExecutionProvider*>(self);
    return Guarded(*provider.host_.ort, [&] { provider.Claim(*graph, *info); });
  };
  OrtEp::Compile = [](OrtEp* self, const OrtGraph** graphs, const OrtNode**, size_t count,
                      OrtNodeComputeInfo** computes, OrtNode**) noexcept -> OrtStatus* {
    const ExecutionProvider& provider = *static_cast<ExecutionProvider*>(self);
    return Guarded(*provider.host_.ort, [&] {
      std::vector<std::unique_ptr<LayerCompute>> made;  // all or, where one fails, none
      for (size_t i = 0; i < count; ++i) made.push_back(provider.CompileGraph(*graphs[i]));
      for (size_t i = 0; i < count; ++i) computes[i] = made[i].release();
    });
  };
  OrtEp::ReleaseNodeComputeInfos = [](OrtEp*, OrtNodeComputeInfo** computes, size_t count) noexcept {
    for (size_t i = 0; i < count; ++i) delete static_cast<LayerCompute*>(computes[i]);
  };
}

void ExecutionProvider::Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info) const {
  if (claims_nothing_) {
    return claims_.Warns("Ortolan claims nothing: it writes no compiled models. Leave out ep.context_enable.");
  }
  const bool has_name = host_.version >= kNamesBranches || !IsBranch(host_, graph);
  for (const OrtNode* const node : NodesOf(host_, graph)) ClaimNode(*node, has_name, info);
}

void ExecutionProvider::ClaimNode(const OrtNode& ort_node, bool has_name, OrtEpGraphSupportInfo& info) const {
  const Node node(host_, ort_node);
  if (!IsMatMulNBits(node)) return;
  try {
    Expect(has_name, ErrorText("it is in a branch, for which ONNX Runtime before 1.", kNamesBranches, " has no names"));
    const NBitsWeight w = ReadMatMulNBits(node).weight;
    const std::string problem = NBitsGroups::WhyNot(w);
    Expect(problem.empty(), problem);
    claims_.Takes(node, ErrorText(w.k, " x ", w.n, ", ", w.bits, " bits in blocks of ", w.block_size));
  } catch (const UnfitError& reason) {
    return claims_.Leaves(node, reason.what());
  }
  OrtNodeFusionOptions options{};
  options.ort_version_supported = host_.version;
  options.drop_constant_initializers = true;  // Compile packs them
  const OrtNode* const nodes[] = {&ort_node};
  Check(*host_.ort, host_.ep->EpGraphSupportInfo_AddNodesToFuse(&info, nodes, 1, &options));
}

std::unique_ptr<LayerCompute> ExecutionProvider::CompileGraph(const OrtGraph& graph) const {
  const std::vector<const OrtNode*> nodes = NodesOf(host_, graph);
  if (nodes.size() != 1) throw OpError(ErrorText("a group of ", nodes.size(), " nodes, expected 1"));
  const Node node(host_, *nodes[0]);
  try {
    return std::make_unique<LayerCompute>(host_, node.Described(), node.InputName(0), ReadMatMulNBits(node));
  } catch (const UnfitError& reason) {
    throw OpError(ErrorText(node.Described(), ": ", reason.what()));
  }
}

}  // namespace ortolan::provider
