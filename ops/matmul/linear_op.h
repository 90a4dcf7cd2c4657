// What the adapters of linear layers share: inputs, outputs and attributes of
//
//     P = X W + bias
//     Y = activation(P) + residual                                    gated_columns 0
//     Y = activation(P[.., : c]) P[.., n / 2 : n / 2 + c] + residual   gated_columns c (GLU: two layers of one input)
//
// LayerNormalization of Y's rows, for operators that have inputs for it, the epilogue, and how the work is divided
// among ORT's threads. W has n columns; with c they are those of both layers, each padded to whole panels: n is 2 x 16
// ceil(c / 16). A room's kernel class has one and gives it the product.
#pragma once

#include <algorithm>
#include <atomic>
#include <optional>
#include <vector>

#include "epilogue/epilogue.h"
#include "epilogue/layer_norm.h"
#include "formats/bitmap.h"
#include "isa/kernel_table.h"
#include "matmul/kernel.h"
#include "ort/broadcast.h"
#include "ort/ort_op.h"

namespace ortolan {

// A chunk of rows expands a panel anew, so it must be long; it is short enough for many threads to share a wide X. A
// multiple of every kernel's row_block.
inline constexpr int64_t kRowChunk = 256;

class LinearOp {
 public:
  // Where the node has its inputs; those but x may be left out. norm: weight and bias of a LayerNormalization,
  // constants [columns of Y], begin there; they count where the attribute norm_epsilon is not -1, nor missing.
  struct Inputs {
    size_t x, bias, residual;
    std::optional<size_t> norm = std::nullopt;
  };
  // Rows of X to be multiplied, and of Y.
  struct Rows {
    const Ort::KernelContext& context;
    const float* x;
    int64_t m;
    float* y;
    EpilogueArgs epilogue;  // lacks only what a chunk of y adds
    bool normalize;         // whether rows of y that are done are to be normalized
  };
  // What a kernel wants of X: see the rooms' headers.
  struct Packing {
    int64_t row_block;
    int64_t bytes;
    int64_t row_bytes;
    int64_t row_chunk = kRowChunk;  // rows of a piece of work, a multiple of row_block and at most kRowChunk
  };

  // Reads the attributes activation, gated_columns and norm_epsilon; checks bias and norm. Throws OpError.
  LinearOp(const OrtKernelInfo& info, std::string node, Inputs inputs, int64_t k, int64_t n);

  // Calls product(rows, bias) for all rows of X; not for none.
  template <typename Product>
  void Compute(Ort::KernelContext& context, const Product& product) const;

  // Packs the rows, then multiplies and ends them chunk by chunk. args: those of the kernel, with the weight and the
  // bias. pack(x, rows, to); multiply(args, panel begin, panel end). padded_k: inputs that a panel holds.
  template <typename Pack>
  void Run(const Rows& rows, const Packing& packing, int64_t padded_k, MatMulArgs args, MultiplyFn* multiply,
           const Pack& pack) const {
    const Scratch packed(rows.context, static_cast<size_t>(packing.bytes));
    PackRows(rows, packing, packed.data(), pack);
    args.x = packed.data();
    Multiply(rows, packing, padded_k, args, multiply);
  }

  // The two halves of Run, for an operator that does something between them: args.x are all rows, packed.
  template <typename Pack>
  void PackRows(const Rows& rows, const Packing& packing, void* packed, const Pack& pack) const;
  void Multiply(const Rows& rows, const Packing& packing, int64_t padded_k, MatMulArgs args,
                MultiplyFn* multiply) const;

  // Calls body(first row, panel begin, panel end) for pieces of the product on ORT's threads. padded_k as in Run.
  template <typename Body>
  static void ForEachPiece(const Ort::KernelContext& context, int64_t m, int64_t row_chunk, int64_t panels,
                           int64_t padded_k, const Body& body);

  // Y's shape: that of X with another last dimension. Left open where a residual may add dimensions by broadcasting:
  // one number, which stands for none, does not.
  static void InferShape(OrtShapeInferContext* context, size_t residual);

  int64_t XRowBytes() const { return k_ * static_cast<int64_t>(sizeof(float)); }

 private:
  // Work below this many multiply-adds is not worth handing to another thread.
  static constexpr int64_t kMinChunkMacs = int64_t{1} << 19;
  // Expanding a weight costs about this many multiply-adds, once per chunk of rows.
  static constexpr int64_t kExpandMacs = 4;
  static constexpr float kNoNorm = -1.0f;  // as norm_epsilon
  static constexpr int64_t kPackChunkFloats = int64_t{1} << 16;
  // Of P, kept until it is gated: two panels of gate and two of factor for a chunk of rows. On the stack.
  static constexpr int64_t kGatedFloats = kRowChunk * 4 * kPanelColumns;

