#include "match/dimensions.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "match/dimension_rules.h"

namespace ortolan::match {
namespace {

constexpr int kMostDepth = 8;  // limit for nested branches

template <typename Number>
void ReadNumbers(const Constant& tensor, Elements& elements) {
  constexpr bool is_bool = std::is_same_v<Number, bool>;
  for (size_t i = 0; i < static_cast<size_t>(tensor.Count()); ++i) {
    std::conditional_t<is_bool, uint8_t, Number> number;
    std::memcpy(&number, static_cast<const char*>(tensor.data) + i * sizeof(number), sizeof(number));
    if constexpr (is_bool) {
      elements.push_back(Element::Bool(number != 0));
    } else if constexpr (std::is_integral_v<Number>) {
      elements.emplace_back(Dim(number));
    } else {
      elements.push_back(Element::Real(number));
    }
  }
}

}  // namespace

std::optional<Elements> ReadElements(const Constant& tensor) {
  Elements elements;
  switch (tensor.type) {
    case ElementType::kInt64:
      ReadNumbers<int64_t>(tensor, elements);
      return elements;
    case ElementType::kInt32:
      ReadNumbers<int32_t>(tensor, elements);
      return elements;
    case ElementType::kFloat:
      ReadNumbers<float>(tensor, elements);
      return elements;
    case ElementType::kFloat16:
      for (const float number : tensor.Floats()) elements.push_back(Element::Real(number));
      return elements;
    case ElementType::kDouble:
      ReadNumbers<double>(tensor, elements);
      return elements;
    case ElementType::kBool:
      ReadNumbers<bool>(tensor, elements);
      return elements;
    default:
      return std::nullopt;
  }
}

Dimensions::Dimensions(const Graph& graph, const Dimensions* around)
    : graph_(graph),
      around_(around),
      depth_(around == nullptr ? 0 : around->depth_ + 1),
      symbols_(around == nullptr ? std::make_shared<Symbols>() : around->symbols_) {
  if (depth_ > kMostDepth) return;
  for (const Node& node : graph.nodes()) Visit(node);
}

std::optional<DimShape> Dimensions::Declared(Value value) const {
  if (!value->shape) return std::nullopt;
  DimShape shape;
  for (size_t axis = 0; axis < value->shape->size(); ++axis) {
    const DeclaredSize& declared = (*value->shape)[axis];
    if (declared.size >= 0) {
      shape.emplace_back(declared.size);
    } else {
      shape.push_back(symbols_->Named(declared.name).value_or(symbols_->Unknown(value, axis)));
    }
  }
  return shape;
}

std::optional<DimShape> Dimensions::ShapeOf(Value value) const {
  if (value == nullptr) return std::nullopt;
  if (const auto found = shapes_.find(value); found != shapes_.end()) return found->second;
  if (value->constant_shape) return DimShape(value->constant_shape->begin(), value->constant_shape->end());
  return around_ == nullptr ? Declared(value) : around_->ShapeOf(value);
}

std::optional<size_t> Dimensions::Rank(Value value) const {
  const std::optional<DimShape> shape = ShapeOf(value);
  return shape ? std::optional(shape->size()) : std::nullopt;
}

std::optional<Elements> Dimensions::ElementsOf(Value value) const {
  if (value == nullptr) return std::nullopt;
  if (const auto found = elements_.find(value); found != elements_.end()) return found->second;
  if (!graph_.IsConstantValue(value)) return around_ == nullptr ? std::nullopt : around_->ElementsOf(value);
  const auto [known, is_new] = constants_.try_emplace(value);
  if (!is_new) return known->second;
  if (value->constant_shape) {
    if (value->constant_shape->size() > 1) return std::nullopt;
    if (!value->constant_shape->empty() && value->constant_shape->front() > static_cast<int64_t>(kMostElements)) {
      return std::nullopt;
    }
  }
  const std::optional<Constant> tensor = graph_.ConstantOf(value);
  const bool is_short = tensor && tensor->shape.size() <= 1 && tensor->Count() <= static_cast<int64_t>(kMostElements);
  if (is_short && (tensor->data != nullptr || tensor->Count() == 0)) known->second = ReadElements(*tensor);
  return known->second;
}

std::optional<double> Dimensions::NumberOf(Value value) const {
  const std::optional<Elements> elements = ElementsOf(value);
  if (!elements || elements->size() != 1) return std::nullopt;
  const std::optional<DimShape> shape = ShapeOf(value);
  if (!shape || shape->size() > 1) return std::nullopt;
  return elements->front().AsNumber();
}

std::optional<double> Dimensions::Scalar(Value value) const {
  const std::optional<double> number = NumberOf(value);
  return number && std::isfinite(static_cast<float>(*number)) ? number : std::nullopt;
}

ElementType Dimensions::TypeOf(Value value) const {
  if (value == nullptr) return ElementType::kUndefined;
  const auto found = types_.find(value);
  return found == types_.end() ? value->type : found->second;
}

std::optional<std::vector<std::optional<Dim>>> Dimensions::ReshapeTarget(const Node& node) const {
  const std::optional<Elements> target = ElementsOf(node.Input(1));
  if (!target) return std::nullopt;
  const std::optional<DimShape> shape = ShapeOf(node.Input(0));
  const bool copies = node.Int("allowzero", 0) == 0;
  std::vector<std::optional<Dim>> sizes;
  for (size_t axis = 0; axis < target->size(); ++axis) {
    const Dim* const dim = (*target)[axis].AsDim();
    if (dim == nullptr || dim->Is(-1)) {
      sizes.emplace_back();
    } else if (copies && dim->Is(0)) {
      if (shape && axis >= shape->size()) return std::nullopt;
      sizes.push_back(shape ? std::optional((*shape)[axis]) : std::nullopt);
    } else {
      if (dim->IsNumber() && dim->number() < 0) return std::nullopt;
      sizes.emplace_back(*dim);
    }
  }
  return sizes;
}

std::optional<std::vector<size_t>> Dimensions::AxesOf(const Node& node, size_t rank) const {
  std::vector<int64_t> given = node.Ints("axes");
  if (node.Has(1)) {
    const std::optional<Elements> elements = ElementsOf(node.Input(1));
    if (!elements) return std::nullopt;
    for (const Element& element : *elements) {
      const std::optional<int64_t> axis = element.AsInt();
      if (!axis) return std::nullopt;
      given.push_back(*axis);
    }
  }
  std::vector<size_t> axes;
  const size_t whole = node.type() == "Unsqueeze" ? rank + given.size() : rank;
  for (const int64_t axis : given) {
    const std::optional<size_t> own = AxisOf(axis, whole);
    if (!own) return std::nullopt;
    axes.push_back(*own);
  }
  std::sort(axes.begin(), axes.end());
  if (std::adjacent_find(axes.begin(), axes.end()) != axes.end()) return std::nullopt;
  return axes;
}

bool Dimensions::ChangesNothing(const Node& node) const {
  if (!node.IsStandard("Cast")) return node.IsStandard("Identity");
  const ElementType type = TypeOf(node.Input(0));
  return type != ElementType::kUndefined && static_cast<int64_t>(type) == node.Int("to", 0);
}

std::string Dimensions::ShapeText(Value value) const {
  const std::optional<DimShape> shape = ShapeOf(value);
  return shape ? symbols_->Text(*shape) : "unknown";
}

void Dimensions::Visit(const Node& node) {
  DimensionRules rules(*this, node, *symbols_);
  for (size_t i = 0; i < node.outputs().size(); ++i) {
    const Value output = node.Output(i);
    if (output == nullptr) continue;
    std::optional<DimShape> shape;
    try {
      shape = rules.Shape(i);
      if (const ElementType type = rules.Type(i); type != ElementType::kUndefined) types_[output] = type;
    } catch (const RefusedError&) {  // an attribute of a wrong type
    }
    const std::optional<DimShape> declared = Declared(output);
    if (!shape) {
      shape = declared;
    } else if (declared && declared->size() == shape->size()) {
      for (size_t axis = 0; axis < shape->size(); ++axis) {
        const Dim& dim = (*shape)[axis];
        if ((*declared)[axis].IsNumber() && !dim.IsNumber() && !symbols_->IsName(dim))
          (*shape)[axis] = (*declared)[axis];
      }
    }
    if (shape) shapes_[output] = *shape;
    if (i != 0 || (shape && shape->size() > 1)) continue;  // only scalars and vectors are shapes or dimensions
    try {
      std::optional<Elements> elements = rules.OutputElements();
      if (elements && elements->size() <= kMostElements) elements_[output] = std::move(*elements);
    } catch (const RefusedError&) {
    }
  }
}

std::optional<size_t> AxisOf(std::optional<int64_t> axis, size_t rank) {
  const int64_t whole = static_cast<int64_t>(rank);
  if (!axis || *axis < -whole || *axis >= whole) return std::nullopt;
  return static_cast<size_t>(*axis < 0 ? *axis + whole : *axis);
}

std::optional<std::vector<size_t>> Permutation(const Node& node, size_t rank) {
  std::vector<size_t> axes;
  const std::vector<int64_t> given = node.Ints("perm");
  if (given.empty()) {
    for (size_t axis = rank; axis-- > 0;) axes.push_back(axis);
    return axes;
  }
  if (given.size() != rank) return std::nullopt;
  std::vector<bool> is_seen(rank);
  for (const int64_t axis : given) {
    const std::optional<size_t> own = AxisOf(axis, rank);
    if (!own || is_seen[*own]) return std::nullopt;
    is_seen[*own] = true;
    axes.push_back(*own);
  }
  return axes;
}

}  // namespace ortolan::match
