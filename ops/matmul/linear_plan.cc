#include "matmul/linear_plan.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <limits>

#include "host/broadcast.h"
#include "host/op_error.h"
#include "isa/kernel_table.h"
#include "isa/tuning.h"
#include "matmul/kernel_choice.h"

namespace ortolan {
namespace {

// Floats of X or Y that a thread packs or normalizes at once.
constexpr int64_t kChunkFloats = int64_t{1} << 14;
// Bytes of Y that a tile kernel writes before its epilogue.
constexpr int64_t kTileOutputBytes = int64_t{32} << 10;
// Stack buffer for the gate and up projections of one row chunk: three panels of each.
constexpr int64_t kGatedFloats = kMostRowChunk * 6 * kPanelColumns;

int64_t Chunks(int64_t count, int64_t chunk) { return (count + chunk - 1) / chunk; }

// Call body(first row, panel begin, panel end) for the pieces of a product on the host's threads.
template <typename Body>
void ForEachPiece(Host& host, const MatMulKernel& kernel, int64_t m, int64_t row_chunk, int64_t panels,
                  int64_t panel_inputs, const Body& body) {
  const int64_t row_chunks = Chunks(m, row_chunk);
  const int64_t panel_macs = PanelMacs(kernel, std::min(m, row_chunk), panel_inputs);
  const int64_t chunk_panels = PiecePanels(panels, panel_macs, PanelsTogether(kernel, m));
  const int64_t panel_chunks = Chunks(panels, chunk_panels);
  host.ParallelFor(panel_chunks * row_chunks, [&](int64_t task) {
    const int64_t panel = task % panel_chunks * chunk_panels;
    body(task / panel_chunks * row_chunk, panel, std::min(panels, panel + chunk_panels));
  });
}

}  // namespace

LinearPlan::LinearPlan(const LinearLayer& layer, Features features)
    : layer_(layer),
      epilogue_(SelectKernel(EpilogueKernels(), features).run),
      layer_norm_(SelectKernel(EpilogueKernels(), features).layer_norm) {
  int64_t row_bytes = std::max({layer_.Inputs(), layer_.w->k, layer_.w->n}) * static_cast<int64_t>(sizeof(float));
  kernels_ = SupportedKernels(layer_.kernels, features, {&FirstWeight(), layer_.w});
  for (const MatMulKernel* kernel : kernels_) {
    row_bytes = std::max(row_bytes, kernel->packed_row_bytes(FirstWeight()) + kernel->packed_row_bytes(*layer_.w));
  }
  // Limit sizes to half of int64, so that the additions to these products cannot overflow.
  most_rows_ = std::numeric_limits<int64_t>::max() / 2 / row_bytes - layer_.row_chunk;
}

const MatMulKernel& LinearPlan::KernelFor(int64_t m) const { return KernelForRows(kernels_, m); }

int64_t LinearPlan::RowChunk(const MatMulKernel& kernel) const {
  const bool reads_tiles = kernel.speed > 1 && layer_.tile_bytes != 0;
  const bool few = reads_tiles && layer_.tile_bytes <= ActiveTuning().l2_bytes / 2;
  int64_t rows = few ? kTileRowChunk : layer_.row_chunk;
  if (kernel.speed > 1) {
    // Tiles are too fast to read x from beyond the level-2 cache for each pair of panels.
    const int64_t x_rows = ActiveTuning().l2_bytes / kernel.packed_row_bytes(*layer_.w);
    while (rows > kTileRowChunk && rows > x_rows) rows /= 2;
  }
  return rows / kernel.row_block * kernel.row_block;
}

int64_t LinearPlan::CountRows(const std::vector<int64_t>& x_shape, const std::string& node,
                              const std::string& x_name) const {
  const int64_t inputs = layer_.Inputs();
  const Windows& windows = layer_.windows;
  const size_t outer = windows.AreRows() ? 1 : 2;
  if (x_shape.size() < outer || x_shape.back() != inputs) {
    throw OpError(ErrorText(node, ": X '", x_name, "' has shape ", ShapeText(x_shape), ", expected [..., ",
                            outer == 1 ? "" : "frames, ", inputs,
                            "]. Feed the model inputs of the shapes it was exported for."));
  }
  std::vector<int64_t> shape = x_shape;
  if (outer == 2) {
    int64_t& frames = shape[shape.size() - 2];
    if (windows.Count(frames) == 0) {
      throw OpError(ErrorText(node, ": X '", x_name, "' has shape ", ShapeText(x_shape), ", and ", frames,
                              " frames are too few for a window of ", windows.size, " with ",
                              windows.pads_begin + windows.pads_end, " frames of padding"));
    }
    frames = windows.Count(frames);
  }
  if (std::find(shape.begin(), shape.end(), 0) != shape.end()) return 0;
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < shape.size(); ++i) {
    if (__builtin_mul_overflow(rows, shape[i], &rows) || rows > most_rows_) {
      throw OpError(ErrorText(node, ": X '", x_name, "' has shape ", ShapeText(x_shape), ", expected at most ",
                              most_rows_, " rows"));
    }
  }
  return rows;
}

