// A LayerNormalization that does not end a layer, such as that of the embeddings before the first layer, with the
// additions before it whose sums have no other consumer: AddLayerNorm, which has the same bits on every CPU.
//
// As in pass fuse_norm (graph_passes/passes/fuse_norm.py), the bits of a sum do not depend on which additions belong to
// it. So answers depend only on which norms are claimed.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "provider/epilogue.h"

namespace ortolan::provider {

struct SumNorm {
  Norm norm;
  std::vector<Value> operands;     // up to kMostSumOperands; they are added up from the left
  std::vector<const Node*> nodes;  // the additions and the norm
  Value y = nullptr;

  // "384 numbers, with 2 additions in front"
  std::string Described() const;
};

// Return nothing if the node is not supported. The graph is seen without replacements (Graph::See), so QDQ pairs before
// and after stay. taken: nodes of other groups.
std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& node, const std::set<const Node*>& taken);

}  // namespace ortolan::provider
