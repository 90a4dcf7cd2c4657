// ortolan._native: the pattern rules of ops/match for onnx-ir graphs. graph_passes/find/graph.py hands over a graph's
// skeleton in one call; constants are read when a rule asks for them. Values and nodes are their indices in Python.
#include <utility>

#include "arrays.h"
#include "match/attention.h"
#include "match/dimensions.h"
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
  // Rules trust the shape. Types of less than a byte are packed.
  const bool packed = constant.type == ElementType::kUint4 || constant.type == ElementType::kInt4;
  const int64_t bytes = buffer.size * buffer.itemsize;
  Require(bytes == (packed ? (constant.Count() + 1) / 2 : constant.Count() * match::BytesOf(constant.type)),
          "constant ", name, " has ", bytes, " bytes, which does not fit its shape");
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
// first. nodes: tuples (name, domain, type, attributes, tensor attributes, subgraphs, inputs, outputs, implicit inputs).
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
      match::Graph::NewNode node{given[0].cast<std::string>(), given[1].cast<std::string>(), given[2].cast<std::string>(),
                                 {}, {}, made->All(given[6]), made->All(given[7]), made->All(given[8])};
      for (const auto& [name, value] : given[3].cast<py::dict>())
        node.attributes.emplace(name.cast<std::string>(), AttributeFrom(value));
      for (const auto& [name, tensor] : given[4].cast<py::dict>())
        node.attributes.emplace(name.cast<std::string>(), ConstantFrom(tensor, name.cast<std::string>()));
      for (const auto& [name, subgraph] : given[5].cast<py::dict>()) {
        const size_t index = subgraph.cast<size_t>();
        Require(index > i, "subgraph ", index, " of a node in graph ", i, ", expected a higher number");
        node.subgraphs.emplace(name.cast<std::string>(), made->graphs.at(index));
      }
      graph.AddNode(std::move(node));
    }
    graph.SetOutputs(made->All(parts[1]));
  }
  for (const auto& graph : made->graphs) graph->Finish();
  return made;
}

// A sum of dimensions: terms (dimension, factor), plus a number.
struct PySum {
  py::tuple terms;
  int64_t number;
  bool operator==(const PySum& other) const { return number == other.number && terms.equal(other.terms); }
};

// Dimensions with results for Python: an integer, a name, (value, axis) of an unknown dimension, or a Sum.
class PyDimensions {
 public:
  explicit PyDimensions(std::shared_ptr<PyGraph> graph) : graph_(std::move(graph)), dims_(graph_->main()) {}

  py::object Shape(int64_t value) const {
    const auto shape = dims_.ShapeOf(graph_->At(value));
    return shape ? Tuple(*shape, [this](const match::Dim& dim) { return Object(dim); }) : py::none();
  }
  py::object Elements(int64_t value) const {
    const auto elements = dims_.ElementsOf(graph_->At(value));
    return elements ? Tuple(*elements, [this](const match::Element& element) { return Object(element); }) : py::none();
  }
  std::optional<double> Number(int64_t value) const { return dims_.NumberOf(graph_->At(value)); }
  int32_t Type(int64_t value) const { return static_cast<int32_t>(dims_.TypeOf(graph_->At(value))); }
  py::object ReshapeTarget(size_t node) const {
    const auto target = dims_.ReshapeTarget(graph_->NodeAt(node));
    const auto object = [this](const std::optional<match::Dim>& dim) { return dim ? Object(*dim) : py::none(); };
    return target ? Tuple(*target, object) : py::none();
  }
  py::list Attentions(bool cached) const {
    py::list found;
    for (const match::FoundAttention& one : cached ? FindCachedAttentions(dims_) : FindAttentions(dims_))
      found.append(std::visit([this](const auto& match) { return Object(match); }, one));
    return found;
  }

