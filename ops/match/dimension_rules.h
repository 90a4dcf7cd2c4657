// The rules of symbolic inference (dimensions.h) for one node.
#pragma once

#include <optional>
#include <vector>

#include "match/dimensions.h"

namespace ortolan::match {

class DimensionRules {
 public:
  DimensionRules(const Dimensions& dims, const Node& node, Symbols& symbols)
      : dims_(dims), node_(node), symbols_(symbols) {}

  // Return the shape of an output; nullopt if its operator has no rule or its inputs are unknown. May throw
  // RefusedError for attributes of a wrong type, as the functions below.
  std::optional<DimShape> Shape(size_t output);
  // Return the element type of an output, kUndefined if unknown.
  ElementType Type(size_t output) const;
  // Return the elements of the first output, if they are integers that shapes may be computed from.
  std::optional<Elements> OutputElements();

 private:
  using ShapeRule = std::optional<DimShape> (DimensionRules::*)();
  using ElementsRule = std::optional<Elements> (DimensionRules::*)();
  static ShapeRule ShapeRuleOf(const std::string& type);
  static ElementsRule ElementsRuleOf(const std::string& type);

  std::optional<DimShape> In(size_t index) const { return dims_.ShapeOf(node_.Input(index)); }
  std::optional<Elements> ElementsIn(size_t index) const { return dims_.ElementsOf(node_.Input(index)); }
  Dim Unknown(size_t axis) const;
  Dim OrUnknown(const std::optional<Dim>& dim, size_t axis) const { return dim ? *dim : Unknown(axis); }
  std::optional<DimShape> Broadcast(const std::vector<std::optional<DimShape>>& shapes) const;
  std::optional<DimShape> BroadcastInputs(size_t first, size_t end) const;
  // Return the shape that an input contains. Only its rank is known if the input's elements are not.
  std::optional<DimShape> ShapeFrom(size_t index) const;
  std::optional<DimShape> Product(size_t a, size_t b) const;
  std::optional<Dim> Sliced(const Dim& dim, const Element& begin, const Element& end, const Element& step) const;

  std::optional<DimShape> Same() { return output_ == 0 ? In(0) : std::nullopt; }
  std::optional<DimShape> BroadcastAll() { return BroadcastInputs(0, node_.inputs().size()); }
  std::optional<DimShape> AddLayerNorm() { return BroadcastInputs(0, 3); }
  std::optional<DimShape> Indices() { return In(1); }
  std::optional<DimShape> Scalar() { return DimShape{}; }
  std::optional<DimShape> MatMul() { return Product(0, 1); }
  std::optional<DimShape> QLinearMatMul() { return Product(0, 3); }
  std::optional<DimShape> Gemm();
  std::optional<DimShape> Linear();
  std::optional<DimShape> MultiHead();
  std::optional<DimShape> AttentionOutput();
  std::optional<DimShape> Transpose();
  std::optional<DimShape> Reshape();
  std::optional<DimShape> Flatten();
  std::optional<DimShape> Reduce();
  std::optional<DimShape> Unsqueeze();
  std::optional<DimShape> Squeeze();
  std::optional<DimShape> Gather();
  std::optional<DimShape> GatherNd();
  std::optional<DimShape> Expand();
  std::optional<DimShape> Slice();
  std::optional<DimShape> If();
  std::optional<DimShape> Tile();
  std::optional<DimShape> Split();
  std::optional<DimShape> ConstantOfShape() { return ShapeFrom(0); }
  std::optional<DimShape> Range();
  std::optional<DimShape> Concat();
  std::optional<DimShape> ShapeOfShape();
  std::optional<DimShape> DynamicQuantize() { return output_ == 0 ? In(0) : std::optional(DimShape{}); }
  std::optional<DimShape> Embed();
  std::optional<DimShape> Convolve();
  std::optional<DimShape> Pool();
  std::optional<DimShape> GlobalPool();
  std::optional<DimShape> Pad();
  std::optional<DimShape> Resize();
  std::optional<DimShape> ArgMax();
  std::optional<DimShape> TopK();
  std::optional<DimShape> NonZero();
  std::optional<DimShape> OneHot();
  std::optional<DimShape> Einsum();
  // Return the shape after a window moves over the spatial axes of `shape`.
  std::optional<DimShape> Windows(DimShape shape, const std::vector<int64_t>& kernel) const;

  std::optional<Elements> ShapeElements();
  std::optional<Elements> SameElements();
  std::optional<Elements> GatherElements();
  std::optional<Elements> SliceElements();
  std::optional<Elements> ConcatElements();
  std::optional<Elements> FilledElements();
  std::optional<Elements> Arithmetic();

  const Dimensions& dims_;
  const Node& node_;
  Symbols& symbols_;
  size_t output_ = 0;
};

}  // namespace ortolan::match