void LinearPlan::RunProduct(Host& host, const LinearCall& call, bool normalizes) const {
  if (call.m == 0) return;
  if (layer_.device == nullptr) return RunOnCpu(host, call, normalizes);
  const auto begin = std::chrono::steady_clock::now();
  const bool on_device = layer_.device->Takes(call.m) && RunOnDevice(host, call, normalizes);
  if (!on_device) RunOnCpu(host, call, normalizes);
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
  layer_.device->Took(call.m, on_device, took.count());
}

void LinearPlan::RunOnCpu(Host& host, const LinearCall& call, bool normalizes) const {
  // Both layers use one kernel, which packs what it reads.
  const MatMulKernel& kernel = KernelFor(call.m);
  const int64_t x_bytes = Aligned(kernel.PackedBytes(FirstWeight(), call.m));
  const int64_t next_bytes = layer_.hidden != nullptr ? kernel.PackedBytes(*layer_.w, call.m) : 0;
  const HostMemory memory(host, x_bytes + next_bytes);
  char* const x = memory.data();
  Pack(host, kernel, call, x);
  if (layer_.hidden == nullptr) return Multiply(host, kernel, call, x, normalizes);
  MultiplyHidden(host, kernel, call.m, x, x + x_bytes);
  Multiply(host, kernel, call, x + x_bytes, normalizes);
}

bool LinearPlan::RunOnDevice(Host& host, const LinearCall& call, bool normalizes) const {
  const int64_t x_bytes = Aligned(call.m * kernels_.back()->packed_row_bytes(*layer_.w));
  const int64_t product_bytes = IsGated() ? call.m * layer_.w->n * static_cast<int64_t>(sizeof(float)) : 0;
  const HostMemory memory(host, x_bytes + product_bytes);
  float* const product = IsGated() ? reinterpret_cast<float*>(memory.data() + x_bytes) : call.y;
  PackForDevice(host, call, memory.data());
  if (!layer_.device->Multiply({call.m, memory.data(), call.bias, product})) return false;
  FinishProduct(host, call, product, normalizes);
  return true;
}

void LinearPlan::PackForDevice(Host& host, const LinearCall& call, char* packed) const {
  const MatMulKernel& kernel = *kernels_.back();
  const int64_t k = layer_.w->k;
  const int64_t row_bytes = kernel.packed_row_bytes(*layer_.w);
  const int64_t rows = std::max<int64_t>(1, kChunkFloats / k);
  host.ParallelFor(Chunks(call.m, rows), [&](int64_t chunk) {
    const int64_t end = std::min(call.m, (chunk + 1) * rows);
    for (int64_t i = chunk * rows; i < end; ++i) {
      kernel.pack(*layer_.w, call.x + i * k, k * static_cast<int64_t>(sizeof(float)), 1, packed + i * row_bytes);
    }
  });
}

