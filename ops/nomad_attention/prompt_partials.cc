#include "nomad_attention/prompt_partials.h"

#include <cstring>

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Enough pieces of work for the threads of a server.
constexpr int64_t kPieces = 64;

int64_t BlocksOf(int64_t rows) { return (rows + kPromptRows - 1) / kPromptRows; }

}  // namespace

PromptPartials::PromptPartials(Host& host, const PromptCache& cache, const SoftmaxKernel& softmax,
                               const CachedCall& call)
    : softmax_(softmax),
      call_(call),
      rows_(call.batch * call.queries * call.Group()),
      parts_(std::clamp<int64_t>(kPieces / (call.kv_heads * BlocksOf(rows_)), 1, cache.Chunks())),
      item_floats_(Aligned(std::min(rows_, kPromptRows) * (2 + call.head_dim) * kFloat) / kFloat),
      memory_(host, BlocksOf(rows_) * call.kv_heads * parts_ * item_floats_ * kFloat) {
  const Features features = ActiveFeatures();
  const int64_t head_dim = call.head_dim, group = call.Group();
  const int64_t most = std::min(rows_, kPromptRows), blocks = BlocksOf(rows_);
  // Of the last block, another kernel may be the best.
  const int64_t kernel_bytes =
      Aligned(std::max(PromptScratchBytes(cache, features, most),
                       PromptScratchBytes(cache, features, rows_ - (blocks - 1) * kPromptRows)));
  const int64_t query_floats = Aligned(most * head_dim * kFloat) / kFloat;
  // The kernel's, the queries, a chunk's partial result.
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
      AttendPrompt(cache, features, kv_head, chunk, q, count, call.scale, chunk == begin ? whole : more, scratch);
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
