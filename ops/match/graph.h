// A model graph as the pattern rules see it, independent of ONNX Runtime and Python. Two front ends build it:
// provider/ort_graph.h from ONNX Runtime's graph, and src/match_bindings.cc from an onnx-ir graph. Models are
// untrusted: rules check types and shapes before they read constants, and every search is bounded.
//
// Values and nodes are compared by address. They belong to the graph and stay valid as long as it.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <variant>
#include <vector>

#include "match/reason.h"

namespace ortolan::match {

// Element types have the numbers of ONNX's TensorProto.DataType, which ONNX Runtime uses too.
enum class ElementType : int32_t {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kUint16 = 4,
  kInt16 = 5,
  kInt32 = 6,
  kInt64 = 7,
  kString = 8,
  kBool = 9,
  kFloat16 = 10,
  kDouble = 11,
  kUint32 = 12,
  kUint64 = 13,
  kBfloat16 = 16,
  kUint4 = 21,
  kInt4 = 22,
};

// Return ONNX's name of a type, such as "FLOAT"; "of unknown type" for kUndefined.
std::string NameOf(ElementType type);
// Return whether linear layers support this float type: float32 or float16.
inline bool IsFloatType(ElementType type) { return type == ElementType::kFloat || type == ElementType::kFloat16; }
inline bool IsAnyFloat(ElementType type) {
  return IsFloatType(type) || type == ElementType::kDouble || type == ElementType::kBfloat16;
}
inline bool IsByte(ElementType type) { return type == ElementType::kUint8 || type == ElementType::kInt8; }
// Return whether this is a type of quantized weights or biases: uint8, int8 or int32.
inline bool IsCode(ElementType type) { return IsByte(type) || type == ElementType::kInt32; }

using Shape = std::vector<int64_t>;

class Node;

// A constant tensor. Its data need not be aligned.
struct Constant {
  std::string name;
  ElementType type = ElementType::kUndefined;
  Shape shape;
  const void* data = nullptr;
  std::shared_ptr<const void> owner;  // keeps `data` alive; null if the graph does

  int64_t Count() const;
  // The tensor must be float32, float16 or bfloat16.
  std::vector<float> Floats() const;
  // The tensor must be uint8, int8 or int32 (IsCode).
  int64_t CodeAt(int64_t index) const;
  // Return the value of a float tensor with one element and at most one axis.
  std::optional<float> Scalar() const;
  // Return the elements of a float, integer or boolean tensor; nullopt for other types.
  std::optional<std::vector<double>> Numbers() const;
};

// One dimension as the model declares it.
struct DeclaredSize {
  int64_t size = -1;  // -1: unknown
  std::string name;   // set only where the name is reliable: at inputs of the main graph
};

struct ValueInfo {
  std::string name;
  ElementType type = ElementType::kUndefined;      // declared or inferred by the front end
  std::optional<std::vector<DeclaredSize>> shape;  // nullopt: unknown rank
  bool is_input = false;                           // input of this graph, and not an initializer
  bool is_output = false;                          // output of this graph
  bool is_constant = false;                        // known before the model runs; callers cannot replace it
  bool is_default = false;                         // an initializer that callers may replace
  std::optional<Shape> constant_shape;             // shape of a constant, without reading it
  size_t index = 0;                                // number of the value in its graph, in the order of Graph::AddValue
};
// A value of a graph; null for an input or output that a node leaves out.
using Value = const ValueInfo*;

using Attribute = std::variant<int64_t, float, std::string, std::vector<int64_t>, std::vector<float>, Constant>;

class Graph;

using Attributes = std::map<std::string, Attribute, std::less<>>;
// Graphs of If, Loop and Scan, by attribute name. They read values of the outer graph by the same address.
using Subgraphs = std::map<std::string, std::shared_ptr<const Graph>, std::less<>>;

class Node {
 public:
  Node(std::string name, std::string domain, std::string type, Attributes attributes, std::vector<Value> inputs,
       std::vector<Value> outputs, std::vector<Value> implicit_inputs = {}, Subgraphs subgraphs = {})
      : name_(std::move(name)),
        domain_(std::move(domain)),
        type_(std::move(type)),
        attributes_(std::move(attributes)),
        subgraphs_(std::move(subgraphs)),
        inputs_(std::move(inputs)),
        outputs_(std::move(outputs)),
        implicit_inputs_(std::move(implicit_inputs)) {}