void LinearPlan::FinishProduct(Host& host, const LinearCall& call, const float* product, bool normalizes) const {
  const bool has_epilogue = IsGated() || layer_.activation != Activation::kNone || call.residual != nullptr;
  if (!has_epilogue && !normalizes) return;
  MatMulArgs all;
  all.y_row_bytes = YRowBytes();
  const int64_t panels = BitmapPanels(layer_.Columns());
  const int64_t rows = std::max<int64_t>(1, kChunkFloats / layer_.Columns());
  host.ParallelFor(Chunks(call.m, rows), [&](int64_t chunk) {
    const int64_t row = chunk * rows;
    MatMulArgs args = all;
    args.m = std::min(rows, call.m - row);
    args.y = call.y + row * layer_.Columns();
    if (has_epilogue) {
      EpilogueArgs piece = EpilogueOf(args, call, row, 0, panels);
      if (IsGated()) {
        piece.x = product + row * layer_.w->n;
        piece.factor = piece.x + panels * kPanelColumns;
        piece.x_row_bytes = layer_.w->n * static_cast<int64_t>(sizeof(float));
      }
      epilogue_(piece);
    }
    if (normalizes) NormalizeRows(args.y, args.m);
  });
}

void LinearPlan::RunWithResidual(Host& host, LinearCall call, const std::vector<int64_t>& shape,
                                 const Residual& residual, const std::vector<int64_t>& y_shape) const {
  if (std::find(y_shape.begin(), y_shape.end(), 0) != y_shape.end()) return;
  const bool same = residual.shape == shape;
  if (same || residual.shape == std::vector<int64_t>{layer_.Columns()}) {
    call.residual = residual.data;
    call.residual_row_bytes = same ? YRowBytes() : 0;
    return Run(host, call);
  }
  float* const y = call.y;
  std::optional<HostMemory> product;
  if (y_shape != shape) call.y = reinterpret_cast<float*>(product.emplace(host, call.m * YRowBytes()).data());
  RunProduct(host, call, false);
  BroadcastAdd(call.y, shape, residual.data, residual.shape, y, y_shape);
  int64_t rows = 1;
  for (size_t i = 0; i + 1 < y_shape.size(); ++i) rows *= y_shape[i];
  if (layer_.norm) Normalize(host, y, rows);
}

int64_t LinearPlan::PackedRows(const MatMulKernel& kernel) const {
  return std::max<int64_t>(1, kChunkFloats / (FirstWeight().k * kernel.row_block)) * kernel.row_block;
}

void LinearPlan::Pack(Host& host, const MatMulKernel& kernel, const LinearCall& call, char* packed) const {
  if (!layer_.windows.AreRows()) return PackWindows(host, kernel, call, packed);
  const MatMulWeight& w = FirstWeight();
  const int64_t row_bytes = kernel.packed_row_bytes(w);
  const int64_t rows = PackedRows(kernel);
  host.ParallelFor(Chunks(call.m, rows), [&](int64_t chunk) {
    const int64_t begin = chunk * rows;
    kernel.pack(w, call.x + begin * w.k, w.k * static_cast<int64_t>(sizeof(float)), std::min(rows, call.m - begin),
                packed + begin * row_bytes);
  });
}

