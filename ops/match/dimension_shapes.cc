// The shapes of match::Dimensions: one rule for each operator.
#include <algorithm>
#include <map>
#include <numeric>
#include <sstream>
#include <unordered_map>

#include "match/dimension_rules.h"

namespace ortolan::match {
namespace {

constexpr int64_t kNoEnd = INT32_MAX;              // a Slice end of at least this means the end of the axis
constexpr int64_t kMostWindow = int64_t{1} << 30;  // limit for kernel sizes, strides, pads and heads

// Return the length of a Slice of an axis.
MaybeDim CutAxis(const Dim& dim, const Element& begin, const Element& end, const Element& step) {
  const auto from = begin.AsInt(), to = end.AsInt(), by = step.AsInt();
  if (from && to && by && *by != 0 && dim.IsNumber()) return CutOf(*from, *to, *by, dim.number()).count;
  if (by != 1 || begin.AsDim() == nullptr || end.AsDim() == nullptr || (from && *from < 0)) return std::nullopt;
  if (const int64_t most = INT32_MAX; from && to && *from < most && *to < 0 && *to > -most) {
    if (const MaybeDim rest = Minus(dim, *from - *to)) return rest;  // never negative
  }
  const bool whole = *end.AsDim() == dim || (to && *to >= kNoEnd);
  // Slices of a table, such as positions, are assumed to end within it. Minus proves it for symbols.
  const bool is_table = dim.IsNumber() && dim.number() > 1;
  if (!whole && !is_table && ((to && *to < 0) || !Minus(dim, *end.AsDim()))) return std::nullopt;
  const MaybeDim length = Minus(whole ? dim : *end.AsDim(), *begin.AsDim());
  return length && length->number() < 0 ? 0 : length;
}

class Rules {
 public:
  explicit Rules(const Visit& visit) : visit_(visit), node_(visit.node) {}
  using Rule = MaybeShape (Rules::*)(size_t output);
  struct Known {
    Rule rule;
    size_t outputs;  // number of outputs that the rule describes
  };
  static const std::unordered_map<std::string, Known>& All();

 private:
  MaybeShape Shape(size_t input) const { return visit_.dims.ShapeOf(node_.Input(input)); }
  MaybeElements ElementsAt(size_t input) const { return visit_.dims.ElementsOf(node_.Input(input)); }
  bool Ours() const { return node_.domain() == "ai.ortolan"; }
  bool Has(const char* attribute, size_t input) const { return node_.HasAttribute(attribute) || node_.Has(input); }
  MaybeElements List(const char* attribute, size_t input) const { return ListOf(visit_.dims, node_, attribute, input); }
  std::optional<size_t> Axis(int64_t missing, size_t rank) const { return AxisOf(node_.Int("axis", missing), rank); }
  Dim Unknown(size_t output, size_t axis) const { return visit_.symbols.Unknown(node_.Output(output), axis); }
  Dim Or(const MaybeDim& dim, size_t axis, size_t output = 0) const { return dim ? *dim : Unknown(output, axis); }
  DimShape AllUnknown(size_t rank) const {
    DimShape shape;
    while (shape.size() < rank) shape.push_back(Unknown(0, shape.size()));
    return shape;
  }
  // Return the shape that an input contains. Only its rank is known if the input's elements are not.
  MaybeShape ShapeIn(size_t input) const {
    const MaybeElements elements = ElementsAt(input);
    if (!elements) {
      const MaybeShape own = Shape(input);
      const auto rank = own && own->size() == 1 ? own->front().Number() : std::nullopt;
      const bool is_rank = rank && *rank >= 0 && *rank <= static_cast<int64_t>(kMostAxes);
      return is_rank ? MaybeShape(AllUnknown(static_cast<size_t>(*rank))) : std::nullopt;
    }
    DimShape shape;
    for (const Element& element : *elements) {
      const bool is_size = element.AsDim() != nullptr && element.AsDim()->number() >= 0;
      shape.push_back(is_size ? *element.AsDim() : Unknown(0, shape.size()));
    }
    return shape;
  }
  static MaybeDim ProductOf(std::span<const Dim> dims) {
    MaybeDim product = 1;
    for (const Dim& dim : dims) product = product ? Product(*product, dim) : product;
    return product;
  }

