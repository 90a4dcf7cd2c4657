// Compiled models, ONNX Runtime's name for models with com.microsoft.EPContext nodes. Each node replaces a group and
// refers to the group's packed weights, which are either in one file beside the model or embedded in the node.
// Attributes:
//
//     source            our provider's name; nodes of other providers are ignored
//     embed_mode        0: the weights are in a file; 1: they are embedded
//     ep_cache_context  0: path of the file, relative to the model's folder; 1: the bytes of a file in Base64, because
//                       ONNX Runtime ends the text at the first zero byte
//     partition_name    name of the group in the file
//     notes             id of the file; it detects a file that belongs to another model
//     ep_sdk_version    version of Ortolan that wrote the node
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "provider/compute.h"

namespace ortolan::provider {

// Options from the session's configuration.
struct ContextOptions {
  bool enabled = false;  // ep.context_enable: the session writes a compiled model
  bool embeds = false;   // ep.context_embed_mode
  std::string path;      // ep.context_file_path: path of the compiled model; may be empty
};

bool IsContextNode(const Node& node);

// Return the text that a compiled model stores in its metadata, for hosts that check compatibility before they create a
// session.
const char* CompatibilityInfo();
// Return whether this version reads the file format that `info` names.
OrtCompiledModelCompatibility CompatibilityOf(const std::string& info);

// Writes and reads the compiled models of one session.
class ContextModel {
 public:
  ContextModel(const HostApi& host, const ContextOptions& options) : host_(host), options_(options) {}

  // Write the packed weights of all groups and create their EPContext nodes, which the caller owns. model_path: path of
  // the original model, or empty. Throws OpError.
  std::vector<OrtNode*> Write(std::span<const std::unique_ptr<GroupCompute>> groups,
                              std::span<const OrtNode* const> fused, const std::string& model_path) const;

  // Create the object that runs a node of a compiled model. reproducible: as for GroupCompute. Throws OpError.
  std::unique_ptr<GroupCompute> Read(const OrtModelGraph& model, const Node& fused, const std::string& model_path,
                                     bool reproducible);

 private:
  std::unique_ptr<GroupCompute> TryRead(const OrtModelGraph& model, const Node& fused, const std::string& model_path,
                                        bool reproducible);
  std::shared_ptr<const ContextFile> FileOf(const OrtModelGraph& model, const std::string& model_path);
  OrtNode* MakeNode(const Node& fused, const std::string& content, uint64_t id) const;

  const HostApi& host_;
  ContextOptions options_;
  std::map<std::string, std::shared_ptr<const ContextFile>> files_;  // mapped files by path
};

}  // namespace ortolan::provider
