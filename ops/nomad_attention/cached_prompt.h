// The adapter's part for a prompt that is part of the model (prompt_cache.h).
//
//     prompt_key_masks u8, prompt_key_values bf16, prompt_key_offsets i64      constants, [D, KV P16]
//     prompt_value_masks, prompt_value_values, prompt_value_offsets            constants, [C, KV chunks D]
//     attributes prompt_tokens (P; 0: none), prompt_head_dim (D)
//
// All sequences of a batch begin with it: lengths, masks and positions count its tokens, as those of any others, while
// past and present caches hold only what follows. Calls of up to 4 tokens whose masks hide nothing of it run on it as
// it is, with queries and weights rounded to bf16. Others unpack it to floats.
#pragma once

#include <vector>

#include "nomad_attention/prompt_cache.h"
#include "ort/ort_op.h"

namespace ortolan {

struct AttentionCall;

class CachedPrompt {
 public:
  CachedPrompt() = default;
  // Reads the attributes, and the six inputs from first_input on. Throws OpError, also where they are given without
  // prompt_tokens.
  CachedPrompt(const OrtKernelInfo& info, const std::string& node, size_t first_input, int64_t kv_heads);

  int64_t Tokens() const { return cache_.tokens; }
  const PromptCache& cache() const { return cache_; }

  // The partial results of all rows of a call: [KV][batch x queries x group], as parts that add up.
  class Partials {
   public:
    Partials(const Ort::KernelContext& context, const std::string& node, const CachedPrompt& prompt,
             const AttentionCall& call);
    // Adds those of the query heads of (batch, kv_head, query).
    void MergeInto(const DecodePartial& whole, int64_t batch, int64_t kv_head, int64_t query) const;

   private:
    // Of an item (block of rows, kv_head, part), from a row of the block on.
    DecodePartial At(int64_t item, int64_t row) const;

    const AttentionCall& call_;
    int64_t rows_;   // that read a head of keys and values
    int64_t parts_;  // of the tokens
    int64_t item_floats_;
    Scratch memory_;
  };

 private:
  PromptCache cache_;
  std::vector<int64_t> key_offsets_, value_offsets_;
};

}  // namespace ortolan
