#include "match/graph.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "formats/float16.h"
#include "host/op_error.h"

namespace ortolan::match {
namespace {

constexpr std::pair<ElementType, const char*> kTypeNames[] = {
    {ElementType::kFloat, "FLOAT"},   {ElementType::kUint8, "UINT8"},     {ElementType::kInt8, "INT8"},
    {ElementType::kUint16, "UINT16"}, {ElementType::kInt16, "INT16"},     {ElementType::kInt32, "INT32"},
    {ElementType::kInt64, "INT64"},   {ElementType::kString, "STRING"},   {ElementType::kBool, "BOOL"},
    {ElementType::kDouble, "DOUBLE"}, {ElementType::kFloat16, "FLOAT16"}, {ElementType::kUint32, "UINT32"},
    {ElementType::kUint64, "UINT64"}, {ElementType::kUint4, "UINT4"},     {ElementType::kBfloat16, "BFLOAT16"},
    {ElementType::kInt4, "INT4"}};

template <typename List, typename Text>
std::string Listing(const List& list, const Text& text) {
  std::string found;
  for (const auto& one : list) found += (found.empty() ? "" : " or ") + text(one);
  return found;
}

template <typename Wanted>
const Wanted* Find(const std::map<std::string, Attribute, std::less<>>& attributes, std::string_view name,
                   const char* what) {
  const auto found = attributes.find(name);
  if (found == attributes.end()) return nullptr;
  const Wanted* const wanted = std::get_if<Wanted>(&found->second);
  Expect(wanted != nullptr, ReasonCode::kAttributeType, std::string(name), what);
  return wanted;
}

Value SeenBy(const std::unordered_map<Value, Value>& instead, Value value) {
  for (auto found = instead.find(value); found != instead.end(); found = instead.find(value)) value = found->second;
  return value;
}

}  // namespace

std::string NameOf(ElementType type) {
  for (const auto& [known, name] : kTypeNames) {
    if (known == type) return name;
  }
  return "of unknown type";
}

int64_t Constant::Count() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

std::vector<float> Constant::Floats() const {
  std::vector<float> floats(static_cast<size_t>(Count()));
  if (floats.empty()) return floats;
  if (type != ElementType::kFloat16 && type != ElementType::kBfloat16) {
    std::memcpy(floats.data(), data, floats.size() * sizeof(float));
    return floats;
  }
  std::vector<uint16_t> halves(floats.size());
  std::memcpy(halves.data(), data, halves.size() * sizeof(uint16_t));
  const auto widen = [](uint16_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); };
  if (type == ElementType::kBfloat16) {
    std::ranges::transform(halves, floats.begin(), widen);
  } else {
    std::ranges::transform(halves, floats.begin(), HalfToFloat);
  }
  return floats;
}

int64_t Constant::CodeAt(int64_t index) const {
  const char* const bytes = static_cast<const char*>(data);
  if (type == ElementType::kUint8) return static_cast<uint8_t>(bytes[index]);
  if (type == ElementType::kInt8) return static_cast<int8_t>(bytes[index]);
  int32_t number = 0;
  std::memcpy(&number, bytes + index * static_cast<int64_t>(sizeof(number)), sizeof(number));
  return number;
}

std::optional<float> Constant::Scalar() const {
  const bool is_scalar = IsFloatType(type) && shape.size() <= 1 && Count() == 1;
  return is_scalar ? std::optional(Floats()[0]) : std::nullopt;
}

std::optional<std::vector<double>> Constant::Numbers() const {
  const auto read = [this]<typename Number>(Number) {
    std::vector<Number> numbers(static_cast<size_t>(Count()));
    if (!numbers.empty()) std::memcpy(numbers.data(), data, numbers.size() * sizeof(Number));
    return std::vector<double>(numbers.begin(), numbers.end());
  };
  switch (type) {
    case ElementType::kFloat16:
    case ElementType::kFloat: {
      const std::vector<float> floats = Floats();
      return std::vector<double>(floats.begin(), floats.end());
    }
    case ElementType::kBfloat16: {
      std::vector<double> numbers = read(uint16_t{});
      for (double& number : numbers) number = std::bit_cast<float>(static_cast<uint32_t>(number) << 16);
      return numbers;
    }
    case ElementType::kDouble:
      return read(double{});
    case ElementType::kInt64:
      return read(int64_t{});
    case ElementType::kInt32:
      return read(int32_t{});
    case ElementType::kInt16:
      return read(int16_t{});
    case ElementType::kUint16:
      return read(uint16_t{});
    case ElementType::kInt8:
      return read(int8_t{});
    case ElementType::kUint8:
    case ElementType::kBool:
      return read(uint8_t{});
    default:
      return std::nullopt;
  }
}

