// The execution plan of NoMADAttention: all heads of a call, on a host's threads. Independent of ONNX Runtime.
// attention/attention.h defines the computation. Query head h reads key and value head h / (heads / kv_heads).
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "attention/attention.h"
#include "attention/decode.h"
#include "attention/kept_tokens.h"
#include "host/thread_scratch.h"
#include "isa/tuning.h"
#include "simd/at_byte.h"

namespace ortolan {

inline constexpr int64_t kMaxTokens = int64_t{1} << 24;  // longest sequence

// The rows of all heads in memory; strides in bytes.
struct HeadRows {
  const float* data = nullptr;
  int64_t batch_bytes = 0;
  int64_t head_bytes = 0;
  int64_t row_bytes = 0;

  const float* At(int64_t batch, int64_t head, int64_t row) const {
    return AtByte(data, batch * batch_bytes + head * head_bytes + row * row_bytes);
  }
};

// A mask that broadcasts to [batch, heads, queries, keys]; strides in elements, 0 for broadcast axes.
struct MaskRows {
  const float* data = nullptr;
  std::array<int64_t, 4> strides{};

  const float* At(int64_t batch, int64_t head, int64_t query) const {
    return data + batch * strides[0] + head * strides[1] + query * strides[2];
  }
};

struct AttentionCall {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t queries = 0;
  int64_t keys = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  float softcap = 0.0f;
  bool causal = false;
  bool zero_hidden_rows = false;
  int64_t window = 0;            // number of latest keys that a query sees, its own included; 0: all
  const float* sinks = nullptr;  // [heads]: a further score of each head, without a value; null: none
  HeadRows q, k, v;
  MaskRows mask;
  float* y = nullptr;  // [batch, queries, heads x head_dim]

  int64_t Group() const { return heads / kv_heads; }
  // Returns the first key that a query sees which sees no key from `end` on.
  int64_t WindowBegin(int64_t end) const { return window > 0 ? std::max<int64_t>(end - window, 0) : 0; }
  float* Y(int64_t batch_row, int64_t head, int64_t query) const {
    return y + ((batch_row * queries + query) * heads + head) * head_dim;
  }
};

// Returns kernel arguments for one head of keys and values and queries first … first + count - 1.
AttentionArgs ArgsOf(const AttentionCall& call, int64_t batch, int64_t kv_head, int64_t first, int64_t count);

// Computes attention for `heads` heads of keys and values with `rows` query rows each. args_of(i) returns the arguments
// of head i, with at most `keys` keys.
template <typename MakeArgs>
void AttendHeads(Host& host, const AttentionKernel& kernel, int64_t heads, int64_t rows, int64_t keys, int64_t head_dim,
                 const MakeArgs& args_of) {
  const int64_t chunks = (rows + kAttentionRows - 1) / kAttentionRows;
  const int64_t units = heads * chunks;
  const int64_t unit_macs = std::max<int64_t>(2 * std::min(rows, kAttentionRows) * keys * head_dim, 1);
  const int64_t item_units = std::clamp<int64_t>(ActiveTuning().piece_macs / unit_macs, 1, units);
  const int64_t items = (units + item_units - 1) / item_units;
  ForEachWithScratch(host, items, kernel.scratch_bytes(head_dim), [&](int64_t item, char* scratch) {
    const int64_t end = std::min(units, (item + 1) * item_units);
    for (int64_t unit = item * item_units; unit < end; ++unit) {
      const int64_t row = unit % chunks * kAttentionRows;
      kernel.run(args_of(unit / chunks), row, std::min(rows, row + kAttentionRows), scratch);
    }
  });
}

class AttentionPlan {
 public:
  // As in FindAttentionKernel. With `reproducible`, calls with few queries take the same kernel as others, because
  // decode kernels sum in an order that depends on the CPU.
  AttentionPlan(int precision, bool reproducible);

  // Attention without a cache. Throws std::bad_alloc.
  void Run(Host& host, const AttentionCall& call) const;

  // Attention of packed sequences: each sequence attends only to itself. The call's rows are the concatenated tokens:
  // batch 1, queries = keys = tokens. Its mask is that of the padded sequences and broadcasts to [batch, heads, tokens,
  // tokens]. Throws std::bad_alloc.
  void Run(Host& host, const AttentionCall& call, const KeptTokens& kept) const;

 private:
  const AttentionKernel& kernel_;
  const DecodeAttentionKernel& decode_;
  bool reproducible_;
};

}  // namespace ortolan