  // Two different symbols on one axis give a new symbol.
  MaybeShape BroadcastShapes(std::span<const MaybeShape> shapes) const {
    size_t rank = 0;
    for (const MaybeShape& shape : shapes) {
      if (!shape) return std::nullopt;
      rank = std::max(rank, shape->size());
    }
    DimShape all(rank, 1);
    for (size_t axis = 0; axis < rank; ++axis) {
      bool differ = false;
      for (const MaybeShape& shape : shapes) {
        if (axis + shape->size() < rank) continue;
        const Dim& dim = (*shape)[axis + shape->size() - rank];
        if (dim.Is(1) || dim == all[axis]) continue;
        differ = differ || !all[axis].Is(1);
        if (all[axis].Is(1) || dim.IsNumber()) all[axis] = dim;
      }
      if (differ && !all[axis].IsNumber()) all[axis] = Unknown(0, axis);
    }
    return all;
  }
  MaybeShape BroadcastInputs(size_t first, size_t count) const {
    std::vector<MaybeShape> shapes;
    for (size_t i = first; i < std::min(first + count, node_.inputs().size()); ++i) shapes.push_back(Shape(i));
    return shapes.empty() ? std::nullopt : BroadcastShapes(shapes);
  }
  MaybeShape Multiply(MaybeShape a, MaybeShape b) const {
    if (!a || !b || a->empty() || b->empty()) return std::nullopt;
    const bool row = a->size() == 1, column = b->size() == 1;
    if (row) a->insert(a->begin(), 1);
    if (column) b->push_back(1);
    const MaybeShape batches[] = {DimShape(a->begin(), a->end() - 2), DimShape(b->begin(), b->end() - 2)};
    DimShape shape = *BroadcastShapes(batches);
    if (!row) shape.push_back(*(a->end() - 2));
    if (!column) shape.push_back(b->back());
    return shape;
  }

  MaybeShape Same(size_t) { return Shape(0); }
  MaybeShape Second(size_t) { return Shape(1); }
  MaybeShape Scalar(size_t) { return DimShape{}; }
  // Output 3 is the sum that was normalized.
  MaybeShape SkipNorm(size_t output) { return output == 0 || output == 3 ? Shape(0) : std::nullopt; }
  MaybeShape DynamicQuantize(size_t output) { return output == 0 ? Shape(0) : DimShape{}; }
  MaybeShape Broadcast(size_t) { return BroadcastInputs(0, SIZE_MAX); }
  MaybeShape AddLayerNorm(size_t) { return BroadcastInputs(0, 3); }
  MaybeShape MatMul(size_t) { return Multiply(Shape(0), Shape(1)); }
  MaybeShape QLinearMatMul(size_t) { return Multiply(Shape(0), Shape(3)); }

  MaybeShape Gemm(size_t) {
    const auto a = Shape(0), b = Shape(1);
    if (!a || !b || a->size() != 2 || b->size() != 2) return std::nullopt;
    return DimShape{(*a)[node_.Int("transA", 0) != 0 ? 1 : 0], (*b)[node_.Int("transB", 0) != 0 ? 0 : 1]};
  }

  // A linear layer's operator whose output width is an attribute.
  MaybeShape Linear(size_t) {
    MaybeShape x = Shape(0);
    int64_t width = 0;
    for (const char* const name : {"gated_columns", "n", "N"}) width = width > 0 ? width : node_.Int(name, 0);
    if (!x || x->empty() || width <= 0) return std::nullopt;
    x->back() = width;
    if (Ours() && !HasWindowsOf(*x)) return std::nullopt;
    const size_t residual = node_.type() == "SparseAMXMatMul" ? 5 : node_.type() == "VNNISpMM" ? 6 : 4;
    if (!Ours() || !node_.Has(residual)) return x;
    const MaybeShape both[] = {x, Shape(residual)};
    return BroadcastShapes(both);
  }

  // Change the frames of a linear layer's X, its second to last axis, to windows (matmul/windows.h). Return false if X
  // has no such axis.
  bool HasWindowsOf(DimShape& x) const {
    const int64_t size = node_.Int("window", 1), stride = node_.Int("window_stride", 1);
    const int64_t begin = node_.Int("window_pads_begin", 0), end = node_.Int("window_pads_end", 0);
    if (size == 1 && stride == 1 && begin == 0 && end == 0) return true;
    if (x.size() < 2) return false;
    const size_t axis = x.size() - 2;
    bool fits = true;
    for (const int64_t one : {size, stride, begin + 1, end + 1}) fits = fits && 0 < one && one <= kMostWindow;
    x[axis] = Or(fits ? CountWindows(x[axis], size, stride, begin + end) : std::nullopt, axis);
    return true;
  }

