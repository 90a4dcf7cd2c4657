// A node of a graph, its attributes and its constant inputs. Valid as long as the graph.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "provider/ort_api.h"

namespace ortolan::provider {

// The reason why a node is left to ONNX Runtime. Models are untrusted: types and shapes are checked before data is
// read.
struct UnfitError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void Expect(bool holds, const std::string& reason) {
  if (!holds) throw UnfitError(reason);
}

// Return whether layers support this float type. float16 inputs are converted to float32 and outputs back to float16.
inline bool IsFloatType(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16;
}

// Return whether this is a type of quantized weights or biases.
inline bool IsCode(ONNXTensorElementDataType type) {
  return type == ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 || type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 ||
         type == ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32;
}

using Shape = std::vector<int64_t>;
// A value of a graph. Values of one graph are equal if their addresses are equal.
using Value = const OrtValueInfo*;

// Return the replacement of a value, or the value if it has none.
Value Seen(const std::unordered_map<Value, Value>& instead, Value value);

// A constant tensor. Its data need not be aligned.
struct Constant {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Shape shape;
  const void* data = nullptr;

  // The tensor must be float32 or float16 (IsFloatType).
  std::vector<float> Floats() const;
  int64_t Count() const;
  // The tensor must be uint8, int8 or int32 (IsCode).
  int64_t CodeAt(int64_t index) const;
  // Return the value of a float tensor with one element and at most one axis.
  std::optional<float> Scalar() const;
};

Shape DimensionsOf(const OrtApi& ort, const OrtTensorTypeAndShapeInfo& info);

std::string NameOf(const HostApi& host, Value value);
// Return UNDEFINED if the value is not a tensor or its type is unknown.
ONNXTensorElementDataType TypeOf(const HostApi& host, Value value);
// Return the shape of a tensor, with -1 for unknown dimensions; nullopt if the shape is unknown.
std::optional<Shape> ShapeOf(const HostApi& host, Value value);
bool IsConstant(const HostApi& host, Value value);
// Return nullopt if the value is not constant or cannot be read.
std::optional<Constant> ReadConstant(const HostApi& host, Value value);
class Node {
 public:
  Node(const HostApi& host, const OrtNode& node);

  const OrtNode& ort() const { return node_; }
  const std::string& type() const { return type_; }
  bool Is(const std::string& domain, const std::string& type) const { return domain_ == domain && type_ == type; }
  // Return whether the operator is in ONNX's default domain.
  bool IsStandard() const { return domain_.empty() || domain_ == "ai.onnx"; }
  bool IsStandard(const std::string& type) const { return IsStandard() && type_ == type; }
  const std::string& name() const { return name_; }
  // Return a text for error messages such as "MatMulNBits node 'model/…/MatMul'".
  std::string Described() const;

  // Throws UnfitError if the attribute is not an integer, or is missing and has no default.
  int64_t Int(const char* name, std::optional<int64_t> missing = std::nullopt) const;
  // Return `missing` if the attribute is missing. Throws UnfitError if it has another type.
  float Float(const char* name, float missing) const;
  std::string String(const char* name, const std::string& missing) const;
  std::vector<int64_t> Ints(const char* name) const;
  // Return the names of all attributes. ONNX Runtime adds missing attributes with their defaults.
  std::vector<std::string> AttributeNames() const;

  // Inputs that the node leaves out are null, or missing at the end.
  const std::vector<Value>& inputs() const { return inputs_; }
  const std::vector<Value>& outputs() const { return outputs_; }
  // Values of the outer graph that subgraphs of the node read.
  const std::vector<Value>& implicit_inputs() const { return implicit_inputs_; }
  // Return the input in the original model, without the replacements of Graph::See.
  Value StoredInput(size_t index) const { return index < stored_inputs_.size() ? stored_inputs_[index] : nullptr; }
  // Return all original inputs and the values that subgraphs read.
  std::vector<Value> StoredReads() const;
  void See(const std::unordered_map<Value, Value>& instead);
  Value Input(size_t index) const { return index < inputs_.size() ? inputs_[index] : nullptr; }
  Value Output(size_t index) const { return index < outputs_.size() ? outputs_[index] : nullptr; }
  bool Has(size_t index) const { return Input(index) != nullptr; }
  // Return "" if the node leaves the input out.
  std::string InputName(size_t index) const { return Has(index) ? NameOf(host_, Input(index)) : ""; }
  ONNXTensorElementDataType InputType(size_t index) const { return TypeOf(host_, Input(index)); }
  bool IsConstant(size_t index) const { return provider::IsConstant(host_, Input(index)); }
  // Return whether an input is a value of an outer graph.
  bool ReadsOutside() const;
  // Throws UnfitError unless the input is constant and has one of these types and shapes. Empty shapes: any shape.
  Constant ConstantInput(size_t index, const char* what, std::initializer_list<ONNXTensorElementDataType> types,
                         const std::vector<Shape>& shapes = {}) const;

 private:
  // Return null if the attribute is missing. Throws UnfitError if it has another type.
  const OrtOpAttr* Attribute(const char* name, OrtOpAttrType type, const char* what) const;

  const HostApi& host_;
  const OrtNode& node_;
  std::string name_, domain_, type_;
  std::vector<Value> inputs_, outputs_, implicit_inputs_;
  std::vector<Value> stored_inputs_, stored_implicit_inputs_;
};

}  // namespace ortolan::provider