std::string Node::Described() const { return ErrorText(type_, " node '", name_, "'"); }

int64_t Node::Int(std::string_view name, std::optional<int64_t> missing) const {
  const int64_t* const found = Find<int64_t>(attributes_, name, "an integer");
  Expect(found != nullptr || missing.has_value(), ReasonCode::kAttributeMissing, std::string(name));
  return found == nullptr ? *missing : *found;
}

float Node::Float(std::string_view name, float missing) const {
  const float* const found = Find<float>(attributes_, name, "a float");
  return found == nullptr ? missing : *found;
}

std::string Node::String(std::string_view name, const std::string& missing) const {
  const std::string* const found = Find<std::string>(attributes_, name, "a string");
  return found == nullptr ? missing : *found;
}

std::vector<int64_t> Node::Ints(std::string_view name) const {
  const std::vector<int64_t>* const found = Find<std::vector<int64_t>>(attributes_, name, "a list of integers");
  return found == nullptr ? std::vector<int64_t>{} : *found;
}

bool Node::IsConstant(size_t index) const { return graph_->IsConstantValue(Input(index)); }

std::vector<Value> Node::StoredReads() const {
  std::vector<Value> values = stored_inputs_;
  values.insert(values.end(), stored_implicit_inputs_.begin(), stored_implicit_inputs_.end());
  return values;
}

Constant Node::ConstantHeader(size_t index, const char* what, std::initializer_list<ElementType> types,
                              const std::vector<Shape>& shapes) const {
  Expect(Has(index), ReasonCode::kInputMissing, what);
  const std::string name = InputName(index);
  Expect(IsConstant(index), ReasonCode::kNotConstant, what, name, what);
  const std::optional<Constant> tensor = graph_->HeaderOf(Input(index));
  Expect(tensor.has_value(), ReasonCode::kNotReadable, what, name);
  Expect(std::ranges::find(types, tensor->type) != types.end(), ReasonCode::kConstantType, what, name,
         NameOf(tensor->type), Listing(types, [](ElementType type) { return NameOf(type); }));
  Expect(shapes.empty() || std::ranges::find(shapes, tensor->shape) != shapes.end(), ReasonCode::kConstantShape, what,
         name, ShapeText(tensor->shape), Listing(shapes, ShapeText));
  return *tensor;
}

Constant Node::ConstantInput(size_t index, const char* what, std::initializer_list<ElementType> types,
                             const std::vector<Shape>& shapes) const {
  const Constant header = ConstantHeader(index, what, types, shapes);
  const std::optional<Constant> tensor = graph_->ConstantOf(Input(index));
  Expect(tensor && tensor->type == header.type && tensor->shape == header.shape, ReasonCode::kNotReadable, what,
         InputName(index));
  return *tensor;
}

ValueInfo& Graph::AddValue(ValueInfo value) {
  value.index = values_.size();
  return values_.emplace_back(std::move(value));
}

const Node& Graph::AddNode(Node node) {
  node.index_ = nodes_.size();
  node.graph_ = this;
  node.stored_inputs_ = node.inputs_;
  node.stored_implicit_inputs_ = node.implicit_inputs_;
  return nodes_.emplace_back(std::move(node));
}

void Graph::FindUses() {
  uses_.clear();
  for (const Node& node : nodes_) {
    if (view_.hidden.count(&node) != 0) continue;
    for (size_t i = 0; i < node.inputs().size(); ++i) {
      if (node.Has(i)) uses_[node.Input(i)].uses.push_back({&node, static_cast<int64_t>(i)});
    }
    for (const Value value : node.implicit_inputs()) {
      if (value != nullptr) uses_[value].uses.push_back({&node, -1});
    }
    for (const Value value : node.outputs()) {
      if (value != nullptr) uses_[Seen(value)].maker = &node;
    }
  }
  for (const Value value : outputs_) uses_[Seen(value)].is_output = true;
}

void Graph::See(View view) {
  view_ = std::move(view);
  for (Node& node : nodes_) {
    const auto seen = [&](Value value) { return value == nullptr ? value : SeenBy(view_.instead, value); };
    std::ranges::transform(node.stored_inputs_, node.inputs_.begin(), seen);
    std::ranges::transform(node.stored_implicit_inputs_, node.implicit_inputs_.begin(), seen);
  }
  FindUses();
}

