#include "match/linear.h"

#include <algorithm>
#include <array>
#include <cmath>

#include "host/op_error.h"
#include "match/ranges.h"
#include "matmul/int8_weight.h"

namespace ortolan::match {
namespace {

using enum ElementType;
using enum ReasonCode;

constexpr std::string_view kMicrosoft = "com.microsoft";
constexpr int64_t kLargestSide = 1 << 28;  // kMaxDimension of formats
constexpr int kMostSteps = 64;
constexpr std::initializer_list<ElementType> kFloats = {kFloat, kFloat16, kBfloat16}, kBytes = {kInt8, kUint8};

// Other operators with weights of linear layers.
constexpr std::pair<std::string_view, ReasonCode> kOthers[] = {{"Attention", kFusedQkv},
                                                               {"QAttention", kFusedInt8Qkv},
                                                               {"LongformerAttention", kLeftQkv},
                                                               {"DecoderAttention", kLeftQkv},
                                                               {"FusedMatMul", kFusedMatMul},
                                                               {"FusedGemm", kFusedGemm},
                                                               {"GemmFastGelu", kGemmFastGelu},
                                                               {"MatMulNBits", kQuantized},
                                                               {"MatMulBnb4", kQuantized},
                                                               {"MatMulFpQ4", kQuantized},
                                                               {"MatMulInteger", kQuantized},
                                                               {"MatMulIntegerToFloat", kQuantized},
                                                               {"DynamicQuantizeMatMul", kQuantized},
                                                               {"QLinearMatMul", kQuantized},
                                                               {"QGemm", kQuantized},
                                                               {"MoE", kExperts},
                                                               {"QMoE", kExperts},
                                                               {"Einsum", kEinsum}};

template <typename List, typename Item>
bool Contains(const List& list, const Item& item) {
  return std::ranges::find(list, item) != std::end(list);
}

std::vector<Shape> OfColumns(int64_t n) { return {{}, {1}, {n}, {1, n}}; }

int64_t CeilOf(int64_t k, int64_t size) { return k / size + (k % size != 0); }

// Return the DequantizeLinear of a constant weight, the nodes from the weight to it, and whether they transpose.
struct Dequantized {
  std::vector<const Node*> nodes;
  bool transposed = false;
  const Node& node() const { return *nodes.back(); }
};
std::optional<Dequantized> FindDequantize(const Graph& graph, Value value) {
  Dequantized found;
  for (int steps = 0; value != nullptr && steps < kMostSteps; ++steps) {
    const Node* const maker = graph.Maker(value);
    if (maker == nullptr) return std::nullopt;
    found.nodes.push_back(maker);
    value = maker->Input(0);
    if (maker->IsStandard("DequantizeLinear")) {
      const std::optional<Constant> codes = graph.HeaderOf(value);
      const bool fits =
          codes && codes->shape.size() == 2 && Contains(std::array{kInt8, kUint8, kInt4, kUint4}, codes->type);
      return fits ? std::optional(found) : std::nullopt;
    }
    if (maker->IsStandard("Transpose")) {
      const std::vector<int64_t> order = maker->Ints("perm");
      if (!order.empty() && order != std::vector<int64_t>{0, 1} && order != std::vector<int64_t>{1, 0}) break;
      found.transposed ^= order != std::vector<int64_t>{0, 1};
    } else if (!maker->IsStandard("Identity")) {
      break;
    }
  }
  return std::nullopt;
}

class Rule {
 public:
  Rule(const Graph& graph, const Node& node) : graph_(graph), node_(node) {
    found_.node = &node;
    found_.nodes = {&node};
  }

