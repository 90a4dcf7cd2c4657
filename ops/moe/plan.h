// The plan of a mixture of experts: routes rows to experts and runs each expert's two layers on its rows. Free of ONNX
// Runtime.
//
//     Y[t] = sum over experts e of row t, in ascending order, of routing_weight[t, e] (H_e(X[t]) down_e + down_bias_e)
//
//     H_e(x) = activation(x up_e + up_bias_e)                            not gated
//            = glu(x gate_e + gate_bias_e, x up_e + up_bias_e)           gated: up_e holds both, as in linear_plan.h
//     glu(g, u) = activation(alpha min(g, limit)) (clamp(u, -limit, limit) + beta) / alpha
//
// Weights of all experts are stacked: expert e is panels e P … e P + P - 1 of one weight, which has P panels per
// expert. Only the panels of experts that rows are routed to are read. A row of Y depends on its own row of X and its
// routing only, because the kernels promise that (matmul/kernel.h) and the order of the sum is fixed.
#pragma once

#include <cstdint>
#include <limits>
#include <span>
#include <vector>

#include "epilogue/epilogue.h"
#include "host/host.h"
#include "matmul/group_weight.h"

namespace ortolan {

// A layer of all experts. The weight has experts x BitmapPanels(columns) panels, twice that if it is gated.
struct ExpertsLayer {
  const GroupWeight* w = nullptr;
  std::span<const MatMulKernel> kernels;
  int64_t panel_inputs = 0;     // inputs that a panel holds: the cost of a row of it
  const float* bias = nullptr;  // [w->n], or null
};

// The input of a plan. All pointers are validated and outlive the plan.
struct Experts {
  int64_t count = 0;
  int64_t hidden = 0;  // columns of X and Y
  int64_t inner = 0;   // columns of H
  bool gated = false;
  Activation activation = Activation::kNone;
  // Parameters of glu: alpha > 0, and alpha = 1 unless the activation is SiLU; limit > 0.
  float alpha = 1.0f;
  float beta = 0.0f;
  float limit = std::numeric_limits<float>::infinity();
  ExpertsLayer up, down;
};

// Contiguous rows. selected and routing_weights are [m][k]; each selected expert is 0 … count - 1.
struct ExpertsCall {
  int64_t m = 0;
  int64_t k = 0;
  const float* x = nullptr;
  const int64_t* selected = nullptr;
  const float* routing_weights = nullptr;
  float* y = nullptr;  // must not overlap other operands
};

class ExpertsPlan {
 public:
  ExpertsPlan(const Experts& experts, Features features);

  const Experts& experts() const { return experts_; }
  void Run(Host& host, const ExpertsCall& call) const;

 private:
  friend class ExpertsRun;

  Experts experts_;
  std::vector<const MatMulKernel*> up_kernels_, down_kernels_;  // supported by this CPU, best first
  EpilogueFn* epilogue_;
};

}  // namespace ortolan
