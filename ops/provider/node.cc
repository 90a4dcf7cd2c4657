#include "provider/node.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "formats/float16.h"

namespace ortolan::provider {

Shape DimensionsOf(const OrtApi& ort, const OrtTensorTypeAndShapeInfo& info) {
  Shape shape;
  size_t rank = 0;
  Check(ort, ort.GetDimensionsCount(&info, &rank));
  shape.resize(rank);
  Check(ort, ort.GetDimensions(&info, shape.data(), rank));
  return shape;
}

namespace {

std::string TypeName(ONNXTensorElementDataType type) {
  constexpr std::pair<ONNXTensorElementDataType, const char*> kNames[] = {
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "float"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "uint8"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "int8"},   {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "float16"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "int32"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, "bfloat16"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64, "int64"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE, "double"}};
  for (const auto& [named, name] : kNames) {
    if (named == type) return name;
  }
  return "of another element type";
}

template <typename List, typename Text>
std::string Listing(const List& list, const Text& text) {
  std::string found;
  for (const auto& one : list) found += (found.empty() ? "" : " or ") + text(one);
  return found;
}

Constant ReadTensor(const OrtApi& ort, const OrtValue& value) {
  OrtTensorTypeAndShapeInfo* info = nullptr;
  Check(ort, ort.GetTensorTypeAndShape(&value, &info));
  Constant tensor;
  OrtStatus* const status = ort.GetTensorElementType(info, &tensor.type);
  if (status == nullptr) tensor.shape = DimensionsOf(ort, *info);
  ort.ReleaseTensorTypeAndShapeInfo(info);
  Check(ort, status);
  return tensor;
}

// The type of the value must be known.
const OrtTensorTypeAndShapeInfo* TensorInfo(const OrtApi& ort, Value value) {
  const OrtTypeInfo* info = nullptr;
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  Check(ort, ort.GetValueInfoTypeInfo(value, &info));
  if (info != nullptr) Check(ort, ort.CastTypeInfoToTensorInfo(info, &tensor));
  return tensor;
}

}  // namespace

std::string NameOf(const HostApi& host, Value value) {
  const char* name = nullptr;
  Check(*host.ort, host.ort->GetValueInfoName(value, &name));
  return name == nullptr ? "" : name;
}

ONNXTensorElementDataType TypeOf(const HostApi& host, Value value) {
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  if (const OrtTensorTypeAndShapeInfo* const tensor = TensorInfo(*host.ort, value)) {
    Check(*host.ort, host.ort->GetTensorElementType(tensor, &type));
  }
  return type;
}

std::optional<Shape> ShapeOf(const HostApi& host, Value value) {
  const OrtTensorTypeAndShapeInfo* const tensor = TensorInfo(*host.ort, value);
  if (tensor == nullptr) return std::nullopt;
  return DimensionsOf(*host.ort, *tensor);
}

Value Seen(const std::unordered_map<Value, Value>& instead, Value value) {
  for (auto found = instead.find(value); found != instead.end(); found = instead.find(value)) value = found->second;
  return value;
}

bool IsConstant(const HostApi& host, Value value) {
  bool is_constant = false;
  Check(*host.ort, host.ort->ValueInfo_IsConstantInitializer(value, &is_constant));
  return is_constant;
}

std::optional<Constant> ReadConstant(const HostApi& host, Value value) {
  if (!IsConstant(host, value)) return std::nullopt;
  const OrtValue* initializer = nullptr;
  Check(*host.ort, host.ort->ValueInfo_GetInitializerValue(value, &initializer));
  if (initializer == nullptr) return std::nullopt;
  Constant tensor = ReadTensor(*host.ort, *initializer);
  tensor.name = NameOf(host, value);
  Check(*host.ort, host.ort->GetTensorData(initializer, &tensor.data));
  return tensor;
}

std::optional<float> Constant::Scalar() const {
  const bool is_constant = IsFloatType(type) && shape.size() <= 1 && Count() == 1;
  return is_constant ? std::optional(Floats()[0]) : std::nullopt;
}