  std::optional<FoundLinear> Match() try {
    if (node_.inputs().size() > 1 && (node_.IsStandard("MatMul") || node_.IsStandard("Gemm"))) {
      ReadProduct();
    } else if (node_.Is(kMicrosoft, "MatMulNBits")) {
      ReadBlocks();
    } else if (node_.Is(kMicrosoft, "QGemm")) {
      ReadQGemm();
    } else if (!HoldsMatrix()) {
      return std::nullopt;
    } else if (node_.Is(kMicrosoft, "DynamicQuantizeMatMul")) {
      Quantized(1, 2, 3);
      of_weight_ = false;
      SetX(node_.Input(0));
      ReadBias(4);
    } else if (node_.Is(kMicrosoft, "MatMulIntegerToFloat")) {
      ReadMatMulIntegerToFloat();
    } else if (node_.IsStandard("MatMulInteger")) {
      ReadMatMulInteger();
    } else if (node_.IsStandard("QLinearMatMul")) {
      Quantized(3, 4, 5);
      SetFixedX(1, 2);
      SetFixedY(6, 7);
    } else {
      const auto* const other =
          std::ranges::find_if(kOthers, [&](const auto& one) { return one.first == node_.type(); });
      if (other == std::end(kOthers)) return std::nullopt;
      return NotLinear{&node_, {other->second, {}}, std::nullopt, true};
    }
    return std::move(found_);
  } catch (const RefusedError& refused) {
    return NotLinear{&node_, refused.reason(), form_, of_weight_};
  }

  std::array<Linear, 3> MatchPacked(const std::array<int64_t, 3>& widths) {
    if (node_.type() == "QAttention") {
      ReadIntegers(3, 4, 6, 7);
    } else {
      const Constant weights = node_.ConstantHeader(1, "weights", kFloats, {});
      Expect(weights.shape.size() == 2, kWeightRank, weights.name, weights.shape.size());
      found_.type = weights.type;
      found_.weight.value = node_.Input(1);
      SetX(node_.Input(0));
      SetSize(weights.shape[0], weights.shape[1], false);
    }
    found_.weight.all_columns = found_.n;
    std::array<Linear, 3> parts;
    int64_t first = 0;
    for (size_t i = 0; i < parts.size(); ++i) {
      parts[i] = found_;
      parts[i].n = widths[i];
      parts[i].weight.first_column = first;
      first += widths[i];
    }
    Expect(first == found_.n, kWeightSize, found_.k, found_.n);
    return parts;
  }

 private:
  bool HoldsMatrix() const {
    return std::ranges::any_of(node_.inputs(), [&](Value value) {
      const std::optional<Constant> tensor = graph_.HeaderOf(value);
      return tensor && tensor->shape.size() >= 2;
    });
  }

  void SetX(Value x) {
    Expect(x != nullptr, kMissing);
    Expect(!graph_.IsConstantValue(x), kBothConstant);
    found_.x = x;
  }

  // --- biases -------------------------------------------------------------------------------------------------------

  // Read a bias [n] of an operator of com.microsoft, or else of the Add that follows.
  void ReadBias(size_t index) {
    found_.bias = node_.Input(index);
    if (found_.bias == nullptr) return FindAdd();
    const std::optional<Constant> bias = graph_.HeaderOf(found_.bias);
    if (form_ == WeightForm::kInt8) {
      Expect(bias && bias->type == kFloat && bias->shape == Shape{found_.n}, kBiasNotFloats, found_.bias->name,
             found_.n);
      return;
    }
    Expect(bias.has_value(), kBiasAtRunTime, found_.bias->name);
    Expect(bias->type == found_.type && bias->shape == Shape{found_.n}, kBiasDiffers, found_.bias->name,
           NameOf(bias->type), ShapeText(bias->shape), NameOf(found_.type), found_.n);
  }

  void FindAdd() {
    const Value product = node_.Output(0);
    const Node* const add = product == nullptr ? nullptr : graph_.OnlyReader(product);
    if (add == nullptr || !add->IsStandard("Add") || add->inputs().size() != 2) return;
    const Value value = Other(*add, product);
    const std::optional<Constant> bias = graph_.HeaderOf(value);
    if (!bias || bias->type != found_.type || bias->shape != Shape{found_.n}) return;
    found_.add = add;
    found_.bias = value;
  }

