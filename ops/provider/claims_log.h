// What a session's provider takes and leaves, told: to the session's log, and to a file where the session names one.
#pragma once

#include <string>

#include "provider/node.h"

namespace ortolan::provider {

// The provider option that names the file; ONNX Runtime keeps it among the session's entries, behind
// "ep.ortolanexecutionprovider.".
inline constexpr const char* kClaimsFile = "claims_file";

class ClaimsLog {
 public:
  // The logger is the session's, and lives as long. file: a line of JSON a node is added to it; none if it is empty.
  // Throws OpError if it cannot be written.
  ClaimsLog(const HostApi& host, const OrtLogger* logger, std::string file);

  void Takes(const Node& node, const std::string& what) const;
  void Leaves(const Node& node, const std::string& reason) const;

 private:
  void Log(OrtLoggingLevel level, const std::string& text) const;
  void Write(const Node& node, bool taken, const std::string& what, const std::string& reason) const;
  void Append(const std::string& text) const;

  const HostApi& host_;
  const OrtLogger* logger_;
  std::string file_;
};

}  // namespace ortolan::provider
