// The groups of a graph's nodes that this room runs, each in one call: linear layers, what they are rounded by, and
// what follows them.
#pragma once

#include <string>
#include <utility>
#include <vector>

#include "provider/attention.h"
#include "provider/cached_attention.h"
#include "provider/epilogue.h"
#include "provider/sum_norm.h"

namespace ortolan::provider {

// What one LinearPlan computes (matmul/linear_plan.h), or attention of queries, keys and values that layers make.
struct Step {
  // One; or of one X: gated, two of one kind, the gate first; queries, keys and values, of any kinds.
  std::vector<Layer> layers;
  Activation activation = Activation::kNone;
  Value residual = nullptr;  // computed when the model runs; or none
  std::optional<Norm> norm;
  std::optional<Attention> attention;  // without any of the above
  Value y = nullptr;
  std::optional<Bounds> y_bounds;  // that it is cut off at, at the end
  std::vector<const Node*> nodes;  // all of the above

  bool IsGated() const { return layers.size() == 2; }
  Value X() const { return layers.front().x; }
  // Of what follows the layer: ", with gelu, residual and layer norm"; or nothing.
  std::string Fused() const;
};

// What a group reads, and others read behind a rounding that is gone.
struct Copy {
  Value from = nullptr;
  Value to = nullptr;
  std::optional<Bounds> bounds;
};

struct Group {
  std::vector<Step> steps;                          // none reads what another one makes
  std::optional<CachedAttention> cached_attention;  // and no steps
  std::optional<SumNorm> sum_norm;                  // and no steps
  std::vector<Copy> copies;
  std::vector<const Node*> nodes;
};

struct Claims {
  std::vector<Group> groups;
  std::vector<std::pair<const Node*, std::string>> left;  // layers and attention that are not taken, and why
};

// Whether one weight can hold both, side by side.
bool CanJoin(const Layer& a, const Layer& b);

// is_group: these are the nodes of one group alone, and it is found again, with what the first time has put into
// clipped_ranges. Else a SumNorm is taken where layers of int8 or int4 are: in their models the optimized file has it.
// From then on, the graph is seen as the groups see it.
Claims FindGroups(Graph& graph, const LayerRules& rules, ClippedRanges& clipped_ranges, bool is_group);

}  // namespace ortolan::provider
