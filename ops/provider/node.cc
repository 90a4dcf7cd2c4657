#include "provider/node.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace ortolan::provider {
namespace {

std::string TypeName(ONNXTensorElementDataType type) {
  constexpr std::pair<ONNXTensorElementDataType, const char*> kNames[] = {
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT, "float"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8, "uint8"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8, "int8"},   {ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16, "float16"},
      {ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32, "int32"}, {ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16, "bfloat16"}};
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
  size_t rank = 0;
  OrtStatus* status = ort.GetTensorElementType(info, &tensor.type);
  if (status == nullptr) status = ort.GetDimensionsCount(info, &rank);
  if (status == nullptr) {
    tensor.shape.resize(rank);
    status = ort.GetDimensions(info, tensor.shape.data(), rank);
  }
  ort.ReleaseTensorTypeAndShapeInfo(info);
  Check(ort, status);
  return tensor;
}

}  // namespace

int64_t Constant::Count() const {
  int64_t count = 1;
  for (const int64_t size : shape) count *= size;
  return count;
}

std::vector<float> Constant::Floats() const {
  std::vector<float> floats(static_cast<size_t>(Count()));
  std::memcpy(floats.data(), data, floats.size() * sizeof(float));
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
  size_t count = 0;
  Check(ort, ort.Node_GetNumInputs(&node, &count));
  inputs_.resize(count);
  Check(ort, ort.Node_GetInputs(&node, inputs_.data(), count));
  for (size_t i = 0; i < count; ++i) {
    if (Has(i) && InputName(i).empty()) inputs_[i] = nullptr;
  }
}

std::string Node::Described() const { return ErrorText(type_, " node '", name_, "'"); }

int64_t Node::Whole(const char* name, std::optional<int64_t> missing) const {
  const OrtApi& ort = *host_.ort;
  const OrtOpAttr* attribute = nullptr;
  // An error too says that there is none: the node's version of the operator does not know it.
  if (OrtStatus* const status = ort.Node_GetAttributeByName(&node_, name, &attribute)) {
    ort.ReleaseStatus(status);
    attribute = nullptr;
  }
  if (attribute == nullptr) {
    Expect(missing.has_value(), ErrorText("its attribute '", name, "' is missing"));
    return *missing;
  }
  OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
  Check(ort, ort.OpAttr_GetType(attribute, &type));
  Expect(type == ORT_OP_ATTR_INT, ErrorText("its attribute '", name, "' is no whole number"));
  int64_t number = 0;
  size_t size = 0;
  Check(ort, ort.ReadOpAttr(attribute, ORT_OP_ATTR_INT, &number, sizeof(number), &size));
  return number;
}

std::string Node::InputName(size_t index) const {
  const char* name = nullptr;
  Check(*host_.ort, host_.ort->GetValueInfoName(inputs_[index], &name));
  return name;
}

ONNXTensorElementDataType Node::InputType(size_t index) const {
  const OrtApi& ort = *host_.ort;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  const OrtTypeInfo* info = nullptr;
  Check(ort, ort.GetValueInfoTypeInfo(inputs_[index], &info));
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  if (info != nullptr) Check(ort, ort.CastTypeInfoToTensorInfo(info, &tensor));
  if (tensor != nullptr) Check(ort, ort.GetTensorElementType(tensor, &type));
  return type;
}

bool Node::IsConstant(size_t index) const {
  bool is_constant = false;
  Check(*host_.ort, host_.ort->ValueInfo_IsConstantInitializer(inputs_[index], &is_constant));
  return is_constant;
}

bool Node::ReadsOutside() const {
  return std::any_of(inputs_.begin(), inputs_.end(), [&](const OrtValueInfo* input) {
    bool is_outside = false;
    if (input != nullptr) Check(*host_.ort, host_.ort->ValueInfo_IsFromOuterScope(input, &is_outside));
    return is_outside;
  });
}

Constant Node::ConstantInput(size_t index, const char* what, std::initializer_list<ONNXTensorElementDataType> types,
                             std::initializer_list<Shape> shapes) const {
  Expect(Has(index), ErrorText("its input ", what, " is missing"));
  const std::string name = InputName(index);
  Expect(IsConstant(index), ErrorText("its ", what, " '", name, "' are not constant"));
  const OrtValue* value = nullptr;
  Check(*host_.ort, host_.ort->ValueInfo_GetInitializerValue(inputs_[index], &value));
  Expect(value != nullptr, ErrorText("its ", what, " '", name, "' cannot be read"));
  Constant tensor = ReadTensor(*host_.ort, *value);
  tensor.name = name;
  Expect(std::find(types.begin(), types.end(), tensor.type) != types.end(),
         ErrorText("its ", what, " '", name, "' are ", TypeName(tensor.type), ", expected ", Listing(types, TypeName)));
  Expect(std::find(shapes.begin(), shapes.end(), tensor.shape) != shapes.end(),
         ErrorText("its ", what, " '", name, "' have shape ", ShapeText(tensor.shape), ", expected ",
                   Listing(shapes, ShapeText)));
  Check(*host_.ort, host_.ort->GetTensorData(value, &tensor.data));
  return tensor;
}

std::vector<const OrtNode*> NodesOf(const HostApi& host, const OrtGraph& graph) {
  size_t count = 0;
  Check(*host.ort, host.ort->Graph_GetNumNodes(&graph, &count));
  std::vector<const OrtNode*> nodes(count);
  Check(*host.ort, host.ort->Graph_GetNodes(&graph, nodes.data(), count));
  return nodes;
}

}  // namespace ortolan::provider