  // Return the number of windows of `size` elements, which start `stride` elements apart.
  static MaybeDim CountWindows(const Dim& length, int64_t size, int64_t stride, int64_t padding) {
    if (stride == 1) return Plus(length, padding - size + 1);
    const auto rest = Plus(length, padding - size);
    if (!rest || !rest->IsNumber() || rest->number() < 0) return std::nullopt;
    return rest->number() / stride + 1;
  }

  // NoMADAttention and MultiHeadAttention: the width is that of the queries.
  MaybeShape HeadsMerged(size_t) {
    auto query = Shape(0);
    if (query && query->size() == 4 && Ours()) {
      const auto width = Product((*query)[1], (*query)[3]);
      return width && width->IsNumber() ? MaybeShape({(*query)[0], (*query)[2], *width}) : std::nullopt;
    }
    if (!query || query->size() != 3) return std::nullopt;
    if (node_.Has(2) && !(Ours() && Shape(2) == DimShape{1})) return query;
    // Packed queries, keys and values.
    const int64_t heads = node_.Int("num_heads", 1), given = node_.Int("kv_num_heads", 0);
    const int64_t kv_heads = given != 0 ? given : heads;
    const bool fits = 0 < heads && heads < kMostWindow && 0 < kv_heads && kv_heads < kMostWindow;
    if (!Ours() || !fits) return std::nullopt;
    const auto width = Product((*query)[2], heads);
    if (!width || !width->IsNumber()) return std::nullopt;
    query->back() = width->number() / (heads + 2 * kv_heads);
    return query;
  }

  MaybeShape Attention(size_t output) {
    if (!node_.IsStandard()) return PackedAttention(output);
    auto query = Shape(0);
    const auto value = Shape(2);
    if (!query || !value || query->size() < 3 || query->size() != value->size()) return std::nullopt;
    query->back() = value->back();
    if (query->size() == 4) return query;
    const int64_t heads = node_.Int("q_num_heads", 0), kv_heads = node_.Int("kv_num_heads", 0);
    const auto width = Product(value->back(), heads);
    if (kv_heads <= 0 || !width || !width->IsNumber()) return std::nullopt;
    query->back() = width->number() / kv_heads;
    return query;
  }

  // ONNX Runtime's Attention and QAttention, which include the projection to queries, keys and values.
  MaybeShape PackedAttention(size_t) {
    auto x = Shape(0);
    const auto weight = Shape(1);
    if (!x || x->size() != 3 || !weight || weight->empty() || !weight->back().IsNumber()) return std::nullopt;
    const auto sizes = node_.Ints("qkv_hidden_sizes");
    x->back() = sizes.empty() ? weight->back().number() / 3 : sizes.back();
    return x;
  }

  MaybeShape Transpose(size_t) {
    const auto shape = Shape(0);
    const auto axes = shape ? Permutation(node_, shape->size()) : std::nullopt;
    const size_t rank = node_.Ints("perm").size();
    if (!axes) {  // as ONNX Runtime, which takes the rank of a shape that it does not know from perm
      const bool is_wrong = shape && shape->size() == rank;
      return !is_wrong && rank > 0 && rank <= kMostAxes ? MaybeShape(AllUnknown(rank)) : std::nullopt;
    }
    DimShape permuted;
    for (const size_t axis : *axes) permuted.push_back((*shape)[axis]);
    return permuted;
  }

  MaybeShape Reshape(size_t) {
    const auto target = visit_.dims.ReshapeTarget(node_);
    if (!target) return ElementsAt(1) ? std::nullopt : ShapeIn(1);
    DimShape known, dims;
    for (const MaybeDim& dim : *target) {
      if (dim) known.push_back(*dim);
      dims.push_back(Or(dim, dims.size()));
    }
    const auto shape = Shape(0);
    const auto rest = shape && known.size() + 1 == dims.size() ? Quotient(*shape, known) : std::nullopt;
    const auto unknown = [](const MaybeDim& dim) { return !dim; };
    if (rest) dims[static_cast<size_t>(std::ranges::find_if(*target, unknown) - target->begin())] = *rest;
    return dims;
  }

