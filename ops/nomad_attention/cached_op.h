// The adapter's part for attention with a cache of keys and values, which each call appends to: decoding.
//
//     past_key, past_value       [B, KV, P, row]: the cache before this call; P may be 0
//     present_key, present_value [B, KV, L, row]: with the call's S tokens appended
//
//     codebooks float [KV, D / d_sub, 16, d_sub]: keys are codes, u8, row D / d_sub / 2 (formats/key_code_cache.h), and
//     values int8 with scales, u8, row 2 + D (formats/value_cache.h), or float, row D. Without codebooks keys and
//     values are float, row D, and attention is exact. lengths int32, B numbers: the tokens of each sequence after this
//     call, less 1, as GroupQueryAttention's seqlens_k. A sequence of fewer than S tokens begins with this call, and
//     what follows it in the call is padding; one of more has its last S tokens in the call. P may then be room that is
//     not filled yet, and L is the larger of P and the longest past + S. Without: all of P and S. cos, sin float
//     [positions, D / 2]: rotary embedding of query and key, at the position in the sequence
//
// Y of padding is of no use, and may be anything but NaN where the inputs are finite. Padding is not appended, and seen
// by padding only. What is behind the tokens of a sequence in the present cache stays what it was in a buffer that is
// shared, and is 0 elsewhere.
//
// The cache of some tokens is no cache of fewer: full blocks lie in another order. So lengths may go back only by
// starting anew.
//
// Caches that are both u8 may be wider than their rows, both of one width W, as hosts want it that make all caches
// alike: [B, KV, P, W]. A head's rows then lie as in a narrow cache, one behind the other from its first byte on: P row
// bytes of its P W. The others are of no use: they stay what they were in a buffer that is shared, and are 0 elsewhere.
//
// Where past and present are one buffer, nothing is copied: the cost of a token is what attention reads. Else what is
// valid of the past is copied.
//
// A call of up to 4 tokens reads the cache as it is, its own tokens included. In a longer one, a prompt, its own keys
// and values are exact; those of the past are what the cache holds.
//
// Attributes window and sinks: keys of so many recent and first tokens are also kept as floats, for caches of codes:
// past_exact_key, present_exact_key float [B, KV, sinks + window, D] (exact_window.h), and read instead of codes.
// What is in it follows from the lengths; without tokens in the past, anything. In a prompt, the past's keys are exact
// as far as past_exact_key holds them. Slots that the call does not write stay as they are in the past.
//
// A prompt may be part of the model, in front of all sequences: cached_prompt.h. lengths then count its tokens too, and
// positions begin behind it.
#pragma once

#include <optional>
#include <vector>

#include "attention/attention.h"
#include "attention/decode.h"
#include "attention/kv_cache/ring.h"
#include "nomad_attention/cached_prompt.h"
#include "ort/ort_op.h"

namespace ortolan {

// Rows of heads in memory; bytes from one to the next.
struct HeadRows {
  const float* data = nullptr;
  int64_t batch_bytes = 0;
  int64_t head_bytes = 0;
  int64_t row_bytes = 0;

  const float* At(int64_t batch, int64_t head, int64_t row) const {
    return reinterpret_cast<const float*>(reinterpret_cast<const char*>(data) + batch * batch_bytes +
                                          head * head_bytes + row * row_bytes);
  }
};

// Of a mask that broadcasts to [B, H, S, T]; strides in elements, 0 where it is broadcast.
struct MaskRows {
  const float* data = nullptr;
  std::vector<int64_t> strides;
};

struct AttentionCall {
  int64_t batch = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t queries = 0;
  int64_t head_dim = 0;
  float scale = 1.0f;
  bool causal = false;
  bool zero_hidden_rows = false;
  int precision = 32;
  HeadRows q, k, v;
  MaskRows mask;
  float* y = nullptr;  // [B, S, H D]
};

// Where a node has the inputs and outputs of its cache.
struct CacheInputs {
  size_t past_key, past_value, codebooks, lengths, cos, sin, past_exact_key, prompt;  // prompt: the first of six
};

class CachedAttention {
 public:
  // kv_heads: of the node. Throws OpError.
  CachedAttention(const OrtKernelInfo& info, std::string node, CacheInputs inputs, int64_t kv_heads);

