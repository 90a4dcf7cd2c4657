// ortolan._native: linear layers found in an onnx-ir graph.
#include "match/linear.h"
#include "match/ranges.h"
#include "match_graph.h"

namespace ortolan {
namespace {

// A linear layer. Its properties are Python's nodes and values, as they were when the graph was handed over.
struct PyLinear {
  std::shared_ptr<PyGraph> graph;
  const match::Graph* part;  // with the layer's node
  match::Linear found;

  template <typename Element>
  static py::array_t<Element> Array(const std::vector<Element>& values) {
    return py::array_t<Element>(static_cast<py::ssize_t>(values.size()), values.data());
  }
};

py::list Linears(const std::shared_ptr<PyGraph>& graph) {
  py::list all;
  for (const auto& part : graph->graphs) {
    for (match::FoundLinear& one : FindLinears(*part)) {
      if (const auto* refused = std::get_if<match::NotLinear>(&one)) {
        all.append(py::make_tuple(graph->nodes.at(refused->node), refused->reason.Text(), refused->of_weight));
      } else {
        all.append(py::cast(PyLinear{graph, part.get(), std::get<match::Linear>(std::move(one))}));
      }
    }
  }
  return all;
}

}  // namespace

void BindMatchLinear(py::module_& module) {
  using match::LayerWeight;
  using match::Linear;
  py::class_<PyLinear> type(module, "Linear", "A linear layer and its weight as stored: ops/match/linear.h.");
  const auto add = [&](const char* name, auto get) { type.def_property_readonly(name, get); };
  const auto value = [&](const char* name, auto member) {
    add(name, [member](const PyLinear& l) { return l.graph->ObjectOf(l.found.*member); });
  };
  const auto weight_value = [&](const char* name, auto member) {
    add(name, [member](const PyLinear& l) { return l.graph->ObjectOf(l.found.weight.*member); });
  };
  const auto plain = [&](const char* name, auto member) {
    add(name, [member](const PyLinear& l) { return l.found.*member; });
  };
  const auto weight_plain = [&](const char* name, auto member) {
    add(name, [member](const PyLinear& l) { return l.found.weight.*member; });
  };
  const auto node = [&](const char* name, auto member) {
    add(name, [member](const PyLinear& l) {
      return l.found.*member == nullptr ? py::none() : l.graph->nodes.at(l.found.*member);
    });
  };
  node("node", &Linear::node);
  node("add", &Linear::add);
  node("quantize", &Linear::quantize);
  add("nodes", [](const PyLinear& l) {
    py::list nodes;
    for (const match::Node* const one : l.found.nodes) nodes.append(l.graph->nodes.at(one));
    return nodes;
  });
  value("x", &Linear::x);
  add("x_range", [](const PyLinear& l) -> py::object {
    const auto found = match::FindInputRange(*l.part, l.found.x);
    if (!found) return py::none();
    const match::FixedRange& range = found->range;
    const bool is_same_type = found->quantize != nullptr && range.floats == l.found.type;
    return py::make_tuple(range.scale, range.zero_point + (range.type == match::ElementType::kInt8 ? 128 : 0),
                          is_same_type ? l.graph->nodes.at(found->quantize) : py::none());
  });
  value("bias", &Linear::bias);
  value("x_scale", &Linear::x_scale);
  value("x_zero_point", &Linear::x_zero_point);
  value("y_scale", &Linear::y_scale);
  value("y_zero_point", &Linear::y_zero_point);
  plain("k", &Linear::k);
  plain("n", &Linear::n);
  plain("transposed", &Linear::transposed);
  plain("bias_in_steps", &Linear::bias_in_steps);
  add("dtype", [](const PyLinear& l) { return static_cast<int32_t>(l.found.type); });
  add("form", [](const PyLinear& l) { return match::kWeightForms[static_cast<size_t>(l.found.weight.form)]; });
  weight_value("weight", &LayerWeight::value);
  weight_value("codes", &LayerWeight::codes);
  weight_value("zero_points", &LayerWeight::zero_points);
  add("scales", [](const PyLinear& l) { return l.graph->ObjectOf(l.found.weight.scales.at(0)); });
  weight_plain("codes_transposed", &LayerWeight::transposed);
  weight_plain("bits", &LayerWeight::bits);
  weight_plain("block_size", &LayerWeight::block_size);
  add("why_not_kept", [](const PyLinear& l) {
    const auto& reason = l.found.weight.why_not_kept;
    return reason ? std::optional(reason->Text()) : std::nullopt;
  });
  type.def(
      "scales_of_columns",
      [](const PyLinear& l, bool divided) { return PyLinear::Array(ScalesOf(*l.part, l.found, divided)); },
      py::arg("divided") = true);
  type.def("zero_points_of_columns", [](const PyLinear& l) { return PyLinear::Array(ZeroPointsOf(*l.part, l.found)); });
  module.def("find_linears", &Linears, py::arg("graph"));
}

}  // namespace ortolan
