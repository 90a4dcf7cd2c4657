#include "nomad_attention/prompt_cache.h"

#include <algorithm>
#include <cstring>

#include "isa/kernel_table.h"
#include "matmul/bitmap_weight.h"
#include "ort/aligned.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr float kLog2E = 1.44269504f;

// Some panels as a matrix of their own.
BitmapView PanelsOf(const BitmapView& all, int64_t first, int64_t count) {
  BitmapView part = all;
  part.n = count * kPanelColumns;
  if (all.IsDense()) {
    part.values = all.PanelValues(kBf16Bitmap, first);
  } else {
    part.masks = all.PanelMasks(kBf16Bitmap, first);
    part.offsets = all.offsets + first;
  }
  return part;
}

BitmapView KeysOf(const PromptCache& cache, int64_t kv_head, int64_t chunk) {
  const int64_t first = kv_head * cache.KeyPanels() + BitmapPanels(chunk * cache.ChunkTokens());
  return PanelsOf(cache.keys, first, BitmapPanels(cache.TokensIn(chunk)));
}

BitmapView ValuesOf(const PromptCache& cache, int64_t kv_head, int64_t chunk) {
  const int64_t panels = BitmapPanels(cache.head_dim);
  return PanelsOf(cache.values, (kv_head * cache.Chunks() + chunk) * panels, panels);
}

BitmapWeight WeightOf(const BitmapView& view) { return {{view.k, view.n}, view}; }

int64_t PackedBytes(const MatMulKernel& kernel, const PromptCache& cache, int64_t rows) {
  const MatMulWeight keys{cache.head_dim, 0}, values{cache.ChunkTokens(), 0};
  return Aligned(std::max(kernel.PackedBytes(keys, rows), kernel.PackedBytes(values, rows)));
}

}  // namespace

int64_t PromptScratchBytes(const PromptCache& cache, Features features, int64_t rows) {
  return PackedBytes(SelectKernel(Bf16Kernels(), features, {rows}), cache, rows) + rows * cache.ChunkTokens() * kFloat;
}

void AttendPrompt(const PromptCache& cache, Features features, int64_t kv_head, int64_t chunk, const float* q,
                  int64_t rows, float scale, const DecodePartial& partial, void* scratch) {
  const MatMulKernel& kernel = SelectKernel(Bf16Kernels(), features, {rows});
  const auto weigh = SelectKernel(SoftmaxKernels(), features).weigh;
  const int64_t width = cache.ChunkTokens();
  float* scores = reinterpret_cast<float*>(static_cast<char*>(scratch) + PackedBytes(kernel, cache, rows));
  MatMulArgs args;
  args.m = rows;
  args.x = scratch;
  const BitmapWeight keys = WeightOf(KeysOf(cache, kv_head, chunk));
  kernel.pack(keys, q, cache.head_dim * kFloat, rows, scratch);
  args.w = &keys;
  args.y = scores;
  args.y_row_bytes = width * kFloat;
  kernel.multiply(args, 0, BitmapPanels(args.w->n));
  const int64_t tokens = cache.TokensIn(chunk);
  for (int64_t i = 0; i < rows; ++i) {
    float* row = scores + i * width;
    weigh(row, tokens, scale * kLog2E, partial.max + i, partial.sum + i);
    std::fill(row + tokens, row + width, 0.0f);
  }
  const BitmapWeight values = WeightOf(ValuesOf(cache, kv_head, chunk));
  kernel.pack(values, scores, width * kFloat, rows, scratch);
  args.w = &values;
  args.y = partial.y;
  args.y_row_bytes = cache.head_dim * kFloat;
  kernel.multiply(args, 0, BitmapPanels(args.w->n));
}

int64_t PromptUnpackBytes(const PromptCache& cache) { return cache.ChunkTokens() * cache.head_dim * kFloat; }

void UnpackPrompt(const PromptCache& cache, int64_t kv_head, int64_t chunk, float* keys, float* values, void* scratch) {
  const int64_t tokens = cache.TokensIn(chunk);
  BitmapView some = KeysOf(cache, kv_head, chunk);
  some.n = tokens;  // behind them there may be other rows
  UnpackBitmap(some, keys, 1, cache.head_dim);
  const BitmapView rows = ValuesOf(cache, kv_head, chunk);
  if (tokens == cache.ChunkTokens()) return UnpackBitmap(rows, values, cache.head_dim);
  UnpackBitmap(rows, static_cast<float*>(scratch), cache.head_dim);
  std::memcpy(values, scratch, static_cast<size_t>(tokens * cache.head_dim * kFloat));
}

}  // namespace ortolan
