// The execution plan of attention over paged caches: apply rotary embedding, append the call's tokens to the pools,
// attend. Independent of ONNX Runtime. op_paged.cc describes inputs and outputs.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "attention/kv_cache/kv_cache.h"
#include "attention/paged.h"
#include "nomad_attention/nomad_attention.h"
#include "nomad_attention/rotary.h"

namespace ortolan {

// Pool of keys or values that tokens are appended to. attention/paged.h has the layouts.
struct PagedCache {
  void* blocks = nullptr;
  float* scales = nullptr;  // null: bfloat16, otherwise int8

  bool IsInt8() const { return scales != nullptr; }
};

// Chunks of several sequences, one after another: batch 1, queries = tokens. keys, mask and causal are not used.
struct PagedCall : AttentionCall {
  explicit PagedCall(const AttentionCall& call) : AttentionCall(call) {}

  std::span<const int64_t> starts;  // first token of each sequence, then the number of tokens
  std::span<const int64_t> past;    // tokens of each sequence in the pools
  const int64_t* table = nullptr;   // [sequences][table_columns]: the sequence's blocks
  int64_t table_columns = 0;
  int64_t blocks = 0;  // of the pools
  PagedCache keys;
  PagedCache values;
  RotaryTables rotary;

  int64_t Sequences() const { return static_cast<int64_t>(past.size()); }
  int64_t Begin(int64_t sequence) const { return starts[static_cast<size_t>(sequence)]; }
  int64_t Added(int64_t sequence) const { return Begin(sequence + 1) - Begin(sequence); }
  int64_t Past(int64_t sequence) const { return past[static_cast<size_t>(sequence)]; }
  const int64_t* Blocks(int64_t sequence) const { return table + sequence * table_columns; }

  // Returns an error text, or an empty string if starts, past and the table fit each other, the tokens and the pools.
  std::string Problem() const;
};

class PagedPlan {
 public:
  PagedPlan();

  // `call` has no Problem. Throws std::bad_alloc.
  void Run(Host& host, PagedCall call) const;

 private:
  void Rotate(Host& host, const PagedCall& call, std::span<const int64_t> positions, float* q, float* k) const;
  void AppendToken(const PagedCall& call, int64_t token, int64_t block, int64_t slot) const;
  void Attend(Host& host, const PagedCall& call) const;

  const PagedAttentionKernel& attention_;
  const DecodeAttentionKernel& decode_;  // merges partial results
  const KvCacheKernel& cache_;
};

}  // namespace ortolan
