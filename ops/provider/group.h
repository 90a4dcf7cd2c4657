// Groups of nodes that the provider computes in one call: linear layers, the quantization of their inputs, and the
// operators after them.
#pragma once

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "provider/attention.h"
#include "provider/epilogue.h"

namespace ortolan::provider {

// The unit of computation of one LinearPlan (matmul/linear_plan.h), or attention, alone or with its query, key and
// value layers.
struct Step {
  // One linear layer, whose halves may be a gate and an up projection, or layers that read the same X: a gate and an up
  // projection of one kind, or query, key and value of any kinds. Attention that is computed alone has no layers.
  std::vector<Layer> layers;
  int64_t gated_columns = 0;  // columns of the gate, and of the output; 0: no gate
  Activation activation = Activation::kNone;
  Value residual = nullptr;  // a value computed at run time; may be null
  std::optional<Norm> norm;
  std::optional<Attention> attention;  // if set, the step has only layers and attention
  Value y = nullptr;
  std::optional<Bounds> y_bounds;  // bounds that clip y
  std::vector<const Node*> nodes;  // all nodes of the step

  // Return the node that claims are reported for.
  const Node& First() const { return layers.empty() ? *attention->node : *layers.front().nodes.front(); }
  int64_t Columns() const { return gated_columns != 0 ? gated_columns : layers.front().Columns(); }
  Value X() const { return layers.front().x; }
  // Return a list of the fused operators, such as ", with gelu, residual and layer norm"; may be empty.
  std::string Fused() const;
};

// A value that the group outputs unchanged or clipped, because nodes outside the group read it after a removed QDQ
// pair.
struct Copy {
  Value from = nullptr;
  Value to = nullptr;
  std::optional<Bounds> bounds;
};

struct Group {
  std::vector<Step> steps;          // independent of each other
  std::optional<SumNorm> sum_norm;  // if set, steps is empty
  std::vector<Copy> copies;
  std::vector<const Node*> nodes;
};

struct Claims {
  std::vector<Group> groups;
  std::vector<std::pair<const Node*, std::string>> left;  // rejected layers and attention, with the reason
};

// Return whether one packed weight can hold the columns of both layers.
bool CanJoin(const Layer& a, const Layer& b);

// Find the groups of a graph, which then has the view of these groups (Graph::See). is_group: the graph has only the
// nodes of one group, which is found again with the `clipped_ranges` of the first search. Otherwise a SumNorm is
// claimed if the graph also has int8 or int4 layers, because only then the optimized file has it too.
// find_attentions: returns the attention of the graph in its present view, and appends reasons to Claims::left.
using FindAttentions = std::function<std::vector<match::Attention>(Claims& claims)>;
Claims FindGroups(Graph& graph, const LayerRules& rules, ClippedRanges& clipped_ranges, bool is_group,
                  const FindAttentions& find_attentions);

}  // namespace ortolan::provider
