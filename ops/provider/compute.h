// Runs a group: plans over packed weights, on the session's threads and in its arena.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <vector>

#include "host/host.h"
#include "provider/context_file.h"
#include "provider/group.h"

namespace ortolan::provider {

// ORT's arena, asked for by the first call that needs it. Calls may come at the same time.
class Arena {
 public:
  explicit Arena(const OrtApi& ort) : ort_(ort) {}
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;
  OrtAllocator* Of(const OrtKernelContext& context);

 private:
  const OrtApi& ort_;
  std::atomic<OrtAllocator*> allocator_{nullptr};
};

// What the record of a step begins with.
enum class StepKind : int64_t { kLayers = 0, kAttention = 1, kCopy = 2, kSumNorm = 3 };

// A step with its numbers packed.
class StepCompute {
 public:
  virtual ~StepCompute() = default;
  // The output that it makes; none: nobody reads it.
  virtual std::optional<size_t> y() const = 0;
  virtual void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const = 0;
  // For GroupCompute's.
  virtual void Write(ContextWriter& writer) const = 0;
};

// The interface that ONNX Runtime calls. The object is its own state, because calls do not change it.
class GroupCompute : public OrtNodeComputeInfo {
 public:
  // fused: the node in the group's place, which says the order of inputs and outputs. The stored numbers may go when
  // this is made.
  GroupCompute(const HostApi& host, const Group& group, const Node& fused);
  // As it was written to the group `name` of a file. node: whose inputs and outputs are those of the node that had the
  // group's place then. Throws OpError if the file or the node are not as they must be.
  GroupCompute(const HostApi& host, std::shared_ptr<const ContextFile> file, const std::string& name, const Node& node,
               const Node& fused);
  ~GroupCompute();

  // The memory of the weights must stay valid until they are written.
  void Write(ContextWriter& writer) const;

 private:
  GroupCompute(const HostApi& host);
  void Run(OrtKernelContext& context);

  const OrtApi& ort_;
  Arena arena_;
  std::shared_ptr<const ContextFile> file_;  // or none
  std::vector<std::unique_ptr<StepCompute>> steps_;
};

}  // namespace ortolan::provider
