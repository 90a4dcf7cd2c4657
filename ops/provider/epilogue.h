// The operators that are computed with a linear layer or a LayerNormalization: match/epilogue.h and norm.h find them.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <vector>

#include "match/epilogue.h"
#include "provider/layer.h"

namespace ortolan::provider {

struct Norm {
  const Node* node = nullptr;       // computes the result
  std::vector<float> weight, bias;  // [n]
  float epsilon = 0;
};

Norm ReadNorm(const Graph& graph, const match::Norm& norm);

// Move the addition of a constant [n] to the layer's output into the layer, unless it already has a bias.
void TakeBias(const Graph& graph, Layer& layer);

// A LayerNormalization that is not fused with a preceding linear layer, such as that of the embeddings, together with
// the additions before it. It is computed as AddLayerNorm, whose results have the same bits on every CPU.
//
// As in pass fuse_norm (graph_passes/passes/fuse_norm.py), the bits of a sum do not depend on how many additions are
// fused. So outputs depend only on which norms are claimed.
struct SumNorm {
  Norm norm;
  std::vector<Value> operands;     // up to kMostSumOperands values, added from left to right
  std::vector<const Node*> nodes;  // the norm and the additions
  Value y = nullptr;

  // Return a text such as "384 numbers, with 2 additions in front".
  std::string Described() const;
};

// Return the norm that begins at a node. The graph must be in its original view (Graph::See), so QDQ pairs before and
// after the norm stay. taken: nodes of other groups.
std::optional<SumNorm> FindSumNorm(const Graph& graph, const Node& node, const std::set<const Node*>& taken);

}  // namespace ortolan::provider
