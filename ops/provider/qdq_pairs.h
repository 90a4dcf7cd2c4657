// QDQ pairs of models with fixed ranges, as quantize_static writes them between operators:
//
//     floats -> QuantizeLinear -> codes -> one or more DequantizeLinear, or layers that read the codes
//
// The codes may also be the output of such a layer. Our layers quantize their inputs row by row, so these pairs are
// removed: the consumers of a DequantizeLinear see the floats before the pair. A range that begins at 0 remains as
// bounds, because it may replace a Relu that ONNX Runtime's quantizer has removed.
//
// The rules are those of graph_passes/find/qdq_pairs.py and stored_int8.py. The pass removes all pairs of a
// model. Here only pairs inside one group are removed, because Compile sees nothing else; other pairs stay. Consumers
// outside the group get the floats from the group.
#pragma once

#include <deque>
#include <string>
#include <unordered_map>
#include <vector>

#include "provider/graph.h"

namespace ortolan::provider {

// The number q stands for scale (q - zero_point).
struct FixedRange {
  float scale = 0;
  int zero_point = 0;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;  // of q

  bool operator==(const FixedRange&) const = default;
  bool BeginsAtZero() const;
};

struct Bounds {
  float least = 0;
  float most = 0;
};

struct QdqPair {
  // A consumer of the output of a DequantizeLinear, or of the codes.
  struct Reader {
    Graph::Use use;
    const Node* end;  // null: a layer that takes the numbers
  };
  enum class State {
    kGone,     // its floats replace the outputs of its ends
    kClipped,  // the floats within bounds
    kStays,
  };

  const Node* maker = nullptr;    // of the numbers: QuantizeLinear, or a layer
  Value floats = nullptr;         // in front of the QuantizeLinear; null: a layer makes numbers
  std::vector<const Node*> ends;  // DequantizeLinear
  std::vector<const Node*> last;  // ends whose floats are outputs of the graph
  std::vector<Reader> readers;
  bool is_alone = false;  // it has one end, and nothing else reads its source
  FixedRange range;
  State state = State::kGone;
  std::string reason;  // why it stays

  Bounds RangeBounds() const;
  // What is rounded: the floats, or of a layer the numbers.
  Value Source() const { return floats != nullptr ? floats : maker->Output(0); }
};

// The range that these inputs of a node say; none: it is not one of 8 bits and constant numbers above 0.
// kind: of the numbers, if there is no zero point.
std::optional<FixedRange> RangeAt(const Graph& graph, const Node& node, size_t scale, size_t zero_point,
                                  ONNXTensorElementDataType kind);

struct Claims;

// Whether a range that begins at 0 cuts negative values off, by the name of the value that is quantized to it. What
// shows that no value is negative may be in front of a group, where Compile does not see it: so a session keeps this
// from Claim to Compile.
using ClippedRanges = std::unordered_map<std::string, bool>;

class QdqPairs {
 public:
  // is_group: the graph is one group's, which Compile sees.
  QdqPairs(const Graph& graph, ClippedRanges& clipped_ranges, bool is_group);
  QdqPairs(const QdqPairs&) = delete;
  QdqPairs& operator=(const QdqPairs&) = delete;

  // The graph without removed pairs.
  View Seen() const;
  // Of what a node reads, as the model has it; null: none.
  const QdqPair* Of(Value stored) const;
  const QdqPair* MadeBy(const Node& layer) const;
  // Gives each rounding between nodes of a group to that group. False: some cannot be anyone's, stay from now on, and
  // the groups are to be found anew.
  bool Place(const Graph& graph, Claims& claims);

 private:
  struct Folded {  // a constant behind DequantizeLinear
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

  std::deque<QdqPair> qdq_pairs_;  // in the order of the graph
  std::deque<Folded> folded_;
  std::unordered_map<Value, const QdqPair*> by_value_;  // numbers, and what their ends make
  std::unordered_map<const Node*, const QdqPair*> by_maker_;
};

}  // namespace ortolan::provider
