// The graph of ortolan._native: match_bindings.cc makes it, the bindings of all pattern rules read it.
#pragma once

#include <memory>
#include <unordered_map>
#include <vector>

#include "arrays.h"
#include "match/graph.h"

namespace ortolan {

using match::Value;

// A graph with its subgraphs, and the Python objects of its values and nodes.
struct PyGraph {
  std::vector<std::shared_ptr<match::Graph>> graphs;  // the main graph first
  std::vector<Value> values;                          // of all graphs, in the order in which Python lists them
  std::unordered_map<PyObject*, Value> by_object;
  std::unordered_map<Value, py::object> objects;
  std::unordered_map<PyObject*, const match::Node*> nodes_by_object;
  std::unordered_map<const match::Node*, py::object> nodes;
  std::unordered_map<Value, match::Constant> kept;
  py::object read;

  const match::Graph& main() const { return *graphs.front(); }
  std::vector<Value> All(py::handle indices) const {
    std::vector<Value> found;
    for (py::handle one : indices) {
      const int64_t index = one.cast<int64_t>();
      Require(index >= -1 && index < static_cast<int64_t>(values.size()), "value ", index, " of ", values.size());
      found.push_back(index == -1 ? nullptr : values[index]);
    }
    return found;
  }
  // Return null for None, and for values that were not in the graph when it was handed over.
  Value ValueOf(py::handle object) const {
    const auto found = by_object.find(object.ptr());
    return found == by_object.end() ? nullptr : found->second;
  }
  py::object ObjectOf(Value value) const { return value == nullptr ? py::none() : objects.at(value); }
};

}  // namespace ortolan
