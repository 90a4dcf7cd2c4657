#include "match/dimension_rules.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <map>
#include <string_view>

namespace ortolan::match {
namespace {

constexpr int64_t kNoEnd = (int64_t{1} << 31) - 1;  // a Slice end of at least this means the end of the axis
constexpr int64_t kFromStart =
    -(int64_t{1} << 31);  // a backward Slice with at most this end includes the first element
constexpr size_t kMostRank = 16;

constexpr std::string_view kSame[] = {"Identity",
                                      "Cast",
                                      "Relu",
                                      "Gelu",
                                      "Erf",
                                      "Tanh",
                                      "Sigmoid",
                                      "Sqrt",
                                      "Softmax",
                                      "LogSoftmax",
                                      "LayerNormalization",
                                      "RMSNormalization",
                                      "Dropout",
                                      "Neg",
                                      "Exp",
                                      "Abs",
                                      "Not",
                                      "IsNaN",
                                      "IsInf",
                                      "Clip",
                                      "Round",
                                      "Swish",
                                      "Elu",
                                      "LeakyRelu",
                                      "HardSwish",
                                      "Softplus",
                                      "Reciprocal",
                                      "Floor",
                                      "Ceil",
                                      "Log",
                                      "Sin",
                                      "Cos",
                                      "CumSum",
                                      "Trilu",
                                      "SimplifiedLayerNormalization",
                                      "SkipLayerNormalization",
                                      "SkipSimplifiedLayerNormalization",
                                      "BiasGelu",
                                      "FastGelu",
                                      "QuickGelu",
                                      "QuantizeLinear",
                                      "DequantizeLinear",
                                      "ScatterND",
                                      "ScatterElements",
                                      "RotaryEmbedding",
                                      "BatchNormalization",
                                      "InstanceNormalization",
                                      "GroupNormalization",
                                      "LpNormalization",
                                      "Sign",
                                      "Softsign",
                                      "Selu",
                                      "HardSigmoid",
                                      "Mish",
                                      "ThresholdedRelu",
                                      "Atan",
                                      "EyeLike",
                                      "RandomNormalLike",
                                      "RandomUniformLike",
                                      "PRelu"};
constexpr std::string_view kBroadcast[] = {
    "Add", "Sub",   "Mul",  "Div",         "Pow",       "Where",          "And", "Or",
    "Xor", "Equal", "Less", "LessOrEqual", "Greater",   "GreaterOrEqual", "Min", "Max",
    "Mod", "Sum",   "Mean", "BitwiseAnd",  "BitwiseOr", "BitShift"};
constexpr std::string_view kBoolean[] = {
    "And", "Or", "Xor", "Not", "Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "IsNaN", "IsInf"};
constexpr std::string_view kInt64[] = {"Shape", "Size", "NonZero", "ArgMax", "ArgMin"};
constexpr std::string_view kArithmetic[] = {"Add", "Sub", "Mul", "Div", "Sqrt", "Reciprocal", "Where", "Equal", "Not"};
constexpr std::string_view kSameElements[] = {"Identity", "Cast", "Unsqueeze", "Squeeze", "Reshape"};
constexpr std::string_view kReductions[] = {"ReduceMean",      "ReduceSum",      "ReduceMax", "ReduceMin",
                                            "ReduceProd",      "ReduceL1",       "ReduceL2",  "ReduceLogSum",
                                            "ReduceLogSumExp", "ReduceSumSquare"};

template <typename Names>
bool IsOneOf(std::string_view type, const Names& names) {
  return std::find(std::begin(names), std::end(names), type) != std::end(names);
}

bool IsFloatingPoint(int64_t type) { return type == 1 || type == 10 || type == 11 || (type >= 16 && type <= 20); }

// Return the result of a standard operator on scalar operands, which may be symbolic; unknown if it cannot be computed.
Element Compute(std::string_view type, const std::vector<Element>& operands) {
  if (type == "Where" && operands.size() == 3) {
    const std::optional<bool> condition = operands[0].AsBool();
    return condition ? operands[*condition ? 1 : 2] : Element();
  }
  if (type == "Not") {
    const std::optional<bool> flag = operands[0].AsBool();
    return flag ? Element::Bool(!*flag) : Element();
  }
  const auto number = [&](size_t i) { return operands[i].AsNumber(); };
  if (operands.size() == 1) {
    const std::optional<double> x = number(0);
    if (!x || (type == "Sqrt" && *x < 0) || (type == "Reciprocal" && *x == 0)) return {};
    return type == "Sqrt" ? Element::Real(std::sqrt(*x)) : type == "Reciprocal" ? Element::Real(1 / *x) : Element();
  }
  if (operands.size() != 2) return {};
  const Element &a = operands[0], &b = operands[1];
  if (!a.IsKnown() || !b.IsKnown()) return {};
  if (type == "Equal") {
    const std::optional<double> x = number(0), y = number(1);
    if (x.has_value() != y.has_value() && (x ? *x : *y) < 0)
      return Element::Bool(false);  // a dimension is not negative
    if (a == b) return Element::Bool(true);
    return x && y ? Element::Bool(*x == *y) : Element();
  }
  const Dim *x = a.AsDim(), *y = b.AsDim();
  std::optional<Dim> made;
  if (x != nullptr && y != nullptr) {
    if (type == "Add") made = Plus(*x, *y);
    if (type == "Sub") made = Minus(*x, *y);
    if (type == "Mul") made = Product(*x, *y);
    if (type == "Div") {
      const bool are_numbers = x->IsNumber() && y->IsNumber() && y->number() != 0 && y->number() != -1;
      made = are_numbers     ? std::optional(Dim(x->number() / y->number()))
             : y->IsNumber() ? Quotient(*x, y->number())
                             : std::nullopt;
    }
    return made ? Element(*made) : Element();
  }
  const std::optional<double> left = number(0), right = number(1);
  if (!left || !right) return {};
  if (type == "Add") return Element::Real(*left + *right);
  if (type == "Sub") return Element::Real(*left - *right);
  if (type == "Mul") return Element::Real(*left * *right);
  return type == "Div" && *right != 0 ? Element::Real(*left / *right) : Element();
}

// Return the first index and the count of elements of a Python slice [begin:end:step].
std::pair<int64_t, int64_t> SliceRange(int64_t size, int64_t begin, int64_t end, int64_t step) {
  const int64_t low = step > 0 ? 0 : -1, high = step > 0 ? size : size - 1;
  const auto bound = [&](int64_t at) { return std::clamp(at < 0 ? at + size : at, low, high); };
  const int64_t first = bound(std::max(begin, -size - 1));
  const int64_t last = step < 0 && end <= kFromStart ? -1 : bound(std::max(end, -size - 1));
  const int64_t span = step > 0 ? last - first : first - last, stride = step > 0 ? step : -step;
  return {first, span <= 0 ? 0 : (span - 1) / stride + 1};
}

}  // namespace

Dim DimensionRules::Unknown(size_t axis) const { return symbols_.Unknown(node_.Output(output_), axis); }

std::optional<DimShape> DimensionRules::Shape(size_t output) {
  output_ = output;
  const bool is_known = node_.IsStandard() || node_.domain() == "com.microsoft" || node_.domain() == "ai.ortolan";
  if (!is_known) return std::nullopt;
  const ShapeRule rule = ShapeRuleOf(node_.type());
  const bool has_more = node_.type() == "Split" || node_.type() == "TopK" || node_.type() == "If" ||
                        node_.type() == "DynamicQuantizeLinear" || node_.type() == "EmbedLayerNormalization";
  if (rule == nullptr || (output != 0 && !has_more)) return std::nullopt;
  std::optional<DimShape> shape = (this->*rule)();
  return shape && shape->size() <= kMostRank ? shape : std::nullopt;
}

DimensionRules::ShapeRule DimensionRules::ShapeRuleOf(const std::string& type) {
  using R = DimensionRules;
  static const std::map<std::string, ShapeRule, std::less<>> kRules = [] {
    std::map<std::string, ShapeRule, std::less<>> rules = {{"MatMul", &R::MatMul},
                                                           {"MatMulIntegerToFloat", &R::MatMul},
                                                           {"DynamicQuantizeMatMul", &R::MatMul},
                                                           {"MatMulInteger", &R::MatMul},
                                                           {"QLinearMatMul", &R::QLinearMatMul},
                                                           {"Gemm", &R::Gemm},
                                                           {"MatMulNBits", &R::Linear},
                                                           {"W4A8MatMul", &R::Linear},
                                                           {"W8A8MatMul", &R::Linear},
                                                           {"SparseAMXMatMul", &R::Linear},
                                                           {"VNNISpMM", &R::Linear},
                                                           {"MaskedMatMul", &R::MatMul},
                                                           {"AddLayerNorm", &R::AddLayerNorm},
                                                           {"NoMADAttention", &R::MultiHead},
                                                           {"MultiHeadAttention", &R::MultiHead},
                                                           {"Attention", &R::AttentionOutput},
                                                           {"QAttention", &R::AttentionOutput},
                                                           {"Transpose", &R::Transpose},
                                                           {"Reshape", &R::Reshape},
                                                           {"Flatten", &R::Flatten},
                                                           {"Unsqueeze", &R::Unsqueeze},
                                                           {"Squeeze", &R::Squeeze},
                                                           {"Gather", &R::Gather},
                                                           {"GatherND", &R::GatherNd},
                                                           {"Slice", &R::Slice},
                                                           {"Split", &R::Split},
                                                           {"Tile", &R::Tile},
                                                           {"If", &R::If},
                                                           {"GatherElements", &R::Indices},
                                                           {"Expand", &R::Expand},
                                                           {"ConstantOfShape", &R::ConstantOfShape},
                                                           {"Range", &R::Range},
                                                           {"Shape", &R::ShapeOfShape},
                                                           {"Size", &R::Scalar},
                                                           {"Concat", &R::Concat},
                                                           {"EmbedLayerNormalization", &R::Embed},
                                                           {"QEmbedLayerNormalization", &R::Embed},
                                                           {"DynamicQuantizeLinear", &R::DynamicQuantize},
                                                           {"Conv", &R::Convolve},
                                                           {"MaxPool", &R::Pool},
                                                           {"AveragePool", &R::Pool},
                                                           {"GlobalAveragePool", &R::GlobalPool},
                                                           {"GlobalMaxPool", &R::GlobalPool},
                                                           {"Pad", &R::Pad},
                                                           {"Resize", &R::Resize},
                                                           {"ArgMax", &R::ArgMax},
                                                           {"ArgMin", &R::ArgMax},
                                                           {"TopK", &R::TopK},
                                                           {"NonZero", &R::NonZero},
                                                           {"OneHot", &R::OneHot},
                                                           {"Einsum", &R::Einsum}};
    for (const std::string_view name : kSame) rules.emplace(name, &R::Same);
    for (const std::string_view name : kBroadcast) rules.emplace(name, &R::BroadcastAll);
    for (const std::string_view name : kReductions) rules.emplace(name, &R::Reduce);
    return rules;
  }();
  const auto found = kRules.find(type);
  return found == kRules.end() ? nullptr : found->second;
}

ElementType DimensionRules::Type(size_t output) const {
  const Value value = node_.Output(output);
  const bool is_known = node_.IsStandard() || node_.domain() == "com.microsoft" || node_.domain() == "ai.ortolan";
  const std::string& type = node_.type();
  if (type == "DynamicQuantizeLinear") return output == 1 ? ElementType::kFloat : ElementType::kUint8;
  if (type == "EmbedLayerNormalization" && output == 1) return ElementType::kInt32;
  if (!is_known || (output != 0 && type != "Split")) return value->type;
  if (type == "Cast" && node_.HasAttribute("to")) return static_cast<ElementType>(node_.Int("to"));
  if (type == "ConstantOfShape") {
    const auto found = node_.attributes().find("value");
    const Constant* const tensor = found == node_.attributes().end() ? nullptr : std::get_if<Constant>(&found->second);
    return tensor == nullptr ? (value->type == ElementType::kUndefined ? ElementType::kFloat : value->type)
                             : tensor->type;
  }
  if (IsOneOf(type, kBoolean)) return ElementType::kBool;
  if (IsOneOf(type, kInt64)) return ElementType::kInt64;
  if (!node_.subgraphs().empty() || type == "Loop" || type == "Scan") return value->type;
  if (type == "Where" || type == "DequantizeLinear") return dims_.TypeOf(node_.Input(1));
  if (type == "QuantizeLinear") return node_.Has(2) ? dims_.TypeOf(node_.Input(2)) : value->type;
  if (type == "MatMulIntegerToFloat" || type == "QAttention" || type == "QEmbedLayerNormalization") {
    return ElementType::kFloat;
  }
  if (type == "EmbedLayerNormalization") return dims_.TypeOf(node_.Input(2));
  if (value->type != ElementType::kUndefined) return value->type;
  for (const Value input : node_.inputs()) {
    if (const ElementType found = dims_.TypeOf(input); found != ElementType::kUndefined) return found;
  }
  return ElementType::kUndefined;
}

// Two different symbols on one axis give an unknown dimension.
std::optional<DimShape> DimensionRules::Broadcast(const std::vector<std::optional<DimShape>>& shapes) const {
  size_t rank = 0;
  for (const std::optional<DimShape>& shape : shapes) {
    if (!shape) return std::nullopt;
    rank = std::max(rank, shape->size());
  }
  DimShape result;
  for (size_t axis = 0; axis < rank; ++axis) {
    std::optional<Dim> dim;
    for (const std::optional<DimShape>& shape : shapes) {
      const size_t missing = rank - shape->size();
      if (axis < missing || (*shape)[axis - missing].Is(1)) continue;
      const Dim& own = (*shape)[axis - missing];
      if (!dim || *dim == own) {
        dim = own;
      } else if (own.IsNumber() || dim->IsNumber()) {
        dim = dim->IsNumber() ? *dim : own;
      } else {
        dim = Unknown(axis);
      }
    }
    result.push_back(dim.value_or(Dim(1)));
  }
  return result;
}

std::optional<DimShape> DimensionRules::BroadcastInputs(size_t first, size_t end) const {
  std::vector<std::optional<DimShape>> shapes;
  for (size_t i = first; i < end; ++i) {
    if (node_.Has(i)) shapes.push_back(In(i));
  }
  return shapes.empty() ? std::nullopt : Broadcast(shapes);
}

std::optional<DimShape> DimensionRules::ShapeFrom(size_t index) const {
  const std::optional<Elements> sizes = ElementsIn(index);
  const std::optional<DimShape> given = In(index);
  const std::optional<int64_t> count = given && given->size() == 1 ? given->front().Number() : std::nullopt;
  if (!sizes && (!count || *count < 0 || *count > static_cast<int64_t>(kMostRank))) return std::nullopt;
  DimShape shape;
  for (size_t axis = 0; axis < (sizes ? sizes->size() : static_cast<size_t>(*count)); ++axis) {
    const Dim* const dim = sizes ? (*sizes)[axis].AsDim() : nullptr;
    const bool is_size = dim != nullptr && (!dim->IsNumber() || dim->number() >= 0);
    shape.push_back(is_size ? *dim : Unknown(axis));
  }
  return shape;
}

std::optional<DimShape> DimensionRules::Product(size_t a_input, size_t b_input) const {
  std::optional<DimShape> a = In(a_input), b = In(b_input);
  if (!a || !b || a->empty() || b->empty()) return std::nullopt;
  const bool is_row = a->size() == 1, is_column = b->size() == 1;
  if (is_row) a->insert(a->begin(), Dim(1));
  if (is_column) b->push_back(Dim(1));
  std::optional<DimShape> shape = Broadcast({DimShape(a->begin(), a->end() - 2), DimShape(b->begin(), b->end() - 2)});
  if (!shape) return shape;
  if (!is_row) shape->push_back((*a)[a->size() - 2]);
  if (!is_column) shape->push_back(b->back());
  return shape;
}

std::optional<DimShape> DimensionRules::Gemm() {
  const std::optional<DimShape> a = In(0), b = In(1);
  if (!a || !b || a->size() != 2 || b->size() != 2) return std::nullopt;
  return DimShape{(*a)[node_.Int("transA", 0) == 0 ? 0 : 1], (*b)[node_.Int("transB", 0) == 0 ? 1 : 0]};
}

// A linear layer's operator whose output width is an attribute.
std::optional<DimShape> DimensionRules::Linear() {
  constexpr std::pair<std::string_view, size_t> kResiduals[] = {
      {"SparseAMXMatMul", 5}, {"VNNISpMM", 6}, {"W4A8MatMul", 4}, {"W8A8MatMul", 4}};
  std::optional<DimShape> shape = In(0);
  int64_t width = node_.Int("gated_columns", 0);
  if (width == 0) width = node_.Int("n", 0);
  if (width == 0) width = node_.Int("N", 0);
  if (!shape || shape->empty() || width <= 0) return std::nullopt;
  shape->back() = Dim(width);
  for (const auto& [type, input] : kResiduals) {
    if (node_.type() == type && node_.domain() == "ai.ortolan" && node_.Has(input))
      return Broadcast({shape, In(input)});
  }
  return shape;
}

// NoMADAttention and MultiHeadAttention: the width of the output is that of the queries.
std::optional<DimShape> DimensionRules::MultiHead() {
  const std::optional<DimShape> query = In(0);
  const bool is_ours = node_.domain() == "ai.ortolan";
  if (is_ours && query && query->size() == 4) {
    const std::optional<Dim> width =
        (*query)[1].IsNumber() && (*query)[3].IsNumber() ? match::Product((*query)[1], (*query)[3]) : std::nullopt;
    return width ? std::optional(DimShape{(*query)[0], (*query)[2], *width}) : std::nullopt;
  }
  if (!query || query->size() != 3) return std::nullopt;
  if (node_.Has(2) && !(is_ours && In(2) == DimShape{1})) return query;
  const int64_t heads = node_.Int("num_heads", 1), own = node_.Int("kv_num_heads", 0);
  const int64_t kv_heads = own == 0 ? heads : own;
  const bool is_small = heads > 0 && heads < 1 << 20 && kv_heads > 0 && kv_heads < 1 << 20;
  if (!is_ours || !(*query)[2].IsNumber() || !is_small) return std::nullopt;
  return DimShape{(*query)[0], (*query)[1], Dim((*query)[2].number() / (heads + 2 * kv_heads) * heads)};
}

std::optional<DimShape> DimensionRules::AttentionOutput() {
  if (!node_.IsStandard()) {  // ONNX Runtime's Attention and QAttention, which include the projections
    const std::optional<DimShape> x = In(0), weight = In(1);
    if (!x || !weight || x->size() != 3 || weight->empty() || !weight->back().IsNumber()) return std::nullopt;
    const std::vector<int64_t> sizes = node_.Ints("qkv_hidden_sizes");
    return DimShape{(*x)[0], (*x)[1], Dim(sizes.empty() ? weight->back().number() / 3 : sizes.back())};
  }
  const std::optional<DimShape> query = In(0), value = In(2);
  if (!query || !value || query->size() < 3 || value->size() != query->size()) return std::nullopt;
  if (query->size() == 4) return DimShape{(*query)[0], (*query)[1], (*query)[2], (*value)[3]};
  const int64_t heads = node_.Int("q_num_heads", 0), kv_heads = node_.Int("kv_num_heads", 0);
  if (!(*value)[2].IsNumber() || kv_heads <= 0 || heads < 0) return std::nullopt;
  const std::optional<Dim> width = match::Product((*value)[2], Dim(heads));
  if (!width) return std::nullopt;
  return DimShape{(*query)[0], (*query)[1], Dim(width->number() / kv_heads)};
}

std::optional<DimShape> DimensionRules::Transpose() {
  const std::optional<DimShape> shape = In(0);
  const std::optional<std::vector<size_t>> axes = shape ? Permutation(node_, shape->size()) : std::nullopt;
  DimShape made;
  if (!axes) {
    const size_t rank = node_.Ints("perm").size();
    if (rank == 0 || rank > kMostRank) return std::nullopt;
    for (size_t axis = 0; axis < rank; ++axis) made.push_back(Unknown(axis));
    return made;
  }
  for (const size_t axis : *axes) made.push_back((*shape)[axis]);
  return made;
}

std::optional<DimShape> DimensionRules::Reshape() {
  const std::optional<DimShape> shape = In(0);
  const std::optional<std::vector<std::optional<Dim>>> target = dims_.ReshapeTarget(node_);
  if (!target) return ElementsIn(1) ? std::nullopt : ShapeFrom(1);
  DimShape made, known;
  for (const std::optional<Dim>& dim : *target) {
    made.push_back(OrUnknown(dim, made.size()));
    if (dim) known.push_back(*dim);
  }
  if (!shape || known.size() + 1 != made.size()) return made;
  const std::optional<Dim> rest = Quotient(*shape, known);
  const auto open = std::find(target->begin(), target->end(), std::nullopt) - target->begin();
  if (rest) made[static_cast<size_t>(open)] = *rest;
  return made;
}

std::optional<DimShape> DimensionRules::Flatten() {
  const std::optional<DimShape> shape = In(0);
  if (!shape) return std::nullopt;
  const int64_t axis = node_.Int("axis", 1), rank = std::ssize(*shape), split = axis < 0 ? axis + rank : axis;
  if (split < 0 || split > rank) return std::nullopt;
  DimShape made = {Dim(1), Dim(1)};
  for (int64_t i = 0; i < rank; ++i) {
    const size_t part = i < split ? 0 : 1;
    made[part] = OrUnknown(match::Product(made[part], (*shape)[static_cast<size_t>(i)]), part);
  }
  return made;
}

std::optional<DimShape> DimensionRules::Reduce() {
  const std::optional<DimShape> shape = In(0);
  const std::optional<std::vector<size_t>> axes = shape ? dims_.AxesOf(node_, shape->size()) : std::nullopt;
  if (!axes) return std::nullopt;
  if (axes->empty() && node_.Int("noop_with_empty_axes", 0) != 0) return shape;
  DimShape made;
  for (size_t axis = 0; axis < shape->size(); ++axis) {
    const bool is_gone = axes->empty() || std::binary_search(axes->begin(), axes->end(), axis);
    if (!is_gone) made.push_back((*shape)[axis]);
    if (is_gone && node_.Int("keepdims", 1) != 0) made.emplace_back(1);
  }
  return made;
}

std::optional<DimShape> DimensionRules::Unsqueeze() {
  std::optional<DimShape> shape = In(0);
  const std::optional<std::vector<size_t>> axes = shape ? dims_.AxesOf(node_, shape->size()) : std::nullopt;
  if (!axes) return std::nullopt;
  for (const size_t axis : *axes) shape->insert(shape->begin() + static_cast<std::ptrdiff_t>(axis), Dim(1));
  return shape;
}

std::optional<DimShape> DimensionRules::Squeeze() {
  const std::optional<DimShape> shape = In(0);
  const std::optional<std::vector<size_t>> axes = shape ? dims_.AxesOf(node_, shape->size()) : std::nullopt;
  if (!axes) return std::nullopt;
  const auto is_number = [](const Dim& dim) { return dim.IsNumber(); };
  if (axes->empty() && !std::all_of(shape->begin(), shape->end(), is_number)) return std::nullopt;
  DimShape made;
  for (size_t axis = 0; axis < shape->size(); ++axis) {
    // Without axes, Squeeze removes all dimensions of 1.
    const bool is_gone = axes->empty() ? (*shape)[axis].Is(1) : std::binary_search(axes->begin(), axes->end(), axis);
    if (!is_gone) made.push_back((*shape)[axis]);
  }
  return made;
}

std::optional<DimShape> DimensionRules::Gather() {
  const std::optional<DimShape> data = In(0), indices = In(1);
  const std::optional<size_t> axis = data && indices ? AxisOf(node_.Int("axis", 0), data->size()) : std::nullopt;
  if (!axis) return std::nullopt;
  const auto at = data->begin() + static_cast<std::ptrdiff_t>(*axis);
  DimShape made(data->begin(), at);
  made.insert(made.end(), indices->begin(), indices->end());
  made.insert(made.end(), at + 1, data->end());
  return made;
}

std::optional<DimShape> DimensionRules::GatherNd() {
  const std::optional<DimShape> data = In(0), indices = In(1);
  if (!data || !indices || indices->empty() || node_.Int("batch_dims", 0) != 0) return std::nullopt;
  const std::optional<int64_t> depth = indices->back().Number();
  if (!depth || *depth < 0 || *depth > std::ssize(*data)) return std::nullopt;
  DimShape made(indices->begin(), indices->end() - 1);
  made.insert(made.end(), data->begin() + *depth, data->end());
  return made;
}

std::optional<DimShape> DimensionRules::Expand() { return Broadcast({In(0), ShapeFrom(1)}); }

// Return the length that a Slice of an axis has.
std::optional<Dim> DimensionRules::Sliced(const Dim& dim, const Element& begin, const Element& end,
                                          const Element& step) const {
  const std::optional<int64_t> first = begin.AsInt(), last = end.AsInt(), stride = step.AsInt();
  if (first && last && dim.IsNumber() && stride && *stride != 0 && *stride > std::numeric_limits<int64_t>::min()) {
    return Dim(SliceRange(dim.number(), *first, *last, *stride).second);
  }
  if (stride != 1) return std::nullopt;
  if (dim.IsNumber() && dim.number() > 1) {  // slices of a table, such as positions, are assumed to end within it
    if ((first && *first < 0) || begin.AsDim() == nullptr || end.AsDim() == nullptr) return std::nullopt;
    return Minus(*end.AsDim(), *begin.AsDim());
  }
  const bool is_whole = (end.AsDim() != nullptr && *end.AsDim() == dim) || (last && *last >= kNoEnd);
  return first == 0 && is_whole ? std::optional(dim) : std::nullopt;
}

std::optional<DimShape> DimensionRules::Slice() {
  if (const std::optional<Elements> elements = SliceElements()) return DimShape{Dim(std::ssize(*elements))};
  std::optional<DimShape> shape = In(0);
  const auto attribute = [&](const char* name) {
    std::optional<Elements> elements;
    if (node_.HasAttribute(name)) {
      const std::vector<int64_t> numbers = node_.Ints(name);
      elements.emplace(numbers.begin(), numbers.end());
    }
    return elements;
  };
  const bool has_inputs = node_.Has(1);
  const std::optional<Elements> starts = has_inputs ? ElementsIn(1) : attribute("starts");
  const std::optional<Elements> ends = has_inputs ? ElementsIn(2) : attribute("ends");
  std::optional<Elements> axes = has_inputs ? ElementsIn(3) : attribute("axes");
  const std::optional<Elements> steps = ElementsIn(4);
  if (!node_.Has(3) && !axes) {
    const std::optional<DimShape> given = has_inputs ? In(1) : std::nullopt;
    const int64_t count = starts                                                  ? std::ssize(*starts)
                          : given && given->size() == 1 && (*given)[0].IsNumber() ? (*given)[0].number()
                                                                                  : -1;
    if (count >= 0 && count <= static_cast<int64_t>(kMostRank)) axes.emplace();
    for (int64_t axis = 0; axes && axis < count; ++axis) axes->emplace_back(Dim(axis));
  }
  if (!shape) return std::nullopt;
  const auto is_unknown = [&](const Element& axis) { return !AxisOf(axis.AsInt(), shape->size()); };
  if (!axes || std::any_of(axes->begin(), axes->end(), is_unknown)) {
    for (size_t axis = 0; axis < shape->size(); ++axis) (*shape)[axis] = Unknown(axis);
    return shape;
  }
  for (size_t i = 0; i < axes->size(); ++i) {
    const size_t axis = *AxisOf((*axes)[i].AsInt(), shape->size());
    const auto at = [&](const std::optional<Elements>& list) {
      return list && i < list->size() ? (*list)[i] : Element();
    };
    const Element step = node_.Has(4) ? at(steps) : Element(Dim(1));
    (*shape)[axis] = OrUnknown(Sliced((*shape)[axis], at(starts), at(ends), step), axis);
  }
  return shape;
}

// The shape that both branches have, or that of the branch that is always taken.
std::optional<DimShape> DimensionRules::If() {
  const std::optional<Elements> condition = ElementsIn(0);
  const std::optional<bool> taken = condition && condition->size() == 1 ? (*condition)[0].AsBool() : std::nullopt;
  std::optional<DimShape> made;
  for (const char* const name : {"then_branch", "else_branch"}) {
    if (taken && *taken != (std::string_view(name) == "then_branch")) continue;
    const auto branch = node_.subgraphs().find(name);
    if (branch == node_.subgraphs().end() || output_ >= branch->second->outputs().size()) return std::nullopt;
    const Dimensions inside(*branch->second, &dims_);
    const std::optional<DimShape> shape = inside.ShapeOf(branch->second->outputs()[output_]);
    if (!shape || (made && made->size() != shape->size())) return std::nullopt;
    if (!made) made = shape;
    for (size_t axis = 0; axis < shape->size(); ++axis) {
      if ((*made)[axis] != (*shape)[axis]) (*made)[axis] = Unknown(axis);
    }
  }
  return made;
}

std::optional<DimShape> DimensionRules::Tile() {
  std::optional<DimShape> shape = In(0);
  const std::optional<Elements> times = ElementsIn(1);
  if (!shape || !times || shape->size() != times->size()) return std::nullopt;
  for (size_t axis = 0; axis < shape->size(); ++axis) {
    const Dim* const count = (*times)[axis].AsDim();
    (*shape)[axis] = OrUnknown(count == nullptr ? std::nullopt : match::Product((*shape)[axis], *count), axis);
  }
  return shape;
}

std::optional<DimShape> DimensionRules::Split() {
  std::optional<DimShape> shape = In(0);
  const std::optional<size_t> axis = shape ? AxisOf(node_.Int("axis", 0), shape->size()) : std::nullopt;
  if (!axis) return std::nullopt;
  Dim& dim = (*shape)[*axis];
  const int64_t parts = std::ssize(node_.outputs()), part = static_cast<int64_t>(output_);
  std::optional<Dim> size;
  if (node_.Has(1)) {
    const std::optional<Elements> sizes = ElementsIn(1);
    if (sizes && output_ < sizes->size() && (*sizes)[output_].AsDim() != nullptr) size = *(*sizes)[output_].AsDim();
  } else if (const std::vector<int64_t> sizes = node_.Ints("split"); !sizes.empty()) {
    if (output_ < sizes.size()) size = Dim(sizes[output_]);
  } else if (dim.IsNumber()) {
    const int64_t chunk = (dim.number() + parts - 1) / parts;
    size = Dim(std::max<int64_t>(0, std::min(chunk, dim.number() - chunk * part)));
  }
  dim = OrUnknown(size, *axis);
  return shape;
}

std::optional<DimShape> DimensionRules::Range() {
  const auto at = [&](size_t index) {
    const std::optional<Elements> elements = ElementsIn(index);
    return elements && elements->size() == 1 ? (*elements)[0] : Element();
  };
  const Element start = at(0), limit = at(1);
  if (at(2).AsInt() != 1 || start.AsDim() == nullptr || limit.AsDim() == nullptr) return DimShape{Unknown(0)};
  const std::optional<Dim> count = Minus(*limit.AsDim(), *start.AsDim());
  return DimShape{count && count->IsNumber() && count->number() < 0 ? Dim(0) : OrUnknown(count, 0)};
}

std::optional<DimShape> DimensionRules::Concat() {
  if (const std::optional<Elements> elements = ConcatElements()) return DimShape{Dim(std::ssize(*elements))};
  std::optional<DimShape> made;
  for (size_t i = 0; i < node_.inputs().size(); ++i) {
    const std::optional<DimShape> shape = In(i);
    if (!shape || (made && made->size() != shape->size())) return std::nullopt;
    if (!made) {
      made = shape;
      continue;
    }
    const std::optional<size_t> along = AxisOf(node_.Int("axis", 0), made->size());
    for (size_t axis = 0; axis < shape->size(); ++axis) {
      Dim& dim = (*made)[axis];
      if (axis == along) {
        dim = OrUnknown(Plus(dim, (*shape)[axis]), axis);
      } else if (!dim.IsNumber() && (*shape)[axis].IsNumber()) {
        dim = (*shape)[axis];  // Concat requires equal dimensions, even under different names
      }
    }
  }
  return made;
}

std::optional<DimShape> DimensionRules::ShapeOfShape() {
  const std::optional<Elements> elements = ShapeElements();
  return DimShape{elements ? Dim(std::ssize(*elements)) : Unknown(0)};
}

std::optional<DimShape> DimensionRules::Embed() {
  std::optional<DimShape> ids = In(0);
  const std::optional<DimShape> table = In(2);
  if (!ids || ids->empty() || !table || table->empty() || output_ > 1) return std::nullopt;
  if (output_ == 1) return DimShape{ids->front()};  // the length of each sequence
  ids->push_back(table->back());
  return ids;
}

std::optional<DimShape> DimensionRules::Windows(DimShape shape, const std::vector<int64_t>& kernel) const {
  const size_t axes = shape.size() - 2;
  const auto list = [&](const char* name, size_t count, int64_t missing) {
    std::vector<int64_t> given = node_.Ints(name);
    return given.size() == count ? given : std::vector<int64_t>(count, missing);
  };
  const std::vector<int64_t> strides = list("strides", axes, 1), dilations = list("dilations", axes, 1);
  const std::vector<int64_t> pads = list("pads", 2 * axes, 0);
  const std::string auto_pad = node_.String("auto_pad", "NOTSET");
  const bool is_plain = (auto_pad == "NOTSET" || auto_pad == "VALID") && node_.Int("ceil_mode", 0) == 0;
  for (size_t i = 0; i < axes; ++i) {
    Dim& dim = shape[i + 2];
    constexpr int64_t kMost = int64_t{1} << 31;
    const bool is_small = kernel[i] >= 1 && kernel[i] < kMost && dilations[i] >= 1 && dilations[i] < kMost &&
                          strides[i] >= 1 && std::abs(pads[i]) < kMost && std::abs(pads[i + axes]) < kMost;
    const bool is_known = is_plain && is_small && dim.IsNumber() && dim.number() < kMost;
    const int64_t room = is_known ? dim.number() + pads[i] + pads[i + axes] - dilations[i] * (kernel[i] - 1) - 1 : -1;
    dim = room < 0 ? Unknown(i + 2) : Dim(room / strides[i] + 1);
  }
  return shape;
}

std::optional<DimShape> DimensionRules::Convolve() {
  std::optional<DimShape> shape = In(0);
  const std::optional<DimShape> weight = In(1);
  if (!shape || !weight || shape->size() < 3 || weight->size() != shape->size()) return std::nullopt;
  std::vector<int64_t> kernel;
  for (size_t i = 2; i < weight->size(); ++i) kernel.push_back((*weight)[i].Number().value_or(-1));
  (*shape)[1] = (*weight)[0];
  return Windows(std::move(*shape), kernel);
}

std::optional<DimShape> DimensionRules::Pool() {
  std::optional<DimShape> shape = In(0);
  const std::vector<int64_t> kernel = node_.Ints("kernel_shape");
  if (!shape || shape->size() < 3 || kernel.size() != shape->size() - 2) return std::nullopt;
  return Windows(std::move(*shape), kernel);
}

std::optional<DimShape> DimensionRules::GlobalPool() {
  std::optional<DimShape> shape = In(0);
  if (!shape || shape->size() < 3) return std::nullopt;
  std::fill(shape->begin() + 2, shape->end(), Dim(1));
  return shape;
}

std::optional<DimShape> DimensionRules::Pad() {
  std::optional<DimShape> shape = In(0);
  const std::optional<Elements> pads = ElementsIn(1);
  if (!shape) return std::nullopt;
  for (size_t axis = 0; axis < shape->size(); ++axis) {
    std::optional<Dim> dim;
    if (pads && pads->size() == 2 * shape->size() && !node_.Has(3)) {
      const Dim *front = (*pads)[axis].AsDim(), *back = (*pads)[axis + shape->size()].AsDim();
      if (front != nullptr && back != nullptr) dim = Plus((*shape)[axis], *front);
      if (dim) dim = Plus(*dim, *back);
      if (dim && dim->IsNumber() && dim->number() < 0) dim.reset();
    }
    (*shape)[axis] = OrUnknown(dim, axis);
  }
  return shape;
}

std::optional<DimShape> DimensionRules::Resize() {
  const std::optional<DimShape> shape = In(0);
  if (!shape) return std::nullopt;
  const bool is_plain = node_.Ints("axes").empty() && node_.String("keep_aspect_ratio_policy", "stretch") == "stretch";
  const std::optional<DimShape> sizes = is_plain ? ShapeFrom(3) : std::nullopt;
  if (sizes && sizes->size() == shape->size()) return sizes;
  DimShape unknown;
  for (size_t axis = 0; axis < shape->size(); ++axis) unknown.push_back(Unknown(axis));
  return unknown;
}

std::optional<DimShape> DimensionRules::ArgMax() {
  std::optional<DimShape> shape = In(0);
  const std::optional<size_t> axis = shape ? AxisOf(node_.Int("axis", 0), shape->size()) : std::nullopt;
  if (!axis) return std::nullopt;
  (*shape)[*axis] = Dim(1);
  if (node_.Int("keepdims", 1) == 0) shape->erase(shape->begin() + static_cast<std::ptrdiff_t>(*axis));
  return shape;
}

std::optional<DimShape> DimensionRules::TopK() {
  std::optional<DimShape> shape = In(0);
  const std::optional<size_t> axis = shape ? AxisOf(node_.Int("axis", -1), shape->size()) : std::nullopt;
  const std::optional<Elements> count = ElementsIn(1);
  if (!axis) return std::nullopt;
  const size_t at = *axis;
  const Dim* const k = count && count->size() == 1 ? (*count)[0].AsDim() : nullptr;
  (*shape)[at] = k == nullptr ? Unknown(at) : *k;
  return shape;
}

std::optional<DimShape> DimensionRules::NonZero() {
  const std::optional<DimShape> shape = In(0);
  return shape ? std::optional(DimShape{Dim(std::ssize(*shape)), Unknown(1)}) : std::nullopt;
}

std::optional<DimShape> DimensionRules::OneHot() {
  std::optional<DimShape> shape = In(0);
  const std::optional<size_t> axis = shape ? AxisOf(node_.Int("axis", -1), shape->size() + 1) : std::nullopt;
  const std::optional<Elements> depth = ElementsIn(1);
  if (!axis) return std::nullopt;
  const size_t at = *axis;
  const Dim* const count = depth && depth->size() == 1 ? (*depth)[0].AsDim() : nullptr;
  shape->insert(shape->begin() + static_cast<std::ptrdiff_t>(at), count == nullptr ? Unknown(at) : *count);
  return shape;
}

std::optional<DimShape> DimensionRules::Einsum() {
  std::string equation = node_.String("equation", "");
  std::erase(equation, ' ');
  const size_t arrow = equation.find("->");
  if (arrow == std::string::npos || equation.find('.') != std::string::npos) return std::nullopt;
  std::map<char, Dim> dims;
  size_t begin = 0;
  for (size_t i = 0; i < node_.inputs().size(); ++i) {
    const size_t end = std::min(equation.find(',', begin), arrow);
    const std::optional<DimShape> shape = In(i);
    if (!shape || begin > arrow || shape->size() != end - begin) return std::nullopt;
    for (size_t axis = 0; axis < shape->size(); ++axis) dims.try_emplace(equation[begin + axis], (*shape)[axis]);
    begin = end + 1;
  }
  DimShape made;
  for (size_t i = arrow + 2; i < equation.size(); ++i) {
    const auto found = dims.find(equation[i]);
    if (found == dims.end()) return std::nullopt;
    made.push_back(found->second);
  }
  return made;
}

DimensionRules::ElementsRule DimensionRules::ElementsRuleOf(const std::string& type) {
  if (IsOneOf(type, kArithmetic)) return &DimensionRules::Arithmetic;
  if (IsOneOf(type, kSameElements)) return &DimensionRules::SameElements;
  if (type == "Shape") return &DimensionRules::ShapeElements;
  if (type == "Gather") return &DimensionRules::GatherElements;
  if (type == "Slice") return &DimensionRules::SliceElements;
  if (type == "Concat") return &DimensionRules::ConcatElements;
  if (type == "ConstantOfShape") return &DimensionRules::FilledElements;
  return nullptr;
}

std::optional<Elements> DimensionRules::OutputElements() {
  output_ = 0;
  const ElementsRule rule = node_.IsStandard() ? ElementsRuleOf(node_.type()) : nullptr;
  return rule == nullptr ? std::nullopt : (this->*rule)();
}

std::optional<Elements> DimensionRules::ShapeElements() {
  const std::optional<DimShape> shape = In(0);
  if (!shape) return std::nullopt;
  const int64_t rank = std::ssize(*shape);
  const auto [first, count] = SliceRange(rank, node_.Int("start", 0), node_.Int("end", rank), 1);
  return Elements(shape->begin() + first, shape->begin() + first + count);
}

std::optional<Elements> DimensionRules::SameElements() {
  std::optional<Elements> elements = ElementsIn(0);
  if (!elements || node_.type() != "Cast" || !IsFloatingPoint(node_.Int("to", 0))) return elements;
  for (Element& element : *elements) {
    if (const std::optional<int64_t> number = element.AsInt()) element = Element::Real(static_cast<double>(*number));
  }
  return elements;
}

std::optional<Elements> DimensionRules::GatherElements() {
  const std::optional<Elements> data = ElementsIn(0), indices = ElementsIn(1);
  if (!data || !indices) return std::nullopt;
  Elements made;
  for (const Element& index : *indices) {
    const std::optional<size_t> own = AxisOf(index.AsInt(), data->size());
    if (!own) return std::nullopt;
    made.push_back((*data)[*own]);
  }
  return made;
}

std::optional<Elements> DimensionRules::SliceElements() {
  const std::optional<Elements> data = ElementsIn(0);
  if (!data || !node_.Has(1) || !node_.Has(2)) return std::nullopt;
  const auto number = [&](size_t input, double missing) -> std::optional<double> {
    return node_.Has(input) ? dims_.NumberOf(node_.Input(input)) : missing;
  };
  const std::optional<double> begin = number(1, 0), end = number(2, 0), step = number(4, 1);
  if (!begin || !end || !step || *step == 0 || std::abs(*step) > 1e9) return std::nullopt;
  const auto whole = [](double value) { return static_cast<int64_t>(std::clamp(value, -4e18, 4e18)); };
  const int64_t stride = whole(*step);
  const auto [first, count] = SliceRange(std::ssize(*data), whole(*begin), whole(*end), stride);
  Elements made;
  for (int64_t i = 0; i < count; ++i) made.push_back((*data)[static_cast<size_t>(first + i * stride)]);
  return made;
}

std::optional<Elements> DimensionRules::ConcatElements() {
  Elements made;
  for (size_t i = 0; i < node_.inputs().size(); ++i) {
    const std::optional<Elements> part = ElementsIn(i);
    if (!part || made.size() + part->size() > kMostElements) return std::nullopt;
    made.insert(made.end(), part->begin(), part->end());
  }
  return made;
}

std::optional<Elements> DimensionRules::FilledElements() {
  const std::optional<Elements> counts = ElementsIn(0);
  const std::optional<int64_t> count = counts && counts->size() == 1 ? (*counts)[0].AsInt() : std::nullopt;
  if (!count || *count < 0 || *count > static_cast<int64_t>(kMostElements)) return std::nullopt;
  const auto found = node_.attributes().find("value");
  const Constant* const tensor = found == node_.attributes().end() ? nullptr : std::get_if<Constant>(&found->second);
  Element fill = Element::Real(0);
  if (tensor != nullptr) {
    const std::optional<Elements> read = ReadElements(*tensor);
    if (!read || read->size() != 1) return std::nullopt;
    fill = read->front();
  }
  return Elements(static_cast<size_t>(*count), fill);
}

std::optional<Elements> DimensionRules::Arithmetic() {
  std::vector<Elements> operands;
  size_t count = 0;
  for (size_t i = 0; i < node_.inputs().size(); ++i) {
    std::optional<Elements> operand = ElementsIn(i);
    if (!operand || operand->empty()) return std::nullopt;
    count = std::max(count, operand->size());
    operands.push_back(std::move(*operand));
  }
  if (operands.empty()) return std::nullopt;
  Elements made;
  for (size_t at = 0; at < count; ++at) {
    std::vector<Element> row;
    for (const Elements& operand : operands) {
      if (operand.size() != 1 && operand.size() != count) return std::nullopt;
      row.push_back(operand[operand.size() == 1 ? 0 : at]);
    }
    made.push_back(Compute(node_.type(), row));
  }
  return made;
}

}  // namespace ortolan::match
