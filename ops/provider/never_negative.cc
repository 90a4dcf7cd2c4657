#include "provider/never_negative.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <utility>

namespace ortolan::provider {
namespace {

constexpr const char* kNeverNegative[] = {"Abs",     "Exp",     "HardSigmoid", "Relu",
                                          "Sigmoid", "Softmax", "Softplus",    "Sqrt"};
constexpr const char* kWithinOne[] = {"Erf", "Tanh"};
// Operators whose output has only elements of the first input, or their sums and means.
constexpr const char* kKeepsSign[] = {"Cast",      "Expand",    "Flatten",    "Gather",   "Identity",
                                      "Reshape",   "Slice",     "Split",      "Squeeze",  "Transpose",
                                      "Unsqueeze", "ReduceMax", "ReduceMean", "ReduceSum"};
constexpr const char* kOfSigns[] = {"Add", "Concat", "Div", "Mul", "Where"};
// Operators that compute a mask from masks. And, Equal and similar operators output integers or bools, which IsOfMask
// accepts for any operator.
constexpr const char* kOfMasks[] = {"Add",     "Cast",  "Div",     "Expand", "Identity",  "Mul",  "Neg",
                                    "Reshape", "Slice", "Squeeze", "Sub",    "Unsqueeze", "Where"};
constexpr int kMostVisits = 64;

template <typename Types>
bool IsOneOf(const Node& node, const Types& types) {
  return node.IsStandard() &&
         std::any_of(std::begin(types), std::end(types), [&](const char* type) { return node.type() == type; });
}

bool IsFloating(ElementType type) {
  return IsFloatType(type) || type == ElementType::kDouble || type == ElementType::kBfloat16;
}

class Prover {
 public:
  Prover(const Graph& graph, const FindUnrounded& find_unrounded) : graph_(graph), find_unrounded_(find_unrounded) {}

  bool IsAbove(Value value) {
    if (value == nullptr || --left_ < 0) return false;
    if (const std::optional<std::vector<float>> constant = Constants(value)) {
      return std::all_of(constant->begin(), constant->end(), [](float number) { return number >= 0; });
    }
    const Node* const node = graph_.Maker(value);
    if (node == nullptr || !node->IsStandard()) return false;
    if (IsOneOf(*node, kNeverNegative)) return true;
    if (node->type() == "DequantizeLinear") {
      const std::optional<Unrounded> rounded = find_unrounded_(value);
      return rounded && (rounded->begins_at_zero || IsAbove(rounded->floats));
    }
    if (node->type() == "Clip") return AllOf(node->Input(1), [](float least) { return least >= 0; });
    if (node->type() == "Pow") return AllOf(node->Input(1), [](float power) { return std::fmod(power, 2.0f) == 0; });
    if (node->type() == "Mul" && node->Input(0) == node->Input(1)) return true;
    if (node->type() == "Add" && IsOneMore(*node)) return true;
    const auto is_above = [this](Value input) { return IsAbove(input); };
    const std::vector<Value>& inputs = node->inputs();
    if (node->type() == "Max") return std::any_of(inputs.begin(), inputs.end(), is_above);
    if (IsOneOf(*node, kOfSigns)) {
      return std::all_of(inputs.begin() + (node->type() == "Where" ? 1 : 0), inputs.end(), is_above);
    }
    return IsOneOf(*node, kKeepsSign) && IsAbove(node->Input(0));
  }

  bool IsOfMask(Value value) const {
    std::vector<Value> waiting = {value};
    for (int visits = 1; !waiting.empty(); ++visits) {
      const Value one = waiting.back();
      waiting.pop_back();
      const ElementType type = one->type;
      const bool is_whole = type != ElementType::kUndefined && !IsFloating(type);
      if (is_whole || Constants(one)) continue;
      if (visits > kMostVisits) return false;
      if (const std::optional<Unrounded> rounded = find_unrounded_(one)) {
        if (rounded->floats == nullptr) return false;
        waiting.push_back(rounded->floats);
        continue;
      }
      const Node* const node = graph_.Maker(one);
      if (node == nullptr || !IsOneOf(*node, kOfMasks)) return false;
      std::copy_if(node->inputs().begin(), node->inputs().end(), std::back_inserter(waiting),
                   [](Value input) { return input != nullptr; });
    }
    return true;
  }

 private:
  // Return the values of a float constant, or of one that a DequantizeLinear with one scale computes.
  std::optional<std::vector<float>> Constants(Value value) const {
    if (const std::optional<Constant> tensor = graph_.ConstantOf(value)) {
      return IsFloatType(tensor->type) ? std::optional(tensor->Floats()) : std::nullopt;
    }
    const Node* const node = value == nullptr ? nullptr : graph_.Maker(value);
    if (node == nullptr || !node->IsStandard("DequantizeLinear")) return std::nullopt;
    const std::optional<Constant> codes = graph_.ConstantOf(node->Input(0));
    const std::optional<float> scale = graph_.NumberOf(node->Input(1));
    std::optional<Constant> zero;
    if (node->Has(2)) zero = graph_.ConstantOf(node->Input(2));
    const bool has_zero = !node->Has(2) || (zero && codes && zero->type == codes->type && zero->Count() == 1);
    if (!codes || !scale || !has_zero || !IsCode(codes->type)) return std::nullopt;
    const int64_t zero_point = zero ? zero->CodeAt(0) : 0;
    std::vector<float> values(static_cast<size_t>(codes->Count()));
    for (size_t i = 0; i < values.size(); ++i) {
      values[i] = static_cast<float>(codes->CodeAt(static_cast<int64_t>(i)) - zero_point) * *scale;
    }
    return values;
  }

  template <typename Holds>
  bool AllOf(Value value, const Holds& holds) const {
    const std::optional<std::vector<float>> constant = Constants(value);
    return constant && std::all_of(constant->begin(), constant->end(), holds);
  }

  // Return whether a node adds about 1 to the output of Erf or Tanh, which is at least -1. The constant may be rounded.
  bool IsOneMore(const Node& add) const {
    for (const size_t index : {0, 1}) {
      Value value = add.Input(index);
      if (const std::optional<Unrounded> rounded = find_unrounded_(value); rounded && rounded->floats != nullptr) {
        value = rounded->floats;
      }
      const Node* const node = graph_.Maker(value);
      if (node == nullptr || !IsOneOf(*node, kWithinOne)) continue;
      return AllOf(add.Input(1 - index), [](float number) { return number > 0.99f; });
    }
    return false;
  }

  const Graph& graph_;
  const FindUnrounded& find_unrounded_;
  int left_ = kMostVisits;  // remaining limit for visited values
};

}  // namespace

bool IsNeverNegative(const Graph& graph, Value value, const FindUnrounded& find_unrounded) {
  Prover prover(graph, find_unrounded);
  return prover.IsOfMask(value) || prover.IsAbove(value);
}

}  // namespace ortolan::provider
