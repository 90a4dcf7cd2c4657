// Decides whether a supported node is worth claiming on this CPU: by the times kept for such layers, or without them by
// the limits of isa/tuning.h. A session never measures.
#pragma once

#include <memory>
#include <string>

#include "provider/kept_times.h"

namespace ortolan::provider {

struct Layer;

class ClaimPolicy {
 public:
  // Claim all nodes.
  ClaimPolicy() = default;
  // Claim what is faster than in ONNX Runtime.
  explicit ClaimPolicy(KeptTimes times) : times_(std::make_shared<KeptTimes>(std::move(times))) {}

  // Return why ONNX Runtime is faster for a layer; empty if it is not. The answer depends only on the layer, because
  // Compile asks again for the nodes of one group.
  std::string WhyNotWorth(const Layer& layer) const;
  // The same for attention with a KV cache.
  std::string WhyNotWorthCachedAttention() const;

 private:
  std::shared_ptr<const KeptTimes> times_;  // null: claim all
};

}  // namespace ortolan::provider
