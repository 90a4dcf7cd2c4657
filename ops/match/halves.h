// Finds a Split or two Slices that split a value into the halves of its last axis, as gated linear units do.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "match/graph.h"

namespace ortolan::match {

struct Halves {
  std::array<Value, 2> values{};   // first half, second half
  std::vector<const Node*> nodes;  // the Split or the Slices, in graph order
};

// Return the halves of a value [..., columns] if it has no other consumer; nullopt otherwise.
std::optional<Halves> FindHalves(const Graph& graph, Value value, int64_t columns);

}  // namespace ortolan::match
