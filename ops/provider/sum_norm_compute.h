// Runs a LayerNormalization that does not end a layer: an AddLayerNormPlan.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "add_layer_norm/plan.h"
#include "provider/compute.h"
#include "provider/io_slots.h"

namespace ortolan::provider {

class SumNormCompute : public StepCompute {
 public:
  SumNormCompute(const HostApi& host, const SumNorm& norm, const Node& fused);
  // As Write wrote it, behind its kind. Throws OpError.
  SumNormCompute(ContextReader& reader, const IoSlots& slots);
  std::optional<size_t> y() const override { return y_; }
  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override;
  void Write(ContextWriter& writer) const override;

 private:
  struct Operand {
    std::string name;            // for errors
    std::optional<size_t> slot;  // of an input; none: a constant
    Shape shape;                 // of that
    std::span<const float> values;
    std::vector<float> own;  // these, or a file's
  };
  void MakePlan(std::span<const float> weight, std::span<const float> bias, float epsilon);

  std::string node_;
  std::optional<size_t> y_;  // none: nobody reads it
  std::vector<Operand> operands_;
  std::vector<float> own_weight_, own_bias_;  // or a file's
  std::optional<AddLayerNormPlan> plan_;      // of the above
};

}  // namespace ortolan::provider
