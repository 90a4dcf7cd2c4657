// The execution plan of LinearAttention: divides heads and columns of the state among threads. Independent of ONNX
// Runtime. README.md has the formulas.
#pragma once

#include <cstdint>

#include "host/host.h"
#include "isa/features.h"
#include "linear_attention/recurrence.h"

namespace ortolan {

// All tensors are contiguous. One of query_heads and value_heads divides the other, and key_heads divides value_heads.
struct LinearAttentionCall {
  int64_t batch = 0, tokens = 0;
  int64_t query_heads = 1, key_heads = 1, value_heads = 1;
  int64_t key_size = 0, value_size = 0;
  const float* query = nullptr;  // [batch, tokens, query_heads, key_size]
  const float* key = nullptr;    // [batch, tokens, key_heads, key_size]
  const float* value = nullptr;  // [batch, tokens, value_heads, value_size]
  const float* decay = nullptr;  // logarithms: [batch, tokens, value_heads, key_size] or [batch, tokens, value_heads]
  bool row_decays = false;       // the former
  const float* beta = nullptr;   // [batch, tokens, value_heads] or [batch, tokens]
  bool head_betas = false;       // the former
  float scale = 1.0f;
  float* y = nullptr;           // [batch, tokens, max(query_heads, value_heads), value_size]
  const float* past = nullptr;  // [batch, value_heads, key_size, value_size]
  float* present = nullptr;
};

class LinearAttentionPlan {
 public:
  explicit LinearAttentionPlan(Features features);

  // decay and beta are null if the update rule has none. Throws std::bad_alloc.
  void Run(Host& host, const LinearAttentionCall& call) const;

 private:
  const RecurrenceKernel& kernel_;
};

}  // namespace ortolan
