// Bindings of match/views.h for tests.
#include "match/views.h"
#include "testing.h"

namespace ortolan {
namespace {

using match::ElementType;

using Step = std::pair<std::string, std::vector<int64_t>>;  // "Reshape" and its target, or "Transpose" and its axes
using Sources = std::vector<std::vector<std::pair<int, int64_t>>>;

std::optional<std::pair<std::vector<int64_t>, Sources>> View(const std::vector<int64_t>& shape,
                                                             const std::vector<Step>& steps) {
  match::Graph graph([&](const match::ValueInfo& value) {
    const std::vector<int64_t>& numbers = steps[std::stoul(value.name)].second;
    const auto size = static_cast<int64_t>(numbers.size());
    return match::Constant{value.name, ElementType::kInt64, {size}, numbers.data(), nullptr};
  });
  const auto add = [&graph](const std::string& name, ElementType type) -> match::ValueInfo& {
    match::ValueInfo value;
    value.name = name;
    value.type = type;
    return graph.AddValue(std::move(value));
  };
  match::ValueInfo& x = add("x", ElementType::kFloat);
  x.is_input = true;
  x.shape.emplace();
  match::DimShape dims;
  for (const int64_t size : shape) {
    x.shape->push_back({size, ""});
    dims.emplace_back(size);
  }
  match::Value value = &x;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& [type, numbers] = steps[i];
    const match::Value out = &add("y" + std::to_string(i), ElementType::kFloat);
    std::vector<match::Value> inputs{value};
    match::Attributes attributes;
    if (type == "Transpose") {
      attributes.emplace("perm", numbers);
    } else {
      match::ValueInfo& target = add(std::to_string(i), ElementType::kInt64);
      target.is_constant = true;
      target.constant_shape = match::Shape{static_cast<int64_t>(numbers.size())};
      inputs.push_back(&target);
    }
    graph.AddNode({"", "", type, std::move(attributes), std::move(inputs), {out}});
    value = out;
  }
  graph.SetOutputs({value});
  graph.Finish();
  const match::Dimensions dimensions(graph);
  match::TensorView view(dims);
  for (const match::Node& node : graph.nodes())
    if (!view.Apply(node, dimensions)) return std::nullopt;
  std::pair<std::vector<int64_t>, Sources> found;
  for (size_t axis = 0; axis < view.rank(); ++axis) found.first.push_back(view.Size(axis).value_or(-1));
  for (const auto& axis : view.Sources()) {
    found.second.emplace_back();
    for (const auto& [source, stride] : axis) found.second.back().emplace_back(source, stride.number());
  }
  return found;
}

}  // namespace

void BindTensorView(py::module_& module) { module.def("tensor_view", &View, py::arg("shape"), py::arg("steps")); }

}  // namespace ortolan
