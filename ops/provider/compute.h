// What runs in the place of a claimed node: a plan over packed numbers, on the session's threads and in its arena.
#pragma once

#include <atomic>
#include <string>
#include <vector>

#include "matmul/linear_plan.h"
#include "provider/mat_mul_nbits.h"

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

// As ORT calls it; it is its own state, as nothing of it changes between calls.
class LayerCompute : public OrtNodeComputeInfo {
 public:
  // node: as errors name it. The stored numbers may go when this is made.
  LayerCompute(const HostApi& host, const std::string& node, const std::string& x_name, StoredLayer stored);

 private:
  void Run(OrtKernelContext& context);

  const OrtApi& ort_;
  std::string node_, x_name_;
  NBitsGroups groups_;
  std::vector<float> bias_;
  LinearPlan plan_;  // of the above
  Arena arena_;
};

}  // namespace ortolan::provider
