// LayerNormalization that is no layer's end, as that of the embeddings in front of the first layer, and the additions
// in front of it whose sums nothing else reads: AddLayerNorm, which has the same bits on every CPU.
//
// As pass fuse_norm does (graph_passes/passes/fuse_norm.py). A sum has the same bits whichever of the additions are
// part of it, so answers hang on which norms are taken alone.
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

// None: the node is none that is taken. The graph is seen as it is (Graph::See): roundings in front or behind stay.
// taken: nodes of other groups.
std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& node, const std::set<const Node*>& taken);

}  // namespace ortolan::provider
