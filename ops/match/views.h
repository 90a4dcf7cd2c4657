// Follows the dimensions of a tensor through a chain of Reshape, Transpose, Unsqueeze and Expand.
//
// Exporters split and merge heads in several ways: [B, S, W] -> [B, S, H, D] -> [B, H, S, D], perhaps through [B H, S,
// D]. A TensorView keeps the tensor's axes as lists of atoms; a Reshape splits and groups atoms without changing their
// order, a Transpose permutes axes. Unsqueeze and Expand repeat key heads that several query heads share; this adds
// atoms whose source is kRepeated.
#pragma once

#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "match/dimensions.h"

namespace ortolan::match {

inline constexpr int kRepeated = -1;

// A factor of a dimension. Split atoms are replaced by their parts.
struct Atom {
  Dim dim;
  int source = kRepeated;  // axis of the original tensor, or kRepeated
  Dim stride = 1;          // distance along that axis between two elements of the atom
};

// A part of an axis in TensorView::Sources: original axis, stride along it.
using Source = std::pair<int, Dim>;

class TensorView {
 public:
  explicit TensorView(const DimShape& shape);

  size_t rank() const { return axes_.size(); }
  // Apply a Reshape, Transpose, Unsqueeze or Expand; return false if its effect is unknown. The view is then undefined.
  // Identity, Cast, and Mul and Div by a scalar change nothing.
  bool Apply(const Node& node, const Dimensions& dims);
  // Return the size of an axis if it is an integer.
  std::optional<int64_t> Size(size_t axis) const;
  // Split [batch, rows, width] to [batch, rows, heads, head_dim]; return false if the width differs.
  bool SplitHeads(int64_t heads, int64_t head_dim);
  // Split [batch x heads, rows, width] to [batch, heads, rows, width].
  void SplitSequences();
  TensorView& Permute(std::span<const size_t> axes);
  // Repeat each element along an axis `times` times in a row.
  TensorView& Repeat(size_t axis, int64_t times);
  // Merge an axis with the next one.
  TensorView& Merge(size_t axis);
  // Return the parts of each axis in order. Two views of one tensor are equal if their sources are equal. Parts of size
  // 1 are omitted.
  std::vector<std::vector<Source>> Sources() const;

 private:
  bool Expand(const Elements& target);
  // An axis whose size is nullopt gets the remaining atoms.
  bool Reshape(std::span<const std::optional<Dim>> target);

  std::vector<std::vector<Atom>> axes_;
};

}  // namespace ortolan::match
