// The plan of a linear layer: which kernels run, on which pieces of the work, in which order. Free of ONNX Runtime.
//
//     P = X W + bias
//     Y = activation(P) + residual                                    gated_columns 0
//     Y = activation(P[.., : c]) P[.., n / 2 : n / 2 + c] + residual   gated_columns c (GLU: two layers of one input)
//
// and, where there is a norm, LayerNormalization of Y's rows. W has n columns; with c they are those of both layers,
// each padded to whole panels: n is 2 x 16 ceil(c / 16). The epilogue runs on each piece of Y right after its product,
// the normalization on each chunk of rows right after its last piece: they are in the cache then.
//
// With a hidden layer (block_sparse_weight.h), X is its input, and its outputs take the place of X above.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "epilogue/epilogue.h"
#include "epilogue/layer_norm.h"
#include "host/host.h"
#include "matmul/block_sparse_weight.h"
#include "matmul/kernel.h"
#include "matmul/matmul_device.h"

namespace ortolan {

inline constexpr int64_t kMostRowChunk = 256;
// Of a tile kernel, where the second-level cache holds w: so few that X and Y of a chunk stay in the caches as well.
inline constexpr int64_t kTileRowChunk = 64;

// What a plan is made for. All that it points to has been checked, and outlives the plan.
struct LinearLayer {
  const MatMulWeight* w = nullptr;
  std::span<const MatMulKernel> kernels;  // those of w's kind
  int64_t panel_inputs = 0;               // inputs that a panel holds: what a row of it costs
  // Rows of a piece of work, kMostRowBlock … kMostRowChunk; whole row blocks of the kernel. A chunk of rows expands a
  // panel anew, so it must be long; it is short enough for many threads to share a wide X.
  int64_t row_chunk = kMostRowChunk;
  int64_t tile_bytes = 0;  // of w, where it lies in memory as AMX's tiles, which are not expanded; else 0
  int64_t gated_columns = 0;
  Activation activation = Activation::kNone;
  std::optional<LayerNormArgs> norm;          // weight, bias and epsilon
  const HiddenLayerWeight* hidden = nullptr;  // with w->k outputs
  const float* hidden_bias = nullptr;         // [w->k]
  int64_t hidden_panel_inputs = 0;
  MatMulDevice* device = nullptr;  // that multiplies with w, too; or null. Not where there is a hidden layer

  // Of Y.
  int64_t Columns() const { return gated_columns != 0 ? gated_columns : w->n; }
  // Of X.
  int64_t Inputs() const { return hidden != nullptr ? hidden->k : w->k; }
};

// Rows of X, and where Y's go: one after another.
struct LinearCall {
  const float* x = nullptr;
  int64_t m = 0;
  float* y = nullptr;               // overlaps nothing else
  const float* bias = nullptr;      // [w->n], or null
  const float* residual = nullptr;  // [m][Columns()] or, with residual_row_bytes 0, [Columns()]; or null
  int64_t residual_row_bytes = 0;
};

struct Residual {
  const float* data;
  std::vector<int64_t> shape;
};

class LinearPlan {
 public:
  LinearPlan(const LinearLayer& layer, Features features);

  const LinearLayer& layer() const { return layer_; }

  // Rows of an X of this shape; 0 if it has no elements. Throws OpError, whose text begins with `node` and names X.
  int64_t CountRows(const std::vector<int64_t>& x_shape, const std::string& node, const std::string& x_name) const;

  void Run(Host& host, const LinearCall& call) const { RunProduct(host, call, layer_.norm.has_value()); }

  // The same with any residual that Y without it, of call.m rows and of this shape, is broadcast with: call.y gets the
  // sum, of y_shape. The call has no residual of its own.
  void RunWithResidual(Host& host, LinearCall call, const std::vector<int64_t>& shape, const Residual& residual,
                       const std::vector<int64_t>& y_shape) const;

 private:
  void RunProduct(Host& host, const LinearCall& call, bool normalizes) const;
  void RunOnCpu(Host& host, const LinearCall& call, bool normalizes) const;
  // False where the device failed.
  bool RunOnDevice(Host& host, const LinearCall& call, bool normalizes) const;
  void PackForDevice(Host& host, const LinearCall& call, char* packed) const;
  // What follows a product [m][w->n]: that is y itself, or what is gated.
  void FinishProduct(Host& host, const LinearCall& call, const float* product, bool normalizes) const;
  const MatMulKernel& KernelFor(int64_t m) const;
  void Pack(Host& host, const MatMulKernel& kernel, const LinearCall& call, char* packed) const;
  void MultiplyHidden(Host& host, const MatMulKernel& kernel, int64_t m, const char* x, char* next) const;
  void Multiply(Host& host, const MatMulKernel& kernel, const LinearCall& call, const char* x, bool normalizes) const;
  void MultiplyPiece(const MatMulKernel& kernel, const MatMulArgs& rows, const LinearCall& call, int64_t row,
                     int64_t panel_begin, int64_t panel_end) const;
  void MultiplyGated(const MatMulKernel& kernel, const MatMulArgs& rows, const LinearCall& call, int64_t row,
                     int64_t panel_begin, int64_t panel_end) const;
  // The epilogue, in place, of some panels of rows of Y; `row` is the first of them.
  EpilogueArgs EpilogueOf(const MatMulArgs& rows, const LinearCall& call, int64_t row, int64_t panel_begin,
                          int64_t panel_end) const;
  void NormalizeRows(float* y, int64_t m) const;
  // All rows of Y, after a sum that is no part of the epilogue.
  void Normalize(Host& host, float* y, int64_t m) const;

  bool IsGated() const { return layer_.gated_columns != 0; }
  int64_t YRowBytes() const { return layer_.Columns() * static_cast<int64_t>(sizeof(float)); }
  int64_t RowChunk(const MatMulKernel& kernel) const;
  const MatMulWeight& FirstWeight() const { return layer_.hidden != nullptr ? *layer_.hidden : *layer_.w; }

  LinearLayer layer_;
  std::vector<const MatMulKernel*> kernels_;  // that this CPU has and this weight allows, best first
  EpilogueFn* epilogue_;
  LayerNormFn* layer_norm_;
  int64_t most_rows_;  // for which no size that Run computes leaves an int64
};

}  // namespace ortolan
