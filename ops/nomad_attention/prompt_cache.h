// A prompt that is part of the model: the pruned keys and values of its tokens are constants that each call reads. The
// cache holds only the tokens after it. Reference: SparAMX, section 6.2 (static cache of a system prompt or of
// knowledge).
//
// Two matrices hold it, in bitmap or dense storage (formats/bitmap.h), so that the kernels of SparseAMXMatMul can
// multiply with them. With P tokens and KV heads of size D (a multiple of 16), keys after rotary embedding:
//
//     keys     [D, KV P16]         token j of head h: column h P16 + j;   P16 = 16 ceil(P / 16)
//     values   [C, KV chunks D]    token c C + j of head h: row j, columns (h chunks + c) D …
//
//     chunks = ceil(P / 512),  C = 32 ceil(ceil(P / chunks) / 32);   other rows and columns are zero
//
// A chunk of C tokens gives a partial result (decode.h) for all m query rows that read a head:
//
//     s = log2(e) scale (bf16(q) . k),  max, w = 2^(s - max),  sum of w,  y = sum of bf16(w) v
//
// Error, in addition to decode.h: for a score, e is (head_dim + 8) u sum |log2(e) scale bf16(q)_d k_d| against the
// product with the rounded query. Rounding the query adds up to 2^-8 sum |log2(e) scale q_d k_d|. Rounding the weights
// adds 2^-8 (sum over the prompt's tokens of p[j] |v[j]|) to the error of y / sum. A score of NaN or +Inf makes the
// row's sum NaN; a score of -Inf has weight 0. No token is skipped.
#pragma once

#include <cstdint>

#include "attention/decode.h"
#include "formats/bitmap.h"
#include "nomad_attention/nomad_attention.h"

namespace ortolan {

inline constexpr int64_t kMostPromptChunk = 512;

struct PromptCache {
  int64_t tokens = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  BitmapView keys;  // both validated by ValidateBitmap, with k and n as above
  BitmapView values;

  constexpr int64_t Chunks() const { return (tokens + kMostPromptChunk - 1) / kMostPromptChunk; }
  constexpr int64_t ChunkTokens() const {  // C
    return ((tokens + Chunks() - 1) / Chunks() + kTileInputs - 1) / kTileInputs * kTileInputs;
  }
  constexpr int64_t KeyPanels() const { return BitmapPanels(tokens); }  // per head
  constexpr int64_t KeyColumns() const { return kv_heads * KeyPanels() * kPanelColumns; }
  constexpr int64_t ValueColumns() const { return kv_heads * Chunks() * head_dim; }
  // Tokens in a chunk, 1 … ChunkTokens().
  constexpr int64_t TokensIn(int64_t chunk) const {
    const int64_t left = tokens - chunk * ChunkTokens();
    return left < ChunkTokens() ? left : ChunkTokens();
  }
};

// Unpacks the keys and values of a chunk to rows of floats, [TokensIn(chunk)][head_dim]. scratch:
// PromptUnpackBytes(cache) bytes.
void UnpackPrompt(const PromptCache& cache, int64_t kv_head, int64_t chunk, float* keys, float* values, void* scratch);
int64_t PromptUnpackBytes(const PromptCache& cache);

// The prompt's partial results for all rows of a call, [KV][batch x queries x group]. The tokens are split into parts,
// whose results are merged. Keeps a reference to the call.
class PromptPartials {
 public:
  // Throws std::bad_alloc.
  PromptPartials(Host& host, const PromptCache& cache, const SoftmaxFunctions& softmax, const AttentionCall& call);
  // Merges the results for the query heads of (batch, kv_head, query) into `whole`.
  void MergeInto(const DecodePartial& whole, int64_t batch, int64_t kv_head, int64_t query) const;

 private:
  // The result of an item (block of rows, kv_head, part), from row `row` of the block on.
  DecodePartial At(int64_t item, int64_t row) const;

  const SoftmaxFunctions& softmax_;
  const AttentionCall& call_;
  int64_t rows_;   // query rows that read a key-value head
  int64_t parts_;  // parts into which the tokens are split
  int64_t item_floats_;
  HostMemory memory_;
};

}  // namespace ortolan