  // Of each sequence: tokens before this call, and those that it adds, fewer than S where padding follows.
  struct Lengths {
    std::vector<int64_t> past;
    std::vector<int64_t> added;
    int64_t total = 0;  // L; none of these counts the prompt's tokens
  };
  // Throws OpError, also if the shapes of the past cache do not fit the call.
  Lengths ReadLengths(const Ort::KernelContext& context, const AttentionCall& call) const;

  // Of a prompt that is part of the model; 0 without one.
  int64_t PromptTokens() const { return prompt_.Tokens(); }

  // Rotates, appends and attends. Outputs 1, 2 and 3 are the present cache.
  void Run(Ort::KernelContext& context, AttentionCall call, const Lengths& lengths) const;

 private:
  struct Rows {  // present_key, present_value or present_exact_key
    char* data = nullptr;
    int64_t row_bytes = 0;
    int64_t head_bytes = 0;

    char* At(int64_t head, int64_t row) const { return data + head * head_bytes + row * row_bytes; }
  };
  struct Cache {
    Rows keys, values, exact_keys;
  };
  struct Tokens {
    int64_t begin, end;
  };

  // Reads and checks the attributes. Throws OpError.
  void ReadWindow(const OrtKernelInfo& info, int64_t kv_heads);

  // Throws OpError if heads of this size do not fit the cache's kind.
  void CheckHeadDim(int64_t head_dim) const;
  // The tokens that the past cache holds or has room for, P. Throws OpError if a shape does not fit the call.
  int64_t Room(const Ort::KernelContext& context, const AttentionCall& call) const;
  // Of a cache's shape. Throws OpError as Room does.
  int64_t TokensOf(const std::vector<int64_t>& shape, const std::string& name, int64_t row, bool may_be_wide,
                   const AttentionCall& call) const;
  int64_t KeyRowBytes(int64_t head_dim) const;
  int64_t ValueRowBytesOf(int64_t head_dim) const;
  Rows Present(Ort::KernelContext& context, size_t input, size_t output, const AttentionCall& call,
               const Lengths& lengths, int64_t row_bytes) const;
  // Throws OpError if the shape of past_exact_key does not fit the call.
  void CheckExactKeys(const Ort::KernelContext& context, const AttentionCall& call) const;
  Rows PresentExactKeys(Ort::KernelContext& context, const AttentionCall& call) const;
  void Rotate(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths, float* q,
              float* k) const;
  void Append(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head,
              const Cache& cache) const;
  void AppendExactKeys(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head,
                       const Rows& exact_keys) const;
  std::optional<Tokens> VisibleTokens(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t head,
                                      int64_t query) const;
  std::optional<std::vector<Tokens>> VisibleTokens(const AttentionCall& call, const Lengths& lengths) const;
  // The tokens that exact keys hold while queries read them: those before the call, and of a single query its own,
  // which takes the place of one that has left its window.
  static int64_t Held(const AttentionCall& call, int64_t past) { return call.queries == 1 ? past + 1 : past; }
  void Attend(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths,
              const Cache& cache) const;
  void Decode(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths, const Cache& cache,
              const std::vector<Tokens>& seen) const;
  // The keys of tokens 0 … end-1 as floats, as the query at `position` sees them.
  void WriteKeys(const AttentionCall& call, const Lengths& lengths, int64_t batch, int64_t kv_head, const Cache& cache,
                 int64_t position, int64_t end, float* to) const;
  // Keys and values of the past and of the call, [past + S][D] each. own_cached: the call's own as the cache holds
  // them.
  void WriteFloats(const AttentionCall& call, const Lengths& lengths, int64_t head, const Cache& cache, int64_t first,
                   bool own_cached, float* k, float* v) const;
  // Queries first … first + count - 1.
  void Prompt(const Ort::KernelContext& context, const AttentionCall& call, const Lengths& lengths, const Cache& cache,
              int64_t first, int64_t count) const;

  std::string node_;
  CacheInputs inputs_;
  std::string past_key_name_, past_value_name_, past_exact_key_name_;
  const float* codebooks_ = nullptr;
  KeyCodeLayout layout_;  // of codebooks_
  ExactWindow window_;
  CachedPrompt prompt_;
  bool int8_values_ = false;
  bool has_lengths_ = false;
  bool has_rotary_ = false;
  bool interleaved_ = false;
};

}  // namespace ortolan
