// The graph of ortolan._native: match_bindings.cc makes it, the bindings of all pattern rules read it.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "arrays.h"
#include "match/graph.h"

namespace ortolan {

using match::Value;

// A graph with its subgraphs. All values have one numbering, in the order in which Python lists them.
struct PyGraph {
  std::vector<std::shared_ptr<match::Graph>> graphs;  // the main graph and all subgraphs
  std::vector<Value> values;
  std::unordered_map<Value, int64_t> indices;
  std::unordered_map<int64_t, match::Constant> kept;
  py::object read;

  const match::Graph& main() const { return *graphs.front(); }
  Value At(int64_t index) const {
    if (index == -1) return nullptr;
    Require(index >= 0 && index < static_cast<int64_t>(values.size()), "value ", index, " of ", values.size());
    return values[index];
  }
  std::vector<Value> All(py::handle list) const {
    std::vector<Value> found;
    for (py::handle index : list) found.push_back(At(index.cast<int64_t>()));
    return found;
  }
  py::object IndexOf(Value value) const { return value == nullptr ? py::none() : py::object(py::int_(indices.at(value))); }
  const match::Node& NodeAt(size_t index) const {
    Require(index < main().nodes().size(), "node ", index, " of ", main().nodes().size());
    return main().nodes()[index];
  }
};

}  // namespace ortolan