void LinearPlan::PackWindows(Host& host, const MatMulKernel& kernel, const LinearCall& call, char* packed) const {
  const MatMulWeight& w = FirstWeight();
  const Windows& windows = layer_.windows;
  const int64_t channels = layer_.Inputs(), frames = call.frames, count = windows.Count(frames);
  const int64_t block_rows = kernel.row_block, row_bytes = kernel.packed_row_bytes(w);
  const int64_t float_bytes = static_cast<int64_t>(sizeof(float));
  const auto rows_of = [&](int64_t block) { return std::min(block_rows, call.m - block * block_rows); };
  // A kernel packs a block of rows at once, so a block with padding or of two sequences is copied. `copies` holds the
  // number of copied blocks before each block.
  std::vector<int64_t> copies(static_cast<size_t>(Chunks(call.m, block_rows) + 1));
  for (size_t i = 0; i + 1 < copies.size(); ++i) {
    const int64_t block = static_cast<int64_t>(i), first = block * block_rows;
    copies[i + 1] = copies[i] + !windows.AreInside(first, first + rows_of(block) - 1, count, frames);
  }
  const HostMemory memory(host, copies.back() * block_rows * w.k * float_bytes);
  float* const copied = reinterpret_cast<float*>(memory.data());
  const auto pack_block = [&](int64_t block) {
    const size_t i = static_cast<size_t>(block);
    const int64_t first = block * block_rows, rows = rows_of(block);
    char* const to = packed + first * row_bytes;
    if (copies[i + 1] == copies[i]) {
      const float* const x = windows.Row(call.x, first, count, frames, channels);
      return kernel.pack(w, x, windows.stride * channels * float_bytes, rows, to);
    }
    float* const x = copied + copies[i] * block_rows * w.k;
    for (int64_t row = 0; row < rows; ++row) {
      windows.CopyRow(call.x, first + row, count, frames, channels, x + row * w.k);
    }
    kernel.pack(w, x, w.k * float_bytes, rows, to);
  };
  const int64_t blocks = Chunks(call.m, block_rows), together = PackedRows(kernel) / block_rows;
  host.ParallelFor(Chunks(blocks, together), [&](int64_t chunk) {
    const int64_t end = std::min(blocks, (chunk + 1) * together);
    for (int64_t block = chunk * together; block < end; ++block) pack_block(block);
  });
}

void LinearPlan::MultiplyHidden(Host& host, const MatMulKernel& kernel, int64_t m, const char* x, char* next) const {
  MatMulArgs args;
  args.m = m;
  args.x = x;
  args.w = layer_.hidden;
  args.bias = layer_.hidden_bias;
  const int64_t x_row_bytes = kernel.packed_row_bytes(*layer_.hidden);
  const int64_t next_row_bytes = kernel.packed_row_bytes(*layer_.w);
  const int64_t row_chunk = RowChunk(kernel);
  ForEachPiece(host, kernel, m, row_chunk, BitmapPanels(layer_.hidden->n), layer_.hidden_panel_inputs,
               [&](int64_t row, int64_t panel, int64_t panel_end) {
                 kernel.multiply_hidden({RowsOf(args, row, row_chunk, x_row_bytes), next + row * next_row_bytes}, panel,
                                        panel_end);
               });
}

void LinearPlan::Multiply(Host& host, const MatMulKernel& kernel, const LinearCall& call, const char* x,
                          bool normalizes) const {
  MatMulArgs args;
  args.m = call.m;
  args.x = x;
  args.w = layer_.w;
  args.bias = call.bias;
  args.y = call.y;
  args.y_row_bytes = YRowBytes();
  const int64_t row_bytes = kernel.packed_row_bytes(*layer_.w);
  const int64_t panels = BitmapPanels(layer_.Columns());
  const int64_t row_chunk = RowChunk(kernel);
  // The number of finished panels of each chunk of rows. The thread that finishes the last panel normalizes the rows:
  // with one thread they are still in the cache, and other threads need not be called again.
  std::vector<std::atomic<int64_t>> done(static_cast<size_t>(normalizes ? Chunks(call.m, row_chunk) : 0));
  const auto piece = [&](int64_t row, int64_t panel, int64_t panel_end) {
    const MatMulArgs rows = RowsOf(args, row, row_chunk, row_bytes);
    MultiplyPiece(kernel, rows, call, row, panel, panel_end);
    if (!normalizes) return;
    std::atomic<int64_t>& of_chunk = done[static_cast<size_t>(row / row_chunk)];
    const int64_t count = panel_end - panel;
    if (of_chunk.fetch_add(count, std::memory_order_acq_rel) + count == panels) NormalizeRows(rows.y, rows.m);
  };
  ForEachPiece(host, kernel, call.m, row_chunk, panels, layer_.panel_inputs * (IsGated() ? 2 : 1), piece);
}

