// The execution provider of one session: which nodes it claims, and what runs in their places.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "provider/claims_log.h"
#include "provider/context_model.h"

namespace ortolan::provider {

struct ProviderOptions {
  ContextOptions context;
  LayerRules rules;
};

class ExecutionProvider : public OrtEp {
 public:
  ExecutionProvider(const HostApi& host, ClaimsLog claims, const ProviderOptions& options);

 private:
  void Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info);
  // Return why no node of the graph can be claimed; empty if they can.
  std::string WhyNot(const OrtGraph& ort_graph, const Graph& graph) const;
  void Tell(const Claims& claims, const std::string& why_not) const;
  // packs: Compile packs its constants, so that the node in their place does not read them.
  void ClaimNodes(std::span<const Node* const> nodes, bool packs, OrtEpGraphSupportInfo& info) const;
  void CompileAll(std::span<const OrtGraph* const> graphs, std::span<const OrtNode* const> fused,
                  OrtNodeComputeInfo** computes, OrtNode** context_nodes);
  std::unique_ptr<GroupCompute> CompileGraph(const OrtGraph& graph, const OrtNode& fused);
  // Return an empty path if the model was not loaded from a file.
  std::string PathOf(const OrtGraph& graph) const;

  const HostApi& host_;
  ClaimsLog claims_;
  ProviderOptions options_;
  ContextModel context_;
  ClippedRanges clipped_ranges_;  // of the graphs that were claimed
  bool has_compiled_ = false;
};

}  // namespace ortolan::provider