 private:
  template <typename List, typename Function>
  static py::object Tuple(const List& list, const Function& function) {
    py::tuple tuple(list.size());
    for (size_t i = 0; i < list.size(); ++i) tuple[i] = function(list[i]);
    return tuple;
  }
  py::object Symbol(uint32_t symbol) const {
    const match::Symbols::Symbol& found = dims_.symbols()[symbol];
    if (found.value == nullptr) return py::str(found.name);
    return py::make_tuple(graph_->IndexOf(found.value), found.axis);
  }
  py::object Object(const match::Dim& dim) const {
    if (const auto number = dim.Number()) return py::int_(*number);
    if (const auto symbol = dim.Symbol()) return Symbol(*symbol);
    const auto term = [this](const auto& part) { return py::make_tuple(Symbol(part.first), part.second); };
    return py::cast(PySum{Tuple(dim.terms(), term), dim.number()});
  }
  py::object Object(const match::Element& element) const {
    if (const match::Dim* dim = element.AsDim()) return Object(*dim);
    if (const auto flag = element.AsBool()) return py::bool_(*flag);
    return element.IsReal() ? py::object(py::float_(*element.AsNumber())) : py::none();
  }
  py::object Object(const match::Mask& mask) const {
    return py::make_tuple(graph_->IndexOf(mask.value), mask.fill, mask.hides, mask.scale, mask.heads, mask.windows);
  }
  static py::object Object(const match::Node* node) { return py::int_(node->index()); }
  static py::object Object(const match::NotAttention& refused) {
    return py::make_tuple(refused.node->index(), refused.reason.Text(), refused.cached);
  }
  py::object Object(const match::Attention& match) const {
    const auto object = [this](const auto& one) { return Object(one); };
    const auto index = [this](Value value) { return graph_->IndexOf(value); };
    py::dict found;
    found["node"] = match.node->index();
    found["inputs"] = Tuple(match.inputs, index);
    py::list layouts;
    for (const match::Layout layout : match.layouts) layouts.append(match::kLayoutNames[static_cast<int>(layout)]);
    layouts.append(match::kLayoutNames[static_cast<int>(match.output_layout)]);
    found["layouts"] = layouts;
    found["heads"] = match.heads;
    found["kv_heads"] = match.kv_heads;
    found["head_dim"] = match.head_dim;
    found["scale"] = match.scale;
    found["masks"] = Tuple(match.masks, object);
    found["causal"] = match.causal;
    found["zero_hidden_rows"] = match.zero_hidden_rows;
    found["output"] = index(match.output);
    found["products"] = Tuple(match.products, object);
    found["nodes"] = Tuple(match.nodes, object);
    if (!match.cache) return found;
    const match::KvCache& cache = *match.cache;
    py::dict values;
    values["past_key"] = index(cache.past_key);
    values["past_value"] = index(cache.past_value);
    values["present_key"] = index(cache.present_key);
    values["present_value"] = index(cache.present_value);
    values["lengths"] = index(cache.lengths);
    values["cos"] = index(cache.cos);
    values["sin"] = index(cache.sin);
    found["cache"] = values;
    found["interleaved"] = cache.interleaved;
    return found;
  }

  std::shared_ptr<PyGraph> graph_;
  match::Dimensions dims_;
};

}  // namespace

void BindMatch(py::module_& module) {
  py::class_<PyGraph, std::shared_ptr<PyGraph>>(module, "Graph", "A model graph for pattern rules (ops/match/graph.h).")
      .def(py::init(&MakeGraph), py::arg("values"), py::arg("graphs"), py::arg("opset"), py::arg("read"));
  py::class_<PySum>(module, "Sum", "A sum of symbolic dimensions with factors, and a number.")
      .def_readonly("terms", &PySum::terms)
      .def_readonly("number", &PySum::number)
      .def("__eq__", [](const PySum& sum, const PySum& other) { return sum == other; }, py::is_operator())
      .def("__hash__", [](const PySum& sum) { return py::hash(py::make_tuple(sum.terms, sum.number)); })
      .def("__repr__", [](const PySum& sum) { return py::str("Sum({}, {})").format(sum.terms, sum.number); });
  py::class_<PyDimensions>(module, "Dimensions", "Symbolic shapes of a graph's values (ops/match/dimensions.h).")
      .def(py::init<std::shared_ptr<PyGraph>>(), py::arg("graph"))
      .def("shape", &PyDimensions::Shape, py::arg("value"))
      .def("elements", &PyDimensions::Elements, py::arg("value"))
      .def("number", &PyDimensions::Number, py::arg("value"))
      .def("dtype", &PyDimensions::Type, py::arg("value"))
      .def("reshape_target", &PyDimensions::ReshapeTarget, py::arg("node"))
      .def("attentions", &PyDimensions::Attentions, py::arg("cached"));
}

}  // namespace ortolan
