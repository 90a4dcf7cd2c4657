// The part of the ORT adapter for attention with a cache of keys and values, to which each call appends: decoding.
//
//     past_key, past_value       [B, KV, P, row]: the cache before this call; P may be 0
//     present_key, present_value [B, KV, L, row]: the cache with the call's S tokens appended
//
//     codebooks float [KV, D / d_sub, 16, d_sub]: keys are codes, u8, row D / d_sub / 2 (formats/key_code_cache.h);
//         values are int8 with scales, u8, row 2 + D (formats/value_cache.h), or float, row D. Without codebooks keys
//         and values are float, row D, and attention is exact.
//     lengths int32 with B elements: the tokens of each sequence after this call, minus 1, like seqlens_k of
//         GroupQueryAttention. A sequence with fewer than S tokens starts with this call, followed by padding; a
//         longer one has its last S tokens in the call. With lengths, P is a capacity, and L is the larger of P and
//         the longest past + S. Without lengths, every sequence has P + S tokens.
//     cos, sin float [positions, D / 2 or less]: rotary embedding of query and key at the token's position in the
//         sequence. Elements of a head beyond twice the columns stay.
//
// Y of padding is unspecified, but not NaN if the inputs are finite. Padding is not appended, and only padding sees it.
// Unused bytes of a present cache keep the contents of a shared buffer, and are 0 otherwise.
//
// Lengths may decrease to restart, or if the host has converted the block that becomes incomplete to rows, and has
// restored the exact keys that the ring has lost (src/ortolan/rewinding.py).
//
// Attribute local_window_size, with causal: a query sees this number of latest keys, its own included; 0: all.
//
// If both caches are u8, they may share a width W above their rows', for hosts that allocate all caches alike:
// [B, KV, P, W]. The rows of a head are contiguous from its first byte on and use P row bytes of its P W.
//
// If past and present share a buffer, nothing is copied, and a token costs only what attention reads. Otherwise the
// valid part of the past is copied.
//
// Calls of up to 4 tokens read everything from the cache, including their own tokens. In longer calls the call's own
// keys and values are exact, and the past is read from the cache.
//
// Attributes window and sinks: the keys of the `window` most recent and the `sinks` first tokens are also kept as
// floats, for caches of codes, and read instead of the codes: past_exact_key, present_exact_key float [B, KV, sinks +
// window, D] (attention/kv_cache/ring.h). Which tokens they hold follows from the lengths; without past tokens their
// contents are arbitrary. Slots that the call does not write are copied from the past.
//
// A prompt may be part of the model, as a prefix of all sequences (prompt_cache.h):
//
//     prompt_key_masks u8, prompt_key_values bf16, prompt_key_offsets i64      constants, [D, KV P16]
//     prompt_value_masks, prompt_value_values, prompt_value_offsets            constants, [C, KV chunks D]
//     attributes prompt_tokens (P; 0: no prompt), prompt_head_dim (D)
//
// lengths, masks and positions include its tokens; past and present caches do not. Calls of up to 4 tokens whose masks
// hide no prompt token multiply with its packed form, with queries and weights rounded to bf16. Other calls unpack it
// to floats.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nomad_attention/cached_plan.h"
#include "nomad_attention/op_node.h"

namespace ortolan {

enum Input : size_t {
  kQuery,
  kMask,
  kKey,
  kValue,
  kPastKey,
  kKept = kPastKey,  // PackedNoMADAttention
  kPastValue,
  kCodebooks,
  kLengths,
  kCos,
  kSin,
  kPastExactKey,
  kPromptKeyMasks,
  kPromptKeyValues,
  kPromptKeyOffsets,
  kPromptValueMasks,
  kPromptValueValues,
  kPromptValueOffsets,
  kInputCount
};
enum Output : size_t { kY, kPresentKey, kPresentValue, kPresentExactKey, kOutputCount };

class CachedAttention {
 public:
  // Throws OpError.
  CachedAttention(const OrtKernelInfo& info, const AttentionNode& node);

  // Sets past, added, room and keys. Needs all other fields of the call except the mask. Throws OpError, also if the
  // shapes of the past cache do not match the call.
  void ReadLengths(const KernelContext& context, CachedCall& call) const;

  // Applies rotary embedding, appends and attends. Outputs 1, 2 and 3 are the present cache.
  void Run(KernelContext& context, Host& host, CachedCall& call) const;

 private:
  // Read and check the node's constants and attributes. Throw OpError.
  void ReadCodebooks(const OrtKernelInfo& info);
  void ReadWindow(const OrtKernelInfo& info);
  void ReadPrompt(const OrtKernelInfo& info);
  // Reads the [k, n] matrix whose masks, values and offsets are the inputs from `first` on. offsets: memory for an
  // aligned copy, if needed.
  BitmapView ReadMatrix(const OrtKernelInfo& info, size_t first, const std::string& meaning, int64_t k, int64_t n,
                        AlignedConstant<int64_t>& offsets) const;

  // Throws OpError if the cache format does not support this head size.
  void CheckHeadDim(int64_t head_dim) const;
  // Returns P, the capacity of the past cache in tokens. Throws OpError if a shape does not match the call.
  int64_t Room(const KernelContext& context, const AttentionCall& call) const;
  // Throws OpError if the shape of past_exact_key does not match the call.
  void CheckExactKeys(const KernelContext& context, const AttentionCall& call) const;
  CacheRows Present(KernelContext& context, size_t input, size_t output, const CachedCall& call, int64_t row) const;
  CacheRows PresentExactKeys(KernelContext& context, const AttentionCall& call) const;
  // Sets cos and sin. Throws OpError if they do not cover all positions.
  void ReadRotary(const KernelContext& context, CachedCall& call) const;

  AttentionNode node_;
  AlignedConstant<float> codebooks_;
  AlignedConstant<int64_t> prompt_key_offsets_, prompt_value_offsets_;
  AlignedConstant<int32_t> lengths_;
  AlignedConstant<float> cos_, sin_;
  CacheForm form_;
  bool has_lengths_ = false;
  bool has_rotary_ = false;
  bool interleaved_ = false;
  std::optional<CachedPlan> plan_;
};

}  // namespace ortolan
