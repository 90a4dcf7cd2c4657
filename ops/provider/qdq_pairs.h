// QDQ pairs of models with fixed ranges, as quantize_static inserts them between operators:
//
//     floats -> QuantizeLinear -> codes -> one or more DequantizeLinear, or layers that read the codes
//
// The codes may also be the output of such a layer. Our layers quantize their inputs row by row, so these pairs are
// removed: the consumers of a DequantizeLinear see the floats before the pair. A range that begins at 0 remains as
// bounds, because it may replace a Relu that ONNX Runtime's quantizer has removed.
//
// match/ranges.h finds the pairs. The graph pass removes all pairs of a model. Here only pairs inside one group are
// removed, because Compile sees nothing else; other pairs stay. Consumers outside the group get the floats from the
// group.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "match/ranges.h"
#include "provider/ort_graph.h"

namespace ortolan::provider {

using match::Bounds;

struct QdqPair : match::QdqPair {
  // A consumer of the codes, or of a DequantizeLinear's output.
  struct Reader {
    Graph::Use use;
    const Node* end;  // the DequantizeLinear; null if the consumer is a layer that reads the codes
  };
  enum class State {
    kGone,     // removed: the floats replace the outputs of `ends`
    kClipped,  // removed: the floats, clipped to bounds, replace them
    kStays,
  };

  std::vector<const Node*> last;  // those of `ends` that compute outputs of the graph
  std::vector<Reader> readers;
  bool is_alone = false;  // it has one DequantizeLinear, and its source has no other consumer
  State state = State::kGone;
  std::string reason;  // why it stays in the graph

  // Return the value before the pair: the floats, or the codes that a layer outputs.
  Value Source() const { return floats != nullptr ? floats : maker->Output(0); }
};

struct Claims;

// Maps the name of a quantized value to whether its range, which begins at 0, clips negative values. The nodes that
// decide this may precede a group, and Compile sees only the group. So a session keeps this map from GetCapability to
// Compile.
using ClippedRanges = std::unordered_map<std::string, bool>;

class QdqPairs {
 public:
  // is_group: the graph has only the nodes of one group, as in Compile.
  QdqPairs(const Graph& graph, ClippedRanges& clipped_ranges, bool is_group);
  QdqPairs(const QdqPairs&) = delete;
  QdqPairs& operator=(const QdqPairs&) = delete;

  // Return the view of the graph without the removed pairs.
  View Seen() const;
  // Return the pair whose codes or dequantized floats a node of the original model reads; null for other values.
  const QdqPair* Of(Value stored) const;
  const QdqPair* MadeBy(const Node& layer) const;
  // Add each pair between nodes of one group to that group. Returns false if a pair fits no group: it then stays in the
  // graph, and the caller must search for groups again.
  bool Place(const Graph& graph, Claims& claims);

 private:
  struct Folded {  // a constant that passes through a DequantizeLinear
    const Node* node;
    const Node* reader;
    Constant constant;
    std::vector<float> values;
    bool is_seen = true;
  };

  void Find(const Graph& graph, const Node& maker);
  void Fold(const Graph& graph, const Node& node);
  void LookAbove(const Graph& graph, QdqPair& rounding, ClippedRanges& clipped_ranges, bool is_group) const;
  struct Groups;
  bool PlaceOne(const Graph& graph, const QdqPair& rounding, Groups& groups) const;
  bool PlaceInFront(const Graph& graph, const QdqPair& rounding, Groups& groups) const;
  bool PlaceBehind(const Graph& graph, const QdqPair& rounding, Groups& groups) const;
  bool IsRoundedAgain(const Graph& graph, const QdqPair& rounding, const Groups& groups) const;
  void LetStay(QdqPair& rounding) const;

  std::deque<QdqPair> qdq_pairs_;  // in graph order
  std::deque<Folded> folded_;
  std::unordered_map<Value, const QdqPair*>
      by_value_;  // by their codes and by the outputs of their DequantizeLinear nodes
  std::unordered_map<const Node*, const QdqPair*> by_maker_;
};

}  // namespace ortolan::provider
