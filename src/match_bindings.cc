// ortolan._native: the pattern rules of ops/match for onnx-ir graphs. graph_passes/find/graph.py hands over a graph's
// skeleton in one call; constants are read when a rule asks for them. Values and nodes are their indices in Python.
#include <utility>

#include "arrays.h"
#include "match/attention.h"
#include "match/dimensions.h"
#include "match/graph.h"
#include "match_graph.h"

namespace ortolan {
namespace {

using match::ElementType;
using match::ValueInfo;

constexpr int64_t kMostKeptBytes = 1024;  // constants up to this size are read from Python only once

// Attributes of the graph module's tuples: flags of a value.
enum : int64_t { kInput = 1, kOutput = 2, kConstant = 4 };

// Return a tensor (element type, shape, array or bytes); it keeps the Python object alive.
match::Constant ConstantFrom(py::handle given, const std::string& name) {
  const py::tuple tensor = given.cast<py::tuple>();
  const py::buffer_info buffer = tensor[2].cast<py::buffer>().request();
  auto* object = new py::object(tensor[2]);
  std::shared_ptr<const void> owner(object, [](const void* kept) {
    const py::gil_scoped_acquire gil;
    delete static_cast<const py::object*>(kept);
  });
  match::Constant constant{name, static_cast<ElementType>(tensor[0].cast<int32_t>()),
                           tensor[1].cast<std::vector<int64_t>>(), buffer.ptr, std::move(owner)};
  const int64_t bytes = buffer.size * buffer.itemsize;  // 4-bit types are packed, others have at least a byte
  Require(bytes >= (constant.Count() + 1) / 2, "constant ", name, " has ", bytes, " bytes, too few for its shape");
  return constant;
}

std::optional<match::Constant> Read(PyGraph& graph, const ValueInfo& value) {
  const py::gil_scoped_acquire gil;
  const int64_t index = graph.indices.at(&value);
  if (const auto kept = graph.kept.find(index); kept != graph.kept.end()) return kept->second;
  const py::object tensor = graph.read(index);
  if (tensor.is_none()) return std::nullopt;
  match::Constant constant = ConstantFrom(tensor, value.name);
  if (constant.Count() <= kMostKeptBytes / 8) graph.kept.emplace(index, constant);
  return constant;
}

match::Attribute AttributeFrom(py::handle value) {
  if (PyLong_Check(value.ptr())) return value.cast<int64_t>();
  if (PyFloat_Check(value.ptr())) return value.cast<float>();
  if (PyUnicode_Check(value.ptr())) return value.cast<std::string>();
  const py::sequence list = value.cast<py::sequence>();
  if (list.size() > 0 && PyFloat_Check(py::object(list[0]).ptr())) return value.cast<std::vector<float>>();
  return value.cast<std::vector<int64_t>>();
}

ValueInfo ValueFrom(const py::tuple& given) {
  ValueInfo value;
  value.name = given[1].cast<std::string>();
  value.type = static_cast<ElementType>(given[2].cast<int32_t>());
  const int64_t flags = given[4].cast<int64_t>();
  value.is_input = (flags & kInput) != 0;
  value.is_output = (flags & kOutput) != 0;
  value.is_constant = (flags & kConstant) != 0;
  if (given[3].is_none()) return value;
  if (value.is_constant) value.constant_shape.emplace();
  value.shape.emplace();
  for (py::handle dim : given[3]) {
    match::DeclaredSize size;
    if (PyLong_Check(dim.ptr())) size.size = std::max<int64_t>(-1, dim.cast<int64_t>());
    if (PyUnicode_Check(dim.ptr())) size.name = dim.cast<std::string>();
    if (value.is_constant) value.constant_shape->push_back(size.size);
    value.shape->push_back(std::move(size));
  }
  return value;
}

// values: tuples (graph, name, element type, shape or None, flags). graphs: tuples (nodes, outputs), the main graph
// first. nodes: tuples (name, domain, type, attributes, tensor attributes, subgraphs, inputs, outputs, implicit
// inputs).
std::shared_ptr<PyGraph> MakeGraph(const py::list& values, const py::list& graphs, int64_t opset, py::object read) {
  auto made = std::make_shared<PyGraph>();
  made->read = std::move(read);
  for (size_t i = 0; i < graphs.size(); ++i) {
    made->graphs.push_back(
        std::make_shared<match::Graph>([graph = made.get()](const ValueInfo& value) { return Read(*graph, value); }));
    made->graphs.back()->SetOpset(opset);
  }
  for (py::handle one : values) {
    const py::tuple value = one.cast<py::tuple>();
    const Value added = &made->graphs.at(value[0].cast<size_t>())->AddValue(ValueFrom(value));
    made->indices.emplace(added, made->values.size());
    made->values.push_back(added);
  }
  for (size_t i = 0; i < graphs.size(); ++i) {
    match::Graph& graph = *made->graphs[i];
    const py::tuple parts = graphs[i].cast<py::tuple>();
    for (py::handle one : parts[0]) {
      const py::tuple given = one.cast<py::tuple>();
      match::Attributes attributes;
      for (const auto& [name, value] : given[3].cast<py::dict>())
        attributes.emplace(name.cast<std::string>(), AttributeFrom(value));
      for (const auto& [name, tensor] : given[4].cast<py::dict>())
        attributes.emplace(name.cast<std::string>(), ConstantFrom(tensor, name.cast<std::string>()));
      match::Subgraphs subgraphs;
      for (const auto& [name, subgraph] : given[5].cast<py::dict>()) {
        const size_t index = subgraph.cast<size_t>();
        Require(index > i, "subgraph ", index, " of a node in graph ", i, ", expected a higher number");
        subgraphs.emplace(name.cast<std::string>(), made->graphs.at(index));
      }
      graph.AddNode(match::Node(given[0].cast<std::string>(), given[1].cast<std::string>(),
                                given[2].cast<std::string>(), std::move(attributes), made->All(given[6]),
                                made->All(given[7]), made->All(given[8]), std::move(subgraphs)));
    }
    graph.SetOutputs(made->All(parts[1]));
  }
  for (const auto& graph : made->graphs) graph->Finish();
  return made;
}

}  // namespace

void BindMatch(py::module_& module) {
  py::class_<PyGraph, std::shared_ptr<PyGraph>>(module, "Graph", "A model graph for pattern rules (ops/match/graph.h).")
      .def(py::init(&MakeGraph), py::arg("values"), py::arg("graphs"), py::arg("opset"), py::arg("read"));
}

}  // namespace ortolan