  bool IsGated() const { return y_n_ != n_; }
  // The epilogue, in place, of some panels of rows of Y; `row` is the first of them.
  EpilogueArgs Piece(EpilogueArgs epilogue, const MatMulArgs& rows, int64_t row, int64_t panel_begin,
                     int64_t panel_end) const;
  void MultiplyGated(const MatMulArgs& part, int64_t row, int64_t panel_begin, int64_t panel_end, MultiplyFn* multiply,
                     const EpilogueArgs& epilogue, EpilogueFn* end) const;

  void ReadNorm(const OrtKernelInfo& info, size_t weight);
  LayerNormArgs NormOf(float* y, int64_t rows) const;
  // All rows of Y, after a sum that is no part of the epilogue.
  void Normalize(const Ort::KernelContext& context, float* y, const std::vector<int64_t>& shape) const;

  int64_t YRowBytes() const { return y_n_ * static_cast<int64_t>(sizeof(float)); }
  const float* Bias(const Ort::KernelContext& context) const;

  std::string node_;
  Inputs inputs_;
  std::string x_name_;
  int64_t k_;
  int64_t n_;    // of W
  int64_t y_n_;  // of Y
  Activation activation_ = Activation::kNone;
  bool has_residual_ = false;
  std::optional<LayerNormArgs> norm_;  // lacks the rows
};

template <typename Product>
void LinearOp::Compute(Ort::KernelContext& context, const Product& product) const {
  const Ort::ConstValue x = context.GetInput(inputs_.x);
  std::vector<int64_t> shape = x.GetTensorTypeAndShapeInfo().GetShape();
  if (shape.empty() || shape.back() != k_) {
    throw OpError(ErrorText(node_, ": X '", x_name_, "' has shape ", ShapeText(shape), ", expected [..., ", k_,
                            "]. Feed the model inputs of the shapes it was exported for."));
  }
  shape.back() = y_n_;
  Rows rows{context, x.GetTensorData<float>(), 1, nullptr, {}, norm_.has_value()};
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows.m *= shape[i];
  rows.epilogue.n = y_n_;
  rows.epilogue.activation = activation_;
  const auto multiply_into = [&](float* y) {
    rows.y = y;
    if (rows.m > 0) product(rows, Bias(context));
  };
  if (!has_residual_) return multiply_into(context.GetOutput(0, shape).GetTensorMutableData<float>());

  const Ort::ConstValue residual = context.GetInput(inputs_.residual);
  const std::vector<int64_t> residual_shape = residual.GetTensorTypeAndShapeInfo().GetShape();
  const float* to_add = residual.GetTensorData<float>();
  const std::optional<std::vector<int64_t>> sum_shape = BroadcastShape(shape, residual_shape);
  if (!sum_shape) {
    throw OpError(ErrorText(node_, ": residual has shape ", ShapeText(residual_shape), ", which does not fit X W of ",
                            ShapeText(shape), ". Feed the model inputs of the shapes it was exported for."));
  }
  float* y = context.GetOutput(0, *sum_shape).GetTensorMutableData<float>();
  if (std::find(sum_shape->begin(), sum_shape->end(), 0) != sum_shape->end()) return;
  const bool same = residual_shape == shape;
  if (same || residual_shape == std::vector<int64_t>{y_n_}) {
    rows.epilogue.residual = to_add;
    rows.epilogue.residual_row_bytes = same ? YRowBytes() : 0;
    return multiply_into(y);
  }
  rows.normalize = false;
  if (*sum_shape == shape) {
    multiply_into(y);
    BroadcastAdd(y, shape, to_add, residual_shape, y, shape);
    return Normalize(context, y, shape);
  }
  if (norm_ && sum_shape->back() != y_n_) {
    throw OpError(ErrorText(node_, ": residual has shape ", ShapeText(residual_shape), ", expected [..., ", y_n_,
                            "], as norm_weight has. Optimize the original model again."));
  }
  const Scratch product_of_x(context, static_cast<size_t>(rows.m * YRowBytes()));
  multiply_into(static_cast<float*>(product_of_x.data()));
  BroadcastAdd(static_cast<const float*>(product_of_x.data()), shape, to_add, residual_shape, y, *sum_shape);
  Normalize(context, y, *sum_shape);
}

template <typename Pack>
void LinearOp::PackRows(const Rows& rows, const Packing& packing, void* packed, const Pack& pack) const {
  const int64_t pack_rows = std::max<int64_t>(1, kPackChunkFloats / (k_ * packing.row_block)) * packing.row_block;
  ParallelFor(rows.context, (rows.m + pack_rows - 1) / pack_rows, [&](int64_t chunk) {
    const int64_t begin = chunk * pack_rows;
    pack(rows.x + begin * k_, std::min(pack_rows, rows.m - begin),
         static_cast<char*>(packed) + begin * packing.row_bytes);
  });
}

template <typename Body>
void LinearOp::ForEachPiece(const Ort::KernelContext& context, int64_t m, int64_t row_chunk, int64_t panels,
                            int64_t padded_k, const Body& body) {
  const int64_t row_chunks = (m + row_chunk - 1) / row_chunk;
  const int64_t panel_macs = padded_k * kPanelColumns * (kExpandMacs + std::min(m, row_chunk));
  const int64_t most_chunks = std::clamp<int64_t>(panels * panel_macs / kMinChunkMacs, 1, panels);
  const int64_t chunk_panels = (panels + most_chunks - 1) / most_chunks;
  const int64_t panel_chunks = (panels + chunk_panels - 1) / chunk_panels;
  ParallelFor(context, row_chunks * panel_chunks, [&](int64_t chunk) {
    const int64_t panel = chunk % panel_chunks * chunk_panels;
    body(chunk / panel_chunks * row_chunk, panel, std::min(panel + chunk_panels, panels));
  });
}

inline void LinearOp::Multiply(const Rows& rows, const Packing& packing, int64_t padded_k, MatMulArgs args,
                               MultiplyFn* multiply) const {
  const EpilogueArgs& epilogue = rows.epilogue;
  const bool ends = IsGated() || epilogue.activation != Activation::kNone || epilogue.residual != nullptr;
  EpilogueFn* const end = ends ? SelectKernel(EpilogueKernels(), ActiveFeatures()).run : nullptr;
  args.m = rows.m;
  args.y = rows.y;
  args.y_row_bytes = YRowBytes();
  const int64_t panels = BitmapPanels(y_n_);
  // Of each chunk of rows, the panels that are done: whoever does the last one normalizes the rows. With one thread
  // they are still in the cache, and other threads need not be called once more.
  std::vector<std::atomic<int64_t>> done(rows.normalize ? (rows.m + packing.row_chunk - 1) / packing.row_chunk : 0);
  LayerNormFn* const normalize = rows.normalize ? SelectKernel(LayerNormKernels(), ActiveFeatures()).run : nullptr;
  const auto piece = [&](int64_t row, int64_t panel, int64_t panel_end) {
    const MatMulArgs part = RowsOf(args, row, packing.row_chunk, packing.row_bytes);
    if (IsGated()) {
      MultiplyGated(part, row, panel, panel_end, multiply, epilogue, end);
    } else {
      multiply(part, panel, panel_end);
      if (end != nullptr) end(Piece(epilogue, part, row, panel, panel_end));
    }
    if (normalize == nullptr) return;
    const int64_t count = panel_end - panel;
    const int64_t before = done[row / packing.row_chunk].fetch_add(count, std::memory_order_acq_rel);
    if (before + count == panels) normalize(NormOf(part.y, part.m));
  };
  ForEachPiece(rows.context, rows.m, packing.row_chunk, panels, padded_k * (IsGated() ? 2 : 1), piece);
}

inline void LinearOp::MultiplyGated(const MatMulArgs& part, int64_t row, int64_t panel_begin, int64_t panel_end,
                                    MultiplyFn* multiply, const EpilogueArgs& epilogue, EpilogueFn* end) const {
  alignas(64) float products[kGatedFloats];
  const int64_t most = kGatedFloats / (2 * kPanelColumns * part.m);
  for (int64_t panel = panel_begin; panel < panel_end; panel += most) {
    const int64_t count = std::min(most, panel_end - panel);
    EpilogueArgs piece = Piece(epilogue, part, row, panel, panel + count);
    piece.x = products;
    piece.factor = products + count * kPanelColumns;
    piece.x_row_bytes = 2 * count * kPanelColumns * static_cast<int64_t>(sizeof(float));
    const auto multiply_to = [&](float* to, int64_t first) {
      MatMulArgs product = part;
      product.y = to;
      product.y_panel = first;
      product.y_row_bytes = piece.x_row_bytes;
      multiply(product, first, first + count);
    };
    multiply_to(products, panel);
    multiply_to(products + count * kPanelColumns, BitmapPanels(y_n_) + panel);
    end(piece);
  }
}

}  // namespace ortolan
