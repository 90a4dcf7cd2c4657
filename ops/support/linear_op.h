// What the adapters of linear layers share: inputs and outputs of Y = activation(X W + bias) + residual, the epilogue,
// and how the work is divided among ORT's threads. A room's kernel class has one and gives it the product.
#pragma once

#include <algorithm>

#include "epilogue/epilogue.h"
#include "formats/bitmap.h"
#include "isa/isa.h"
#include "support/broadcast.h"
#include "support/matmul_args.h"
#include "support/ort_op.h"

namespace ortolan {

// A chunk of rows expands a panel anew, so it must be long; it is short enough for many threads to share a wide X. A
// multiple of every kernel's row_block.
inline constexpr int64_t kRowChunk = 256;

class LinearOp {
 public:
  // Where the node has its inputs; those but x may be left out.
  struct Inputs {
    size_t x, bias, residual;
  };
  // Rows of X to be multiplied, and of Y.
  struct Rows {
    const Ort::KernelContext& context;
    const float* x;
    int64_t m;
    float* y;
    EpilogueArgs epilogue;  // lacks only what a chunk of y adds
  };
  // What a kernel wants of X: see the rooms' headers.
  struct Packing {
    int64_t row_block;
    int64_t bytes;
    int64_t row_bytes;
  };

  // Reads the attribute activation; checks bias. Throws OpError.
  LinearOp(const OrtKernelInfo& info, std::string node, Inputs inputs, int64_t k, int64_t n);

  // Calls product(rows, bias) for all rows of X; not for none.
  template <typename Product>
  void Compute(Ort::KernelContext& context, const Product& product) const;

  // Packs the rows, then multiplies and ends them chunk by chunk. args: those of the kernel, with the weight and the
  // bias. pack(x, rows, to); multiply(args, panel begin, panel end). padded_k: inputs that a panel holds.
  template <typename Args, typename Pack>
  void Run(const Rows& rows, const Packing& packing, int64_t padded_k, Args args,
           void (*multiply)(const Args&, int64_t, int64_t), const Pack& pack) const;

  int64_t XRowBytes() const { return k_ * static_cast<int64_t>(sizeof(float)); }

 private:
  // Work below this many multiply-adds is not worth handing to another thread.
  static constexpr int64_t kMinChunkMacs = int64_t{1} << 19;
  // Expanding a weight costs about this many multiply-adds, once per chunk of rows.
  static constexpr int64_t kExpandMacs = 4;
  static constexpr int64_t kPackChunkFloats = int64_t{1} << 16;

  int64_t YRowBytes() const { return n_ * static_cast<int64_t>(sizeof(float)); }
  const float* Bias(const Ort::KernelContext& context) const;

  std::string node_;
  Inputs inputs_;
  std::string x_name_;
  int64_t k_;
  int64_t n_;
  Activation activation_ = Activation::kNone;
  bool has_residual_ = false;
};

template <typename Product>
void LinearOp::Compute(Ort::KernelContext& context, const Product& product) const {
  const Ort::ConstValue x = context.GetInput(inputs_.x);
  std::vector<int64_t> shape = x.GetTensorTypeAndShapeInfo().GetShape();
  if (shape.empty() || shape.back() != k_) {
    throw OpError(ErrorText(node_, ": X '", x_name_, "' has shape ", ShapeText(shape), ", expected [..., ", k_,
                            "]. Feed the model inputs of the shapes it was exported for."));
  }
  shape.back() = n_;
  Rows rows{context, x.GetTensorData<float>(), 1, nullptr, {}};
  for (size_t i = 0; i + 1 < shape.size(); ++i) rows.m *= shape[i];
  rows.epilogue.n = n_;
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
  if (same || residual_shape == std::vector<int64_t>{n_}) {
    rows.epilogue.residual = to_add;
    rows.epilogue.residual_row_bytes = same ? YRowBytes() : 0;
    return multiply_into(y);
  }
  if (*sum_shape == shape) {
    multiply_into(y);
    return BroadcastAdd(y, shape, to_add, residual_shape, y, shape);
  }
  const Scratch product_of_x(context, static_cast<size_t>(rows.m * YRowBytes()));
  multiply_into(static_cast<float*>(product_of_x.data()));
  BroadcastAdd(static_cast<const float*>(product_of_x.data()), shape, to_add, residual_shape, y, *sum_shape);
}

template <typename Args, typename Pack>
void LinearOp::Run(const Rows& rows, const Packing& packing, int64_t padded_k, Args args,
                   void (*multiply)(const Args&, int64_t, int64_t), const Pack& pack) const {
  const Scratch scratch(rows.context, static_cast<size_t>(packing.bytes));
  char* packed = static_cast<char*>(scratch.data());
  const int64_t pack_rows = std::max<int64_t>(1, kPackChunkFloats / (k_ * packing.row_block)) * packing.row_block;
  ParallelFor(rows.context, (rows.m + pack_rows - 1) / pack_rows, [&](int64_t chunk) {
    const int64_t begin = chunk * pack_rows;
    pack(rows.x + begin * k_, std::min(pack_rows, rows.m - begin), packed + begin * packing.row_bytes);
  });

  const EpilogueArgs& epilogue = rows.epilogue;
  const bool ends = epilogue.activation != Activation::kNone || epilogue.residual != nullptr;
  EpilogueFn* const end = ends ? SelectEpilogue(ActiveIsa()).run : nullptr;
  const int64_t panels = BitmapPanels(n_);
  const int64_t row_chunks = (rows.m + kRowChunk - 1) / kRowChunk;
  const int64_t panel_macs = padded_k * kPanelColumns * (kExpandMacs + std::min(rows.m, kRowChunk));
  const int64_t most_chunks = std::clamp<int64_t>(panels * panel_macs / kMinChunkMacs, 1, panels);
  const int64_t chunk_panels = (panels + most_chunks - 1) / most_chunks;
  const int64_t panel_chunks = (panels + chunk_panels - 1) / chunk_panels;
  args.m = rows.m;
  args.x = packed;
  args.y = rows.y;
  args.y_row_bytes = YRowBytes();
  ParallelFor(rows.context, row_chunks * panel_chunks, [&](int64_t chunk) {
    const int64_t row = chunk / panel_chunks * kRowChunk;
    const int64_t panel = chunk % panel_chunks * chunk_panels;
    const int64_t panel_end = std::min(panel + chunk_panels, panels);
    const Args part = RowsOf(args, row, kRowChunk, packing.row_bytes);
    multiply(part, panel, panel_end);
    if (end == nullptr) return;
    EpilogueArgs tile = epilogue;
    const int64_t column = panel * kPanelColumns;
    tile.m = part.m;
    tile.n = std::min(panel_end * kPanelColumns, n_) - column;
    tile.y = part.y + column;
    tile.y_row_bytes = YRowBytes();
    if (tile.residual != nullptr) {
      tile.residual =
          reinterpret_cast<const float*>(reinterpret_cast<const char*>(tile.residual) + row * tile.residual_row_bytes) +
          column;
    }
    end(tile);
  });
}

}  // namespace ortolan
