// Finds scaled dot-product attention in a graph, or the reason why a similar subgraph does not fit.
//
// Forms without a cache: decomposed, as in most exports (MatMul, scale, masks, Softmax, MatMul, with Reshapes and
// Transposes that split and merge the heads); ONNX Runtime's MultiHeadAttention; ONNX's Attention (opset 23). Forms
// with a KV cache: decomposed, with a Concat of the past; GroupQueryAttention; MultiHeadAttention; Attention.
//
// The inputs are the outputs [batch, rows, width] of the query, key and value projections; the formula is in
// nomad_attention. If another operation changes or reads the split heads, an input has another layout.
#pragma once

#include <array>
#include <optional>
#include <string>
#include <unordered_set>
#include <variant>
#include <vector>

#include "match/dimensions.h"
#include "match/graph.h"

namespace ortolan::match {

inline constexpr float kHiddenScore = -1e30f;  // a key whose mask is below this has a Softmax weight of 0

// The layout of a query, key, value or output: the axes of batch, heads, rows and head width of a 4-D value, or of
// batch, rows and the width of all heads of a 3-D value.
enum class Layout {
  kByRows,     // [batch, rows, width]
  kColumns,    // [batch, width, rows]
  kRowsFirst,  // [rows, batch, width]
  kByHeads,    // [batch, heads, rows, head width]
  kApart,      // [batch, rows, heads, head width]
  kByColumns,  // [batch, heads, head width, rows]
};
// Names for Python and for records of compiled models, in the order of Layout.
inline constexpr const char* kLayoutNames[] = {"by_rows", "columns", "rows_first", "by_heads", "apart", "by_columns"};

// A mask of the scores: floats that are added, or booleans that add `fill` to masked keys and 0 to other keys.
struct Mask {
  Value value = nullptr;
  std::optional<double> fill{};  // nullopt: a float mask
  bool hides = true;             // a boolean mask hides keys where it is true; otherwise where it is false
  double scale = 1;              // factor of a float mask
  int64_t heads = 0;             // number of heads if the mask is [batch x heads, queries, keys]
  bool windows = false;          // [1, windows, 1 or heads, queries, keys], for scores [batch x windows, heads, …]
  // [provider] Key padding. int32 [batch, keys] or [batch, rows, keys]: `fill` is added where it is 0 or negative.
  // int32 [batch]: numbers of keys; `fill` is added to all keys from that index on. In causal attention, keys after the
  // query get the lowest float instead.
  bool padding = false;
  bool truncated = false;  // [provider] only the first columns count, one for each key
  bool operator==(const Mask&) const = default;
};

// The cache of a cached attention. The past caches are inputs, the present caches outputs: [batch, kv_heads, tokens,
// head width], with the new tokens appended.
struct KvCache {
  Value past_key = nullptr, past_value = nullptr;
  Value present_key = nullptr, present_value = nullptr;
  Value lengths = nullptr;  // int32 [batch], tokens of each sequence after the call minus 1; null: past + rows for all
  Value total = nullptr;    // int32, one element: minimum length of the present caches; may be null
  // Tables of the rotary embedding, [positions, head width / 2], or of fewer columns for the first elements of a head;
  // may be null.
  Value cos = nullptr, sin = nullptr;
  bool interleaved = false;
  // The reason why a pass may not change the type of the caches; nullopt: they are inputs and outputs of the graph, and
  // no other node reads them.
  std::optional<Reason> why_kept{};
};

struct Attention {
  const Node* node = nullptr;  // the Softmax or the attention operator
  // key and value are null if `query` contains all three (see cache and weight).
  std::array<Value, 3> inputs{};  // query, key, value
  std::array<Layout, 3> layouts{};
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  double scale = 0;         // 0: 1 / sqrt(head width)
  double softcap = 0;       // scores become softcap tanh(scores / softcap) before masks are added; 0: they stay
  std::vector<Mask> masks;  // the sum of all masks is added to the scores
  bool causal = false;
  int64_t window = 0;             // causal attention: number of latest keys that a query sees; 0: all
  std::vector<float> sinks;       // a further score of each head, without a value (gpt-oss); empty: none
  bool zero_hidden_rows = false;  // fully masked rows give zeros instead of NaN
  Value zero_rows = nullptr;      // [provider] bool, broadcasts to [batch, heads, rows, 1]: rows set to zero where true
  // [provider] Constant [columns, query width + key width + value width] of com.microsoft's Attention and QAttention,
  // which multiply inputs[0] by it (PackedLinears of linear.h); key and value are null.
  Value weight = nullptr;
  // [provider] Constant [query width + key width + value width], added to query, key and value.
  Value bias = nullptr;
  std::optional<KvCache> cache;
  // [provider] Its keys come from a cache that does not fit the rules, and stays outside. Short calls need the
  // precision of cached attention.
  bool beside_cache = false;
  // [provider] Cached attention, or attention beside a cache, in a model without layers that lose precision.
  bool precise = false;
  Value output = nullptr;  // of one of the layouts kByRows, kApart or kByHeads; the last one only without a cache
  Layout output_layout = Layout::kByRows;
  std::vector<const Node*> products;  // the two MatMuls of decomposed attention: scores, context
  std::vector<const Node*> nodes;     // nodes that one operator replaces, in graph order
};

// A node of a subgraph that resembles attention, with the reason why it does not fit.
struct NotAttention {
  const Node* node = nullptr;
  Reason reason;
  bool cached = true;  // false: FindCachedAttentions found no KV cache
};

// The attributes and inputs of com.microsoft's Attention, QAttention and MultiHeadAttention. The first two also contain
// the linear layers of query, key and value.
struct FusedAttention {
  std::array<int64_t, 3> widths{};  // of query, key and value
  int64_t heads = 0;
  double scale = 0;  // 0: 1 / sqrt(head width)
  bool causal = false;
  std::optional<Mask> padding;
  Value score_bias = nullptr;  // added to the scores; may be null
  Value weight = nullptr;      // constant [columns, sum of widths]; null for MultiHeadAttention
  Value bias = nullptr;        // constant [sum of widths], or null
};

using FoundAttention = std::variant<Attention, NotAttention>;

// The runtime of an attention: an operator in an optimized file, or the execution provider. Only the provider has
// float16 attention, and the roles marked [provider].
enum class Executor { kOperator, kProvider };

// Read one of these operators. Throws RefusedError.
FusedAttention ReadFused(const Dimensions& dims, const Node& node, Executor executor);
// Return attention without a cache and similar subgraphs, in graph order.
std::vector<FoundAttention> FindAttentions(const Dimensions& dims, Executor executor = Executor::kOperator);
// Return cached attention and similar subgraphs, in graph order.
std::vector<FoundAttention> FindCachedAttentions(const Dimensions& dims, Executor executor = Executor::kOperator);
// Return the head width of a cache whose shape does not state it, as in models of new ONNX Runtime GenAI builders, from
// the width of the queries of its GroupQueryAttention; nullopt if unknown.
std::optional<int64_t> HeadSize(const Dimensions& dims, Value past);
// Return a line for each result of both searches for the provider: all fields of an attention, or the reason. Both
// front ends must give the same lines for the same model.
std::vector<std::string> AttentionTexts(const Dimensions& dims);

}  // namespace ortolan::match
