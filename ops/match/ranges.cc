#include "match/ranges.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>
#include <string_view>

namespace ortolan::match {
namespace {

constexpr const char* kMicrosoft = "com.microsoft";
constexpr size_t kMostVisits = 64;

using Types = std::span<const std::string_view>;

// Operators that move elements of the first input without changing them.
constexpr std::string_view kMoves[] = {"Expand", "Flatten", "Gather",  "Identity",  "Reshape",
                                       "Slice",  "Split",   "Squeeze", "Transpose", "Unsqueeze"};
constexpr std::string_view kNeverNegative[] = {"Abs",     "Exp",     "HardSigmoid", "Relu",
                                               "Sigmoid", "Softmax", "Softplus",    "Sqrt"};
constexpr std::string_view kWithinOne[] = {"Erf", "Tanh"};
// Operators whose output is not negative if the first input, or all inputs, are not negative.
constexpr std::string_view kKeepsSign[] = {"Cast", "ReduceMax", "ReduceMean", "ReduceSum"};
constexpr std::string_view kOfSigns[] = {"Add", "Concat", "Div", "Mul", "Where"};
constexpr std::string_view kTruthValues[] = {"And", "Equal", "Greater", "Less", "Not", "Or"};
// Operators that compute a mask from masks.
constexpr std::string_view kOfMasks[] = {"Add",     "Cast",  "Div",     "Expand", "Identity",  "Mul",  "Neg",
                                         "Reshape", "Slice", "Squeeze", "Sub",    "Unsqueeze", "Where"};

bool IsOneOf(const Node& node, Types types) {
  return node.IsStandard() && std::ranges::find(types, node.type()) != types.end();
}

// Indices of the inputs that are a layer's scale and zero point, here those of its first input.
struct RangeInputs {
  size_t scale, zero_point;
};
std::optional<RangeInputs> InputRangeOf(const Node& node) {
  if (node.IsStandard("QLinearMatMul") || node.Is(kMicrosoft, "QGemm")) return RangeInputs{1, 2};
  if (node.Is(kMicrosoft, "MatMulIntegerToFloat")) return RangeInputs{2, 4};
  if (node.Is(kMicrosoft, "QAttention")) return RangeInputs{3, 6};
  return std::nullopt;
}

// Return the indices for the output of a QuantizeLinear or layer; nullopt unless the output is 8-bit.
std::optional<RangeInputs> OutputRangeOf(const Node& node) {
  if (node.IsStandard("QuantizeLinear")) return RangeInputs{1, 2};
  if (node.IsStandard("QLinearMatMul")) return RangeInputs{6, 7};
  if (node.Is(kMicrosoft, "QGemm") && node.Has(7)) return RangeInputs{7, 8};
  return std::nullopt;
}

// Return the QuantizeLinear whose codes a DequantizeLinear reads with the same range, perhaps after moves; or null.
const Node* QuantizeBefore(const Graph& graph, const Node& dequantize) {
  const Node* const node = MakerOfElements(graph, dequantize.Input(0));
  if (node == nullptr || !node->IsStandard("QuantizeLinear") || !IsPlain(*node) || !IsPlain(dequantize)) return nullptr;
  const std::optional<FixedRange> range = RangeAt(graph, *node, 1, 2, ElementType::kUint8);
  return range && RangeAt(graph, dequantize, 1, 2, range->type) == range ? node : nullptr;
}

// Return the float input of the QuantizeLinear before the DequantizeLinear that computes a value; null for other
// values. The DequantizeLinear's output is negative only if the input is.
Value Unrounded(const Graph& graph, Value value) {
  const Node* const node = graph.Maker(value);
  const bool ends = node != nullptr && node->IsStandard("DequantizeLinear");
  const Node* const quantize = ends ? QuantizeBefore(graph, *node) : nullptr;
  return quantize == nullptr ? nullptr : quantize->Input(0);
}

class Prover {
 public:
  explicit Prover(const Graph& graph) : graph_(graph) {}