  // --- MatMul and Gemm ----------------------------------------------------------------------------------------------

  void ReadProduct() {
    const Value x = node_.Input(0), value = node_.Input(1);
    Expect(x != nullptr && value != nullptr, kMissing);
    const bool is_gemm = node_.type() == "Gemm";
    const std::optional<Dequantized> stored = FindDequantize(graph_, value);
    std::optional<Constant> tensor = graph_.HeaderOf(value);
    if (!tensor && stored && stored->node().IsConstant(1) && (!stored->node().Has(2) || stored->node().IsConstant(2))) {
      tensor = graph_.HeaderOf(stored->node().Input(0));
      if (stored->transposed) std::swap(tensor->shape[0], tensor->shape[1]);
      tensor->type = value->type;
    }
    if (!tensor) RefuseNotConstant(value);
    LayerWeight& w = found_.weight;
    w.value = value;
    form_ = !stored ? WeightForm::kFloat : IsByte(stored->node().InputType(0)) ? WeightForm::kInt8 : WeightForm::kInt4;
    Expect(tensor->shape.size() == 2, kWeightRank, value->name, tensor->shape.size());
    Expect(Contains(kFloats, tensor->type), kWeightType, value->name, NameOf(tensor->type));
    SetX(x);
    found_.type = tensor->type;
    found_.transposed = is_gemm && node_.Int("transB", 0) != 0;
    SetSize(tensor->shape[0], tensor->shape[1], found_.transposed);
    Expect(found_.k > 0 && found_.n > 0, kWeightEmpty, value->name, found_.k, found_.n);
    if (is_gemm) {
      ReadGemm();
    } else {
      FindAdd();
    }
    if (!stored) return;
    w.form = *form_;
    w.nodes = stored->nodes;
    const bool transposed = stored->transposed != found_.transposed;
    const Node& node = stored->node();
    try {
      if (w.form == WeightForm::kInt8) {
        const Constant scales = node.ConstantInput(1, "weight's scales", kFloats);
        malformed_ = WhyNotScales(scales.Floats());
        Expect(malformed_.empty(), kText, malformed_);
      }
      ReadDequantized(node, transposed);
    } catch (const RefusedError& refused) {
      if (!malformed_.empty()) throw;
      w.why_not_kept = refused.reason();
    }
  }

  void ReadGemm() {
    Expect(node_.Int("transA", 0) == 0, kTransA);
    found_.bias = node_.Input(2);
    const std::optional<Constant> bias = graph_.HeaderOf(found_.bias);
    for (const char* const name : {"alpha", "beta"}) {
      const float factor = found_.bias == nullptr && *name == 'b' ? 1 : node_.Float(name, 1);
      Expect(factor == 1, kNotOne, name, factor);
    }
    if (found_.bias == nullptr) return;
    Expect(bias.has_value(), kBiasAtRunTime, found_.bias->name);
    Expect(IsOfColumns(*bias), kBiasShape, found_.bias->name, ShapeText(bias->shape), found_.n);
  }

  bool IsOfColumns(const Constant& tensor) const {
    return Contains(OfColumns(found_.n), tensor.shape) || tensor.shape == Shape{1, 1};
  }

  [[noreturn]] void RefuseNotConstant(Value weight) const {
    Expect(!weight->is_default, kReplaceable);
    if (const std::optional<Reason> reason = WhyNotComputed(weight)) throw RefusedError(*reason);
    const std::optional<Constant> first = graph_.HeaderOf(node_.Input(0));
    if (!first || first->shape.size() < 2) Refuse(kActivations);
    Refuse(first->shape.back() == 1 ? kOuterProduct : kConstantFirst);
  }

