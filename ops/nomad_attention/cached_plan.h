// Attention with a cache of keys and values as a plan: copying the past, rotary embedding, appending, attention over
// the cache. Free of ONNX Runtime. op_cached.h says what the inputs and outputs mean.
#pragma once

#include <optional>
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
  int precision = 32;

  int64_t KeyRowBytes(int64_t head_dim) const {
    return codebooks == nullptr ? head_dim * static_cast<int64_t>(sizeof(float)) : layout.RowBytes();
  }
  int64_t ValueRowBytes(int64_t head_dim) const {
    return int8_values ? ortolan::ValueRowBytes(head_dim) : head_dim * static_cast<int64_t>(sizeof(float));
  }
};

// The present keys, values or exact keys, of batch x kv_heads heads, and the past ones, which may be the same memory.
struct CacheRows {
  char* data = nullptr;
  int64_t row_bytes = 0;
  int64_t head_bytes = 0;
  const char* past = nullptr;
  int64_t past_head_bytes = 0;

  char* At(int64_t head, int64_t row) const { return data + head * head_bytes + row * row_bytes; }
};

// `keys` counts the prompt's tokens and all that the present cache has room for.
struct CachedCall : AttentionCall {
  // Of each sequence: tokens before this call, and those that it adds, fewer than `queries` where padding follows. None
  // of the numbers here counts the prompt's tokens.
  std::vector<int64_t> past;
  std::vector<int64_t> added;
  int64_t room = 0;  // tokens of the present cache
  CacheRows key_cache, value_cache, exact_keys;
  const float* cos = nullptr;  // [positions][head_dim / 2]; null: no rotary embedding
  const float* sin = nullptr;

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
  struct Tokens {
    int64_t begin, end;
  };
  struct Row {  // query heads that share a head of keys and values, of one query
    int64_t batch, kv_head, query;
  };

  void CopyPast(Host& host, const CachedCall& call) const;
  void Rotate(Host& host, const CachedCall& call, float* q, float* k) const;
  void Append(const CachedCall& call, int64_t batch, int64_t kv_head) const;
  void AppendExactKeys(const CachedCall& call, int64_t batch, int64_t kv_head) const;
  void Attend(Host& host, const CachedCall& call) const;

  std::optional<Tokens> VisibleTokens(const CachedCall& call, int64_t batch, int64_t head, int64_t query) const;
  std::optional<std::vector<Tokens>> VisibleTokens(const CachedCall& call) const;

  // The tokens that exact keys hold while queries read them: those before the call, and of a single query its own,
  // which takes the place of one that has left its window.
  static int64_t Held(const CachedCall& call, int64_t past) { return call.queries == 1 ? past + 1 : past; }
  DecodeAttentionArgs DecodeArgs(const CachedCall& call, Row row) const;
  void DecodeRange(const CachedCall& call, Row row, Tokens range, const DecodePartial& whole, const DecodePartial& more,
                   void* scratch) const;
  void Decode(Host& host, const CachedCall& call, const std::vector<Tokens>& seen) const;

  // The keys of tokens 0 … end-1 as floats, as the query at `position` sees them.
  void WriteKeys(const CachedCall& call, int64_t batch, int64_t kv_head, int64_t position, int64_t end,
                 float* to) const;
  // Keys and values of the past and of the call, [past + S][D] each. own_cached: the call's own as the cache holds
  // them.
  void WriteFloats(const CachedCall& call, int64_t head, int64_t first, bool own_cached, float* k, float* v) const;
  // Those and the prompt's, of some heads: [head][2][most][D].
  void WriteHeads(Host& host, const CachedCall& call, int64_t first_head, int64_t heads, int64_t first, bool own_cached,
                  int64_t most, float* to) const;
  // Queries first … first + count - 1; a short call reads its own keys and values from the cache.
  void Prompt(Host& host, const CachedCall& call, int64_t first, int64_t count, bool is_short) const;

  CacheForm form_;
  const AttentionKernel& attention_;
  const DecodeAttentionKernel& decode_;
  const SoftmaxKernel& softmax_;
  const KvCacheKernel& cache_;
};

}  // namespace ortolan
