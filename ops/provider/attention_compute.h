// Runs an attention with the layers of its queries, keys and values. Queries, keys and values are contiguous, as in an
// optimized model, so the answers are those of NoMADAttention (nomad_attention/op.cc).
#pragma once

#include <deque>
#include <unordered_map>

#include "nomad_attention/nomad_attention.h"
#include "provider/call_values.h"
#include "provider/compute.h"
#include "provider/io_slots.h"
#include "provider/packed_layers.h"

namespace ortolan::provider {

class AttentionCompute : public StepCompute {
 public:
  // As GroupCompute; step has attention.
  AttentionCompute(const HostApi& host, const Step& step, const Node& fused);
  // As Write wrote it, behind its kind. Throws OpError.
  AttentionCompute(ContextReader& reader, const IoSlots& slots);
  std::optional<size_t> y() const override { return y_; }
  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override;
  void Write(ContextWriter& writer) const override;

 private:
  // Layers whose outputs are rows of one tensor.
  struct Part {
    explicit Part(std::span<const Layer> layers);
    explicit Part(ContextReader& reader);
    PackedLayers packed;
    LinearPlan plan;
  };
  // Of a call.
  struct Sequences {
    int64_t batch = 0;
    int64_t rows = 0;
    int64_t heads = 0;
    int64_t head_dim = 0;
  };
  // A call's context and its sizes.
  struct Call;

  void ReadParts(ContextReader& reader);
  // Of the queries, of the keys and of the values.
  int64_t Width() const { return parts_.back().plan.layer().Columns() / (parts_.size() == 1 ? 3 : 1); }
  int64_t NumberOf(const Size& size, const Call& call) const;
  Shape Reshaped(const Shape& shape, const Target& target, const Call& call) const;
  Sequences SplitRows(Call& call) const;
  void CheckKeyViews(const Call& call) const;
  FloatInput ReadMask(size_t index, const Shape& scores, Call& call) const;
  FloatInput ReadPadding(const Mask& mask, const InputTensor<int32_t>& input, const Shape& scores, Call& call) const;
  MaskRows ReadMasks(const Shape& scores, Call& call) const;
  void ZeroRows(const AttentionCall& attention, const Call& call) const;

  std::string node_, x_name_;
  Attention attention_;
  size_t x_;
  std::optional<size_t> y_;                   // none: nobody reads it
  std::unordered_map<Value, size_t> inputs_;  // of masks and sizes
  std::deque<Part> parts_;                    // one of all three, or three
  AttentionPlan plan_;
};

}  // namespace ortolan::provider
