// Decides whether a value of a graph can be negative. If not, quantizing it to a range that begins at 0 clips nothing,
// so the range does not replace a Relu (qdq_pairs.h). The rules are those of graph_passes/find/qdq_pairs.py.
#pragma once

#include <functional>

#include "provider/ort_graph.h"

namespace ortolan::provider {

// The float input of the QDQ pair whose output is a given value.
struct Unrounded {
  Value floats = nullptr;       // null: unknown
  bool begins_at_zero = false;  // whether the pair's range begins at 0
};
using FindUnrounded = std::function<std::optional<Unrounded>(Value)>;

// Return whether no element of the value is negative, or the value is a mask, computed element by element from integers
// and constants.
bool IsNeverNegative(const Graph& graph, Value value, const FindUnrounded& find_unrounded);

}  // namespace ortolan::provider