  // Return the node that prevents computing a value from constants; nullopt if the value depends on inputs.
  std::optional<Reason> WhyNotComputed(Value value) const {
    std::vector<Value> waiting = {value};
    std::optional<Reason> reason;
    for (int visits = 0; !waiting.empty(); ++visits) {
      const Value one = waiting.back();
      waiting.pop_back();
      if (graph_.IsConstantValue(one)) continue;
      const Node* const maker = graph_.Maker(one);
      const auto is_random = [&](std::string_view name) { return maker->type().rfind(name, 0) == 0; };
      if (maker == nullptr || visits == kMostSteps || !maker->IsStandard() || !maker->subgraphs().empty() ||
          is_random("Random") || is_random("Bernoulli") || is_random("Multinomial")) {
        return std::nullopt;
      }
      const auto is_known = [&](Value input) { return input == nullptr || graph_.IsConstantValue(input); };
      if (!reason && std::ranges::all_of(maker->inputs(), is_known)) {
        const std::string& name = maker->name().empty() ? one->name : maker->name();
        reason = Reason{kNotComputed, {value->name, maker->type(), name}};
      }
      for (auto input = maker->inputs().rbegin(); input != maker->inputs().rend(); ++input) {
        if (*input != nullptr) waiting.push_back(*input);
      }
    }
    return reason;
  }

  // --- weights ------------------------------------------------------------------------------------------------------

  void SetSize(int64_t rows, int64_t columns, bool transposed) {
    found_.k = transposed ? columns : rows;
    found_.n = transposed ? rows : columns;
  }

  static void CheckSize(int64_t k, int64_t n) {
    Expect(k > 0 && n > 0 && n <= kLargestSide, kWeightSize, k, n);
    Expect(k <= kMostLayerInputs, kTooWide, k, kMostLayerInputs);
  }

  // Blocks of 4-bit weights become groups of 128, 64 or 32 inputs.
  static void CheckBlocks(int64_t k, int64_t size) { Expect(size >= k || size % 32 == 0, kBlockSize, size); }

  // Read 8-bit codes, their scales (unless they are known already) and zero points.
  void Read8Bits(const Node& node, size_t codes, std::optional<size_t> scales, size_t zeros, bool transposed) {
    LayerWeight& w = found_.weight;
    const Constant tensor = node.ConstantHeader(codes, "weight", kBytes);
    Expect(tensor.shape.size() == 2, kCodesRank, tensor.name, tensor.shape.size());
    Expect(std::min(tensor.shape[0], tensor.shape[1]) > 0, kCodesEmpty, tensor.name, ShapeText(tensor.shape));
    SetSize(tensor.shape[0], tensor.shape[1], transposed);
    const std::vector<Shape> shapes = OfColumns(found_.n);
    if (scales) node.ConstantHeader(*scales, "weight's scales", kFloats, shapes);
    if (node.Has(zeros)) node.ConstantHeader(zeros, "weight's zero points", {tensor.type}, shapes);
    w.codes = node.Input(codes);
    w.transposed = transposed;
    w.bits = 8;
    if (scales) w.scales = {node.Input(*scales)};
    w.zero_points = node.Input(zeros);
    const std::string problem = WhyNotScales(ScalesOf(graph_, found_));
    Expect(problem.empty(), kText, problem);
  }

  // Read the weight of an operator with int8 weights.
  void Quantized(size_t codes, std::optional<size_t> scales, size_t zeros, bool transposed = false) {
    of_weight_ = true;
    form_ = found_.weight.form = WeightForm::kInt8;
    found_.weight.value = node_.Input(codes);
    Read8Bits(node_, codes, scales, zeros, transposed);
  }