  bool IsAbove(Value value) {
    if (value == nullptr || left_-- == 0) return false;
    if (const std::optional<std::vector<double>> numbers = Numbers(value)) {
      return std::ranges::all_of(*numbers, [](double number) { return number >= 0; });
    }
    const Node* const node = graph_.Maker(value);
    if (node == nullptr || !node->IsStandard()) return false;
    if (IsOneOf(*node, kNeverNegative)) return true;
    if (node->type() == "DequantizeLinear") {
      const std::optional<FixedRange> range = RangeAt(graph_, *node, 1, 2, ElementType::kUint8);
      return (range && IsPlain(*node) && range->BeginsAtZero()) || IsAbove(Unrounded(graph_, value));
    }
    if (node->type() == "Clip") return AllOf(node->Input(1), [](double least) { return least >= 0; });
    if (node->type() == "Pow") return AllOf(node->Input(1), [](double power) { return std::fmod(power, 2) == 0; });
    if (node->type() == "Mul" && node->Has(0) && Source(node->Input(0)) == Source(node->Input(1))) return true;
    if (node->type() == "Add" && IsOneMore(*node)) return true;
    const auto is_above = [this](Value input) { return IsAbove(input); };
    const std::vector<Value>& inputs = node->inputs();
    if (node->type() == "Max") return std::ranges::any_of(inputs, is_above);
    if (IsOneOf(*node, kOfSigns)) {
      const std::ptrdiff_t first = node->type() == "Where" && !inputs.empty() ? 1 : 0;
      return std::all_of(inputs.begin() + first, inputs.end(), is_above);
    }
    return (IsOneOf(*node, kKeepsSign) || IsOneOf(*node, kMoves)) && IsAbove(node->Input(0));
  }

  bool IsOfMask(Value value) const {
    std::vector<Value> waiting = {value};
    for (size_t visits = 1; !waiting.empty(); ++visits) {
      const Value one = Source(waiting.back());
      waiting.pop_back();
      const Node* const node = graph_.Maker(one);
      const bool is_whole = (one->type != ElementType::kUndefined && !IsAnyFloat(one->type)) ||
                            (node != nullptr && IsOneOf(*node, kTruthValues));
      if (is_whole || Numbers(one)) continue;
      if (visits > kMostVisits || node == nullptr || !IsOneOf(*node, kOfMasks)) return false;
      std::ranges::copy_if(node->inputs(), std::back_inserter(waiting), [](Value input) { return input != nullptr; });
    }
    return true;
  }

 private:
  // Return the value before a QDQ pair, or the value itself.
  Value Source(Value value) const {
    const Value floats = Unrounded(graph_, value);
    return floats == nullptr ? value : floats;
  }

  // Return the elements of a constant, or of one that a DequantizeLinear with one scale computes.
  std::optional<std::vector<double>> Numbers(Value value) const {
    if (const std::optional<Constant> tensor = graph_.ConstantOf(value)) return tensor->Numbers();
    const Node* const node = graph_.Maker(value);
    if (node == nullptr || !node->IsStandard("DequantizeLinear")) return std::nullopt;
    const std::optional<Constant> codes = graph_.ConstantOf(node->Input(0));
    const std::optional<double> scale = graph_.AnyNumberOf(node->Input(1)), zero = graph_.AnyNumberOf(node->Input(2));
    std::optional<std::vector<double>> numbers = codes ? codes->Numbers() : std::nullopt;
    if (!numbers || !scale || (node->Has(2) && !zero)) return std::nullopt;
    for (double& number : *numbers) number = (number - zero.value_or(0)) * *scale;
    return numbers;
  }

  template <typename Holds>
  bool AllOf(Value value, const Holds& holds) const {
    const std::optional<std::vector<double>> numbers = Numbers(value);
    return numbers && std::ranges::all_of(*numbers, holds);
  }

  // Return whether a node adds about 1 to the output of Erf or Tanh, which is at least -1. The constant may be rounded.
  bool IsOneMore(const Node& add) const {
    for (const size_t index : {0, 1}) {
      const Node* const node = graph_.Maker(Source(add.Input(index)));
      if (node != nullptr && IsOneOf(*node, kWithinOne)) {
        return AllOf(add.Input(1 - index), [](double number) { return number > 0.99f; });
      }
    }
    return false;
  }

