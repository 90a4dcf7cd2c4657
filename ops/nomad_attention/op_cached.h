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
// past_exact_key, present_exact_key float [B, KV, sinks + window, D] (attention/kv_cache/ring.h), and read instead of
// codes. What is in it follows from the lengths; without tokens in the past, anything. In a prompt, the past's keys are
// exact as far as past_exact_key holds them. Slots that the call does not write stay as they are in the past.
//
// A prompt may be part of the model, in front of all sequences: op_prompt.h. lengths then count its tokens too, and
// positions begin behind it.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nomad_attention/cached_plan.h"
#include "nomad_attention/op_prompt.h"
#include "ort/ort_op.h"

namespace ortolan {

// Where a node has the inputs and outputs of its cache.
struct CacheInputs {
  size_t past_key, past_value, codebooks, lengths, cos, sin, past_exact_key, prompt;  // prompt: the first of six
};

class CachedAttention {
 public:
  // kv_heads: of the node. Throws OpError.
  CachedAttention(const OrtKernelInfo& info, std::string node, CacheInputs inputs, int64_t kv_heads, int precision);

  // Sets past, added, room and keys of a call of which the rest of AttentionCall but the mask is set. Throws OpError,
  // also if the shapes of the past cache do not fit the call.
  void ReadLengths(const Ort::KernelContext& context, CachedCall& call) const;

  // Rotates, appends and attends. Outputs 1, 2 and 3 are the present cache.
  void Run(Ort::KernelContext& context, Host& host, CachedCall& call) const;

 private:
  // These read and check what the constructor finds. They throw OpError.
  void ReadCodebooks(const OrtKernelInfo& info, int64_t kv_heads);
  void ReadWindow(const OrtKernelInfo& info, int64_t kv_heads);

  // Throws OpError if heads of this size do not fit the cache's kind.
  void CheckHeadDim(int64_t head_dim) const;
  // The tokens that the past cache holds or has room for, P. Throws OpError if a shape does not fit the call.
  int64_t Room(const Ort::KernelContext& context, const AttentionCall& call) const;
  // Of a cache's shape. Throws OpError as Room does.
  int64_t TokensOf(const std::vector<int64_t>& shape, const std::string& name, int64_t row, bool may_be_wide,
                   const AttentionCall& call) const;
  CacheRows Present(Ort::KernelContext& context, size_t input, size_t output, const CachedCall& call,
                    int64_t row_bytes) const;
  // Throws OpError if the shape of past_exact_key does not fit the call.
  void CheckExactKeys(const Ort::KernelContext& context, const AttentionCall& call) const;
  CacheRows PresentExactKeys(Ort::KernelContext& context, const AttentionCall& call) const;
  // Sets cos and sin. Throws OpError if they are not for all positions.
  void ReadRotary(const Ort::KernelContext& context, CachedCall& call) const;

  std::string node_;
  CacheInputs inputs_;
  std::string past_key_name_, past_value_name_, past_exact_key_name_;
  std::vector<float> copied_codebooks_;  // of a file that has them at an odd address
  CachedPrompt prompt_;
  CacheForm form_;
  bool has_lengths_ = false;
  bool has_rotary_ = false;
  std::optional<CachedPlan> plan_;
};

}  // namespace ortolan
