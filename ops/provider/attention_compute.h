// Computes an attention, alone or together with its query, key and value layers, with or without a KV cache. Outputs
// equal those of NoMADAttention in an optimized model (nomad_attention/op.cc), because the plans are the same.
#pragma once

#include <deque>

#include "nomad_attention/cached_plan.h"
#include "nomad_attention/nomad_attention.h"
#include "provider/attention_spec.h"
#include "provider/call_values.h"
#include "provider/compute.h"
#include "provider/packed_layers.h"

namespace ortolan::provider {

class AttentionCompute : public StepCompute {
 public:
  // See GroupCompute. The step must have an attention, and no or three layers.
  AttentionCompute(const Graph& graph, const Step& step, const Node& fused, bool reproducible);
  // Reads what Write has written after the step kind. reproducible: also if the step was written without it. Throws
  // OpError.
  AttentionCompute(ContextReader& reader, const IoSlots& slots, bool reproducible);
  OutputSlots Outputs() const override { return {spec_.y, spec_.cache.present_key, spec_.cache.present_value}; }
  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override;
  void Write(ContextWriter& writer) const override;

 private:
  // Linear layers whose outputs are columns of one tensor.
  struct Part {
    explicit Part(std::span<const Layer> layers);
    explicit Part(ContextReader& reader);
    PackedLayers packed;
    LinearPlan plan;
  };
  // The context of a call.
  struct Call;

  void MakePlan();
  void ReadParts(ContextReader& reader);
  int64_t WidthOf(size_t role) const { return (role == 0 ? spec_.heads : spec_.kv_heads) * spec_.head_dim; }
  void Project(Call& call, AttentionCall& attention) const;
  HeadRows Rows(Call& call, size_t role, int64_t heads, AttentionCall& attention) const;
  void ReadInputs(Call& call, AttentionCall& attention) const;
  FloatInput ReadPadding(const MaskSpec& mask, const Shape& scores, Call& call) const;
  FloatInput ReadMask(const MaskSpec& mask, const Shape& scores, Call& call) const;
  MaskRows ReadMasks(const Shape& scores, Call& call) const;
  void ZeroRows(const AttentionCall& attention, Call& call) const;
  void Finish(const AttentionCall& attention, Call& call) const;
  void RunCached(Call& call, const AttentionCall& attention) const;
  int64_t ReadRoom(Call& call, const AttentionCall& attention) const;
  void ReadLengths(Call& call, CachedCall& cached) const;
  void ReadRotary(Call& call, CachedCall& cached) const;
  CacheRows Present(Call& call, const NamedInput& past, std::optional<size_t> present, const CachedCall& cached) const;

  template <typename... Parts>
  OpError Error(const Parts&... parts) const {
    return OpError(ErrorText(spec_.node, ": ", parts...));
  }
  OpError WrongShape(const NamedInput& input, const Shape& found, const std::string& expected) const;

  AttentionSpec spec_;
  std::array<std::vector<float>, 3> own_biases_;
  std::vector<float> own_sinks_;
  std::deque<Part> parts_;             // one part for query, key and value together, or three; none without layers
  std::optional<AttentionPlan> plan_;  // without a cache
  std::optional<AttentionPlan> short_plan_;  // for calls of a few tokens beside a cache
  std::optional<CachedPlan> cached_plan_;    // with a cache
};

}  // namespace ortolan::provider