  MaybeShape Flatten(size_t) {
    const auto shape = Shape(0);
    if (!shape) return std::nullopt;
    const int64_t given = node_.Int("axis", 1), rank = static_cast<int64_t>(shape->size());
    const auto axis = given == rank ? shape->size() : AxisOf(given, shape->size());
    if (!axis) return std::nullopt;
    const std::span<const Dim> dims = *shape;
    return DimShape{Or(ProductOf(dims.first(*axis)), 0), Or(ProductOf(dims.subspan(*axis)), 1)};
  }

  MaybeShape WithoutAxes(const DimShape& shape, std::span<const size_t> axes, bool keeps) const {
    DimShape left;
    for (size_t axis = 0; axis < shape.size(); ++axis) {
      const bool is_gone = std::ranges::find(axes, axis) != axes.end();
      if (!is_gone || keeps) left.push_back(is_gone ? Dim(1) : shape[axis]);
    }
    return left;
  }

  MaybeShape Reduce(size_t) {
    const auto shape = Shape(0);
    if (!shape) return std::nullopt;
    const bool keeps = node_.Int("keepdims", 1) != 0;
    auto axes = visit_.dims.AxesOf(node_, shape->size());
    if (!axes) return keeps && !shape->empty() ? MaybeShape(AllUnknown(shape->size())) : std::nullopt;
    if (axes->empty() && node_.Int("noop_with_empty_axes", 0) != 0) return shape;
    if (axes->empty()) {
      axes->resize(shape->size());
      std::iota(axes->begin(), axes->end(), 0);
    }
    return WithoutAxes(*shape, *axes, keeps);
  }

  MaybeShape ArgMax(size_t) {
    const auto shape = Shape(0);
    const auto axis = shape ? Axis(0, shape->size()) : std::nullopt;
    return axis ? WithoutAxes(*shape, std::span(&*axis, 1), node_.Int("keepdims", 1) != 0) : std::nullopt;
  }

  MaybeShape Squeeze(size_t) {
    const auto shape = Shape(0);
    auto axes = shape ? visit_.dims.AxesOf(node_, shape->size()) : std::nullopt;
    if (!axes || (axes->empty() && !std::ranges::all_of(*shape, &Dim::IsNumber))) return std::nullopt;
    const bool finds_ones = axes->empty();  // without axes, Squeeze removes all dimensions of 1
    for (size_t axis = 0; finds_ones && axis < shape->size(); ++axis) {
      if ((*shape)[axis].Is(1)) axes->push_back(axis);
    }
    return WithoutAxes(*shape, *axes, false);
  }

  MaybeShape Unsqueeze(size_t) {
    auto shape = Shape(0);
    const auto axes = shape ? visit_.dims.AxesOf(node_, shape->size()) : std::nullopt;
    if (!axes || axes->size() > kMostAxes) return std::nullopt;
    for (const size_t axis : *axes) shape->insert(shape->begin() + static_cast<ptrdiff_t>(axis), 1);
    return shape;
  }

  // Return dims[0, first) + middle + dims[last, end).
  static DimShape Replaced(const DimShape& dims, size_t first, size_t last, const DimShape& middle) {
    DimShape made(dims.begin(), dims.begin() + static_cast<ptrdiff_t>(first));
    made.insert(made.end(), middle.begin(), middle.end());
    made.insert(made.end(), dims.begin() + static_cast<ptrdiff_t>(last), dims.end());
    return made;
  }

  MaybeShape Gather(size_t) {
    const auto data = Shape(0), indices = Shape(1);
    const auto axis = data && indices ? Axis(0, data->size()) : std::nullopt;
    return axis ? MaybeShape(Replaced(*data, *axis, *axis + 1, *indices)) : std::nullopt;
  }

  MaybeShape GatherNd(size_t) {
    const auto data = Shape(0), indices = Shape(1);
    const int64_t batch = node_.Int("batch_dims", 0);
    if (!data || !indices || indices->empty() || batch < 0 || !indices->back().IsNumber()) return std::nullopt;
    const int64_t taken = indices->back().number(), rank = static_cast<int64_t>(data->size());
    if (taken < 1 || batch >= rank || taken > rank - batch) return std::nullopt;
    const DimShape front(indices->begin(), indices->end() - 1);
    return Replaced(*data, 0, static_cast<size_t>(batch + taken), front);
  }

  MaybeShape Expand(size_t) {
    const MaybeShape both[] = {Shape(0), ShapeIn(1)};
    return BroadcastShapes(both);
  }