void LinearPlan::MultiplyPiece(const MatMulKernel& kernel, const MatMulArgs& rows, const LinearCall& call, int64_t row,
                               int64_t panel_begin, int64_t panel_end) const {
  if (IsGated()) return MultiplyGated(kernel, rows, call, row, panel_begin, panel_end);
  const bool has_epilogue = layer_.activation != Activation::kNone || call.residual != nullptr;
  // Tiles are so fast that a second pass over Y must find it in the level-1 cache.
  const int64_t l1_panels = kTileOutputBytes / (rows.m * kPanelColumns * static_cast<int64_t>(sizeof(float)));
  const bool splits = has_epilogue && kernel.speed > 1;
  const int64_t step = splits ? std::max(kernel.panels_together, l1_panels) : panel_end - panel_begin;
  for (int64_t panel = panel_begin; panel < panel_end; panel += step) {
    const int64_t end = std::min(panel_end, panel + step);
    kernel.multiply(rows, panel, end);
    if (has_epilogue) epilogue_(EpilogueOf(rows, call, row, panel, end));
  }
}

void LinearPlan::MultiplyGated(const MatMulKernel& kernel, const MatMulArgs& rows, const LinearCall& call, int64_t row,
                               int64_t panel_begin, int64_t panel_end) const {
  alignas(64) float products[kGatedFloats];
  const int64_t most = PanelsThatFit(kernel, kGatedFloats / 2, rows.m);
  for (int64_t panel = panel_begin; panel < panel_end; panel += most) {
    const int64_t count = std::min(most, panel_end - panel);
    float* const factor = products + count * kPanelColumns;
    MatMulArgs product = rows;
    product.y_row_bytes = 2 * count * kPanelColumns * static_cast<int64_t>(sizeof(float));
    const auto multiply_to = [&](float* to, int64_t first) {
      product.y = to;
      product.y_panel = first;
      kernel.multiply(product, first, first + count);
    };
    multiply_to(products, panel);
    multiply_to(factor, BitmapPanels(layer_.gated_columns) + panel);
    EpilogueArgs piece = EpilogueOf(rows, call, row, panel, panel + count);
    piece.x = products;
    piece.factor = factor;
    piece.x_row_bytes = product.y_row_bytes;
    epilogue_(piece);
  }
}

EpilogueArgs LinearPlan::EpilogueOf(const MatMulArgs& rows, const LinearCall& call, int64_t row, int64_t panel_begin,
                                    int64_t panel_end) const {
  const int64_t column = panel_begin * kPanelColumns;
  EpilogueArgs args;
  args.m = rows.m;
  args.n = std::min(panel_end * kPanelColumns, layer_.Columns()) - column;
  args.y = rows.y + column;
  args.y_row_bytes = rows.y_row_bytes;
  args.x = args.y;
  args.x_row_bytes = args.y_row_bytes;
  args.activation = layer_.activation;
  if (call.residual != nullptr) {
    const char* first = reinterpret_cast<const char*>(call.residual) + row * call.residual_row_bytes;
    args.residual = reinterpret_cast<const float*>(first) + column;
    args.residual_row_bytes = call.residual_row_bytes;
  }
  return args;
}

void LinearPlan::NormalizeRows(float* y, int64_t m) const {
  LayerNormArgs args = *layer_.norm;
  args.m = m;
  args.n = layer_.Columns();
  args.y = y;
  args.y_row_bytes = YRowBytes();
  layer_norm_(args);
}

void LinearPlan::Normalize(Host& host, float* y, int64_t m) const {
  const int64_t rows = std::max<int64_t>(1, kChunkFloats / layer_.Columns());
  host.ParallelFor(Chunks(m, rows), [&](int64_t chunk) {
    const int64_t begin = chunk * rows;
    NormalizeRows(y + begin * layer_.Columns(), std::min(rows, m - begin));
  });
}

}  // namespace ortolan
