// Reports which nodes the provider of a session claims: to the session's log, and to a file if the session names one.
#pragma once

#include <string>

#include "provider/ort_graph.h"

namespace ortolan::provider {

// The provider option that names the file. ONNX Runtime stores it as the session entry
// "ep.ortolanexecutionprovider.claims_file".
inline constexpr const char* kClaimsFile = "claims_file";

class ClaimsLog {
 public:
  // The logger must live as long as the session. file: a file to which one line of JSON is appended per node; empty for
  // no file. Throws OpError if the file cannot be written.
  ClaimsLog(const HostApi& host, const OrtLogger* logger, std::string file);

  void Takes(const Node& node, const std::string& what) const;
  void Leaves(const Node& node, const std::string& reason) const;
  // Write what the rules for attention found in a graph, if there is a file.
  void Finds(const Graph& graph) const;

 private:
  void Log(OrtLoggingLevel level, const std::string& text) const;
  void Write(const Node& node, bool taken, const std::string& what, const std::string& reason) const;
  void Append(const std::string& text) const;

  const HostApi& host_;
  const OrtLogger* logger_;
  std::string file_;
};

}  // namespace ortolan::provider
