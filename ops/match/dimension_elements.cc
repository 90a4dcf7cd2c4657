// The elements and types of match::Dimensions: the arithmetic from which models compute shapes.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <sstream>
#include <string>
#include <string_view>
#include <unordered_map>

#include "formats/float16.h"
#include "match/dimension_rules.h"

namespace ortolan::match {
namespace {

template <typename T>
T At(const Constant& tensor, int64_t index) {
  T element;
  std::memcpy(&element, static_cast<const char*>(tensor.data) + static_cast<size_t>(index) * sizeof(T), sizeof(T));
  return element;
}

Element Arithmetic(std::string_view type, std::span<const Element> operands) {
  const Element &a = operands[0], &b = operands[operands.size() - 1];
  if (type == "Where") {
    if (operands.size() != 3 || !a.AsBool()) return {};
    return operands[*a.AsBool() ? 1 : 2];
  }
  if (type == "Not") return a.AsBool() ? Element::Bool(!*a.AsBool()) : Element();
  const auto x = a.AsNumber(), y = b.AsNumber();
  if (type == "Equal") {
    if (!a.IsKnown() || !b.IsKnown()) return {};
    if (a == b) return Element::Bool(true);
    if ((x && y) || (a.AsBool() && b.AsBool())) return Element::Bool(x == y && a.AsBool() == b.AsBool());
    // A dimension is not negative.
    return (x && *x < 0) || (y && *y < 0) ? Element::Bool(false) : Element();
  }
  if (type == "Sqrt") return x && *x >= 0 ? Element::Real(std::sqrt(*x)) : Element();
  if (type == "Reciprocal") return x && *x != 0 ? Element::Real(1 / *x) : Element();
  const bool adds = type == "Add", subtracts = type == "Sub", multiplies = type == "Mul";
  if (a.AsDim() != nullptr && b.AsDim() != nullptr) {
    const Dim &one = *a.AsDim(), &other = *b.AsDim();
    const auto number = one.Number(), divisor = other.Number();
    MaybeDim dim;
    if (adds || subtracts || multiplies) {
      dim = adds ? Plus(one, other) : subtracts ? Minus(one, other) : Product(one, other);
    } else if (number && divisor) {
      if (*divisor != 0 && (*divisor != -1 || *number != INT64_MIN)) dim = *number / *divisor;
    } else if (divisor) {
      dim = Quotient(one, *divisor);
    }
    return dim ? Element(*dim) : Element();
  }
  if (!x || !y || (type == "Div" && *y == 0)) return {};
  return Element::Real(adds ? *x + *y : subtracts ? *x - *y : multiplies ? *x * *y : *x / *y);
}

MaybeElements ShapeElements(const Dimensions& dims, const Node& node) {
  const auto shape = dims.ShapeOf(node.Input(0));
  if (!shape) return std::nullopt;
  const auto rank = static_cast<int64_t>(shape->size());
  const Cut cut = CutOf(node.Int("start", 0), node.Int("end", rank), 1, rank);
  return Elements(shape->begin() + cut.begin, shape->begin() + cut.begin + cut.count);
}

// Identity, Cast, Squeeze, Unsqueeze and Reshape of scalars and vectors.
MaybeElements SameElements(const Dimensions& dims, const Node& node) {
  auto elements = dims.ElementsOf(node.Input(0));
  if (!elements || node.type() != "Cast") return elements;
  const auto type = static_cast<ElementType>(node.Int("to"));
  for (Element& element : *elements) {
    const auto number = element.AsNumber();
    if (type == ElementType::kBool) {
      element = number ? Element::Bool(*number != 0) : element.AsBool() ? element : Element();
    } else if (IsAnyFloat(type)) {
      if (number) element = Element::Real(*number);
    } else if (element.AsBool()) {
      element = Dim(*element.AsBool() ? 1 : 0);
    } else if (element.IsReal()) {
      const bool fits = std::abs(*number) < 0x1p31;
      element = fits ? Element(static_cast<int64_t>(*number)) : Element();
    }
  }
  return elements;
}

MaybeElements GatherElements(const Dimensions& dims, const Node& node) {
  const auto data = dims.ElementsOf(node.Input(0)), indices = dims.ElementsOf(node.Input(1));
  if (!data || !indices) return std::nullopt;
  Elements taken;
  for (const Element& index : *indices) {
    const auto place = AxisOf(index.AsInt(), data->size());
    if (!place) return std::nullopt;
    taken.push_back((*data)[*place]);
  }
  return taken;
}

MaybeElements SliceElements(const Dimensions& dims, const Node& node) {
  const auto data = dims.ElementsOf(node.Input(0));
  const auto one = [&](const char* attribute, size_t input) -> std::optional<int64_t> {
    const auto list = ListOf(dims, node, attribute, input);
    return list && list->size() == 1 ? (*list)[0].AsInt() : std::nullopt;
  };
  const auto begin = one("starts", 1), end = one("ends", 2), step = node.Has(4) ? one("steps", 4) : 1;
  if (!data || !begin || !end || !step || *step == 0) return std::nullopt;
  const Cut cut = CutOf(*begin, *end, *step, static_cast<int64_t>(data->size()));
  Elements taken;
  for (int64_t i = 0; i < cut.count; ++i) taken.push_back((*data)[static_cast<size_t>(cut.begin + i * *step)]);
  return taken;
}

MaybeElements ConcatElements(const Dimensions& dims, const Node& node) {
  Elements all;
  for (size_t i = 0; i < node.inputs().size(); ++i) {
    const auto part = dims.ElementsOf(node.Input(i));
    if (!part) return std::nullopt;
    all.insert(all.end(), part->begin(), part->end());
  }
  return all;
}

// Return the value of a ConstantOfShape.
std::optional<Element> FillOf(const Node& node) {
  const auto value = node.attributes().find("value");
  if (value == node.attributes().end()) return Element::Real(0);
  const Constant* const tensor = std::get_if<Constant>(&value->second);
  if (tensor == nullptr || tensor->data == nullptr || tensor->Count() != 1) return std::nullopt;
  return ElementAt(*tensor, 0);
}

MaybeElements FilledElements(const Dimensions& dims, const Node& node) {
  const auto counts = dims.ElementsOf(node.Input(0));
  const auto count = counts && counts->size() == 1 ? (*counts)[0].AsInt() : std::nullopt;
  const std::optional<Element> fill = FillOf(node);
  if (!fill || !count || *count < 0 || *count > static_cast<int64_t>(kMostElements)) return std::nullopt;
  return Elements(static_cast<size_t>(*count), *fill);
}

// The largest element of a vector that is filled with one value.
MaybeElements LargestElement(const Dimensions& dims, const Node& node) {
  const auto shape = dims.ShapeOf(node.Input(0));
  const auto axes = dims.AxesOf(node, 1);
  const bool is_vector = shape && shape->size() == 1 && shape->front().Number().value_or(0) > 0;
  const auto fill = is_vector && axes && (axes->size() == 1 || node.Int("noop_with_empty_axes", 0) == 0)
                        ? FilledWith(dims, node.Input(0))
                        : std::nullopt;
  return fill ? MaybeElements({*fill}) : std::nullopt;
}

MaybeElements Calculated(const Dimensions& dims, const Node& node) {
  std::vector<Elements> operands;
  size_t count = 1;
  for (size_t i = 0; i < node.inputs().size(); ++i) {
    auto elements = dims.ElementsOf(node.Input(i));
    if (!elements || elements->empty()) return std::nullopt;
    if (elements->size() != 1 && count != 1 && count != elements->size()) return std::nullopt;
    count = std::max(count, elements->size());
    operands.push_back(std::move(*elements));
  }
  if (operands.empty()) return std::nullopt;
  Elements results;
  for (size_t i = 0; i < count; ++i) {
    Elements row;
    for (const Elements& operand : operands) row.push_back(operand[operand.size() == 1 ? 0 : i]);
    results.push_back(Arithmetic(node.type(), row));
  }
  return results;
}

// The type of an output that is not that of the first input: a type, or the index of an input.
struct TypeRule {
  ElementType type = ElementType::kUndefined;
  size_t input = 0;
};
const std::unordered_map<std::string, TypeRule>& TypeRules() {
  static const auto* const kRules = [] {
    auto* const rules = new std::unordered_map<std::string, TypeRule>;
    // A digit after a name is the index of the output.
    const std::pair<const char*, TypeRule> lists[] = {
        {"And Or Xor Not Equal Less LessOrEqual Greater GreaterOrEqual IsNaN IsInf Dropout1", {ElementType::kBool}},
        {"Shape Size NonZero ArgMax ArgMin TopK1", {ElementType::kInt64}},
        {"MatMulIntegerToFloat QAttention QEmbedLayerNormalization DynamicQuantizeLinear1", {ElementType::kFloat}},
        {"DynamicQuantizeLinear DynamicQuantizeLinear2", {ElementType::kUint8}},
        {"MatMulInteger ConvInteger EmbedLayerNormalization1 QEmbedLayerNormalization1", {ElementType::kInt32}},
        {"Where DequantizeLinear CastLike", {ElementType::kUndefined, 1}},
        {"OneHot EmbedLayerNormalization QuantizeLinear", {ElementType::kUndefined, 2}},
        {"QLinearMatMul QLinearConv", {ElementType::kUndefined, 7}}};
    for (const auto& [names, rule] : lists) {
      std::istringstream list(names);
      for (std::string name; list >> name;) (*rules)[name] = rule;
    }
    return rules;
  }();
  return *kRules;
}

}  // namespace

MaybeElements InferElements(const Dimensions& dims, const Node& node) {
  using ElementRule = MaybeElements (*)(const Dimensions&, const Node&);
  static const auto* const kRules = new std::unordered_map<std::string_view, ElementRule>{
      {"Shape", ShapeElements},   {"Identity", SameElements},
      {"Cast", SameElements},     {"Unsqueeze", SameElements},
      {"Squeeze", SameElements},  {"Reshape", SameElements},
      {"Gather", GatherElements}, {"Slice", SliceElements},
      {"Concat", ConcatElements}, {"ConstantOfShape", FilledElements},
      {"Add", Calculated},        {"Sub", Calculated},
      {"Mul", Calculated},        {"Div", Calculated},
      {"Sqrt", Calculated},       {"Reciprocal", Calculated},
      {"Where", Calculated},      {"Equal", Calculated},
      {"Not", Calculated},        {"ReduceMax", LargestElement}};
  const auto rule = node.IsStandard() ? kRules->find(node.type()) : kRules->end();
  return rule == kRules->end() ? std::nullopt : rule->second(dims, node);
}

ElementType InferType(const Visit& visit, size_t output) {
  constexpr auto kUndefined = ElementType::kUndefined;
  const Node& node = visit.node;
  const ElementType declared = node.Output(output)->type;
  if (!node.subgraphs().empty()) {
    ElementType type = declared;
    for (const auto& branch : visit.branches) {
      const auto& outputs = branch->graph().outputs();
      if (type == kUndefined && output < outputs.size()) type = branch->TypeOf(outputs[output]);
    }
    return type;
  }
  if (node.type() == "Cast") return static_cast<ElementType>(node.Int("to"));
  if (node.type() == "ConstantOfShape") {
    const auto value = node.attributes().find("value");
    if (value == node.attributes().end()) return ElementType::kFloat;
    const auto* const tensor = std::get_if<Constant>(&value->second);
    return tensor == nullptr ? declared : tensor->type;
  }
  const auto found = TypeRules().find(node.type() + (output == 0 ? "" : std::to_string(output)));
  if (found != TypeRules().end()) {
    const auto& [type, input] = found->second;
    const ElementType known = type != kUndefined ? type : visit.dims.TypeOf(node.Input(input));
    return known != kUndefined ? known : declared;
  }
  const bool is_like_input = output == 0 || node.type() == "Split" || node.type().starts_with("Skip");
  if (!is_like_input) return declared;
  ElementType type = declared;
  for (const Value input : node.inputs()) type = type == kUndefined ? visit.dims.TypeOf(input) : type;
  return type;
}

Element ElementAt(const Constant& tensor, int64_t index) {
  switch (tensor.type) {
    case ElementType::kInt64:
      return Dim(At<int64_t>(tensor, index));
    case ElementType::kInt32:
      return Dim(At<int32_t>(tensor, index));
    case ElementType::kFloat:
      return Element::Real(At<float>(tensor, index));
    case ElementType::kFloat16:
      return Element::Real(HalfToFloat(At<uint16_t>(tensor, index)));
    case ElementType::kDouble:
      return Element::Real(At<double>(tensor, index));
    case ElementType::kBool:
      return Element::Bool(At<uint8_t>(tensor, index) != 0);
    default:
      return {};
  }
}

std::optional<Element> FilledWith(const Dimensions& dims, Value value) {
  while (const Node* const node = MakerOf(dims.graph(), value, "Unsqueeze")) value = node->Input(0);
  const Node* const filled = MakerOf(dims.graph(), value, "ConstantOfShape");
  return filled == nullptr ? std::nullopt : FillOf(*filled);
}

MaybeElements ListOf(const Dimensions& dims, const Node& node, const char* attribute, size_t input) {
  if (!node.HasAttribute(attribute)) return dims.ElementsOf(node.Input(input));
  const auto given = node.Ints(attribute);
  return Elements(given.begin(), given.end());
}

Cut CutOf(int64_t begin, int64_t end, int64_t step, int64_t size) {
  const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  begin = std::clamp(begin < 0 ? begin + size : begin, low, high);
  end = std::clamp(end < 0 ? end + size : end, low, high);
  const int64_t way = step > 0 ? end - begin : begin - end;
  const int64_t stride = step == INT64_MIN ? INT64_MAX : std::abs(step);
  return {begin, way <= 0 ? 0 : (way - 1) / stride + 1};
}

}  // namespace ortolan::match
