// Compiled models, as ONNX Runtime calls models of com.microsoft.EPContext nodes. Each node replaces a group and refers
// to its packed weights: in one file beside the model for all nodes, or in the node.
//
//     source            our name; nodes of other providers are ignored
//     embed_mode        0: a file; 1: the node
//     ep_cache_context  0: the file, relative to the model's folder; 1: the bytes of a file in Base64, because ONNX
//                       Runtime ends the text at the first zero byte
//     partition_name    the group in the file
//     notes             the file's id, which detects the file of another model
//     ep_sdk_version    the version that wrote it
#pragma once

#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "provider/compute.h"

namespace ortolan::provider {

// Of the session's configuration.
struct ContextOptions {
  bool enabled = false;  // ep.context_enable: the session writes a compiled model
  bool embeds = false;   // ep.context_embed_mode
  std::string path;      // ep.context_file_path: of the compiled model; or empty
};

bool IsContextNode(const Node& node);

// What a compiled model says of itself in its metadata, for hosts that ask before they make a session.
const char* CompatibilityInfo();
// Whether files of the format that it names are read here.
OrtCompiledModelCompatibility CompatibilityOf(const std::string& info);

// Those of one session.
class ContextModel {
 public:
  ContextModel(const HostApi& host, const ContextOptions& options) : host_(host), options_(options) {}

  // Writes what groups need, and makes their nodes; these belong to the caller. model_path: of the model as it is, or
  // empty. Throws OpError.
  std::vector<OrtNode*> Write(std::span<const std::unique_ptr<GroupCompute>> groups,
                              std::span<const OrtNode* const> fused, const std::string& model_path) const;

  // Create the object that runs a node of a compiled model. Throws OpError.
  std::unique_ptr<GroupCompute> Read(const Node& node, const Node& fused, const std::string& model_path);

 private:
  std::unique_ptr<GroupCompute> TryRead(const Node& node, const Node& fused, const std::string& model_path);
  std::shared_ptr<const ContextFile> FileOf(const Node& node, const std::string& model_path);
  OrtNode* MakeNode(const Node& fused, const std::string& content, uint64_t id) const;

  const HostApi& host_;
  ContextOptions options_;
  std::map<std::string, std::shared_ptr<const ContextFile>> files_;  // that were mapped, by path
};

}  // namespace ortolan::provider
