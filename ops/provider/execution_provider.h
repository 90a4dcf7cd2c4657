// The execution provider of one session: which nodes it claims, and what runs in their places.
#pragma once

#include <memory>

#include "provider/claims_log.h"
#include "provider/compute.h"

namespace ortolan::provider {

struct ProviderOptions {
  // The session writes a model of compiled nodes (ep.context_enable), which this provider cannot make.
  bool claims_nothing = false;
  LayerRules rules;
};

class ExecutionProvider : public OrtEp {
 public:
  ExecutionProvider(const HostApi& host, ClaimsLog claims, const ProviderOptions& options);

 private:
  void Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info) const;
  void Tell(const Claims& claims, bool has_names) const;
  void ClaimGroup(const Group& group, OrtEpGraphSupportInfo& info) const;
  std::unique_ptr<GroupCompute> CompileGraph(const OrtGraph& graph, const OrtNode& fused) const;

  const HostApi& host_;
  ClaimsLog claims_;
  ProviderOptions options_;
};

}  // namespace ortolan::provider