int64_t Constant::Count() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

int64_t Constant::CodeAt(int64_t index) const {
  const char* const bytes = static_cast<const char*>(data);
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8) return static_cast<uint8_t>(bytes[index]);
  if (type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8) return static_cast<int8_t>(bytes[index]);
  int32_t number = 0;
  std::memcpy(&number, bytes + index * static_cast<int64_t>(sizeof(number)), sizeof(number));
  return number;
}

std::vector<float> Constant::Floats() const {
  std::vector<float> floats(static_cast<size_t>(Count()));
  if (type != ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16) {
    std::memcpy(floats.data(), data, floats.size() * sizeof(float));
    return floats;
  }
  std::vector<uint16_t> halves(floats.size());
  std::memcpy(halves.data(), data, halves.size() * sizeof(uint16_t));
  std::transform(halves.begin(), halves.end(), floats.begin(), HalfToFloat);
  return floats;
}

Node::Node(const HostApi& host, const OrtNode& node) : host_(host), node_(node) {
  const OrtApi& ort = *host.ort;
  const auto text = [&](auto get) {
    const char* found = nullptr;
    Check(ort, get(&node, &found));
    return std::string(found == nullptr ? "" : found);
  };
  name_ = text(ort.Node_GetName);
  domain_ = text(ort.Node_GetDomain);
  type_ = text(ort.Node_GetOperatorType);
  const auto values = [&](auto get_count, auto get) {
    size_t count = 0;
    Check(ort, get_count(&node, &count));
    std::vector<Value> found(count);
    Check(ort, get(&node, found.data(), count));
    for (Value& value : found) {
      if (value != nullptr && NameOf(host, value).empty()) value = nullptr;
    }
    return found;
  };
  inputs_ = values(ort.Node_GetNumInputs, ort.Node_GetInputs);
  outputs_ = values(ort.Node_GetNumOutputs, ort.Node_GetOutputs);
  implicit_inputs_ = values(ort.Node_GetNumImplicitInputs, ort.Node_GetImplicitInputs);
  stored_inputs_ = inputs_;
  stored_implicit_inputs_ = implicit_inputs_;
}

std::vector<Value> Node::StoredReads() const {
  std::vector<Value> values = stored_inputs_;
  values.insert(values.end(), stored_implicit_inputs_.begin(), stored_implicit_inputs_.end());
  return values;
}

void Node::See(const std::unordered_map<Value, Value>& instead) {
  const auto seen = [&](Value value) { return value == nullptr ? value : Seen(instead, value); };
  std::transform(stored_inputs_.begin(), stored_inputs_.end(), inputs_.begin(), seen);
  std::transform(stored_implicit_inputs_.begin(), stored_implicit_inputs_.end(), implicit_inputs_.begin(), seen);
}

std::string Node::Described() const { return ErrorText(type_, " node '", name_, "'"); }

const OrtOpAttr* Node::Attribute(const char* name, OrtOpAttrType type, const char* what) const {
  const OrtApi& ort = *host_.ort;
  const OrtOpAttr* attribute = nullptr;
  // Older versions of an operator may not define the attribute; ONNX Runtime reports that as an error.
  if (OrtStatus* const status = ort.Node_GetAttributeByName(&node_, name, &attribute)) {
    ort.ReleaseStatus(status);
    return nullptr;
  }
  if (attribute == nullptr) return nullptr;
  OrtOpAttrType found = ORT_OP_ATTR_UNDEFINED;
  Check(ort, ort.OpAttr_GetType(attribute, &found));
  Expect(found == type, ErrorText("its attribute '", name, "' is ", what));
  return attribute;
}

int64_t Node::Int(const char* name, std::optional<int64_t> missing) const {
  const OrtOpAttr* const attribute = Attribute(name, ORT_OP_ATTR_INT, "not an integer");
  if (attribute == nullptr) {
    Expect(missing.has_value(), ErrorText("its attribute '", name, "' is missing"));
    return *missing;
  }
  int64_t number = 0;
  size_t size = 0;
  Check(*host_.ort, host_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &number, sizeof(number), &size));
  return number;
}

