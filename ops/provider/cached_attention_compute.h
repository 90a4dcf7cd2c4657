// Computes an attention with a KV cache by a CachedPlan, as NoMADAttention does with float32 caches.
// nomad_attention/op_cached.h defines sequence lengths and caches.
//
// If the host passes one buffer for past and present, as with IOBinding, new tokens are appended in place.
#pragma once

#include "nomad_attention/cached_plan.h"
#include "provider/cached_attention.h"
#include "provider/call_values.h"
#include "provider/compute.h"

namespace ortolan::provider {

class CachedAttentionCompute : public StepCompute {
 public:
  CachedAttentionCompute(const CachedAttention& attention, const Node& fused);
  std::optional<size_t> y() const override { return y_; }
  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override;
  // Throws OpError: the node has no weights to pack, so it is not claimed when a session writes a compiled model.
  void Write(ContextWriter& writer) const override;

 private:
  // An input: its index in the fused node, and its name for error messages.
  struct NamedInput {
    size_t index = 0;
    std::string name;
  };
  struct Running;  // the context of a call

  // Return the rows of a [batch, rows, heads x head_dim] input.
  HeadRows ReadRows(Running& running, const NamedInput& slot, int64_t heads, CachedCall& call) const;
  int64_t ReadRoom(Running& running, const CachedCall& call) const;
  void ReadLengths(Running& running, CachedCall& call) const;
  void ReadRotary(Running& running, CachedCall& call) const;
  CacheRows Present(Running& running, const NamedInput& past, std::optional<size_t> present,
                    const CachedCall& call) const;

  template <typename... Parts>
  OpError Error(const Parts&... parts) const {
    return OpError(ErrorText(node_, ": ", parts...));
  }
  OpError WrongShape(const NamedInput& slot, const Shape& found, const std::string& expected) const;

  std::string node_;
  AttentionCall sizes_;  // the sizes that are the same in all calls
  NamedInput query_, past_key_, past_value_, lengths_, total_;
  std::optional<NamedInput> key_, value_, cos_, sin_;
  std::optional<size_t> y_, present_key_, present_value_;  // nullopt if no node reads the output
  CachedPlan plan_;
};

}  // namespace ortolan::provider
