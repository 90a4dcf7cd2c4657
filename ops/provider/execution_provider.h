// The execution provider of one session: which nodes it claims, and what runs in their places.
#pragma once

#include <memory>

#include "provider/claims_log.h"
#include "provider/compute.h"

namespace ortolan::provider {

class ExecutionProvider : public OrtEp {
 public:
  // claims_nothing: the session writes a model of compiled nodes (ep.context_enable), which this provider cannot make.
  ExecutionProvider(const HostApi& host, ClaimsLog claims, bool claims_nothing);

 private:
  void Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info) const;
  // has_name: the host can name what takes the node's place.
  void ClaimNode(const OrtNode& node, bool has_name, OrtEpGraphSupportInfo& info) const;
  std::unique_ptr<LayerCompute> CompileGraph(const OrtGraph& graph) const;

  const HostApi& host_;
  ClaimsLog claims_;
  bool claims_nothing_;
};

}  // namespace ortolan::provider
