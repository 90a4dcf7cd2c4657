// The plan of a linear layer: which kernels run, on which pieces of the work, in which order. Free of ONNX Runtime.
//
//     P = X W + bias
//     Y = activation(P) + residual                                    gated_columns 0
//     Y = activation(P[.., : c]) P[.., n / 2 : n / 2 + c] + residual   gated_columns c (GLU: two layers of one input)
//
// If there is a norm, LayerNormalization of Y's rows follows. W has n columns. With gated_columns c these are the
// columns of both layers, each padded to whole panels: n is 2 x 16 ceil(c / 16). The epilogue runs on each piece of Y
// right after its product, and the normalization on each chunk of rows right after its last piece, while they are in
// the cache.
//
// With a hidden layer (block_sparse_weight.h), X is the hidden layer's input and its outputs replace X above. With
// windows (windows.h), the rows of the product are windows over the rows of X: a 1-D convolution.
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
#include "matmul/windows.h"

namespace ortolan {

inline constexpr int64_t kMostRowChunk = 256;
// Rows of a chunk for a tile kernel if w fits the level-2 cache: few enough that X and Y of the chunk fit as well.
inline constexpr int64_t kTileRowChunk = 32;

// The input of a plan. All pointers are validated and outlive the plan.
struct LinearLayer {
  const MatMulWeight* w = nullptr;
  std::span<const MatMulKernel> kernels;  // the kernels of w's kind
  int64_t panel_inputs = 0;               // inputs that a panel holds: the cost of a row of it
  // Rows of a piece of work, kMostRowBlock … kMostRowChunk; whole row blocks of the kernel. Each chunk of rows expands
  // the panels again, so it must be long, but short enough that many threads can share a wide X.
  int64_t row_chunk = kMostRowChunk;
  int64_t tile_bytes = 0;  // size of w if it is stored as AMX tiles, which are not expanded; else 0
  int64_t gated_columns = 0;
  Activation activation = Activation::kNone;
  std::optional<LayerNormArgs> norm;          // weight, bias and epsilon
  const HiddenLayerWeight* hidden = nullptr;  // has w->k outputs
  const float* hidden_bias = nullptr;         // [w->k]
  int64_t hidden_panel_inputs = 0;
  MatMulDevice* device = nullptr;  // another device that can multiply with w, or null; requires hidden == nullptr
  // Requires w->k to be a multiple of windows.size; other than rows of X also hidden == nullptr and device == nullptr.
  Windows windows;

  // Columns of Y.
  int64_t Columns() const { return gated_columns != 0 ? gated_columns : w->n; }
  // Columns of X.
  int64_t Inputs() const { return hidden != nullptr ? hidden->k : w->k / windows.size; }
};

// Contiguous rows of X and of Y.
struct LinearCall {
  const float* x = nullptr;
  int64_t m = 0;                    // rows of Y, before a residual adds more
  int64_t frames = 0;               // rows of X in each sequence; used only if the product's rows are windows
  float* y = nullptr;               // must not overlap other operands
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

  // Return the number of rows of the product with an X of this shape; 0 if it has no elements. Throws OpError, whose
  // message starts with `node` and names X.
  int64_t CountRows(const std::vector<int64_t>& x_shape, const std::string& node, const std::string& x_name) const;

  void Run(Host& host, const LinearCall& call) const { RunProduct(host, call, layer_.norm.has_value()); }

  // Run and add a residual by broadcasting. Without the residual, the result has call.m rows and the shape `shape`.
  // call.y receives the sum, whose shape is y_shape. call.residual must be null.
  void RunWithResidual(Host& host, LinearCall call, const std::vector<int64_t>& shape, const Residual& residual,
                       const std::vector<int64_t>& y_shape) const;

 private:
  void RunProduct(Host& host, const LinearCall& call, bool normalizes) const;
  void RunOnCpu(Host& host, const LinearCall& call, bool normalizes) const;
  // Return false if the device failed.
  bool RunOnDevice(Host& host, const LinearCall& call, bool normalizes) const;
  void PackForDevice(Host& host, const LinearCall& call, char* packed) const;
  // Finish a product [m][w->n]: y, or the buffer that is gated into y.
  void FinishProduct(Host& host, const LinearCall& call, const float* product, bool normalizes) const;
  const MatMulKernel& KernelFor(int64_t m) const;
  void Pack(Host& host, const MatMulKernel& kernel, const LinearCall& call, char* packed) const;
  void PackWindows(Host& host, const MatMulKernel& kernel, const LinearCall& call, char* packed) const;
  void MultiplyHidden(Host& host, const MatMulKernel& kernel, int64_t m, const char* x, char* next) const;
  void Multiply(Host& host, const MatMulKernel& kernel, const LinearCall& call, const char* x, bool normalizes) const;
  void MultiplyPiece(const MatMulKernel& kernel, const MatMulArgs& rows, const LinearCall& call, int64_t row,
                     int64_t panel_begin, int64_t panel_end) const;
  void MultiplyGated(const MatMulKernel& kernel, const MatMulArgs& rows, const LinearCall& call, int64_t row,
                     int64_t panel_begin, int64_t panel_end) const;
  // Arguments of the in-place epilogue of some panels of rows of Y; `row` is the first of these rows.
  EpilogueArgs EpilogueOf(const MatMulArgs& rows, const LinearCall& call, int64_t row, int64_t panel_begin,
                          int64_t panel_end) const;
  void NormalizeRows(float* y, int64_t m) const;
  // Normalize all rows of Y, after a sum that is not part of the epilogue.
  void Normalize(Host& host, float* y, int64_t m) const;

  bool IsGated() const { return layer_.gated_columns != 0; }
  int64_t YRowBytes() const { return layer_.Columns() * static_cast<int64_t>(sizeof(float)); }
  int64_t RowChunk(const MatMulKernel& kernel) const;
  int64_t PackedRows(const MatMulKernel& kernel) const;
  const MatMulWeight& FirstWeight() const { return layer_.hidden != nullptr ? *layer_.hidden : *layer_.w; }

  LinearLayer layer_;
  std::vector<const MatMulKernel*> kernels_;  // supported by this CPU and weight, best first
  EpilogueFn* epilogue_;
  LayerNormFn* layer_norm_;
  int64_t most_rows_;  // largest number of rows for which all sizes in Run fit int64
};

}  // namespace ortolan
