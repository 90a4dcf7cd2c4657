// The epilogue: the element-wise end of a linear layer. It is not an operator: the matmul operators run it on each
// piece of their product while the piece is in the cache.
//
//     y[i, j] = activation(x[i, j]) factor[i, j] + residual[i, j]    i < m, j < n; factor and residual are optional
//
//     kNone      x
//     kRelu      max(x, 0)
//     kGelu      x Phi(x), Phi(x) = (1 + erf(x / sqrt(2))) / 2              ONNX Gelu, approximate="none"
//     kGeluTanh  x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2          ONNX Gelu, approximate="tanh"
//     kSilu      x / (1 + exp(-x))
//
// Error bound of every kernel, for every finite float32 x (including denormals), against the exact formula:
//
//     kNone, kRelu                exact
//     kGelu, kGeluTanh, kSilu     |error| <= 3 2^-24 |x| + 2^-149        (measured: README.md)
//
// The activation is zero for x < -13.3 (kGelu), -10.1 (kGeluTanh), -88 (kSilu), and x for x > 13.3, 10.1, 88. The
// product with the factor and the sum with the residual each add one float32 rounding; both together add one (fused).
// If the caller's thread flushes denormals to zero, 2^-149 becomes 2^-126.
//
// NaN gives NaN. Activations of Inf are their limits: +Inf gives +Inf, -Inf gives 0 (kNone: -Inf). Factor and residual
// follow IEEE 754. Zero keeps its sign.
//
// An element's result depends only on its own x, factor and residual, and every kernel gives the same bits (any NaN
// equals any other).
#pragma once

#include <cstdint>
#include <span>

#include "epilogue/layer_norm.h"
#include "isa/features.h"

namespace ortolan {

// Values of the operators' attribute `activation`.
enum class Activation : int64_t { kNone = 0, kRelu = 1, kGelu = 2, kGeluTanh = 3, kSilu = 4 };

// Returns whether an attribute of a model file may be cast to Activation. Callers must check.
constexpr bool IsActivation(int64_t value) { return value >= 0 && value <= static_cast<int64_t>(Activation::kSilu); }

struct EpilogueArgs {
  int64_t m = 0;
  int64_t n = 0;
  float* y = nullptr;               // [m][n]; only these elements are written
  int64_t y_row_bytes = 0;          // stride of y
  const float* x = nullptr;         // [m][n]; y, or no overlap with it
  const float* factor = nullptr;    // [m][n], or null; no overlap with y
  int64_t x_row_bytes = 0;          // stride of x and factor
  const float* residual = nullptr;  // [m][n], or null; y, or no overlap with it
  int64_t residual_row_bytes = 0;   // 0 adds one row to every row of y
  Activation activation = Activation::kNone;
};

using EpilogueFn = void(const EpilogueArgs& args);

struct EpilogueKernel {
  const char* name;
  Features needs;
  EpilogueFn* run;
  LayerNormFn* layer_norm;
};

// The kernels of this build, best first; the last one runs on any CPU.
std::span<const EpilogueKernel> EpilogueKernels();

}  // namespace ortolan