  void ReadDequantized(const Node& node, bool transposed) {
    LayerWeight& w = found_.weight;
    const int64_t k = found_.k, n = found_.n;
    const bool is_4_bits = w.form == WeightForm::kInt4;
    if (is_4_bits) CheckSize(k, n);
    const int64_t axis = node.Int("axis", 1), block_size = node.Int("block_size", 0);
    Expect(axis >= -2 && axis < 2, kAxis, axis);
    const bool along_inputs = (axis + 2) % 2 == (transposed ? 1 : 0);
    if (is_4_bits) {
      std::vector<Shape> shapes = {{}, {1}};
      if (block_size != 0) {
        Expect(along_inputs, kBlocksOfOutputs);
        Expect(block_size > 0, kBlockSize, block_size);
        shapes = {transposed ? Shape{n, CeilOf(k, block_size)} : Shape{CeilOf(k, block_size), n}};
      } else if (!along_inputs) {
        shapes.push_back({n});
      }
      const Constant scales = node.ConstantHeader(1, "scales", kFloats, shapes);
      CheckOutputType(node, scales.type);
      if (node.Has(2)) node.ConstantHeader(2, "zero_points", {node.InputType(0)}, {scales.shape});
      if (block_size != 0) CheckBlocks(k, block_size);
      w.codes = node.Input(0);
      w.transposed = transposed;
      w.bits = 4;
      w.block_size = block_size;
      w.scales = {node.Input(1)};
      w.zero_points = node.Input(2);
      return;
    }
    Expect(block_size == 0, kScalesOfBlocks, block_size);
    const std::optional<Constant> scales = graph_.HeaderOf(node.Input(1));
    Expect(!along_inputs || !scales || scales->Count() == 1, kScalesOfInputs);
    Read8Bits(node, 0, 1, 2, transposed);
    CheckOutputType(node, node.InputType(1));
  }

  static void CheckOutputType(const Node& node, ElementType scales) {
    const int64_t made = node.Int("output_dtype", 0);
    Expect(made == 0 || made == static_cast<int64_t>(scales), kOutputType);
  }

  // MatMulNBits: B, scales [n, blocks], zero_points, g_idx, bias. Scales and zero points may be flat.
  void ReadBlocks() {
    of_weight_ = true;
    form_ = found_.weight.form = WeightForm::kBlocks;
    LayerWeight& w = found_.weight;
    w.bits = node_.Int("bits", 4);
    const int64_t k = found_.k = node_.Int("K"), n = found_.n = node_.Int("N");
    w.block_size = node_.Int("block_size");
    Expect(w.bits == 4 || w.bits == 8, kBits, w.bits);
    Expect(node_.Int("weight_prepacked", 0) == 0, kPrepacked);
    CheckSize(k, n);
    Expect(w.block_size > 0 && (w.bits == 8 || w.block_size % 2 == 0), kBlockSize, w.block_size);
    const int64_t blocks = CeilOf(k, w.block_size);
    const std::vector<Shape> shapes = {{n, blocks}, {n * blocks}};
    node_.ConstantHeader(1, "B", {kUint8}, {{n, blocks, w.bits == 8 ? w.block_size : w.block_size / 2}});
    const Constant scales = node_.ConstantHeader(2, "scales", kFloats, shapes);
    found_.type = scales.type;
    if (node_.Has(4)) CheckOrder(blocks);
    if (w.bits == 4) CheckBlocks(k, w.block_size);
    if (node_.Has(3)) CheckZeroPoints(blocks, shapes);
    w.value = w.codes = node_.Input(1);
    w.scales = {node_.Input(2)};
    w.zero_points = node_.Input(3);
    of_weight_ = false;
    SetX(node_.Input(0));
    ReadBias(5);
  }

  void CheckZeroPoints(int64_t blocks, const std::vector<Shape>& shapes) const {
    const int64_t n = found_.n, packed = CeilOf(blocks, 2);
    const bool are_packed = !node_.IsConstant(3) || node_.InputType(3) == kUint8;
    if (found_.weight.bits == 4 && are_packed) {
      node_.ConstantHeader(3, "zero_points", {kUint8}, {{n, packed}, {n * packed}});
      return;
    }
    node_.ConstantHeader(3, "zero_points", {kUint8, found_.type}, shapes);
    if (found_.weight.bits == 8) return;
    const std::vector<float> zeros = node_.ConstantInput(3, "zero_points", kFloats).Floats();
    const bool is_finite = std::ranges::all_of(zeros, [](float zero) { return std::isfinite(zero); });
    Expect(is_finite, kZeroPointsNotFinite, node_.InputName(3));
  }