Value Graph::Seen(Value value) const { return SeenBy(view_.instead, value); }

std::optional<Constant> Graph::ConstantOf(Value value) const {
  if (value == nullptr) return std::nullopt;
  const auto found = view_.constants.find(value);
  if (found != view_.constants.end()) return found->second;
  return value->is_constant ? read_(*value) : std::nullopt;
}

std::optional<Constant> Graph::HeaderOf(Value value) const {
  if (value == nullptr || !value->is_constant || !value->constant_shape || view_.constants.count(value) != 0) {
    return ConstantOf(value);
  }
  return Constant{value->name, value->type, *value->constant_shape, nullptr, nullptr};
}

std::optional<float> Graph::NumberOf(Value value) const {
  const std::optional<Constant> tensor = ConstantOf(value);
  return tensor ? tensor->Scalar() : std::nullopt;
}

std::optional<double> Graph::AnyNumberOf(Value value) const {
  const auto is_one = [](const Shape& shape) { return shape.empty() || shape == Shape{1}; };
  // Do not read large constants.
  if (value == nullptr || (value->constant_shape && !is_one(*value->constant_shape))) return std::nullopt;
  const std::optional<Constant> tensor = ConstantOf(value);
  if (!tensor || !is_one(tensor->shape)) return std::nullopt;
  const std::optional<std::vector<double>> numbers = tensor->Numbers();
  return numbers ? std::optional(numbers->front()) : std::nullopt;
}

bool Graph::IsConstantValue(Value value) const {
  return value != nullptr && (value->is_constant || view_.constants.count(value) != 0);
}

bool Graph::IsFloatCast(const Node& node) const {
  return node.IsStandard("Cast") && IsFloatOrHalf(node.Input(0)) && node.Output(0) != nullptr &&
         IsFloatOrHalf(node.Output(0));
}

const Graph::ValueUses& Graph::Of(Value value) const {
  static const ValueUses kUnknown;
  const auto found = uses_.find(Seen(value));
  return found == uses_.end() ? kUnknown : found->second;
}

const Node* Graph::Maker(Value value) const { return Of(value).maker; }

std::span<const Graph::Use> Graph::Uses(Value value) const { return Of(value).uses; }

bool Graph::IsOutput(Value value) const { return Of(value).is_output; }

const Node* Graph::OnlyReader(Value value) const {
  const ValueUses& uses = Of(value);
  if (uses.is_output || uses.uses.size() != 1 || uses.uses[0].index < 0) return nullptr;
  return uses.uses[0].node;
}

bool Graph::CanBeOne(std::span<const Node* const> nodes, std::span<const Node* const> behind) const {
  std::vector<bool> is_inside(nodes_.size()), is_behind(nodes_.size()), is_seen(nodes_.size());
  for (const Node* const node : behind) is_behind[node->index()] = true;
  size_t first = nodes_.size();
  for (const Node* const node : nodes) {
    is_inside[node->index()] = true;
    first = std::min(first, node->index());
  }
  std::vector<const Node*> waiting;
  // A reader outside the set that can only run after the set: `nodes` must not read its outputs.
  const auto wait_for = [&](const Node& reader, Value value) {
    const Node* const maker = value == nullptr ? nullptr : Maker(value);
    if (maker == nullptr) return true;
    const size_t index = maker->index();
    if (is_inside[index]) return static_cast<bool>(is_inside[reader.index()]);
    if (is_behind[index]) return false;
    if (index > first && !is_seen[index]) {
      is_seen[index] = true;
      waiting.push_back(maker);
    }
    return true;
  };
  const auto follow = [&](const Node& node) {
    const auto wait = [&](Value value) { return wait_for(node, value); };
    return std::ranges::all_of(node.inputs(), wait) && std::ranges::all_of(node.implicit_inputs(), wait);
  };
  for (const Node* const node : nodes) {
    if (!follow(*node)) return false;
  }
  while (!waiting.empty()) {
    const Node& node = *waiting.back();
    waiting.pop_back();
    if (!follow(node)) return false;
  }
  return true;
}

std::string Quoted(Value value) { return value == nullptr ? "nothing" : ErrorText("'", value->name, "'"); }

std::string Described(const Node& node) { return ErrorText(node.type(), " '", node.name(), "'"); }

const Node* MakerOf(const Graph& graph, Value value, std::string_view type) {
  const Node* const node = value == nullptr ? nullptr : graph.Maker(value);
  return node != nullptr && node->IsStandard(type) ? node : nullptr;
}

}  // namespace ortolan::match
