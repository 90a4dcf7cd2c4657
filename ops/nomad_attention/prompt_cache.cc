#include "nomad_attention/prompt_cache.h"

#include <algorithm>
#include <cstring>

#include "host/aligned.h"
#include "isa/kernel_table.h"
#include "matmul/bitmap_weight.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
constexpr float kLog2E = 1.44269504f;
constexpr int64_t kPromptRows = 64;  // query rows that process a chunk together
constexpr int64_t kPieces = 64;      // work items: enough for the threads of a server

int64_t BlocksOf(int64_t rows) { return (rows + kPromptRows - 1) / kPromptRows; }

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

const MatMulKernel& KernelFor(int64_t rows) { return SelectKernel(Bf16Kernels(), ActiveFeatures(), {rows}); }

int64_t PackedBytes(const MatMulKernel& kernel, const PromptCache& cache, int64_t rows) {
  const MatMulWeight keys{cache.head_dim, 0}, values{cache.ChunkTokens(), 0};
  return Aligned(std::max(kernel.PackedBytes(keys, rows), kernel.PackedBytes(values, rows)));
}

int64_t ScratchBytes(const PromptCache& cache, int64_t rows) {
  return PackedBytes(KernelFor(rows), cache, rows) + rows * cache.ChunkTokens() * kFloat;
}

// Computes the partial result of a chunk for `rows` queries, 1 … kPromptRows, q [rows][head_dim].
void AttendChunk(const PromptCache& cache, const SoftmaxFunctions& softmax, int64_t kv_head, int64_t chunk,
                 const float* q, int64_t rows, float scale, float softcap, const DecodePartial& partial,
                 void* scratch) {
  const MatMulKernel& kernel = KernelFor(rows);
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
    softmax.weigh(row, tokens, scale * kLog2E, softcap, partial.max + i, partial.sum + i);
    std::fill(row + tokens, row + width, 0.0f);
  }
  const BitmapWeight values = WeightOf(ValuesOf(cache, kv_head, chunk));
  kernel.pack(values, scores, width * kFloat, rows, scratch);
  args.w = &values;
  args.y = partial.y;
  args.y_row_bytes = cache.head_dim * kFloat;
  kernel.multiply(args, 0, BitmapPanels(args.w->n));
}

}  // namespace

int64_t PromptUnpackBytes(const PromptCache& cache) { return cache.ChunkTokens() * cache.head_dim * kFloat; }

void UnpackPrompt(const PromptCache& cache, int64_t kv_head, int64_t chunk, float* keys, float* values, void* scratch) {
  const int64_t tokens = cache.TokensIn(chunk);
  BitmapView some = KeysOf(cache, kv_head, chunk);
  some.n = tokens;  // the next columns may belong to other heads
  UnpackBitmap(some, keys, 1, cache.head_dim);
  const BitmapView rows = ValuesOf(cache, kv_head, chunk);
  if (tokens == cache.ChunkTokens()) return UnpackBitmap(rows, values, cache.head_dim);
  UnpackBitmap(rows, static_cast<float*>(scratch), cache.head_dim);
  std::memcpy(values, scratch, static_cast<size_t>(tokens * cache.head_dim * kFloat));
}

PromptPartials::PromptPartials(Host& host, const PromptCache& cache, const SoftmaxFunctions& softmax,
                               const AttentionCall& call)
    : softmax_(softmax),
      call_(call),
      rows_(call.batch * call.queries * call.Group()),
      // Independent of the number of rows, because the order of sums must not depend on the batch.
      parts_(std::clamp<int64_t>(kPieces / call.kv_heads, 1, cache.Chunks())),
      item_floats_(Aligned(std::min(rows_, kPromptRows) * (2 + call.head_dim) * kFloat) / kFloat),
      memory_(host, BlocksOf(rows_) * call.kv_heads * parts_ * item_floats_ * kFloat) {
  const int64_t head_dim = call.head_dim, group = call.Group();
  const int64_t most = std::min(rows_, kPromptRows), blocks = BlocksOf(rows_);
  // The last block may use another kernel, because it has fewer rows.
  const int64_t kernel_bytes =
      Aligned(std::max(ScratchBytes(cache, most), ScratchBytes(cache, rows_ - (blocks - 1) * kPromptRows)));
  const int64_t query_floats = Aligned(most * head_dim * kFloat) / kFloat;
  // Scratch memory of the kernel, then the queries, then the partial result of a chunk.
  const int64_t bytes = kernel_bytes + (query_floats + item_floats_) * kFloat;
  ForEachWithScratch(host, blocks * call.kv_heads * parts_, bytes, [&](int64_t item, char* scratch) {
    const int64_t part = item % parts_, kv_head = item / parts_ % call.kv_heads;
    const int64_t first = item / parts_ / call.kv_heads * kPromptRows, count = std::min(most, rows_ - first);
    float* q = reinterpret_cast<float*>(scratch + kernel_bytes);
    for (int64_t i = 0; i < count; ++i) {
      const int64_t row = (first + i) / group;
      const float* from = call.q.At(row / call.queries, kv_head * group + (first + i) % group, row % call.queries);
      std::memcpy(q + i * head_dim, from, static_cast<size_t>(head_dim * kFloat));
    }
    const DecodePartial whole = At(item, 0);
    float* rest = q + query_floats;
    const DecodePartial more{rest, rest + most, rest + 2 * most};
    const int64_t begin = cache.Chunks() * part / parts_, end = cache.Chunks() * (part + 1) / parts_;
    for (int64_t chunk = begin; chunk < end; ++chunk) {
      AttendChunk(cache, softmax_, kv_head, chunk, q, count, call.scale, call.softcap, chunk == begin ? whole : more,
                  scratch);
      if (chunk != begin) softmax_.merge(count, head_dim, more, whole);
    }
  });
}

DecodePartial PromptPartials::At(int64_t item, int64_t row) const {
  const int64_t most = std::min(rows_, kPromptRows);
  float* floats = reinterpret_cast<float*>(memory_.data()) + item * item_floats_;
  return {floats + row, floats + most + row, floats + 2 * most + row * call_.head_dim};
}

void PromptPartials::MergeInto(const DecodePartial& whole, int64_t batch, int64_t kv_head, int64_t query) const {
  const int64_t group = call_.Group();
  for (int64_t h = 0; h < group; ++h) {
    const int64_t row = (batch * call_.queries + query) * group + h;
    const DecodePartial into{whole.max + h, whole.sum + h, whole.y + h * call_.head_dim};
    for (int64_t part = 0; part < parts_; ++part) {
      const int64_t item = (row / kPromptRows * call_.kv_heads + kv_head) * parts_ + part;
      softmax_.merge(1, call_.head_dim, At(item, row % kPromptRows), into);
    }
  }
}

}  // namespace ortolan
