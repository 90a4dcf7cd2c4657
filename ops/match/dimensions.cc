#include "match/dimensions.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "match/dimension_rules.h"

namespace ortolan::match {
namespace {

constexpr int kMostDepth = 16;  // limit for nested branches

// Return whether a tensor of this shape is a scalar or a vector of few elements.
bool IsShort(const Shape& shape) {
  return shape.empty() || (shape.size() == 1 && 0 <= shape[0] && shape[0] <= static_cast<int64_t>(kMostElements));
}

}  // namespace

Dimensions::Dimensions(const Graph& graph, const Dimensions* around)
    : graph_(graph),
      around_(around),
      depth_(around == nullptr ? 0 : around->depth_ + 1),
      symbols_(around == nullptr ? std::make_shared<Symbols>() : around->symbols_) {
  for (const Node& node : graph.nodes()) Visit(node);
}

void Dimensions::Visit(const Node& node) {
  match::Visit visit{*this, *symbols_, node};
  // A rule throws if an attribute has a wrong type: then only what the model declares is known.
  const auto checked = [](const auto& infer, auto missing) {
    try {
      return decltype(missing)(infer());
    } catch (const RefusedError&) {
      return missing;
    }
  };
  const bool is_known = node.IsStandard() || node.domain() == "com.microsoft" || node.domain() == "ai.ortolan";
  if (node.IsStandard("If") && depth_ < kMostDepth) visit.branches = BranchesOf(node);
  if (!graph_.IsConstantValue(node.Output(0))) {
    visit.elements = checked([&] { return InferElements(*this, node); }, MaybeElements());
  }
  for (size_t output = 0; output < node.outputs().size(); ++output) {
    const Value value = node.Output(output);
    if (value == nullptr) continue;
    MaybeShape shape;
    if (graph_.IsConstantValue(value)) shape = ShapeOf(value);
    if (!shape && is_known) shape = checked([&] { return InferShape(visit, output); }, MaybeShape());
    if (!shape) shape = Declared(value);
    for (size_t axis = 0; shape && axis < shape->size(); ++axis) {
      Dim& dim = (*shape)[axis];
      const bool is_declared = value->shape && value->shape->size() == shape->size() && (*value->shape)[axis].size >= 0;
      if (dim.number() < 0) dim = symbols_->Unknown(value, axis);
      if (is_declared && !dim.IsNumber() && !symbols_->IsName(dim)) dim = (*value->shape)[axis].size;
    }
    const ElementType type = is_known ? checked([&] { return InferType(visit, output); }, value->type) : value->type;
    if (type != ElementType::kUndefined) types_[value] = type;
    // Only scalars and vectors are shapes or dimensions.
    const bool is_flat = !shape || shape->size() < 2;
    if (output == 0 && is_flat && visit.elements && visit.elements->size() <= kMostElements) {
      elements_[value] = *visit.elements;
    }
    if (shape && shape->size() <= kMostAxes) shapes_[value] = std::move(*shape);
  }
}

std::vector<std::unique_ptr<Dimensions>> Dimensions::BranchesOf(const Node& node) const {
  const auto condition = ElementsOf(node.Input(0));
  const auto taken = condition && condition->size() == 1 ? (*condition)[0].AsBool() : std::nullopt;
  std::vector<std::unique_ptr<Dimensions>> branches;
  for (const bool is_then : {true, false}) {
    const auto found = node.subgraphs().find(is_then ? "then_branch" : "else_branch");
    if (taken.value_or(is_then) != is_then) continue;
    if (found == node.subgraphs().end() || found->second == nullptr) return {};
    branches.push_back(std::make_unique<Dimensions>(*found->second, this));
  }
  return branches;
}

std::optional<DimShape> Dimensions::Declared(Value value) const {
  if (!value->shape) return std::nullopt;
  DimShape shape;
  for (const DeclaredSize& declared : *value->shape) {
    const auto name = declared.size < 0 ? symbols_->Named(declared.name) : std::nullopt;
    shape.push_back(declared.size >= 0 ? Dim(declared.size) : name ? *name : symbols_->Unknown(value, shape.size()));
  }
  return shape;
}

std::optional<DimShape> Dimensions::ShapeOf(Value value) const {
  if (value == nullptr) return std::nullopt;
  if (const auto found = shapes_.find(value); found != shapes_.end()) return found->second;
  if (value->constant_shape) return DimShape(value->constant_shape->begin(), value->constant_shape->end());
  if (!value->is_constant && graph_.IsConstantValue(value)) {  // made by a view of the graph
    const auto tensor = graph_.ConstantOf(value);
    if (tensor) return DimShape(tensor->shape.begin(), tensor->shape.end());
  }
  return around_ == nullptr ? Declared(value) : around_->ShapeOf(value);
}

std::optional<size_t> Dimensions::Rank(Value value) const {
  const auto shape = ShapeOf(value);
  return shape ? std::optional(shape->size()) : std::nullopt;
}

std::optional<Elements> Dimensions::ElementsOf(Value value) const {
  if (value == nullptr) return std::nullopt;
  if (const auto found = elements_.find(value); found != elements_.end()) return found->second;
  if (!graph_.IsConstantValue(value)) return around_ == nullptr ? std::nullopt : around_->ElementsOf(value);
  if (value->constant_shape && !IsShort(*value->constant_shape)) return std::nullopt;
  const auto [found, is_new] = constants_.try_emplace(value);
  const auto tensor = is_new ? graph_.ConstantOf(value) : std::nullopt;
  const bool is_short = tensor && IsShort(tensor->shape) && (tensor->data != nullptr || tensor->Count() == 0);
  if (!is_short) return found->second;
  Elements elements;
  for (int64_t i = 0; i < tensor->Count(); ++i) elements.push_back(ElementAt(*tensor, i));
  if (std::ranges::all_of(elements, &Element::IsKnown)) found->second = std::move(elements);
  return found->second;
}

std::optional<double> Dimensions::NumberOf(Value value) const {
  const auto elements = ElementsOf(value);
  if (!elements || elements->size() != 1) return std::nullopt;
  const auto shape = ShapeOf(value);
  return shape && (shape->empty() || *shape == DimShape{1}) ? (*elements)[0].AsNumber() : std::nullopt;
}

std::optional<double> Dimensions::Scalar(Value value) const {
  const auto number = NumberOf(value);
  return number && std::isfinite(*number) && std::abs(*number) <= std::numeric_limits<float>::max() ? number
                                                                                                    : std::nullopt;
}

ElementType Dimensions::TypeOf(Value value) const {
  if (value == nullptr) return ElementType::kUndefined;
  if (const auto found = types_.find(value); found != types_.end()) return found->second;
  if (value->type != ElementType::kUndefined || around_ == nullptr) return value->type;
  return around_->TypeOf(value);
}

std::optional<std::vector<std::optional<Dim>>> Dimensions::ReshapeTarget(const Node& node) const {
  const auto elements = ElementsOf(node.Input(1));
  if (!elements) return std::nullopt;
  const bool keeps_zeros = node.Int("allowzero", 0) != 0;
  std::optional<DimShape> shape;
  std::vector<std::optional<Dim>> target;
  for (const Element& element : *elements) {
    const Dim* const dim = element.AsDim();
    if (dim != nullptr && dim->Is(0) && !keeps_zeros) {
      if (!shape) shape = ShapeOf(node.Input(0));
      if (shape && target.size() >= shape->size()) return std::nullopt;
      target.push_back(shape ? std::optional((*shape)[target.size()]) : std::nullopt);
    } else {
      target.push_back(dim == nullptr || dim->number() < 0 ? std::nullopt : std::optional(*dim));
    }
  }
  return target;
}

std::optional<std::vector<size_t>> Dimensions::AxesOf(const Node& node, size_t rank) const {
  std::vector<int64_t> given = node.Ints("axes");
  if (!node.HasAttribute("axes") && node.Has(1)) {
    const auto elements = ElementsOf(node.Input(1));
    if (!elements) return std::nullopt;
    for (const Element& element : *elements) {
      if (!element.AsInt()) return std::nullopt;
      given.push_back(*element.AsInt());
    }
  }
  if (node.IsStandard("Unsqueeze")) rank += given.size();
  std::vector<size_t> axes;
  for (const int64_t axis : given) {
    if (!AxisOf(axis, rank)) return std::nullopt;
    axes.push_back(*AxisOf(axis, rank));
  }
  std::ranges::sort(axes);
  return std::ranges::adjacent_find(axes) == axes.end() ? std::optional(axes) : std::nullopt;
}

bool Dimensions::ChangesNothing(const Node& node) const {
  return node.IsStandard("Identity") ||
         (node.IsStandard("Cast") && TypeOf(node.Input(0)) == static_cast<ElementType>(node.Int("to")));
}

std::string Dimensions::ShapeText(Value value) const {
  const auto shape = ShapeOf(value);
  return shape ? symbols_->Text(*shape) : "unknown";
}

std::optional<std::vector<size_t>> Permutation(const Node& node, size_t rank) {
  std::vector<size_t> axes;
  for (size_t axis = rank; !node.HasAttribute("perm") && axis > 0; --axis) axes.push_back(axis - 1);
  std::vector<bool> is_taken(rank);
  for (const int64_t axis : node.Ints("perm")) {
    if (axis < 0 || axis >= static_cast<int64_t>(rank) || is_taken[static_cast<size_t>(axis)]) return std::nullopt;
    is_taken[static_cast<size_t>(axis)] = true;
    axes.push_back(static_cast<size_t>(axis));
  }
  return axes.size() == rank ? std::optional(axes) : std::nullopt;
}

std::optional<size_t> AxisOf(std::optional<int64_t> axis, size_t rank) {
  const auto size = static_cast<int64_t>(rank);
  if (!axis || *axis < -size || *axis >= size) return std::nullopt;
  return static_cast<size_t>(*axis < 0 ? *axis + size : *axis);
}

}  // namespace ortolan::match
