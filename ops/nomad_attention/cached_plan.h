// The execution plan of attention with a cache of keys and values: copy the past, apply rotary embedding, append,
// attend. Independent of ONNX Runtime. op_cached.h describes inputs and outputs.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "attention/decode.h"
#include "attention/kv_cache/kv_cache.h"
#include "attention/kv_cache/ring.h"
#include "nomad_attention/nomad_attention.h"
#include "nomad_attention/prompt_cache.h"
#include "nomad_attention/rotary.h"

namespace ortolan {

struct CacheForm {
  KeyCodeLayout layout;              // layout of the key codes
  const float* codebooks = nullptr;  // [kv_heads][S][16][d_sub]; null: keys are floats
  bool int8_values = false;          // otherwise floats
  ExactWindow window;
  PromptCache prompt;         // prefix of all sequences; empty if it has no tokens
  int precision = 32;         // in calls with more than kMostDecodeQueries tokens
  bool reproducible = false;  // the same bits on every CPU; needs precision 16, which short calls then have too

  // Elements of a token in the key cache and in the value cache.
  int64_t KeyRow(int64_t head_dim) const { return codebooks == nullptr ? head_dim : layout.RowBytes(); }
  int64_t ValueRow(int64_t head_dim) const { return int8_values ? ValueRowBytes(head_dim) : head_dim; }
};

// Present keys, values or exact keys of batch x kv_heads heads, and the past ones, which may share the memory.
struct CacheRows {
  char* data = nullptr;
  int64_t row_bytes = 0;
  int64_t head_bytes = 0;
  const char* past = nullptr;
  int64_t past_head_bytes = 0;

  char* At(int64_t head, int64_t row) const { return data + head * head_bytes + row * row_bytes; }
  const float* Floats(int64_t head, int64_t row) const { return reinterpret_cast<const float*>(At(head, row)); }
  uint8_t* Bytes(int64_t head) const { return reinterpret_cast<uint8_t*>(At(head, 0)); }
};

// `keys` includes the prompt's tokens and the capacity of the present cache.
struct CachedCall : AttentionCall {
  explicit CachedCall(const AttentionCall& call) : AttentionCall(call) {}

  // For each sequence, the tokens before this call and the tokens it adds (fewer than `queries` if padding follows),
  // without the prompt's tokens.
  std::vector<int64_t> past;
  std::vector<int64_t> added;
  int64_t room = 0;  // capacity of the present cache in tokens
  CacheRows key_cache, value_cache, exact_keys;
  RotaryTables rotary;

  // Sets past, added, room and keys. lengths: for each sequence, its tokens after this call minus 1, including the
  // model's prompt. past_room: capacity of the past cache. Returns an empty string or an error text, which calls the
  // lengths `name` and the past cache `past_name`.
  std::string SetLengths(std::span<const int32_t> lengths, int64_t past_room, int64_t prompt_tokens,
                         const std::string& name, const std::string& past_name);

  int64_t Past(int64_t b) const { return past[static_cast<size_t>(b)]; }
  int64_t Tokens(int64_t b) const { return Past(b) + added[static_cast<size_t>(b)]; }
  // The longest sequence after this call, including padding.
  int64_t MostTokens() const { return *std::max_element(past.begin(), past.end()) + queries; }
};

class CachedPlan {
 public:
  explicit CachedPlan(const CacheForm& form);

  // Throws std::bad_alloc.
  void Run(Host& host, CachedCall call) const;

 private:
  class Running;  // the execution of one call

  CacheForm form_;
  const AttentionKernel& attention_;
  const AttentionKernel& short_attention_;  // for short calls that the decode kernel cannot serve
  const DecodeAttentionKernel& decode_;
  const KvCacheKernel& cache_;
};

}  // namespace ortolan
