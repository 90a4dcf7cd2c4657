// Attention with a cache of keys and values, as in decoders: com.microsoft.GroupQueryAttention over floats. It is a
// single node, claimed alone, wherever its queries come from.
//
// The rules are those of graph_passes/find/cached_attention.py, except that the caches need not belong to the graph.
#pragma once

#include <optional>
#include <string>

#include "provider/graph.h"

namespace ortolan::provider {

struct CachedAttention {
  const Node* node = nullptr;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  float scale = 1;
  bool is_interleaved = false;  // the rotary embedding
  Value query = nullptr;        // [batch, rows, heads x head_dim], or with keys and values side by side
  Value key = nullptr;          // [batch, rows, kv_heads x head_dim]; null, as value: they are in query
  Value value = nullptr;
  Value past_key = nullptr;  // [batch, kv_heads, tokens, head_dim]
  Value past_value = nullptr;
  Value lengths = nullptr;  // int32 [batch]: tokens of each sequence after a call, less 1
  Value total = nullptr;    // int32, one number: as many tokens as the present caches must have room for
  Value cos = nullptr;      // [positions, head_dim / 2]; null, as sin: no rotary embedding
  Value sin = nullptr;
  Value y = nullptr;
  Value present_key = nullptr;
  Value present_value = nullptr;

  // "attention of 9 heads of 64 over a cache of 3, with rotary embedding"
  std::string Described() const;
};

// None: the node is something else. Throws UnfitError for one that is not taken.
std::optional<CachedAttention> FindCachedAttention(const Graph& graph, const Node& node);

}  // namespace ortolan::provider