  const std::string& name() const { return name_; }
  const std::string& domain() const { return domain_; }
  const std::string& type() const { return type_; }
  size_t index() const { return index_; }  // position in topological order
  bool Is(std::string_view domain, std::string_view type) const { return domain_ == domain && type_ == type; }
  // Return whether the operator is in ONNX's default domain.
  bool IsStandard() const { return domain_.empty() || domain_ == "ai.onnx"; }
  bool IsStandard(std::string_view type) const { return IsStandard() && type_ == type; }
  // Return a text for reasons such as "MatMulNBits node 'model/…/MatMul'".
  std::string Described() const;

  // Return the attribute, or `missing`. Throws RefusedError if it has another type, or is missing without a default.
  int64_t Int(std::string_view name, std::optional<int64_t> missing = std::nullopt) const;
  float Float(std::string_view name, float missing) const;
  std::string String(std::string_view name, const std::string& missing) const;
  // Return an empty list if the attribute is missing.
  std::vector<int64_t> Ints(std::string_view name) const;
  bool HasAttribute(std::string_view name) const { return attributes_.find(name) != attributes_.end(); }
  // ONNX Runtime adds missing attributes with their defaults; onnx-ir does not.
  const Attributes& attributes() const { return attributes_; }
  const Subgraphs& subgraphs() const { return subgraphs_; }

  // Inputs that the node leaves out are null, or missing at the end.
  const std::vector<Value>& inputs() const { return inputs_; }
  const std::vector<Value>& outputs() const { return outputs_; }
  // Values of the outer graph that subgraphs of the node read.
  const std::vector<Value>& implicit_inputs() const { return implicit_inputs_; }
  Value Input(size_t index) const { return index < inputs_.size() ? inputs_[index] : nullptr; }
  Value Output(size_t index) const { return index < outputs_.size() ? outputs_[index] : nullptr; }
  bool Has(size_t index) const { return Input(index) != nullptr; }
  // Return "" if the node leaves the input out.
  std::string InputName(size_t index) const { return Has(index) ? Input(index)->name : ""; }
  ElementType InputType(size_t index) const { return Has(index) ? Input(index)->type : ElementType::kUndefined; }

  // Inputs of the original model, without the replacements of Graph::See.
  Value StoredInput(size_t index) const { return index < stored_inputs_.size() ? stored_inputs_[index] : nullptr; }
  // Return all original inputs and the values that subgraphs read.
  std::vector<Value> StoredReads() const;
  bool IsConstant(size_t index) const;
  // Throws RefusedError unless the input is constant and has one of these types and shapes. Empty shapes: any shape.
  Constant ConstantInput(size_t index, const char* what, std::initializer_list<ElementType> types,
                         const std::vector<Shape>& shapes = {}) const;
  // The same without the data, which is not read.
  Constant ConstantHeader(size_t index, const char* what, std::initializer_list<ElementType> types,
                          const std::vector<Shape>& shapes = {}) const;

 private:
  friend class Graph;
  const Graph* graph_ = nullptr;
  std::string name_, domain_, type_;
  size_t index_ = 0;
  Attributes attributes_;
  Subgraphs subgraphs_;
  std::vector<Value> inputs_, outputs_, implicit_inputs_;
  std::vector<Value> stored_inputs_, stored_implicit_inputs_;
};

// Replacements for some values and nodes of a graph, applied before rules read it.
struct View {
  std::unordered_map<Value, Value> instead;       // replacement of each value
  std::unordered_set<const Node*> hidden;         // nodes that rules do not see
  std::unordered_map<Value, Constant> constants;  // outputs of hidden nodes that are constant
};

class Graph {
 public:
  // A consumer of a value: a node and its input index, or -1 if a subgraph of the node reads the value.
  struct Use {
    const Node* node;
    int64_t index;
  };
  // Reads the data of a constant; nullopt if it cannot be read.
  using ReadConstant = std::function<std::optional<Constant>(const ValueInfo&)>;

