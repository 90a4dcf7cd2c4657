// A linear layer as a model has it, Y = X W + bias: one node, or several.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "matmul/block_int8_weight.h"
#include "matmul/float_weight.h"
#include "matmul/int8_weight.h"
#include "matmul/nbits_weight.h"
#include "provider/graph.h"
#include "provider/qdq_pairs.h"

namespace ortolan::provider {

// What layers of floats become.
enum class Precision { kFloat32, kBf16, kInt8 };  // kFloat32: they stay as they are

struct LayerRules {
  double least_zero_blocks = 0.0;  // of layers that store int8, their share (IsBlockSparse); above 1: none is taken
  Precision precision = Precision::kFloat32;
  std::string why_no_cached_attention;  // is taken; empty: it is
};

struct RoundedWeight : FloatWeight {
  Precision precision = Precision::kBf16;  // another one than kFloat32
};

struct BlockInt8Weight : Int8Weight {};  // IsBlockSparse

using StoredWeight = std::variant<NBitsWeight, Int8Weight, BlockInt8Weight, RoundedWeight>;

struct Layer {
  std::vector<const Node*> nodes;  // the first has the weight, the last makes Y; layers may share those in between
  std::vector<const Node*> weight_nodes;  // what makes floats of the weight's numbers
  // What makes 8-bit numbers of X for this layer, and perhaps for others: a layer rounds X itself.
  const Node* quantize = nullptr;
  Value x = nullptr;  // float
  Value y = nullptr;  // float
  StoredWeight weight;
  std::vector<float> bias;         // [n], or none
  bool is_static = false;          // of a model that may have fixed ranges: roundings may be its group's
  std::optional<Bounds> x_bounds;  // that X must be cut off at

  int64_t Inputs() const;
  int64_t Columns() const;
  std::string Described() const { return nodes.front()->Described(); }
  // "576 x 1536, 4 bits in blocks of 32"
  std::string Numbers() const;
};

// Return nothing if the node is not a known kind of layer. Throws UnfitError, with the reason, for unsupported nodes of
// a known kind. The stored weights belong to the graph.
std::optional<Layer> ReadLayer(const Graph& graph, const QdqPairs& roundings, const Node& node,
                               const LayerRules& rules);

}  // namespace ortolan::provider
