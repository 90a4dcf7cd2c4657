// The execution provider of one session: claims nodes and compiles them.
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
  bool reproducible = false;  // the same bits on every CPU
};

class ExecutionProvider : public OrtEp {
 public:
  ExecutionProvider(const HostApi& host, ClaimsLog claims, const ProviderOptions& options);

 private:
  void Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info);
  // Return the reason why no node of the graph can be claimed; empty if nodes can be claimed.
  std::string WhyNot(const OrtModelGraph& model) const;
  // Keep the claimed attention for Compile. A group whose attention cannot be kept is not claimed.
  void SaveAttentions(const std::shared_ptr<const OrtModelGraph>& model, Claims& claims);
  void Tell(const Claims& claims, const std::string& why_not) const;
  // packs: Compile packs the constant inputs, so the fused node need not read them.
  void ClaimNodes(const OrtModelGraph& model, std::span<const Node* const> nodes, bool packs,
                  OrtEpGraphSupportInfo& info) const;
  void CompileAll(std::span<const OrtGraph* const> graphs, std::span<const OrtNode* const> fused,
                  OrtNodeComputeInfo** computes, OrtNode** context_nodes);
  std::unique_ptr<GroupCompute> CompileGraph(const OrtGraph& graph, const OrtNode& fused);
  // Return an empty path if the model was not loaded from a file.
  std::string PathOf(const OrtGraph& graph) const;

  const HostApi& host_;
  ClaimsLog claims_;
  ProviderOptions options_;
  ContextModel context_;
  ClippedRanges clipped_ranges_;  // ranges of all graphs seen by GetCapability
  SavedAttentions attentions_;    // claimed by GetCapability
  bool has_compiled_ = false;
};

}  // namespace ortolan::provider
