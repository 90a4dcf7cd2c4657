// A node of a graph, read: its attributes, and its constant inputs as they lie in memory. Valid as long as the graph.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "provider/ort_api.h"

namespace ortolan::provider {

// Why a node is left to ONNX Runtime. A model is untrusted: types and shapes are checked before any number is read.
struct UnfitError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

inline void Expect(bool holds, const std::string& reason) {
  if (!holds) throw UnfitError(reason);
}

using Shape = std::vector<int64_t>;

// Of these numbers of elements; at any address.
struct Constant {
  std::string name;
  ONNXTensorElementDataType type = ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED;
  Shape shape;
  const void* data = nullptr;

  // Of a tensor of floats.
  std::vector<float> Floats() const;
  int64_t Count() const;
};

class Node {
 public:
  Node(const HostApi& host, const OrtNode& node);

  bool Is(const std::string& domain, const std::string& type) const { return domain_ == domain && type_ == type; }
  const std::string& name() const { return name_; }
  const std::string& type() const { return type_; }
  // "MatMulNBits node 'model/…/MatMul'": the beginning of what is said of it.
  std::string Described() const;

  // Throws UnfitError if the attribute is no whole number, or missing where nothing stands for that.
  int64_t Whole(const char* name, std::optional<int64_t> missing = std::nullopt) const;

  // Inputs may be left out, at the end or in between.
  bool Has(size_t index) const { return index < inputs_.size() && inputs_[index] != nullptr; }
  std::string InputName(size_t index) const;
  // UNDEFINED: no tensor, or its type is not known.
  ONNXTensorElementDataType InputType(size_t index) const;
  bool IsConstant(size_t index) const;
  // Whether an input is a value of a graph around its own.
  bool ReadsOutside() const;
  // Throws UnfitError unless the input is there, constant, and of one of the types and shapes.
  Constant ConstantInput(size_t index, const char* what, std::initializer_list<ONNXTensorElementDataType> types,
                         std::initializer_list<Shape> shapes) const;

 private:
  const HostApi& host_;
  const OrtNode& node_;
  std::string name_, domain_, type_;
  std::vector<const OrtValueInfo*> inputs_;
};

// All nodes of the graph, in its order.
std::vector<const OrtNode*> NodesOf(const HostApi& host, const OrtGraph& graph);

}  // namespace ortolan::provider
