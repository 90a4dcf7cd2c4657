// Chooses kernels and divides products into pieces of work, for all plans that multiply with packed panels.
#pragma once

#include <algorithm>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <vector>

#include "isa/tuning.h"
#include "matmul/kernel.h"

namespace ortolan {

// Return the kernels that this CPU supports and that multiply all of `weights`, best first.
inline std::vector<const MatMulKernel*> SupportedKernels(std::span<const MatMulKernel> kernels, Features features,
                                                         std::initializer_list<const MatMulWeight*> weights) {
  std::vector<const MatMulKernel*> found;
  for (const MatMulKernel& kernel : kernels) {
    const auto takes = [&](const MatMulWeight* w) { return kernel.Takes(*w); };
    if (!features.Has(kernel.needs) || !std::all_of(weights.begin(), weights.end(), takes)) continue;
    found.push_back(&kernel);
    if (kernel.least_rows <= 1) break;
  }
  return found;
}

// Return the fastest of the supported kernels for m rows. All give the same bits.
inline const MatMulKernel& KernelForRows(std::span<const MatMulKernel* const> kernels, int64_t m) {
  for (const MatMulKernel* kernel : kernels) {
    if (kernel->least_rows <= m) return *kernel;
  }
  return *kernels.back();
}

// Return the cost in multiply-adds of a panel of `inputs` inputs, which is expanded once for m rows.
inline int64_t PanelMacs(const MatMulKernel& kernel, int64_t m, int64_t inputs) {
  constexpr int64_t kExpandMacs = 4;  // approximate cost of expanding a weight
  return inputs * kPanelColumns * (kExpandMacs + m / kernel.speed);
}

// Return the number of panels multiplied together for m rows.
inline int64_t PanelsTogether(const MatMulKernel& kernel, int64_t m) {
  return m < kManyRows ? std::max(kPanelsOfFewRows, kernel.panels_together) : kernel.panels_together;
}

// Return the number of panels whose products with `rows` rows of x fit in `floats` floats, rounded down to a multiple
// of panels_together unless fewer fit.
inline int64_t PanelsThatFit(const MatMulKernel& kernel, int64_t floats, int64_t rows) {
  const int64_t most = floats / (kPanelColumns * rows);
  return most < kernel.panels_together ? most : most / kernel.panels_together * kernel.panels_together;
}

// Return the number of panels of a piece of work: a multiple of `together`, large enough to hand to another thread.
inline int64_t PiecePanels(int64_t panels, int64_t panel_macs, int64_t together) {
  const auto divided_up = [](int64_t count, int64_t by) { return (count + by - 1) / by; };
  const int64_t most_pieces = std::clamp<int64_t>(panels * panel_macs / ActiveTuning().piece_macs, 1, panels);
  return divided_up(divided_up(panels, most_pieces), together) * together;
}

}  // namespace ortolan