  // Check that g_idx assigns inputs to blocks in order, which is also the meaning of a missing g_idx.
  void CheckOrder(int64_t blocks) const {
    const int64_t size = found_.weight.block_size;
    const Constant order = node_.ConstantInput(4, "g_idx", {kInt32}, {{found_.k}, {blocks * size}});
    for (int64_t l = 0; l < found_.k; ++l) Expect(order.CodeAt(l) == l / size, kOrder, order.name);
  }

  // --- int8 layers with quantized inputs ----------------------------------------------------------------------------

  // Return the DynamicQuantizeLinear that computes the codes of X, or null.
  const Node* DynamicSource() const {
    const Node* const maker = node_.Has(0) ? graph_.Maker(node_.Input(0)) : nullptr;
    const bool known = maker != nullptr && maker->IsStandard("DynamicQuantizeLinear") && maker->Has(0);
    return known && maker->Output(0) == node_.Input(0) ? maker : nullptr;
  }

  // X is quantized at run time: the node's zero point must be that of X.
  void SetDynamicX(const Node& quantize, size_t zero) {
    Expect(node_.Has(zero) && node_.Input(zero) == quantize.Output(2), kDynamicZeroPoint);
    found_.quantize = &quantize;
    found_.x_codes = node_.Input(0);
    found_.x_scale = quantize.Output(1);
    found_.x_zero_point = node_.Input(zero);
  }

  void SetFixedX(size_t scale, size_t zero) {
    Expect(node_.Has(0) && node_.Has(scale), kMissing);
    Expect(!node_.IsConstant(0), kBothConstant);
    CheckRange(node_, scale, zero, "input");
    found_.x_codes = node_.StoredInput(0);
    found_.x_scale = node_.Input(scale);
    found_.x_zero_point = node_.Input(zero);
  }

  void SetFixedY(size_t scale, size_t zero) {
    CheckRange(node_, scale, zero, "output");
    found_.y_scale = node_.Input(scale);
    found_.y_zero_point = node_.Input(zero);
  }

  void CheckRange(const Node& node, size_t scale, size_t zero, const char* what) const {
    Expect(HasRange(node, scale, zero), kNoRangeOf, what);
    Expect(node.InputType(scale) == kFloat, kRangeNotFloat, what);
  }

  // Return whether the inputs are a constant scale that kernels support, and a constant 8-bit zero point.
  bool HasRange(const Node& node, size_t scale, size_t zero) const {
    const Value codes = node.StoredInput(0);  // a view may replace the codes by floats
    const std::optional<FixedRange> range =
        RangeAt(graph_, node, scale, zero, codes == nullptr ? kUndefined : codes->type);
    return range && range->IsSupported();
  }

  // Read X and the weight of MatMulIntegerToFloat or QAttention, whose first inputs are the codes of both.
  void ReadIntegers(size_t x_scale, size_t scales, size_t x_zero, size_t zeros) {
    of_weight_ = true;
    form_ = WeightForm::kInt8;
    const Node* const quantize = DynamicSource();
    if (quantize != nullptr) {
      SetDynamicX(*quantize, x_zero);
      Expect(node_.Input(x_scale) == quantize->Output(1), kDynamicScale);
    }
    Quantized(1, scales, zeros);
    if (quantize == nullptr) return SetFixedX(x_scale, x_zero);
    of_weight_ = false;
    SetX(quantize->Input(0));
  }

  // Inputs: A, B, a_scale, b_scale, a_zero_point, b_zero_point, bias.
  void ReadMatMulIntegerToFloat() {
    ReadIntegers(2, 3, 4, 5);
    if (found_.quantize != nullptr) return ReadBias(6);
    if (node_.Has(6)) node_.ConstantHeader(6, "bias", {kFloat}, {{found_.n}});
    found_.bias = node_.Input(6);
  }

