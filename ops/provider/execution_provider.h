// The execution provider of one session: which nodes it claims, and what runs in their places.
#pragma once

#include <memory>
#include <string>

#include "provider/compute.h"

namespace ortolan::provider {

class ExecutionProvider : public OrtEp {
 public:
  // The logger is the session's, and lives as long. claims_nothing: the session writes a model of compiled nodes
  // (ep.context_enable), which this provider cannot make.
  ExecutionProvider(const HostApi& host, const OrtLogger* logger, bool claims_nothing);

 private:
  void Claim(const OrtGraph& graph, OrtEpGraphSupportInfo& info) const;
  // has_name: the host can name what takes the node's place.
  void ClaimNode(const OrtNode& node, bool has_name, OrtEpGraphSupportInfo& info) const;
  std::unique_ptr<LayerCompute> CompileGraph(const OrtGraph& graph) const;
  void Log(OrtLoggingLevel level, const std::string& text) const;

  const HostApi& host_;
  const OrtLogger* logger_;
  bool claims_nothing_;
};

}  // namespace ortolan::provider
