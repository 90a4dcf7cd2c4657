// Attention with a KV cache, as in decoder models: com.microsoft.GroupQueryAttention on float32. The node is a separate
// group; its query need not come from a claimed layer.
//
// The rules are those of graph_passes/find/cached_attention.py, except that the caches need not be inputs and outputs
// of the graph.
#pragma once

#include <optional>
#include <string>

#include "provider/ort_graph.h"

namespace ortolan::provider {

struct CachedAttention {
  const Node* node = nullptr;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1;
  bool is_interleaved = false;  // layout of the rotary embedding
  Value query = nullptr;  // [batch, rows, heads x head_dim], or query, key and value concatenated on the last axis
  Value key = nullptr;    // [batch, rows, kv_heads x head_dim]; key and value are null if they are part of `query`
  Value value = nullptr;
  Value past_key = nullptr;  // [batch, kv_heads, tokens, head_dim]
  Value past_value = nullptr;
  Value lengths = nullptr;  // int32 [batch]: length of each sequence after the call, minus 1
  Value total = nullptr;    // int32, one element: minimum length of the present caches, in tokens
  Value cos = nullptr;      // [positions, head_dim / 2]; cos and sin are null without a rotary embedding
  Value sin = nullptr;
  Value y = nullptr;
  Value present_key = nullptr;
  Value present_value = nullptr;

  // Return a text such as "attention of 9 heads of 64 over a cache of 3, with rotary embedding".
  std::string Described() const;
};

// Return nullopt for other nodes. Throws UnfitError if the attention is not supported.
std::optional<CachedAttention> FindCachedAttention(const Node& node);

}  // namespace ortolan::provider