  MaybeShape Slice(size_t) {
    if (visit_.elements) return DimShape{static_cast<int64_t>(visit_.elements->size())};
    auto shape = Shape(0);
    if (!shape) return std::nullopt;
    const auto starts = List("starts", 1), ends = List("ends", 2), axes = List("axes", 3), steps = List("steps", 4);
    const auto given = node_.HasAttribute("starts") ? DimShape{static_cast<int64_t>(starts->size())} : Shape(1);
    const bool has_axes = Has("axes", 3);
    if (!axes && (has_axes || !given || given->size() != 1 || !(*given)[0].IsNumber())) {
      return AllUnknown(shape->size());
    }
    const size_t count = axes ? axes->size() : static_cast<size_t>((*given)[0].number());
    for (size_t i = 0; i < count; ++i) {
      const auto axis = AxisOf(axes ? (*axes)[i].AsInt() : static_cast<int64_t>(i), shape->size());
      if (!axis) return AllUnknown(shape->size());
      const auto at = [&](const MaybeElements& list) { return list && i < list->size() ? (*list)[i] : Element(); };
      const Element step = node_.Has(4) ? at(steps) : Element(1);
      (*shape)[*axis] = Or(CutAxis((*shape)[*axis], at(starts), at(ends), step), *axis);
    }
    return shape;
  }

  // If: the shape that both branches have, or the shape of the branch that is always taken.
  MaybeShape If(size_t output) {
    MaybeShape all;
    for (const auto& branch : visit_.branches) {
      const auto& outputs = branch->graph().outputs();
      const auto shape = output < outputs.size() ? branch->ShapeOf(outputs[output]) : std::nullopt;
      if (!shape || (all && all->size() != shape->size())) return std::nullopt;
      if (!all) all = shape;
      for (size_t axis = 0; axis < all->size(); ++axis) {
        if ((*all)[axis] != (*shape)[axis]) (*all)[axis] = Unknown(output, axis);
      }
    }
    return all;
  }

  MaybeShape Tile(size_t) {
    auto shape = Shape(0);
    const auto times = ElementsAt(1);
    if (!shape || !times || shape->size() != times->size()) return std::nullopt;
    for (size_t axis = 0; axis < shape->size(); ++axis) {
      const Dim* const count = (*times)[axis].AsDim();
      (*shape)[axis] = Or(count == nullptr ? std::nullopt : Product((*shape)[axis], *count), axis);
    }
    return shape;
  }

  MaybeShape Split(size_t output) {
    auto shape = Shape(0);
    const auto axis = shape ? Axis(0, shape->size()) : std::nullopt;
    if (!axis) return std::nullopt;
    const auto sizes = List("split", 1);
    const auto width = (*shape)[*axis].Number();
    MaybeDim size;
    if (sizes && output < sizes->size() && (*sizes)[output].AsDim() != nullptr) size = *(*sizes)[output].AsDim();
    if (!Has("split", 1) && width && *width >= 0) {
      const int64_t parts = static_cast<int64_t>(node_.outputs().size());
      const int64_t chunk = *width / parts + (*width % parts != 0 ? 1 : 0);
      size = std::clamp<int64_t>(*width - chunk * static_cast<int64_t>(output), 0, chunk);
    }
    (*shape)[*axis] = Or(size, *axis, output);
    return shape;
  }

  MaybeShape FromInput(size_t) { return ShapeIn(0); }

  MaybeShape Range(size_t) {
    const auto start = ElementsAt(0), limit = ElementsAt(1), step = ElementsAt(2);
    const auto first = [](const MaybeElements& elements) {
      return elements && elements->size() == 1 ? (*elements)[0].AsDim() : nullptr;
    };
    MaybeDim count;
    if (first(start) != nullptr && first(limit) != nullptr && first(step) != nullptr && first(step)->Is(1)) {
      count = Minus(*first(limit), *first(start));
    }
    return DimShape{count && count->number() < 0 ? 0 : Or(count, 0)};
  }

