// Shared parts of the attention rules (attention.cc, cached_attention.cc): a matcher around one Softmax, and functions
// that follow queries, keys, values and the output through views.
//
// Queries, keys and values are followed from the attention's MatMul back to the output of their projection. The output
// is followed forward until its heads are merged.
#pragma once

#include <limits>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "match/attention.h"
#include "match/views.h"

namespace ortolan::match {

using NodeSet = std::unordered_set<const Node*>;

inline constexpr int kMostSteps = 64;  // limit for the nodes of each search in one direction

// Queries, keys or values; normally the output of their projection, before it is split into heads.
struct Operand {
  Value base = nullptr;
  Dim batch, rows;
  int64_t heads = 0;
  int64_t head_dim = 0;
  double scale = 1;  // factor that is applied between `base` and the MatMul
  Layout layout = Layout::kByRows;
};

struct Chain {
  std::vector<const Node*> nodes;  // the nodes passed, from the last to the first
  double scale = 1;                // product of the constants
  Value value = nullptr;           // the value reached
};

// Follow a value back through standard operators of the types `views`, Identity, Cast to the same type, and
// multiplications by a constant. alone: stop at a value with several consumers.
Chain ThroughViews(const Dimensions& dims, Value value, std::span<const std::string_view> views, bool alone = false);

// Follow split heads [batch, heads, rows, head_dim] back to the output [batch, rows, width] of their projection, and
// add the nodes passed to `nodes`. transposed: the heads are [batch, heads, head_dim, rows]. Throws RefusedError.
Operand SplitOperand(const Dimensions& dims, Value value, const char* meaning, NodeSet& nodes, bool transposed = false);

// Return heads [batch, heads, rows, head_dim] as an operand, or the input of the Transpose that computes them. The
// number of heads must be known. transposed: the heads are [batch, heads, head_dim, rows]. single: the value is [batch
// x heads, rows, head_dim] and counts as one head.
Operand HeadsOperand(const Dimensions& dims, Value value, const char* meaning, NodeSet& nodes, bool transposed,
                     bool single);

// Return the operand of an attention operator that reads [batch, rows, width] and splits the heads itself.
Operand WholeOperand(const Dimensions& dims, Value value, const char* meaning, int64_t heads);

// Follow the output [batch, heads, rows, head_dim] forward to the value [batch, rows, width] with merged heads.
Value MergedHeads(const Dimensions& dims, Value value, const Operand& query, NodeSet& nodes);

// Return a boolean mask that hides the keys where it is false.
inline Mask VisibleMask(Value value) { return {value, -std::numeric_limits<double>::infinity(), false}; }

// Check that a mask broadcasts against the scores, and its type. The provider checks an integer against a symbolic
// dimension when the model runs.
void CheckMask(const Dimensions& dims, const Mask& mask, const DimShape& scores,
               Executor executor = Executor::kOperator);

struct Visible {
  Value product = nullptr;  // the given product, or the output of the Where after it
  std::vector<Mask> masks;
  bool zeroed = false;  // a Where sets fully masked rows of the output to zero; the mask is then boolean
  Value zero_rows = nullptr;
};
// Follow the product of weights and values through a Where that sets fully masked rows to zero, as in exports of
// transformers 5, and add the Where to `nodes`. `masks` are all that hide keys.
Visible WithoutHiddenRows(const Dimensions& dims, Value product, std::vector<Mask> masks, NodeSet& nodes,
                          Executor executor);

// Check that only `nodes` read the values that will be removed; the present caches are exempt. Other nodes whose
// results only removed nodes read, such as shape computations, are added to `nodes`, and all are listed in `found`. For
// the provider, a mask that they expand or slice to the shape of the scores is replaced by the mask before. Throws
// RefusedError, also if an input is computed by `nodes`.
void CheckUses(const Dimensions& dims, NodeSet& nodes, Attention& found, Executor executor = Executor::kOperator);

// Return the mask before it is expanded to the shape of the scores, which broadcasting does anyway.
Value BeforeExpand(const Dimensions& dims, Value value);

// Return whether two dimensions that the model requires to be equal can be equal. A computed dimension can equal any
// other except 1; an integer or a name equals only itself.
bool SameNumber(const Dimensions& dims, const Dim& one, const Dim& other);

// Return whether a value has several consumers, or is an output of the graph.
bool HasOthers(const Graph& graph, Value value);

// Return whether a node is a Slice that keeps all elements.
bool IsWholeSlice(const Dimensions& dims, const Node& node);

// Return the `scale` attribute of an attention operator; 0 if it has none.
double ScaleAttribute(const Node& node);

// Check a softcap, which may be 0, and return it.
double CheckedSoftcap(double softcap);

// Return the sinks of a constant with one float for each head, also behind Reshape and Expand to [batch, heads, rows,
// 1]. Throws RefusedError.
std::vector<float> SinksOf(const Dimensions& dims, Value value, int64_t heads);

// Return nodes of the set in graph order.
std::vector<const Node*> InGraphOrder(const NodeSet& nodes);

// Matcher of decomposed attention around one Softmax.
class Decomposed {
 public:
  Decomposed(const Dimensions& dims, const Node& softmax) : dims_(dims), softmax_(softmax), nodes_{&softmax} {}

  // The two products of attention.
  struct Products {
    const Node* scores = nullptr;   // the MatMul of queries and keys
    const Node* context = nullptr;  // the MatMul of weights and values
    bool zero_hidden_rows = false;  // NaN values of the Softmax are replaced by zeros
  };
  // Find the products, check the Softmax's axis, and add the nodes between them to nodes(). nullopt if the Softmax has
  // another purpose, such as a classifier's.
  std::optional<Products> FindProducts();

  struct Scores {
    std::vector<Mask> masks;  // in the order in which the model adds them
    double scale = 1;
    double softcap = 0;
    Value sinks = nullptr;  // a further column of scores; may be null
  };
  // Read the masks between scores and Softmax, the sinks, the cap, and the scale of the scores.
  Scores ReadScores(const Products& products);

  NodeSet& nodes() { return nodes_; }

 private:
  const Node* FindScores(Value value, int steps = kMostSteps);
  const Node* ScoresBehind(Value value, int steps);
  const Node* LargestOfRows(const Node& subtract) const;
  Value WithoutLast(Value weights);
  Value Beyond(Value value, bool reshapes);
  bool KeepsRows(const Node& reshape);
  double Factor(const Node& node, size_t index) const;
  Mask Fill(const Node& where, size_t index) const;

  const Dimensions& dims_;
  const Node& softmax_;
  NodeSet nodes_;
  bool drops_last_ = false;                       // the last weight of each row is dropped, that of a sink
  std::unordered_map<Value, const Node*> found_;  // results of FindScores
};

}  // namespace ortolan::match
