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
// A prompt may be part of the model, in front of all sequences (prompt_cache.h):
//
//     prompt_key_masks u8, prompt_key_values bf16, prompt_key_offsets i64      constants, [D, KV P16]
//     prompt_value_masks, prompt_value_values, prompt_value_offsets            constants, [C, KV chunks D]
//     attributes prompt_tokens (P; 0: none), prompt_head_dim (D)
//
// lengths, masks and positions count its tokens, as those of any others, while past and present caches hold only what
// follows. Calls of up to 4 tokens whose masks hide nothing of it run on it as it is, with queries and weights rounded
// to bf16. Others unpack it to floats.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "nomad_attention/cached_plan.h"
#include "ort/ort_op.h"

namespace ortolan {

// Of the operator, with and without a cache.
enum Input : size_t {
  kQuery,
  kMask,
  kKey,
  kValue,
  kPastKey,
  kKept = kPastKey,  // of packed sequences
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

using Shape = std::vector<int64_t>;

inline Shape ShapeOf(const Ort::KernelContext& context, size_t input) {
  return context.GetInput(input).GetTensorTypeAndShapeInfo().GetShape();
}

// What both parts of the adapter know of a node, and say of it.
struct AttentionNode {
  std::string text;                          // that begins each error
  std::vector<std::string> inputs, outputs;  // their names; empty where they are left out
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int precision = 32;
  bool any_order = false;

  AttentionNode(const OrtKernelInfo& info, const char* op_type);

  bool HasInput(size_t input) const { return input < inputs.size() && !inputs[input].empty(); }
  bool HasOutput(size_t output) const { return output < outputs.size() && !outputs[output].empty(); }
  // Whether the input is there, and no 0 that stands for none.
  bool HasValues(const OrtKernelInfo& info, size_t input) const {
    return HasInput(input) && !IsConstantZero(info, input);
  }
  // Attributes, 0 where they are missing. Throw OpError.
  bool Flag(const OrtKernelInfo& info, const char* name) const;
  int64_t Tokens(const OrtKernelInfo& info, const char* name) const;

  template <typename... Parts>
  OpError Error(const Parts&... parts) const {
    return OpError(ErrorText(text, ": ", parts...));
  }
  OpError WrongShape(const Ort::KernelContext& context, size_t input, const char* meaning,
                     const std::string& expected) const;
};

class CachedAttention {
 public:
  // Throws OpError.
  CachedAttention(const OrtKernelInfo& info, const AttentionNode& node);

  // Sets past, added, room and keys of a call of which the rest of AttentionCall but the mask is set. Throws OpError,
  // also if the shapes of the past cache do not fit the call.
  void ReadLengths(const Ort::KernelContext& context, CachedCall& call) const;

  // Rotates, appends and attends. Outputs 1, 2 and 3 are the present cache.
  void Run(Ort::KernelContext& context, Host& host, CachedCall& call) const;

 private:
  // These read and check what the constructor finds. They throw OpError.
  void ReadCodebooks(const OrtKernelInfo& info);
  void ReadWindow(const OrtKernelInfo& info);
  void ReadPrompt(const OrtKernelInfo& info);
  // The [k, n] matrix whose masks, values and offsets the inputs from `first` on are. offsets: where they may lie.
  BitmapView ReadMatrix(const OrtKernelInfo& info, size_t first, const std::string& meaning, int64_t k, int64_t n,
                        AlignedConstant<int64_t>& offsets) const;

  // Throws OpError if heads of this size do not fit the cache's kind.
  void CheckHeadDim(int64_t head_dim) const;
  // The tokens that the past cache holds or has room for, P. Throws OpError if a shape does not fit the call.
  int64_t Room(const Ort::KernelContext& context, const AttentionCall& call) const;
  // Throws OpError if the shape of past_exact_key does not fit the call.
  void CheckExactKeys(const Ort::KernelContext& context, const AttentionCall& call) const;
  CacheRows Present(Ort::KernelContext& context, size_t input, size_t output, const CachedCall& call,
                    int64_t row) const;
  CacheRows PresentExactKeys(Ort::KernelContext& context, const AttentionCall& call) const;
  // Sets cos and sin. Throws OpError if they are not for all positions.
  void ReadRotary(const Ort::KernelContext& context, CachedCall& call) const;

  AttentionNode node_;
  AlignedConstant<float> codebooks_;
  AlignedConstant<int64_t> prompt_key_offsets_, prompt_value_offsets_;
  AlignedConstant<int32_t> lengths_;
  AlignedConstant<float> cos_, sin_;
  CacheForm form_;
  bool has_lengths_ = false;
  bool has_rotary_ = false;
  std::optional<CachedPlan> plan_;
};

}  // namespace ortolan
