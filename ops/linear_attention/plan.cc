#include "linear_attention/plan.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <optional>

#include "host/thread_scratch.h"
#include "isa/kernel_table.h"

namespace ortolan {
namespace {

constexpr int64_t kFloat = sizeof(float);
// Exponentials per work item: some 20 microseconds.
constexpr int64_t kChunkDecays = int64_t{1} << 12;
// With fewer tokens than this, a strip takes less time than handing it to another thread, so a thread gets all strips
// of a head. Memory is the limit then: the state is copied in one stream, and its strips are read from the L2 cache.
constexpr int64_t kStripTokens = 8;

void Exponentials(Host& host, const float* from, int64_t count, float* to) {
  host.ParallelFor((count + kChunkDecays - 1) / kChunkDecays, [&](int64_t chunk) {
    const int64_t end = std::min(count, (chunk + 1) * kChunkDecays);
    for (int64_t i = chunk * kChunkDecays; i < end; ++i) to[i] = std::exp(from[i]);
  });
}

// The arguments for all columns of a head.
RecurrenceArgs HeadArgs(const LinearAttentionCall& call, const float* decays, int64_t sequence, int64_t head) {
  const int64_t row = sequence * call.tokens;  // the sequence's first token
  RecurrenceArgs args;
  args.tokens = call.tokens;
  args.key_size = call.key_size;
  args.scale = call.scale;
  args.queries = std::max<int64_t>(1, call.query_heads / call.value_heads);
  const int64_t q_width = call.query_heads * call.key_size, k_width = call.key_heads * call.key_size;
  const int64_t v_width = call.value_heads * call.value_size;
  const int64_t y_width = std::max(call.query_heads, call.value_heads) * call.value_size;
  args.q = call.query + row * q_width + head * call.query_heads / call.value_heads * call.key_size;
  args.q_row_bytes = q_width * kFloat;
  args.k = call.key + row * k_width + head * call.key_heads / call.value_heads * call.key_size;
  args.k_row_bytes = k_width * kFloat;
  args.v = call.value + row * v_width + head * call.value_size;
  args.v_row_bytes = v_width * kFloat;
  if (decays != nullptr) {
    const int64_t size = call.row_decays ? call.key_size : 1;
    args.row_decays = call.row_decays;
    args.decay = decays + (row * call.value_heads + head) * size;
    args.decay_row_bytes = call.value_heads * size * kFloat;
  }
  if (call.beta != nullptr) {
    const int64_t width = call.head_betas ? call.value_heads : 1;
    args.beta = call.beta + row * width + (call.head_betas ? head : 0);
    args.beta_row_bytes = width * kFloat;
  }
  args.y = call.y + row * y_width + head * args.queries * call.value_size;
  args.y_row_bytes = y_width * kFloat;
  args.y_query = call.value_size;
  const int64_t state = (sequence * call.value_heads + head) * call.key_size * call.value_size;
  args.past = call.past + state;
  args.present = call.present + state;
  args.state_row_bytes = call.value_size * kFloat;
  return args;
}

}  // namespace

#define ORTOLAN_KERNEL(target)            \
  namespace target {                      \
  void Recurrence(const RecurrenceArgs&); \
  }
#include "linear_attention/kernels.inc"
#undef ORTOLAN_KERNEL

std::span<const RecurrenceKernel> RecurrenceKernels() {
  static const RecurrenceKernel kernels[] = {
#define ORTOLAN_KERNEL(target) {&target::Recurrence, #target, feature_set::target},
#include "linear_attention/kernels.inc"
#undef ORTOLAN_KERNEL
  };
  return kernels;
}

LinearAttentionPlan::LinearAttentionPlan(Features features) : kernel_(SelectKernel(RecurrenceKernels(), features)) {}

void LinearAttentionPlan::Run(Host& host, const LinearAttentionCall& call) const {
  const int64_t states = call.batch * call.value_heads;
  if (call.tokens == 0) {
    const int64_t bytes = states * call.key_size * call.value_size * kFloat;
    if (bytes > 0) std::memcpy(call.present, call.past, static_cast<size_t>(bytes));
    return;
  }
  std::optional<HostMemory> decays;
  if (call.decay != nullptr) {
    const int64_t count = states * call.tokens * (call.row_decays ? call.key_size : 1);
    decays.emplace(host, count * kFloat);
    Exponentials(host, call.decay, count, reinterpret_cast<float*>(decays->data()));
  }
  const int64_t strips = (call.value_size + kStripColumns - 1) / kStripColumns;
  const int64_t together = call.tokens < kStripTokens ? strips : 1;  // strips of a work item
  const int64_t items = strips / together;
  ForEachWithScratch(host, states * items, call.key_size * kStripColumns * kFloat, [&](int64_t item, char* scratch) {
    const int64_t state = item / items;
    RecurrenceArgs head = HeadArgs(call, decays ? reinterpret_cast<const float*>(decays->data()) : nullptr,
                                   state / call.value_heads, state % call.value_heads);
    if (call.tokens > 1) head.scratch = reinterpret_cast<float*>(scratch);
    if (call.tokens < kStripTokens) {
      std::memcpy(head.present, head.past, static_cast<size_t>(call.key_size * head.state_row_bytes));
      head.past = head.present;
    }
    for (int64_t strip = item % items * together, end = strip + together; strip < end; ++strip) {
      const int64_t first = strip * kStripColumns;
      RecurrenceArgs args = head;
      args.columns = std::min(kStripColumns, call.value_size - first);
      args.v += first;
      args.y += first;
      args.past += first;
      args.present += first;
      kernel_.run(args);
    }
  });
}

}  // namespace ortolan