  const Graph& graph_;
  size_t left_ = kMostVisits;  // remaining limit for visited values
};

// Return whether MatMul, Gemm or Transpose reads the dequantized constant, so that it is a layer's weight.
bool IsWeight(const Graph& graph, const QdqPair& pair) {
  return std::ranges::any_of(pair.ends, [&](const Node* end) {
    const std::span<const Graph::Use> uses = graph.Uses(end->Output(0));
    return std::ranges::any_of(uses, [](const Graph::Use& use) {
      const std::string& type = use.node->type();
      return type == "MatMul" || type == "Gemm" || type == "Transpose";
    });
  });
}

}  // namespace

Bounds FixedRange::FromZero() const {
  constexpr double kLargest = std::numeric_limits<float>::max();
  return {0, static_cast<float>(std::min(255 * static_cast<double>(scale), kLargest))};
}

bool FixedRange::IsSupported() const {
  using Limits = std::numeric_limits<float>;
  // A scale times any code must stay finite.
  return IsByte(type) && floats != ElementType::kDouble && scale >= Limits::min() && scale <= Limits::max() / 256;
}

const Node* MakerOfElements(const Graph& graph, Value value) {
  const Node* node = graph.Maker(value);
  for (size_t i = 0; node != nullptr && IsOneOf(*node, kMoves); ++i) {
    node = i < kMostVisits ? graph.Maker(node->Input(0)) : nullptr;
  }
  return node;
}

std::optional<InputRange> FindInputRange(const Graph& graph, Value x) {
  const Node* const node = MakerOfElements(graph, x);
  if (node == nullptr || !node->IsStandard("DequantizeLinear")) return std::nullopt;
  const std::optional<FixedRange> range = RangeAt(graph, *node, 1, 2, node->InputType(0));
  if (!range || !range->IsSupported()) return std::nullopt;
  const Node* const quantize = QuantizeBefore(graph, *node);
  const bool is_next = quantize != nullptr && quantize->Output(0) == node->Input(0) && graph.Maker(x) == node;
  return InputRange{*range, is_next ? quantize : nullptr};
}

bool IsPlain(const Node& node) {
  try {
    return node.Int("output_dtype", 0) == 0 && node.Int("precision", 0) == 0 && node.Int("block_size", 0) == 0;
  } catch (const RefusedError&) {
    return false;
  }
}

std::optional<FixedRange> RangeAt(const Graph& graph, const Node& node, size_t scale, size_t zero_point,
                                  ElementType kind) {
  const std::optional<Constant> scales = graph.ConstantOf(node.StoredInput(scale));
  if (!scales || !IsAnyFloat(scales->type) || scales->Count() != 1) return std::nullopt;
  FixedRange range{static_cast<float>(scales->Numbers()->front()), 0, kind, scales->type};
  if (!(range.scale > 0) || std::isinf(range.scale)) return std::nullopt;
  if (node.StoredInput(zero_point) == nullptr) return range;
  const std::optional<Constant> zero = graph.ConstantOf(node.StoredInput(zero_point));
  if (!zero || !IsByte(zero->type) || zero->Count() != 1) return std::nullopt;
  range.zero_point = static_cast<int>(zero->CodeAt(0));
  range.type = zero->type;
  return range;
}

std::optional<QdqPair> FindQdqPair(const Graph& graph, const Node& maker) {
  const std::optional<RangeInputs> inputs = OutputRangeOf(maker);
  if (!inputs || maker.Output(0) == nullptr) return std::nullopt;
  const bool quantizes = maker.IsStandard("QuantizeLinear");
  const std::optional<Constant> zero = graph.ConstantOf(maker.StoredInput(inputs->zero_point));
  if (zero && !IsByte(zero->type)) return std::nullopt;
  const std::optional<FixedRange> range = RangeAt(graph, maker, inputs->scale, inputs->zero_point, ElementType::kUint8);
  Expect(range && IsPlain(maker) && maker.Has(0), ReasonCode::kNoFixedRange);
  QdqPair pair{&maker, quantizes ? maker.Input(0) : nullptr, {}, {}, {}, *range};
  std::vector<Value> waiting = {maker.Output(0)};
  for (size_t i = 0; i < waiting.size(); ++i) {
    Expect(!graph.IsOutput(waiting[i]), ReasonCode::kCodesAreOutput, Quoted(waiting[i]));
    for (const auto& [user, index] : graph.Uses(waiting[i])) {
      const auto has_range = [&](const RangeInputs& own) {
        return RangeAt(graph, *user, own.scale, own.zero_point, range->type) == range;
      };
      const std::optional<RangeInputs> layer = InputRangeOf(*user);
      const bool is_end = user->IsStandard("DequantizeLinear") && IsPlain(*user) && user->Output(0) != nullptr;
      if (index == 0 && is_end && has_range({1, 2})) {
        pair.ends.push_back(user);
      } else if (index == 0 && layer && has_range(*layer)) {
        pair.layers.push_back(user);
      } else {
        Expect(index == 0 && IsOneOf(*user, kMoves), ReasonCode::kCodesAreRead, Described(*user));
        pair.moves.push_back(user);
        std::ranges::copy_if(user->outputs(), std::back_inserter(waiting),
                             [](Value output) { return output != nullptr; });
      }
    }
  }
  return graph.IsConstantValue(pair.floats) && IsWeight(graph, pair) ? std::nullopt : std::optional(std::move(pair));
}

bool IsNeverNegative(const Graph& graph, Value value) {
  Prover prover(graph);
  return value != nullptr && (prover.IsOfMask(value) || prover.IsAbove(value));
}

}  // namespace ortolan::match