  MaybeShape Concat(size_t) {
    if (visit_.elements) return DimShape{static_cast<int64_t>(visit_.elements->size())};
    MaybeShape all;
    std::optional<size_t> place;
    MaybeDim sum = 0;
    for (size_t i = 0; i < node_.inputs().size(); ++i) {
      const auto shape = Shape(i);
      if (!shape || (all && all->size() != shape->size())) return std::nullopt;
      if (!all) all = shape;
      if (!place) place = Axis(0, shape->size());
      if (!place) return std::nullopt;
      sum = sum ? Plus(*sum, (*shape)[*place]) : sum;
      for (size_t axis = 0; axis < all->size(); ++axis) {  // equal dimensions, even under different names
        if (!(*all)[axis].IsNumber() && (*shape)[axis].IsNumber()) (*all)[axis] = (*shape)[axis];
      }
    }
    if (all) (*all)[*place] = Or(sum, *place);
    return all;
  }

  MaybeShape ShapeVector(size_t) {
    return DimShape{visit_.elements ? Dim(static_cast<int64_t>(visit_.elements->size())) : Unknown(0, 0)};
  }

  MaybeShape Embed(size_t output) {
    auto ids = Shape(0);
    const auto table = Shape(2);
    if (!ids || !table || ids->empty() || table->empty()) return std::nullopt;
    if (output == 1) return DimShape{(*ids)[0]};  // the length of each sequence
    ids->push_back(table->back());
    return ids;
  }

  MaybeShape TopK(size_t output) {
    auto shape = Shape(0);
    const auto axis = shape ? Axis(-1, shape->size()) : std::nullopt;
    if (!axis) return std::nullopt;
    const auto count = node_.HasAttribute("k") ? Elements{Dim(node_.Int("k"))} : ElementsAt(1);
    const Dim* const size = count && count->size() == 1 ? (*count)[0].AsDim() : nullptr;
    (*shape)[*axis] = size == nullptr ? Unknown(output, *axis) : *size;
    return shape;
  }

  MaybeShape OneHot(size_t) {
    auto shape = Shape(0);
    const auto axis = shape ? Axis(-1, shape->size() + 1) : std::nullopt;
    if (!axis) return std::nullopt;
    const auto depth = ElementsAt(1);
    const Dim* const size = depth && depth->size() == 1 ? (*depth)[0].AsDim() : nullptr;
    shape->insert(shape->begin() + static_cast<ptrdiff_t>(*axis), size == nullptr ? Unknown(0, *axis) : *size);
    return shape;
  }

  // Exports of repeat_interleave compare Range(0, n) with a tensor filled with n, so all elements are true.
  bool IsAllTrue(Value value) const {
    const Graph& graph = visit_.dims.graph();
    const Node* const less = MakerOf(graph, value, "Less");
    const Node* const range = less == nullptr ? nullptr : MakerOf(graph, less->Input(0), "Range");
    if (range == nullptr) return false;
    const auto limit = visit_.dims.NumberOf(range->Input(1)), step = visit_.dims.NumberOf(range->Input(2));
    const auto fill = FilledWith(visit_.dims, less->Input(1));
    const auto number = fill ? fill->AsNumber() : std::nullopt;
    return limit && step && number && *step > 0 && *limit <= *number;
  }
  MaybeShape NonZero(size_t) {
    const auto shape = Shape(0);
    if (!shape) return std::nullopt;
    const MaybeDim count = IsAllTrue(node_.Input(0)) ? ProductOf(*shape) : std::nullopt;
    return DimShape{static_cast<int64_t>(shape->size()), Or(count, 1)};
  }

  MaybeShape Pad(size_t) {
    auto shape = Shape(0);
    if (!shape) return std::nullopt;
    const auto pads = List("pads", 1), axes = ElementsAt(3);
    const size_t count = axes ? axes->size() : shape->size();
    if (!pads || pads->size() != 2 * count || (!axes && node_.Has(3))) return AllUnknown(shape->size());
    for (size_t i = 0; i < count; ++i) {
      const auto axis = AxisOf(axes ? (*axes)[i].AsInt() : static_cast<int64_t>(i), shape->size());
      if (!axis) return AllUnknown(shape->size());
      const Dim *const before = (*pads)[i].AsDim(), *const after = (*pads)[i + count].AsDim();
      const auto more = before != nullptr && after != nullptr ? Plus(*before, *after) : std::nullopt;
      (*shape)[*axis] = Or(more ? Plus((*shape)[*axis], *more) : std::nullopt, *axis);
    }
    return shape;
  }

  MaybeShape Resize(size_t) {
    const auto shape = Shape(0), sizes = ShapeIn(3);
    if (!shape) return std::nullopt;
    const bool is_whole = sizes && sizes->size() == shape->size() && node_.Ints("axes").empty() &&
                          node_.String("keep_aspect_ratio_policy", "stretch") == "stretch";
    return is_whole ? *sizes : AllUnknown(shape->size());
  }

