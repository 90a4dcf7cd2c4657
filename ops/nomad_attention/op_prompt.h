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

#include <string>
#include <vector>

#include "nomad_attention/prompt_cache.h"
#include "ort/ort_op.h"

namespace ortolan {

class CachedPrompt {
 public:
  CachedPrompt() = default;
  // Reads the attributes, and the six inputs from first_input on. Throws OpError, also where they are given without
  // prompt_tokens.
  CachedPrompt(const OrtKernelInfo& info, const std::string& node, size_t first_input, int64_t kv_heads);

  const PromptCache& cache() const { return cache_; }  // no tokens: there is none

 private:
  PromptCache cache_;
  std::vector<int64_t> key_offsets_, value_offsets_;
};

}  // namespace ortolan