float Node::Float(const char* name, float missing) const {
  const OrtOpAttr* const attribute = Attribute(name, ORT_OP_ATTR_FLOAT, "not a float");
  if (attribute == nullptr) return missing;
  float number = 0;
  size_t size = 0;
  Check(*host_.ort, host_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_FLOAT, &number, sizeof(number), &size));
  return number;
}

std::string Node::String(const char* name, const std::string& missing) const {
  const OrtOpAttr* const attribute = Attribute(name, ORT_OP_ATTR_STRING, "not a string");
  if (attribute == nullptr) return missing;
  size_t size = 0;
  // The first call fails and returns the size of the text.
  if (OrtStatus* const status = host_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, nullptr, 0, &size)) {
    host_.ort->ReleaseStatus(status);
  }
  std::string text(size, '\0');
  if (size != 0) Check(*host_.ort, host_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_STRING, text.data(), size, &size));
  while (!text.empty() && text.back() == '\0') text.pop_back();
  return text;
}

std::vector<int64_t> Node::Ints(const char* name) const {
  const OrtOpAttr* const attribute = Attribute(name, ORT_OP_ATTR_INTS, "not a list of integers");
  if (attribute == nullptr) return {};
  size_t bytes = 0;
  if (OrtStatus* const status = host_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, nullptr, 0, &bytes)) {
    host_.ort->ReleaseStatus(status);
  }
  std::vector<int64_t> values(bytes / sizeof(int64_t));
  if (values.empty()) return values;
  Check(*host_.ort, host_.ort->ReadOpAttr(attribute, ORT_OP_ATTR_INTS, values.data(), bytes, &bytes));
  return values;
}

std::vector<std::string> Node::AttributeNames() const {
  const OrtApi& ort = *host_.ort;
  size_t count = 0;
  Check(ort, ort.Node_GetNumAttributes(&node_, &count));
  std::vector<const OrtOpAttr*> attributes(count);
  Check(ort, ort.Node_GetAttributes(&node_, attributes.data(), count));
  std::vector<std::string> names;
  for (const OrtOpAttr* const attribute : attributes) {
    const char* name = nullptr;
    Check(ort, ort.OpAttr_GetName(attribute, &name));
    names.emplace_back(name);
  }
  return names;
}

bool Node::ReadsOutside() const {
  return std::any_of(inputs_.begin(), inputs_.end(), [&](const OrtValueInfo* input) {
    bool is_outside = false;
    if (input != nullptr) Check(*host_.ort, host_.ort->ValueInfo_IsFromOuterScope(input, &is_outside));
    return is_outside;
  });
}

Constant Node::ConstantInput(size_t index, const char* what, std::initializer_list<ONNXTensorElementDataType> types,
                             const std::vector<Shape>& shapes) const {
  Expect(Has(index), ErrorText("its input ", what, " is missing"));
  const std::string name = InputName(index);
  Expect(IsConstant(index), ErrorText("its ", what, " '", name, "' are not constant"));
  const std::optional<Constant> found = ReadConstant(host_, Input(index));
  Expect(found.has_value(), ErrorText("its ", what, " '", name, "' cannot be read"));
  const Constant& tensor = *found;
  Expect(std::find(types.begin(), types.end(), tensor.type) != types.end(),
         ErrorText("its ", what, " '", name, "' are ", TypeName(tensor.type), ", expected ", Listing(types, TypeName)));
  Expect(shapes.empty() || std::find(shapes.begin(), shapes.end(), tensor.shape) != shapes.end(),
         ErrorText("its ", what, " '", name, "' have shape ", ShapeText(tensor.shape), ", expected ",
                   Listing(shapes, ShapeText)));
  return tensor;
}

}  // namespace ortolan::provider