  explicit Graph(ReadConstant read) : read_(std::move(read)) {}
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // --- built by a front end: values first, then nodes in topological order, then Finish -----------------------------

  ValueInfo& AddValue(ValueInfo value);
  const Node& AddNode(Node node);
  void SetOutputs(std::vector<Value> outputs) { outputs_ = std::move(outputs); }
  void SetOpset(int64_t opset) { opset_ = opset; }
  void Finish() { FindUses(); }

  // --- read by rules ------------------------------------------------------------------------------------------------

  // Apply a view; all other functions then describe the graph with these replacements. The data of the view's constants
  // must stay valid as long as the graph.
  void See(View view);
  Value Seen(Value value) const;

  // The nodes in topological order.
  const std::deque<Node>& nodes() const { return nodes_; }
  const std::deque<ValueInfo>& values() const { return values_; }
  const std::vector<Value>& outputs() const { return outputs_; }
  // Opset of the default domain; 0 if unknown.
  int64_t opset() const { return opset_; }
  // Return the node that computes a value; null for inputs, initializers, and values of an outer graph.
  const Node* Maker(Value value) const;
  std::span<const Use> Uses(Value value) const;
  bool IsOutput(Value value) const;
  // Return the only consumer of a value; null if the value has more consumers or uses, is read by a subgraph, or is an
  // output of the graph.
  const Node* OnlyReader(Value value) const;

  // Return whether these nodes can run as one: true if no path leaves the set and re-enters it. behind: further nodes
  // that can only run after the set.
  bool CanBeOne(std::span<const Node* const> nodes, std::span<const Node* const> behind = {}) const;

  // Return a constant with its data; nullopt if the value is not constant or cannot be read.
  std::optional<Constant> ConstantOf(Value value) const;
  // Return a constant without its data, which is read only if its shape is unknown.
  std::optional<Constant> HeaderOf(Value value) const;
  // Return the value of a constant float scalar.
  std::optional<float> NumberOf(Value value) const;
  // Return the value of a constant of any number type with one element and at most one axis: more could add axes to a
  // result.
  std::optional<double> AnyNumberOf(Value value) const;
  bool IsConstantValue(Value value) const;
  bool IsFloat(Value value) const { return value != nullptr && value->type == ElementType::kFloat; }
  bool IsFloatOrHalf(Value value) const { return value != nullptr && IsFloatType(value->type); }
  // Return whether a node is a Cast between float32 and float16.
  bool IsFloatCast(const Node& node) const;

 private:
  struct ValueUses {
    const Node* maker = nullptr;
    std::vector<Use> uses;
    bool is_output = false;
  };
  void FindUses();
  const ValueUses& Of(Value value) const;

  ReadConstant read_;
  int64_t opset_ = 0;
  std::deque<ValueInfo> values_;
  std::deque<Node> nodes_;
  std::vector<Value> outputs_;
  View view_;
  std::unordered_map<Value, ValueUses> uses_;
};

// Return the other operand of a binary operator.
inline Value Other(const Node& node, Value operand) { return node.Input(0) == operand ? node.Input(1) : node.Input(0); }
// Return the node that computes a value if it is a standard operator of this type.
const Node* MakerOf(const Graph& graph, Value value, std::string_view type);
// Return a value's name in quotes for reasons; "nothing" for null.
std::string Quoted(Value value);
// Return a node's type and name for reasons, such as "Reshape 'encoder/Reshape_1'".
std::string Described(const Node& node);

}  // namespace ortolan::match