  // Inputs: A, a_scale, a_zero_point, B, b_scale, b_zero_point, C, y_scale, y_zero_point.
  void ReadQGemm() {
    of_weight_ = true;
    form_ = WeightForm::kInt8;
    Expect(node_.Int("transA", 0) == 0, kTransA);
    const float alpha = node_.Float("alpha", 1);
    Expect(alpha == 1, kNotOne, "alpha", alpha);
    Quantized(3, 4, 5, node_.Int("transB", 0) != 0);
    SetFixedX(1, 2);
    const int64_t n = found_.n;
    if (node_.Has(6)) node_.ConstantHeader(6, "bias", {kInt32}, {{n}, {1, n}, {}, {1}, {1, 1}});
    found_.bias = node_.Input(6);
    found_.bias_in_steps = node_.Has(6);
    if (node_.Has(7)) SetFixedY(7, 8);
  }

  // Inputs: A, B, a_zero_point, b_zero_point. Then an optional Add of a bias, Cast, and Muls by the scales.
  void ReadMatMulInteger() {
    of_weight_ = true;
    form_ = WeightForm::kInt8;
    Expect(node_.Has(0) && node_.Has(1), kMissing);
    Expect(!node_.IsConstant(0), kConstantFirst);
    const Constant tensor = node_.ConstantHeader(1, "weight", kBytes);
    Expect(tensor.shape.size() == 2, kCodesRank, tensor.name, tensor.shape.size());
    found_.n = tensor.shape[1];
    const Node* const dynamic = DynamicSource();
    const Node* const source = dynamic != nullptr ? dynamic : MakerOfElements(graph_, node_.Input(0));
    Expect(source != nullptr && (dynamic != nullptr || source->IsStandard("QuantizeLinear")), kNoRange);
    const Node* next = &NextOf(node_);
    if (next->type() == "Add") {
      Expect(dynamic == nullptr, kBiasOfSums);
      found_.bias = OtherOf(*next, node_.Output(0));
      CheckColumns(found_.bias, kInt32, "bias");
      found_.bias_in_steps = true;
      found_.nodes.push_back(next);
      next = &NextOf(*next);
    }
    Expect(next->type() == "Cast" && next->Int("to", 0) == static_cast<int64_t>(kFloat), kSumsNotCast, next->type(),
           next->name());
    found_.nodes.push_back(next);
    ReadScales(dynamic == nullptr ? nullptr : dynamic->Output(1));
    if (dynamic != nullptr) {
      SetDynamicX(*dynamic, 2);
      found_.x = dynamic->Input(0);
    } else {
      Expect(HasRange(*source, 1, 2), kNoRangeOf, "input");
      Expect(ZeroOf(node_.Input(2)) == ZeroOf(source->Input(2)), kZeroPointDiffers);
      found_.x_codes = node_.Input(0);
      found_.x_scale = found_.weight.scale_divisor = source->Input(1);
      found_.x_zero_point = source->Input(2);
    }
    Quantized(1, std::nullopt, 3);
  }

  // Return a zero point, 0 for null; nullopt if it is not a constant byte.
  std::optional<int64_t> ZeroOf(Value value) const {
    if (value == nullptr) return 0;
    const std::optional<Constant> zero = graph_.ConstantOf(value);
    return zero && zero->Count() == 1 && IsByte(zero->type) ? std::optional(zero->CodeAt(0)) : std::nullopt;
  }

  const Node& NextOf(const Node& node) const {
    const Value sums = node.Output(0);
    const Node* const next = sums == nullptr ? nullptr : graph_.OnlyReader(sums);
    if (next == nullptr) Refuse(kSumsRead, sums == nullptr ? "" : sums->name);
    Expect(next->IsStandard(), kSumsFollowed, next->type());
    return *next;
  }

  static Value OtherOf(const Node& node, Value value) {
    Expect(node.inputs().size() == 2, kTwoInputs, node.type(), node.name(), node.inputs().size());
    return Other(node, value);
  }

