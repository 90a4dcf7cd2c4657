// Attention with a cache of keys and values as a plan: copying the past, rotary embedding, appending, attention over
// the cache. Free of ONNX Runtime. op_cached.h says what the inputs and outputs mean.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "attention/decode.h"
#include "attention/kv_cache/kv_cache.h"
#include "attention/kv_cache/ring.h"
#include "nomad_attention/nomad_attention.h"
#include "nomad_attention/prompt_cache.h"

namespace ortolan {

// What the cache of a node holds.
struct CacheForm {
  KeyCodeLayout layout;              // of codebooks
  const float* codebooks = nullptr;  // [kv_heads][S][16][d_sub]; null: keys are floats
  bool int8_values = false;          // else floats
  ExactWindow window;
  PromptCache prompt;  // in front of all sequences; no tokens: none
  bool interleaved = false;
  int precision = 32;  // of products, in calls of more than a few tokens
  bool any_order = false;

  // Of a token, in elements of the cache.
  int64_t KeyRow(int64_t head_dim) const { return codebooks == nullptr ? head_dim : layout.RowBytes(); }
  int64_t ValueRow(int64_t head_dim) const { return int8_values ? ValueRowBytes(head_dim) : head_dim; }
};

// The present keys, values or exact keys, of batch x kv_heads heads, and the past ones, which may be the same memory.
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

// `keys` counts the prompt's tokens and all that the present cache has room for.
struct CachedCall : AttentionCall {
  explicit CachedCall(const AttentionCall& call) : AttentionCall(call) {}

  // Of each sequence: tokens before this call, and those that it adds, fewer than `queries` where padding follows. None
  // of the numbers here counts the prompt's tokens.
  std::vector<int64_t> past;
  std::vector<int64_t> added;
  int64_t room = 0;  // tokens of the present cache
  CacheRows key_cache, value_cache, exact_keys;
  const float* cos = nullptr;  // [positions][head_dim / 2]; null: no rotary embedding
  const float* sin = nullptr;

  // Sets past, added, room and keys. lengths: of each sequence, its tokens after this call less 1, with the
  // `prompt_tokens` of a prompt in the model; past_room: that of the past cache. Returns what is wrong, or nothing;
  // `name` and `past_name` are what the text calls the lengths and the past.
  std::string SetLengths(std::span<const int32_t> lengths, int64_t past_room, int64_t prompt_tokens,
                         const std::string& name, const std::string& past_name);

  int64_t Past(int64_t b) const { return past[static_cast<size_t>(b)]; }
  int64_t Tokens(int64_t b) const { return Past(b) + added[static_cast<size_t>(b)]; }
  // Of all sequences, padding included.
  int64_t MostTokens() const { return *std::max_element(past.begin(), past.end()) + queries; }
};

class CachedPlan {
 public:
  explicit CachedPlan(const CacheForm& form);

  // Throws std::bad_alloc.
  void Run(Host& host, CachedCall call) const;

 private:
  class Running;  // a call

  CacheForm form_;
  const AttentionKernel& attention_;
  const AttentionKernel& short_attention_;  // of a few tokens, where the decode kernel does not serve
  const DecodeAttentionKernel& decode_;
  const KvCacheKernel& cache_;
};

}  // namespace ortolan
