// ortolan._native: the rules for what surrounds linear layers: epilogues, norms, QDQ pairs. Used by
// graph_passes/find/epilogue.py and qdq_pairs.py.
#include "match/dimensions.h"
#include "match/epilogue.h"
#include "match/halves.h"
#include "match/norm.h"
#include "match/ranges.h"
#include "match_graph.h"

namespace ortolan {
namespace {

py::list Objects(const PyGraph& graph, const std::vector<const match::Node*>& nodes) {
  py::list objects;
  for (const match::Node* const node : nodes) objects.append(graph.nodes.at(node));
  return objects;
}

py::tuple Object(const PyGraph& graph, const match::Norm& norm) {
  return py::make_tuple(graph.ObjectOf(norm.weight), graph.ObjectOf(norm.bias), norm.epsilon,
                        Objects(graph, norm.nodes));
}

py::tuple FindEpilogue(const PyGraph& graph, const py::object& output, const py::list& factors, int64_t columns,
                       const py::function& may_take) {
  std::vector<Value> values;
  for (const py::handle factor : factors) {
    if (const Value value = graph.ValueOf(factor)) values.push_back(value);
  }
  const match::Epilogue found =
      match::FindEpilogue(graph.main(), graph.ValueOf(output), values, columns,
                          [&](const match::Node& node) { return may_take(graph.nodes.at(&node)).cast<bool>(); });
  py::object residual = py::none();
  if (found.sum != nullptr)
    residual = py::make_tuple(graph.nodes.at(found.sum), found.sum->Input(0) == found.residual ? 0 : 1);
  return py::make_tuple(static_cast<int64_t>(found.activation), graph.ObjectOf(found.factor), residual,
                        found.norm ? py::object(Object(graph, *found.norm)) : py::none(), Objects(graph, found.nodes));
}

py::object FindHalves(const PyGraph& graph, const py::object& value, int64_t columns) {
  const std::optional<match::Halves> found = match::FindHalves(graph.main(), graph.ValueOf(value), columns);
  if (!found) return py::none();
  return py::make_tuple(graph.ObjectOf(found->values[0]), graph.ObjectOf(found->values[1]),
                        Objects(graph, found->nodes));
}

py::list FindNorms(const PyGraph& graph) {
  const match::Dimensions dims(graph.main());
  const auto columns_of = [&](Value value) {
    const std::optional<match::DimShape> shape = dims.ShapeOf(value);
    return shape && !shape->empty() ? shape->back().Number() : std::nullopt;
  };
  py::list norms;
  for (const match::Node& node : graph.main().nodes()) {
    const auto found = FindSumNorm(graph.main(), node, columns_of, [](const match::Node&) { return true; });
    if (!found || graph.main().ConstantOf(found->norm.weight)->type != match::ElementType::kFloat) continue;
    py::list operands;
    for (const Value operand : found->operands) operands.append(graph.ObjectOf(operand));
    norms.append(py::make_tuple(Object(graph, found->norm), operands, Objects(graph, found->sums)));
  }
  return norms;
}

py::list FindQdqPairs(const PyGraph& graph) {
  py::list pairs;
  for (const match::Node& node : graph.main().nodes()) {
    if (!node.IsStandard("QuantizeLinear")) continue;
    try {
      const std::optional<match::QdqPair> pair = match::FindQdqPair(graph.main(), node);
      if (!pair) continue;
      if (!pair->layers.empty()) Refuse(match::ReasonCode::kCodesAreRead, Described(*pair->layers.front()));
      py::object bounds = py::none();
      if (pair->range.BeginsAtZero() && !IsNeverNegative(graph.main(), pair->floats)) {
        bounds = py::make_tuple(pair->range.FromZero().least, pair->range.FromZero().most);
      }
      pairs.append(py::make_tuple(graph.nodes.at(&node), py::none(), Objects(graph, pair->moves),
                                  Objects(graph, pair->ends), bounds));
    } catch (const match::RefusedError& refused) {
      pairs.append(py::make_tuple(graph.nodes.at(&node), refused.what(), py::list(), py::list(), py::none()));
    }
  }
  return pairs;
}

}  // namespace

void BindMatchEpilogue(py::module_& module) {
  module.def("find_epilogue", &FindEpilogue, py::arg("graph"), py::arg("output"), py::arg("factors"),
             py::arg("columns"), py::arg("may_take"),
             "Return activation, factor, residual (node, input), norm and nodes: ops/match/epilogue.h.");
  module.def("find_halves", &FindHalves, py::arg("graph"), py::arg("value"), py::arg("columns"),
             "Return the two halves of a value's columns and the nodes that split it, or None: ops/match/halves.h.");
  module.def(
      "find_norms", &FindNorms, py::arg("graph"),
      "Return each float32 norm (weight, bias, epsilon, nodes), the operands that it adds, and the additions, last one "
      "first: ops/match/norm.h.");
  module.def("find_qdq_pairs", &FindQdqPairs, py::arg("graph"),
             "Return for each QuantizeLinear of an activation: node, why it cannot be removed or None, nodes that move "
             "the codes, DequantizeLinear nodes, bounds to clip to or None: ops/match/ranges.h.");
}

}  // namespace ortolan
