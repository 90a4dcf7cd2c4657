// ortolan._native: the pattern rules of ops/match for onnx-ir graphs. graph_passes/find/graph.py hands over a graph's
// skeleton in one call; constants are read when a rule asks for them.
#include <utility>

#include "arrays.h"
#include "match/attention.h"
#include "match/dimensions.h"
#include "match_graph.h"

namespace ortolan {
namespace {

using match::ElementType;
using match::ValueInfo;

constexpr int64_t kMostKept = 128;  // constants of at most this number of elements are read from Python only once

// Flags of a value.
enum : int64_t { kInput = 1, kOutput = 2, kConstant = 4, kDefault = 8 };

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

std::optional<match::Constant> Read(PyGraph& graph, Value value) {
  const py::gil_scoped_acquire gil;
  if (const auto kept = graph.kept.find(value); kept != graph.kept.end()) return kept->second;
  const py::object tensor = graph.read(graph.ObjectOf(value));
  if (tensor.is_none()) return std::nullopt;
  match::Constant constant = ConstantFrom(tensor, value->name);
  if (constant.Count() <= kMostKept) graph.kept.emplace(value, constant);
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
  value.name = given[2].cast<std::string>();
  value.type = static_cast<ElementType>(given[3].cast<int32_t>());
  const int64_t flags = given[5].cast<int64_t>();
  value.is_input = (flags & kInput) != 0;
  value.is_output = (flags & kOutput) != 0;
  value.is_constant = (flags & kConstant) != 0;
  value.is_default = (flags & kDefault) != 0;
  if (given[4].is_none()) return value;
  if (value.is_constant) value.constant_shape.emplace();
  value.shape.emplace();
  for (py::handle dim : given[4]) {
    match::DeclaredSize size;
    if (PyLong_Check(dim.ptr())) size.size = std::max<int64_t>(-1, dim.cast<int64_t>());
    if (PyUnicode_Check(dim.ptr())) size.name = dim.cast<std::string>();
    if (value.is_constant) value.constant_shape->push_back(size.size);
    value.shape->push_back(std::move(size));
  }
  return value;
}

match::Node NodeFrom(const PyGraph& graph, const py::tuple& given) {
  match::Attributes attributes;
  match::Subgraphs subgraphs;
  for (const auto& [name, value] : given[4].cast<py::dict>())
    attributes.emplace(name.cast<std::string>(), AttributeFrom(value));
  for (const auto& [name, tensor] : given[5].cast<py::dict>())
    attributes.emplace(name.cast<std::string>(), ConstantFrom(tensor, name.cast<std::string>()));
  for (const auto& [name, subgraph] : given[6].cast<py::dict>())
    subgraphs.emplace(name.cast<std::string>(), graph.graphs.at(subgraph.cast<size_t>()));
  return {given[1].cast<std::string>(), given[2].cast<std::string>(), given[3].cast<std::string>(),
          std::move(attributes),        graph.All(given[7]),          graph.All(given[8]),
          graph.All(given[9]),          std::move(subgraphs)};
}

// values: tuples (object, graph, name, element type, shape or None, flags). graphs: tuples (nodes, outputs), the main
// graph first, and each subgraph after the graph around it. nodes: tuples (object, name, domain, type, attributes,
// tensor attributes, subgraphs, inputs, outputs, implicit inputs). read: returns the tensor of a value, or None.
std::shared_ptr<PyGraph> MakeGraph(const py::list& values, const py::list& graphs, int64_t opset, py::object read) {
  auto made = std::make_shared<PyGraph>();
  made->read = std::move(read);
  for (size_t i = 0; i < graphs.size(); ++i) {
    made->graphs.push_back(
        std::make_shared<match::Graph>([graph = made.get()](const ValueInfo& value) { return Read(*graph, &value); }));
    made->graphs.back()->SetOpset(opset);
  }
  for (py::handle one : values) {
    const py::tuple given = one.cast<py::tuple>();
    const Value value = &made->graphs.at(given[1].cast<size_t>())->AddValue(ValueFrom(given));
    made->values.push_back(value);
    made->objects.emplace(value, given[0]);
    made->by_object.emplace(py::object(given[0]).ptr(), value);
  }
  for (size_t i = 0; i < graphs.size(); ++i) {
    match::Graph& graph = *made->graphs[i];
    const py::tuple parts = graphs[i].cast<py::tuple>();
    for (py::handle one : parts[0]) {
      const py::tuple given = one.cast<py::tuple>();
      const match::Node& node = graph.AddNode(NodeFrom(*made, given));
      made->nodes.emplace(&node, given[0]);
      made->nodes_by_object.emplace(py::object(given[0]).ptr(), &node);
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

  py::object Shape(py::handle value) const { return Optional(dims_.ShapeOf(graph_->ValueOf(value))); }
  py::object Elements(py::handle value) const { return Optional(dims_.ElementsOf(graph_->ValueOf(value))); }
  int32_t Type(py::handle value) const { return static_cast<int32_t>(dims_.TypeOf(graph_->ValueOf(value))); }
  std::optional<int64_t> HeadSize(py::handle value) const { return match::HeadSize(dims_, graph_->ValueOf(value)); }
  py::list Attentions(bool cached) const {
    py::list found;
    for (const match::FoundAttention& one : cached ? FindCachedAttentions(dims_) : FindAttentions(dims_))
      found.append(std::visit([this](const auto& match) { return Object(match); }, one));
    return found;
  }
  // Return the fields of FusedAttention for a node, or the reason why it cannot be read. The mask is its value.
  py::object Fused(py::handle object) const try {
    const auto node = graph_->nodes_by_object.find(object.ptr());
    Require(node != graph_->nodes_by_object.end(), "the node is not part of this graph");
    const match::FusedAttention match = match::ReadFused(dims_, *node->second, match::Executor::kOperator);
    const auto value = [this](Value one) { return one == nullptr ? py::object(py::none()) : Object(one); };
    py::dict found;
    found["widths"] = match.widths;
    found["heads"] = match.heads;
    found["scale"] = match.scale;
    found["causal"] = match.causal;
    found["mask"] = value(match.padding ? match.padding->value : nullptr);
    found["mask_rank"] = match.padding ? dims_.Rank(match.padding->value).value_or(0) : 0;
    found["fill"] = match.padding ? match.padding->fill.value_or(0) : 0;
    found["score_bias"] = value(match.score_bias);
    found["weight"] = value(match.weight);
    found["bias"] = value(match.bias);
    return found;
  } catch (const match::RefusedError& refused) {
    return py::str(refused.what());
  }
  std::vector<std::string> AttentionTexts() const { return match::AttentionTexts(dims_); }

 private:
  template <typename List>
  py::tuple Tuple(const List& list) const {
    py::tuple tuple(list.size());
    for (size_t i = 0; i < list.size(); ++i) tuple[i] = Object(list[i]);
    return tuple;
  }
  template <typename List>
  py::object Optional(const std::optional<List>& list) const {
    return list ? Tuple(*list) : py::object(py::none());
  }
  py::object Symbol(uint32_t symbol) const {
    const match::Symbols::Symbol& found = dims_.symbols()[symbol];
    if (found.value == nullptr) return py::str(found.name);
    return py::make_tuple(graph_->ObjectOf(found.value), found.axis);
  }
  py::object Object(const std::pair<uint32_t, int64_t>& term) const {
    return py::make_tuple(Symbol(term.first), term.second);
  }
  py::object Object(const match::Dim& dim) const {
    if (const auto number = dim.Number()) return py::int_(*number);
    if (const auto symbol = dim.Symbol()) return Symbol(*symbol);
    return py::cast(PySum{Tuple(dim.terms()), dim.number()});
  }
  py::object Object(const match::Element& element) const {
    if (const match::Dim* dim = element.AsDim()) return Object(*dim);
    if (const auto flag = element.AsBool()) return py::bool_(*flag);
    return element.IsReal() ? py::object(py::float_(*element.AsNumber())) : py::none();
  }
  py::object Object(const match::Mask& mask) const {
    return py::make_tuple(Object(mask.value), mask.fill, mask.hides, mask.scale, mask.heads, mask.windows);
  }
  py::object Object(Value value) const { return graph_->ObjectOf(value); }
  py::object Object(const match::Node* node) const { return graph_->nodes.at(node); }
  py::object Object(const match::NotAttention& refused) const {
    return py::make_tuple(Object(refused.node), refused.reason.Text(), refused.cached);
  }
  // Return the fields of Attention or CachedAttention in Python.
  py::object Object(const match::Attention& match) const {
    if (match.cache && match.cache->why_kept)
      return py::make_tuple(Object(match.node), match.cache->why_kept->Text(), true);
    py::dict found;
    const auto value = [&](const char* name, Value value) { found[name] = Object(value); };
    found["node"] = Object(match.node);
    value("query", match.inputs[0]);
    value("key", match.inputs[1]);
    value("value", match.inputs[2]);
    value("output", match.output);
    found["heads"] = match.heads;
    found["kv_heads"] = match.kv_heads;
    found["head_dim"] = match.head_dim;
    found["scale"] = match.scale;
    found["softcap"] = match.softcap;
    found["window"] = match.window;
    found["sinks"] = py::tuple(py::cast(match.sinks));
    found["masks"] = Tuple(match.masks);
    found["causal"] = match.causal;
    found["zero_hidden_rows"] = match.zero_hidden_rows;
    found["products"] = py::list(Tuple(match.products));
    found["nodes"] = py::set(Tuple(match.nodes));
    if (match.cache) {
      value("past_key", match.cache->past_key);
      value("past_value", match.cache->past_value);
      value("present_key", match.cache->present_key);
      value("present_value", match.cache->present_value);
      value("lengths", match.cache->lengths);
      value("cos", match.cache->cos);
      value("sin", match.cache->sin);
      found["interleaved"] = match.cache->interleaved;
    }
    py::dict layouts;
    const auto layout = [&](const char* name, match::Layout one) {
      if (one != match::Layout::kByRows) layouts[name] = match::kLayoutNames[static_cast<int>(one)];
    };
    layout("query", match.layouts[0]);
    layout("key", match.layouts[1]);
    layout("value", match.layouts[2]);
    layout("output", match.output_layout);
    found["layouts"] = layouts;
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
      .def(
          "__eq__", [](const PySum& sum, const PySum& other) { return sum == other; }, py::is_operator())
      .def("__hash__", [](const PySum& sum) { return py::hash(py::make_tuple(sum.terms, sum.number)); })
      .def("__repr__", [](const PySum& sum) { return py::str("Sum({}, {})").format(sum.terms, sum.number); });
  py::class_<PyDimensions>(module, "Dimensions", "Symbolic shapes of a graph's values (ops/match/dimensions.h).")
      .def(py::init<std::shared_ptr<PyGraph>>(), py::arg("graph"))
      .def("shape", &PyDimensions::Shape, py::arg("value"))
      .def("elements", &PyDimensions::Elements, py::arg("value"))
      .def("dtype", &PyDimensions::Type, py::arg("value"))
      .def("head_size", &PyDimensions::HeadSize, py::arg("past"))
      .def("fused_attention", &PyDimensions::Fused, py::arg("node"))
      .def("attentions", &PyDimensions::Attentions, py::arg("cached"))
      .def("attention_texts", &PyDimensions::AttentionTexts);
}

}  // namespace ortolan