  // Read the Muls by the scales: constants, and the scale of X if it is known only at run time.
  void ReadScales(Value x_scale) {
    bool found = x_scale == nullptr;
    std::vector<Value>& scales = found_.weight.scales;
    while (!found || scales.empty()) {
      const Node& last = *found_.nodes.back();
      const Node& multiply = NextOf(last);
      Expect(multiply.type() == "Mul", kSumsNotScaled, multiply.type(), multiply.name());
      const Value other = OtherOf(multiply, last.Output(0));
      const Node* const product = graph_.IsConstantValue(other) || other == nullptr ? nullptr : graph_.Maker(other);
      std::vector<Value> factors = {other};
      if (product != nullptr && product->IsStandard("Mul")) {
        factors = product->inputs();
        found_.scale_nodes.push_back(product);
      }
      for (const Value factor : factors) {
        if (factor != nullptr && factor == x_scale && !found) {
          found = true;
        } else {
          CheckColumns(factor, kFloat, "scales");
          found_.scales_have_rows |= graph_.HeaderOf(factor)->shape.size() == 2;
          scales.push_back(factor);
        }
      }
      found_.nodes.push_back(&multiply);
    }
  }

  // Check that a value is a constant with one or n elements.
  void CheckColumns(Value value, ElementType type, const char* what) const {
    const std::optional<Constant> tensor = graph_.HeaderOf(value);
    Expect(tensor && tensor->type == type && IsOfColumns(*tensor), kNotOfColumns, what,
           value == nullptr ? "" : value->name, NameOf(type), found_.n);
  }

  const Graph& graph_;
  const Node& node_;
  Linear found_;
  std::optional<WeightForm> form_;
  bool of_weight_ = false;
  std::string malformed_;
};

}  // namespace

std::vector<float> ScalesOf(const Graph& graph, const Linear& linear, bool divided) {
  std::vector<float> scales(static_cast<size_t>(linear.n), 1.0f);
  const int64_t all = linear.weight.all_columns == 0 ? linear.n : linear.weight.all_columns;
  const size_t first = static_cast<size_t>(linear.weight.first_column);
  const auto read = [&](Value value) {
    const std::optional<Constant> tensor = graph.ConstantOf(value);
    Expect(tensor && (tensor->Count() == 1 || tensor->Count() == all), kNotReadable, "scales", value->name);
    return tensor->Floats();
  };
  for (const Value value : linear.weight.scales) {
    const std::vector<float> factors = read(value);
    for (size_t j = 0; j < scales.size(); ++j) scales[j] *= factors[factors.size() == 1 ? 0 : first + j];
  }
  if (!divided || linear.weight.scale_divisor == nullptr) return scales;
  const float divisor = read(linear.weight.scale_divisor)[0];
  for (float& scale : scales) scale /= divisor;
  return scales;
}

std::vector<int16_t> ZeroPointsOf(const Graph& graph, const Linear& linear) {
  std::vector<int16_t> zeros(static_cast<size_t>(linear.n));
  if (linear.weight.zero_points == nullptr) return zeros;
  const std::optional<Constant> tensor = graph.ConstantOf(linear.weight.zero_points);
  Expect(tensor.has_value(), kNotReadable, "zero points", linear.weight.zero_points->name);
  const int64_t count = tensor->Count();
  for (int64_t j = 0; j < linear.n; ++j) {
    zeros[static_cast<size_t>(j)] =
        static_cast<int16_t>(tensor->CodeAt(count == 1 ? 0 : linear.weight.first_column + j));
  }
  return zeros;
}

std::optional<FoundLinear> MatchLinear(const Graph& graph, const Node& node) { return Rule(graph, node).Match(); }

std::array<Linear, 3> PackedLinears(const Graph& graph, const Node& node, const std::array<int64_t, 3>& widths) {
  return Rule(graph, node).MatchPacked(widths);
}

std::vector<FoundLinear> FindLinears(const Graph& graph) {
  std::vector<FoundLinear> found;
  for (const Node& node : graph.nodes()) {
    if (std::optional<FoundLinear> one = MatchLinear(graph, node)) found.push_back(std::move(*one));
  }
  return found;
}

}  // namespace ortolan::match
