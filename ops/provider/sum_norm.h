// A LayerNormalization that is not fused with a preceding linear layer, such as that of the embeddings, together with
// the additions before it whose sums have no other consumer. It is computed as AddLayerNorm, whose results have the
// same bits on every CPU.
//
// As in pass fuse_norm (graph_passes/passes/fuse_norm.py), the bits of a sum do not depend on how many additions are
// fused. So outputs depend only on which norms are claimed.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "provider/epilogue.h"

namespace ortolan::provider {

struct SumNorm {
  Norm norm;
  std::vector<Value> operands;     // up to kMostSumOperands values, added from left to right
  std::vector<const Node*> nodes;  // the additions and the norm
  Value y = nullptr;

  // Return a text such as "384 numbers, with 2 additions in front".
  std::string Described() const;
};

// Return nullopt if the node is not supported. The graph must be in its original view (Graph::See), so QDQ pairs before
// and after the norm stay. taken: nodes of other groups.
std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& node, const std::set<const Node*>& taken);

}  // namespace ortolan::provider