  // Return the length of an axis after a convolution or pooling.
  MaybeDim Windowed(const Dim& size, const MaybeDim& kernel, size_t axis, size_t axes) const {
    const std::string automatic = node_.String("auto_pad", "NOTSET");
    const auto pads = automatic == "NOTSET" ? node_.Ints("pads") : std::vector<int64_t>{};
    const auto at = [&](const std::vector<int64_t>& list, size_t i, int64_t missing) {
      return i < list.size() ? list[i] : missing;
    };
    const int64_t stride = at(node_.Ints("strides"), axis, 1), dilation = at(node_.Ints("dilations"), axis, 1);
    const int64_t before = at(pads, axis, 0), after = at(pads, axis + axes, 0);
    if (!kernel || !kernel->IsNumber() || (!pads.empty() && pads.size() != 2 * axes)) return std::nullopt;
    for (const int64_t one : {stride, dilation, kernel->number(), before + 1, after + 1}) {
      if (one < 1 || one > kMostWindow) return std::nullopt;
    }
    const int64_t reach = dilation * (kernel->number() - 1) + 1;
    const int64_t padding = automatic.starts_with("SAME") ? reach - 1 : before + after;
    const auto count = CountWindows(size, reach, stride, padding);
    const bool rounds_up = node_.Int("ceil_mode", 0) != 0;
    return rounds_up && count != CountWindows(size, reach, stride, padding + stride - 1) ? std::nullopt : count;
  }

  MaybeShape Conv(size_t) { return Convolved(Shape(node_.type() == "QLinearConv" ? 3 : 1)); }
  MaybeShape Pool(size_t) { return Convolved(std::nullopt); }
  MaybeShape Convolved(const MaybeShape& weight) const {
    auto shape = Shape(0);
    const auto kernel = node_.Ints("kernel_shape");
    const bool is_pool = node_.type().ends_with("Pool");
    const bool fits = shape && shape->size() > 2 && (is_pool || (weight && weight->size() == shape->size()));
    if (!fits || (is_pool && kernel.size() != shape->size() - 2)) return std::nullopt;
    if (!is_pool) (*shape)[1] = (*weight)[0];
    for (size_t axis = 2; axis < shape->size(); ++axis) {
      const Dim size = is_pool ? Dim(kernel[axis - 2]) : (*weight)[axis];
      (*shape)[axis] = Or(Windowed((*shape)[axis], size, axis - 2, shape->size() - 2), axis);
    }
    return shape;
  }

  MaybeShape GlobalPool(size_t) {
    auto shape = Shape(0);
    if (shape && shape->size() > 2) std::fill(shape->begin() + 2, shape->end(), 1);
    return shape;
  }

  MaybeShape Einsum(size_t) {
    std::string equation = node_.String("equation", "");
    std::erase(equation, ' ');
    const size_t arrow = equation.find("->");
    std::map<char, std::pair<Dim, int>> sizes;  // each letter's dimension and the number of its uses
    std::istringstream terms(equation.substr(0, arrow));
    size_t input = 0;
    for (std::string term; std::getline(terms, term, ','); ++input) {
      const auto shape = Shape(input);
      if (!shape || term.size() != shape->size()) return std::nullopt;  // also for an ellipsis
      for (size_t axis = 0; axis < term.size(); ++axis) {
        auto& [dim, uses] = sizes.try_emplace(term[axis], (*shape)[axis], 0).first->second;
        if (++uses > 1 && (dim.Is(1) || (*shape)[axis].IsNumber()) && !(*shape)[axis].Is(1)) dim = (*shape)[axis];
      }
    }
    std::string letters;
    if (arrow != std::string::npos) letters = equation.substr(arrow + 2);
    for (const auto& [letter, size] : sizes) {
      if (arrow == std::string::npos && size.second == 1) letters += letter;
    }
    DimShape shape;
    for (const char letter : letters) {
      if (!sizes.contains(letter)) return std::nullopt;
      shape.push_back(sizes[letter].first);
    }
    return shape;
  }

