// Computes a LayerNormalization that is not fused with a linear layer, by an AddLayerNormPlan.
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
  SumNormCompute(const Graph& graph, const SumNorm& norm, const Node& fused);
  // Reads what Write has written after the step kind. Throws OpError.
  SumNormCompute(ContextReader& reader, const IoSlots& slots);
  OutputSlots Outputs() const override { return {y_}; }
  void Run(const OrtApi& ort, OrtKernelContext& context, Host& host) const override;
  void Write(ContextWriter& writer) const override;

 private:
  struct Operand {
    std::string name;            // for error messages
    std::optional<size_t> slot;  // input index; nullopt for a constant
    Shape shape;                 // shape of the constant
    std::span<const float> values;
    std::vector<float> own;  // owner of `values`, unless they belong to a file
  };
  void MakePlan(std::span<const float> weight, std::span<const float> bias, float epsilon);

  std::string node_;
  std::optional<size_t> y_;  // nullopt if no node reads the output
  std::vector<Operand> operands_;
  std::vector<float> own_weight_, own_bias_;  // empty if they belong to a file
  std::optional<AddLayerNormPlan> plan_;      // uses the weight and bias above
};

}  // namespace ortolan::provider
