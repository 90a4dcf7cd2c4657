// Which values of a graph are never below 0, as their operators show. A range that begins at 0 then cuts nothing off
// that a Relu would have (qdq_pairs.h). The rules are those of graph_passes/find/qdq_pairs.py.
#pragma once

#include <functional>

#include "provider/graph.h"

namespace ortolan::provider {

// What a DequantizeLinear's output was rounded from.
struct Unrounded {
  Value floats = nullptr;       // null: not known
  bool begins_at_zero = false;  // the range that it was rounded to
};
using FindUnrounded = std::function<std::optional<Unrounded>(Value)>;

// Whether no number of the value is below 0, or it is a mask: made of integers and constants, element by element.
bool IsNeverNegative(const Graph& graph, Value value, const FindUnrounded& find_unrounded);

}  // namespace ortolan::provider
