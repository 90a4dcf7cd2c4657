// One token's attention to a prompt that is part of the model, of all rows of a call.
#pragma once

#include "nomad_attention/cached_plan.h"

namespace ortolan {

// The partial results of all rows of a call: [KV][batch x queries x group], as parts that add up. Refers to the call.
class PromptPartials {
 public:
  // Throws std::bad_alloc.
  PromptPartials(Host& host, const PromptCache& cache, const SoftmaxKernel& softmax, const CachedCall& call);
  // Adds those of the query heads of (batch, kv_head, query).
  void MergeInto(const DecodePartial& whole, int64_t batch, int64_t kv_head, int64_t query) const;

 private:
  // Of an item (block of rows, kv_head, part), from a row of the block on.
  DecodePartial At(int64_t item, int64_t row) const;

  const SoftmaxKernel& softmax_;
  const CachedCall& call_;
  int64_t rows_;   // that read a head of keys and values
  int64_t parts_;  // of the tokens
  int64_t item_floats_;
  HostMemory memory_;
};

}  // namespace ortolan
