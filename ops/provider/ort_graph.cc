#include "provider/ort_graph.h"

#include <algorithm>
#include <utility>

namespace ortolan::provider {
namespace {

// First version in which GetCapability can read the parent node. With older versions a branch is recognized by values
// of an outer graph.
constexpr uint32_t kTellsOfParents = 24;
// First version that tells a scalar from a value of unknown rank.
constexpr uint32_t kTellsOfShapes = 24;
constexpr size_t kMostAttributeElements = 64;  // limit for tensors in attributes

struct TensorInfo {
  ElementType type = ElementType::kUndefined;
  Shape shape;
  std::vector<const char*> names;
};

TensorInfo ReadInfo(const OrtApi& ort, const OrtTensorTypeAndShapeInfo& info) {
  TensorInfo read;
  read.type = static_cast<ElementType>(Get<ONNXTensorElementDataType>(ort, ort.GetTensorElementType, &info));
  read.shape = DimensionsOf(ort, info);
  read.names.resize(read.shape.size());
  Check(ort, ort.GetSymbolicDimensions(&info, read.names.data(), read.names.size()));
  return read;
}

Constant ReadTensor(const OrtApi& ort, const OrtValue& value, std::string name) {
  Constant tensor{std::move(name), static_cast<ElementType>(ElementTypeOf(ort, value)), ShapeOf(ort, value), nullptr,
                  nullptr};
  if (tensor.type != ElementType::kString) Check(ort, ort.GetTensorData(&value, &tensor.data));
  return tensor;
}

template <typename Element>
std::vector<Element> ReadList(const OrtApi& ort, const OrtOpAttr& attribute, OrtOpAttrType type) {
  size_t bytes = 0;
  // The first call fails and returns the size.
  if (OrtStatus* const status = ort.ReadOpAttr(&attribute, type, nullptr, 0, &bytes)) ort.ReleaseStatus(status);
  std::vector<Element> values(bytes / sizeof(Element));
  if (!values.empty()) Check(ort, ort.ReadOpAttr(&attribute, type, values.data(), bytes, &bytes));
  return values;
}

std::string ReadString(const OrtApi& ort, const OrtOpAttr& attribute) {
  const std::vector<char> bytes = ReadList<char>(ort, attribute, ORT_OP_ATTR_STRING);
  std::string text(bytes.begin(), bytes.end());
  while (!text.empty() && text.back() == '\0') text.pop_back();
  return text;
}

std::optional<match::Attribute> ReadAttribute(const OrtApi& ort, const OrtOpAttr& attribute) {
  OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
  Check(ort, ort.OpAttr_GetType(&attribute, &type));
  size_t size = 0;
  switch (type) {
    case ORT_OP_ATTR_INT: {
      int64_t number = 0;
      Check(ort, ort.ReadOpAttr(&attribute, type, &number, sizeof(number), &size));
      return number;
    }
    case ORT_OP_ATTR_FLOAT: {
      float number = 0;
      Check(ort, ort.ReadOpAttr(&attribute, type, &number, sizeof(number), &size));
      return number;
    }
    case ORT_OP_ATTR_INTS:
      return ReadList<int64_t>(ort, attribute, type);
    case ORT_OP_ATTR_FLOATS:
      return ReadList<float>(ort, attribute, type);
    case ORT_OP_ATTR_STRING: {
      if (OrtStatus* const status = ort.ReadOpAttr(&attribute, type, nullptr, 0, &size)) ort.ReleaseStatus(status);
      if (size > kMostTextBytes) return std::nullopt;
      return ReadString(ort, attribute);
    }
    case ORT_OP_ATTR_TENSOR: {
      OrtValue* value = nullptr;
      Check(ort, ort.OpAttr_GetTensorAttributeAsOrtValue(&attribute, &value));
      const std::shared_ptr<OrtValue> owner(value, ort.ReleaseValue);
      Constant tensor = ReadTensor(ort, *value, "");
      if (tensor.data == nullptr || tensor.Count() > static_cast<int64_t>(kMostAttributeElements)) return std::nullopt;
      tensor.owner = owner;
      return tensor;
    }
    default:
      return std::nullopt;
  }
}

template <typename Item, typename Count, typename Get, typename Of>
std::vector<const Item*> List(const OrtApi& ort, const Of* of, Count count, Get get) {
  size_t size = 0;
  Check(ort, count(of, &size));
  std::vector<const Item*> items(size);
  Check(ort, get(of, items.data(), size));
  return items;
}

std::string Text(const char* text) { return text == nullptr ? "" : text; }

std::string NameOf(const OrtApi& ort, const OrtValueInfo* value) {
  const char* name = nullptr;
  Check(ort, ort.GetValueInfoName(value, &name));
  return Text(name);
}

}  // namespace

std::string ReadText(const HostApi& host, const OrtNode& node, const char* name) {
  const OrtOpAttr* attribute = nullptr;
  // ONNX Runtime reports a missing attribute as an error.
  if (OrtStatus* const status = host.ort->Node_GetAttributeByName(&node, name, &attribute)) {
    host.ort->ReleaseStatus(status);
    return {};
  }
  OrtOpAttrType type = ORT_OP_ATTR_UNDEFINED;
  if (attribute != nullptr) Check(*host.ort, host.ort->OpAttr_GetType(attribute, &type));
  return type == ORT_OP_ATTR_STRING ? ReadString(*host.ort, *attribute) : std::string();
}

std::optional<Shape> DeclaredShape(Value value) {
  if (value == nullptr || !value->shape) return std::nullopt;
  Shape shape;
  for (const match::DeclaredSize& size : *value->shape) shape.push_back(size.size);
  return shape;
}

OrtModelGraph::OrtModelGraph(const HostApi& host, const OrtGraph& graph, const OrtModelGraph* around)
    : host_(host), around_(around), graph_([this](const match::ValueInfo& value) { return Read(value); }) {
  const OrtApi& ort = *host.ort;
  const std::vector<const OrtNode*> nodes = List<OrtNode>(ort, &graph, ort.Graph_GetNumNodes, ort.Graph_GetNodes);
  const std::vector<const OrtValueInfo*> inputs =
      List<OrtValueInfo>(ort, &graph, ort.Graph_GetNumInputs, ort.Graph_GetInputs);
  const OrtNode* parent = nullptr;
  Check(ort, ort.Graph_GetParentNode(&graph, &parent));
  const auto is_outside = [&](const OrtValueInfo* value) {
    bool outside = false;
    if (value != nullptr) Check(ort, ort.ValueInfo_IsFromOuterScope(value, &outside));
    return outside;
  };
  is_branch_ = parent != nullptr || around != nullptr;
  if (!is_branch_ && host.version < kTellsOfParents) {
    is_branch_ = inputs.empty() || std::ranges::any_of(nodes, [&](const OrtNode* node) {
                   const std::vector<const OrtValueInfo*> read =
                       List<OrtValueInfo>(ort, node, ort.Node_GetNumInputs, ort.Node_GetInputs);
                   return std::ranges::any_of(read, is_outside);
                 });
  }
  for (const OrtValueInfo* const value : inputs) AddValue(value);
  for (const OrtNode* const node : nodes) AddNode(*node);
  graph_.SetOutputs(AddValues(List<OrtValueInfo>(ort, &graph, ort.Graph_GetNumOutputs, ort.Graph_GetOutputs)));
  size_t count = 0;
  Check(ort, ort.Graph_GetNumOperatorSets(&graph, &count));
  std::vector<const char*> domains(count);
  std::vector<int64_t> versions(count);
  Check(ort, ort.Graph_GetOperatorSets(&graph, domains.data(), versions.data(), count));
  for (size_t i = 0; i < count; ++i) {
    if (Text(domains[i]).empty() || Text(domains[i]) == "ai.onnx") graph_.SetOpset(versions[i]);
  }
  graph_.Finish();
}

OrtModelGraph::OrtModelGraph(const HostApi& host, const OrtNode& node)
    : host_(host), graph_([this](const match::ValueInfo& value) { return Read(value); }) {
  AddNode(node);
  graph_.Finish();
}

void OrtModelGraph::AddNode(const OrtNode& node) {
  const OrtApi& ort = *host_.ort;
  const auto text = [&](auto get) {
    const char* found = nullptr;
    Check(ort, get(&node, &found));
    return Text(found);
  };
  match::Attributes attributes;
  for (const OrtOpAttr* const attribute :
       List<OrtOpAttr>(ort, &node, ort.Node_GetNumAttributes, ort.Node_GetAttributes)) {
    const char* name = nullptr;
    Check(ort, ort.OpAttr_GetName(attribute, &name));
    if (std::optional<match::Attribute> read = ReadAttribute(ort, *attribute)) {
      attributes.emplace(Text(name), std::move(*read));
    }
  }
  const auto values = [&](auto count, auto get) { return AddValues(List<OrtValueInfo>(ort, &node, count, get)); };
  const std::string type = text(ort.Node_GetOperatorType);
  std::vector<Value> inputs = values(ort.Node_GetNumInputs, ort.Node_GetInputs);
  std::vector<Value> implicit = values(ort.Node_GetNumImplicitInputs, ort.Node_GetImplicitInputs);
  match::Subgraphs subgraphs;
  size_t count = 0;
  if (type == "If") Check(ort, ort.Node_GetNumSubgraphs(&node, &count));
  std::vector<const OrtGraph*> branches(count);
  std::vector<const char*> names(count);
  if (count != 0) Check(ort, ort.Node_GetSubgraphs(&node, branches.data(), count, names.data()));
  for (size_t i = 0; i < count; ++i) {
    const auto branch = std::make_shared<OrtModelGraph>(host_, *branches[i], this);
    subgraphs.emplace(Text(names[i]), std::shared_ptr<const Graph>(branch, &branch->graph()));
  }
  graph_.AddNode({text(ort.Node_GetName), text(ort.Node_GetDomain), type, std::move(attributes), std::move(inputs),
                  values(ort.Node_GetNumOutputs, ort.Node_GetOutputs), std::move(implicit), std::move(subgraphs)});
  ort_nodes_.push_back(&node);
}

std::vector<Value> OrtModelGraph::AddValues(const std::vector<const OrtValueInfo*>& values) {
  std::vector<Value> added;
  for (const OrtValueInfo* const value : values) added.push_back(AddValue(value));
  return added;
}

Value OrtModelGraph::AddValue(const OrtValueInfo* value) {
  if (value == nullptr) return nullptr;
  const auto known = values_.find(value);
  if (known != values_.end()) return known->second;
  const OrtApi& ort = *host_.ort;
  match::ValueInfo info;
  info.name = NameOf(ort, value);
  if (info.name.empty()) return nullptr;
  bool is_outside = false;
  Check(ort, ort.ValueInfo_IsFromOuterScope(value, &is_outside));
  for (const OrtModelGraph* outer = is_outside ? around_ : nullptr; outer != nullptr; outer = outer->around_) {
    const auto found = outer->by_name_.find(info.name);
    if (found != outer->by_name_.end()) return values_[value] = found->second;
  }
  if (const auto found = by_name_.find(info.name); found != by_name_.end()) return values_[value] = found->second;
  Check(ort, ort.ValueInfo_IsConstantInitializer(value, &info.is_constant));
  // ONNX Runtime asks about a branch before its outer graph exists, so values of the outer graph count as inputs.
  info.is_input = is_outside && !info.is_constant;
  if (!is_outside) {
    Check(ort, ort.ValueInfo_IsRequiredGraphInput(value, &info.is_input));
    Check(ort, ort.ValueInfo_IsGraphOutput(value, &info.is_output));
  }
  const OrtTypeInfo* type = nullptr;
  const OrtTensorTypeAndShapeInfo* tensor = nullptr;
  Check(ort, ort.GetValueInfoTypeInfo(value, &type));
  if (type != nullptr) Check(ort, ort.CastTypeInfoToTensorInfo(type, &tensor));
  if (tensor != nullptr) {
    const TensorInfo read = ReadInfo(ort, *tensor);
    info.type = read.type;
    const bool has_shape = host_.version >= kTellsOfShapes ? ort.TensorTypeAndShape_HasShape(tensor)
                                                           : info.is_constant || !read.shape.empty();
    if (has_shape) info.shape.emplace();
    for (size_t i = 0; i < read.shape.size(); ++i) {
      const bool is_named = info.is_input && !is_branch_ && read.shape[i] < 0;
      info.shape->push_back({read.shape[i], is_named ? Text(read.names[i]) : ""});
    }
    if (info.is_constant) info.constant_shape = read.shape;
  }
  const Value added = &graph_.AddValue(std::move(info));
  ort_values_[added] = value;
  by_name_[added->name] = added;
  return values_[value] = added;
}

std::optional<Constant> OrtModelGraph::Read(const match::ValueInfo& value) const {
  const auto own = ort_values_.find(&value);
  if (own == ort_values_.end()) return around_ == nullptr ? std::nullopt : around_->Read(value);
  const OrtValue* initializer = nullptr;
  Check(*host_.ort, host_.ort->ValueInfo_GetInitializerValue(own->second, &initializer));
  if (initializer == nullptr) return std::nullopt;
  return ReadTensor(*host_.ort, *initializer, value.name);
}

}  // namespace ortolan::provider
