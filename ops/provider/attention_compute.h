// Computes an attention together with its query, key and value layers. Query, key and value rows are contiguous, as in
// an optimized model, so outputs equal those of NoMADAttention (nomad_attention/op.cc).
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
  // See GroupCompute. The step must have an attention.
  AttentionCompute(const Step& step, const Node& fused);
  // Reads what Write has written after the step kind. Throws OpError.
  AttentionCompute(ContextReader& reader, const IoSlots& slots);
  std::optional<size_t> y() const override { return y_; }
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
  // The sizes of one call.
  struct Sequences {
    int64_t batch = 0;
    int64_t rows = 0;
    int64_t heads = 0;
    int64_t head_dim = 0;
  };
  // A call's context and its sizes.
  struct Call;

  void ReadParts(ContextReader& reader);
  // Columns of the query, which are also those of the key and of the value.
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
  std::optional<size_t> y_;                   // nullopt if no node reads the output
  std::unordered_map<Value, size_t> inputs_;  // input index of each mask, size and zero_rows tensor
  std::deque<Part> parts_;                    // one part for query, key and value together, or three
  AttentionPlan plan_;
};

}  // namespace ortolan::provider