  const Visit& visit_;
  const Node& node_;
};

const std::unordered_map<std::string, Rules::Known>& Rules::All() {
  static const auto* const kAll = [] {
    auto* const rules = new std::unordered_map<std::string, Known>;
    const auto add = [&](const char* names, Rule rule, size_t outputs = 1) {
      std::istringstream list(names);
      for (std::string name; list >> name;) (*rules)[name] = {rule, outputs};
    };
    add("Identity Cast CastLike Relu Gelu Erf Tanh Sigmoid Sqrt Softmax LogSoftmax Hardmax LayerNormalization Neg Exp "
        "RMSNormalization Abs Not IsNaN IsInf Clip Round Swish Elu Selu Celu LeakyRelu ThresholdedRelu HardSwish "
        "HardSigmoid Mish Shrink Softplus Softsign Sign Reciprocal Floor Ceil Log Sin Cos Tan Asin Acos Atan Sinh Cosh "
        "Asinh Acosh Atanh BitwiseNot CumSum Trilu SimplifiedLayerNormalization BiasGelu FastGelu QuickGelu "
        "QuantizeLinear DequantizeLinear Scatter ScatterND ScatterElements RotaryEmbedding BatchNormalization "
        "InstanceNormalization GroupNormalization LpNormalization MeanVarianceNormalization LRN ReverseSequence",
        &Rules::Same);
    add("Dropout", &Rules::Same, 2);
    add("SkipLayerNormalization SkipSimplifiedLayerNormalization", &Rules::SkipNorm, 4);
    add("Add Sub Mul Div Pow PRelu Where And Or Xor Equal Less LessOrEqual Greater GreaterOrEqual Min Max Mean Sum Mod "
        "BitShift BitwiseAnd BitwiseOr BitwiseXor",
        &Rules::Broadcast);
    add("MatMul MatMulInteger MatMulIntegerToFloat DynamicQuantizeMatMul MaskedMatMul", &Rules::MatMul);
    add("QLinearMatMul", &Rules::QLinearMatMul);
    add("Gemm", &Rules::Gemm);
    add("MatMulNBits W4A8MatMul W8A8MatMul SparseAMXMatMul VNNISpMM", &Rules::Linear);
    add("AddLayerNorm", &Rules::AddLayerNorm);
    add("NoMADAttention MultiHeadAttention", &Rules::HeadsMerged);
    add("Attention", &Rules::Attention);
    add("QAttention", &Rules::PackedAttention);
    add("Transpose", &Rules::Transpose);
    add("Reshape", &Rules::Reshape);
    add("Flatten", &Rules::Flatten);
    add("ReduceMean ReduceSum ReduceMax ReduceMin ReduceProd ReduceL1 ReduceL2 ReduceLogSum ReduceLogSumExp "
        "ReduceSumSquare",
        &Rules::Reduce);
    add("ArgMax ArgMin", &Rules::ArgMax);
    add("Unsqueeze", &Rules::Unsqueeze);
    add("Squeeze", &Rules::Squeeze);
    add("Gather", &Rules::Gather);
    add("GatherElements", &Rules::Second);
    add("GatherND", &Rules::GatherNd);
    add("Slice", &Rules::Slice);
    add("Split", &Rules::Split, SIZE_MAX);
    add("If", &Rules::If, SIZE_MAX);
    add("Tile", &Rules::Tile);
    add("Expand", &Rules::Expand);
    add("ConstantOfShape", &Rules::FromInput);
    add("Range", &Rules::Range);
    add("Shape", &Rules::ShapeVector);
    add("Size", &Rules::Scalar);
    add("Concat", &Rules::Concat);
    add("EmbedLayerNormalization QEmbedLayerNormalization", &Rules::Embed, 3);
    add("DynamicQuantizeLinear", &Rules::DynamicQuantize, 3);
    add("TopK", &Rules::TopK, 2);
    add("OneHot", &Rules::OneHot);
    add("NonZero", &Rules::NonZero);
    add("Pad", &Rules::Pad);
    add("Resize", &Rules::Resize);
    add("Conv ConvInteger QLinearConv", &Rules::Conv);
    add("MaxPool AveragePool LpPool", &Rules::Pool);
    add("GlobalAveragePool GlobalMaxPool GlobalLpPool", &Rules::GlobalPool);
    add("Einsum", &Rules::Einsum);
    return rules;
  }();
  return *kAll;
}

}  // namespace

MaybeShape InferShape(const Visit& visit, size_t output) {
  const auto known = Rules::All().find(visit.node.type());
  if (known == Rules::All().end() || output >= known->second.outputs) return std::nullopt;
  return (Rules(visit).*known->second.rule)(output);
}

}  // namespace ortolan::match
