// The execution provider of one session: which nodes it claims, and what runs in their places.
#pragma once

#include <memory>
#include <string>

#include "provider/compute.h"

namespace ortolan::provider {

struct ProviderOptions {
  // The session writes a model of compiled nodes (ep.context_enable), which this provider cannot make.
  bool claims_nothing = false;
  LayerRules rules;
};

class ExecutionProvider : public OrtEp {
 public:
  // The logger is the session's, and lives as long.
  ExecutionProvider(const HostApi& host, const OrtLogger* logger, const ProviderOptions& options);

 private:
  void Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info) const;
  void ClaimGroup(const Group& group, OrtEpGraphSupportInfo& info) const;
  std::unique_ptr<GroupCompute> CompileGraph(const OrtGraph& graph, const OrtNode& fused) const;
  void Log(OrtLoggingLevel level, const std::string& text) const;

  const HostApi& host_;
  const OrtLogger* logger_;
  ProviderOptions options_;
};

}  // namespace ortolan::provider
