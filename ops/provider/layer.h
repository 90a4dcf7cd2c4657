// A linear layer of a model, Y = X W + bias: one or more nodes.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "match/attention.h"
#include "matmul/block_int8_weight.h"
#include "matmul/float_weight.h"
#include "matmul/int8_weight.h"
#include "matmul/nbits_weight.h"
#include "provider/claim_policy.h"
#include "provider/ort_graph.h"
#include "provider/qdq_pairs.h"

namespace ortolan::provider {

// The precision in which layers with float weights are computed.
enum class Precision { kFloat32, kBf16, kInt8 };  // kFloat32: left to ONNX Runtime

struct LayerRules {
  Precision precision = Precision::kFloat32;
  ClaimPolicy policy;
};

struct RoundedWeight : FloatWeight {
  Precision precision = Precision::kBf16;  // never kFloat32
};

struct BlockInt8Weight : Int8Weight {};  // chosen if IsBlockSparse

using StoredWeight = std::variant<NBitsWeight, Int8Weight, BlockInt8Weight, RoundedWeight>;

struct Layer {
  std::vector<const Node*> nodes;  // the first reads the weight, the last computes Y; layers may share nodes in between
  std::vector<const Node*> weight_nodes;  // nodes that dequantize the weight
  // The node that quantizes X, which other layers may share. May be null. The layer's kernel quantizes X
  // instead.
  const Node* quantize = nullptr;
  Value x = nullptr;  // float
  Value y = nullptr;  // float
  StoredWeight weight;
  std::shared_ptr<const std::vector<uint8_t>> own_codes;  // owns the integers of the weight; null if the graph does
  std::vector<float> bias;                                // [n], or empty
  bool is_static = false;          // from a model with fixed ranges: a group of such layers may include QDQ pairs
  std::optional<Bounds> x_bounds;  // bounds that clip X
  bool is_inside = false;          // Attention or QAttention: the node also computes the attention

  int64_t Inputs() const;
  int64_t Columns() const;
  std::string Described() const { return nodes.front()->Described(); }
  // Return a text such as "576 x 1536, 4 bits in blocks of 32".
  std::string Numbers() const;
};

// Return nullopt if the node is not a known kind of layer. Throws UnfitError, with the reason, for unsupported nodes of
// a known kind. The graph owns stored weights that the layer does not own.
std::optional<Layer> ReadLayer(const Graph& graph, const QdqPairs& roundings, const Node& node,
                               const LayerRules& rules);
// Return the query, key and value layers that an attention contains; none if they stay float. Throws UnfitError.
std::vector<Layer> ReadPackedLayers(const Graph& graph, const QdqPairs& roundings, const match::Attention& attention,
                                    const LayerRules& rules);

}  // namespace ortolan::provider
