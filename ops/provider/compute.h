// Computes a group: runs plans over packed weights with the session's threads and memory arena.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "provider/context_file.h"
#include "provider/group.h"

namespace ortolan::provider {

// The first field in the record of a step.
enum class StepKind : int64_t { kLayers = 0, kAttention = 1, kCopy = 2, kSumNorm = 3 };

using OutputSlots = std::vector<std::optional<size_t>>;

// A step with packed weights.
class StepCompute {
 public:
  virtual ~StepCompute() = default;
  // Return the indices of the outputs that the step computes; nullopt for an output that no node reads.
  virtual OutputSlots Outputs() const = 0;
  virtual void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const = 0;
  // Append the step to the record that GroupCompute::Write begins.
  virtual void Write(ContextWriter& writer) const = 0;
};

// The interface that ONNX Runtime calls. The object also serves as the compute state, because calls do not modify it.
class GroupCompute : public OrtNodeComputeInfo {
 public:
  // fused: the node that replaces the group; it defines the order of inputs and outputs. The stored weights may be
  // released after construction. reproducible: the same bits on every CPU.
  GroupCompute(const HostApi& host, const Graph& graph, const Group& group, const Node& fused, bool reproducible);
  // Loads the group `name` from a file. node: the EPContext node, whose inputs and outputs are those of the fused node
  // at the time of writing. reproducible: also if the group was written without it. Throws OpError if the file or the
  // node is damaged.
  GroupCompute(const HostApi& host, std::shared_ptr<const ContextFile> file, const std::string& name, const Node& node,
               const Node& fused, bool reproducible);
  ~GroupCompute();

  // Writes references: the packed weights must stay valid until the writer has saved the file.
  void Write(ContextWriter& writer) const;

 private:
  GroupCompute(const HostApi& host);
  void Run(OrtKernelContext& context);

  const OrtApi& ort_;
  Arena arena_;
  std::shared_ptr<const ContextFile> file_;  // null unless the group was loaded from a file
  std::vector<std::unique_ptr<StepCompute>> steps_;
};

}  // namespace ortolan::provider
