#include "match/views.h"

#include <algorithm>

namespace ortolan::match {
namespace {

using Atoms = std::vector<Atom>;

// Remove the atoms whose product is `dim` from one end of the list and return them; nullopt if they do not fit.
std::optional<Atoms> Take(Atoms& atoms, const Dim& dim, bool from_back) {
  const auto nearest = [&]() -> Atom* { return atoms.empty() ? nullptr : from_back ? &atoms.back() : &atoms.front(); };
  const auto pop = [&] {
    const Atom atom = *nearest();
    atoms.erase(from_back ? atoms.end() - 1 : atoms.begin());
    return atom;
  };
  if (nearest() != nullptr && nearest()->dim == dim) return Atoms{pop()};
  if (dim.Is(1)) return Atoms{};
  Atoms taken;
  if (!dim.IsNumber()) {  // such as batch x heads: a dimension, then an integer
    const int64_t times = dim.Times();
    if (times == 1) return std::nullopt;
    const Dim single = *Quotient(dim, times);
    auto first = Take(atoms, from_back ? Dim(times) : single, from_back);
    auto second = first ? Take(atoms, from_back ? single : Dim(times), from_back) : std::nullopt;
    if (!second) return std::nullopt;
    if (from_back) std::swap(*first, *second);
    first->insert(first->end(), second->begin(), second->end());
    return first;
  }
  if (dim.number() < 1) return std::nullopt;
  for (int64_t left = dim.number(); left > 1;) {
    const int64_t size = nearest() == nullptr ? 0 : nearest()->dim.Number().value_or(0);
    if (size < 1 || (left % size != 0 && size % left != 0)) return std::nullopt;
    Atom atom = pop();
    if (left % size == 0) {
      left /= size;
    } else {
      const int64_t inner = from_back ? left : size / left;
      const auto stride = Product(atom.stride, inner);
      if (!stride) return std::nullopt;
      Atom outer = {size / inner, atom.source, *stride};
      atom.dim = inner;
      if (!from_back) std::swap(outer, atom);
      atoms.insert(from_back ? atoms.end() : atoms.begin(), outer);
      left = 1;
    }
    taken.insert(from_back ? taken.begin() : taken.end(), atom);
  }
  return taken;
}

std::optional<Dim> SizeOf(const Atoms& atoms) {
  std::optional<Dim> size = 1;
  for (const Atom& atom : atoms) size = size ? Product(*size, atom.dim) : size;
  return size;
}

}  // namespace

TensorView::TensorView(const DimShape& shape) {
  for (const Dim& dim : shape) axes_.push_back(Atoms{{dim, static_cast<int>(axes_.size())}});
}

bool TensorView::Apply(const Node& node, const Dimensions& dims) {
  if (node.IsStandard("Transpose")) {
    const auto order = Permutation(node, rank());
    if (order) Permute(*order);
    return order.has_value();
  }
  if (node.IsStandard("Reshape")) {
    const auto target = dims.ReshapeTarget(node);
    return target && Reshape(*target);
  }
  if (node.IsStandard("Unsqueeze")) {
    const auto axes = dims.AxesOf(node, rank());
    if (!axes) return false;
    for (const size_t axis : *axes)
      axes_.insert(axes_.begin() + static_cast<ptrdiff_t>(axis), Atoms{{1, kRepeated, 0}});
    return true;
  }
  if (node.IsStandard("Expand")) {
    const auto target = dims.ElementsOf(node.Input(1));
    return target && Expand(*target);
  }
  return node.IsStandard("Identity") || node.IsStandard("Cast") || node.IsStandard("Mul") || node.IsStandard("Div");
}

std::optional<int64_t> TensorView::Size(size_t axis) const {
  const auto size = axis < rank() ? SizeOf(axes_[axis]) : std::nullopt;
  return size ? size->Number() : std::nullopt;
}

bool TensorView::SplitHeads(int64_t heads, int64_t head_dim) {
  const auto batch = rank() < 2 ? std::nullopt : SizeOf(axes_[0]);
  const auto rows = rank() < 2 ? std::nullopt : SizeOf(axes_[1]);
  const std::optional<Dim> target[] = {batch, rows, heads, head_dim};
  return batch && rows && Reshape(target);
}

void TensorView::SplitSequences() {
  if (rank() != 3 || axes_[0].size() != 2) return;
  axes_.insert(axes_.begin() + 1, Atoms{axes_[0][1]});
  axes_[0].pop_back();
}

TensorView& TensorView::Permute(std::span<const size_t> axes) {
  std::vector<Atoms> permuted;
  for (const size_t axis : axes) permuted.push_back(axis < rank() ? axes_[axis] : Atoms{});
  axes_ = std::move(permuted);
  return *this;
}

TensorView& TensorView::Repeat(size_t axis, int64_t times) {
  if (axis < rank()) axes_[axis].push_back({times, kRepeated, 0});
  return *this;
}

TensorView& TensorView::Merge(size_t axis) {
  if (axis + 1 < rank()) {
    axes_[axis].insert(axes_[axis].end(), axes_[axis + 1].begin(), axes_[axis + 1].end());
    axes_.erase(axes_.begin() + static_cast<ptrdiff_t>(axis) + 1);
  }
  return *this;
}

std::vector<std::vector<Source>> TensorView::Sources() const {
  std::vector<std::vector<Source>> sources;
  for (const Atoms& axis : axes_) {
    std::vector<Source>& parts = sources.emplace_back();
    for (const Atom& atom : axis) {
      // Two atoms that are neighbours in the tensor too are one part.
      const auto span = atom.dim.IsNumber() ? Product(atom.stride, atom.dim) : std::nullopt;
      if (!parts.empty() && span && parts.back() == Source(atom.source, *span)) {
        parts.back().second = atom.stride;
      } else if (!atom.dim.Is(1)) {
        parts.emplace_back(atom.source, atom.stride);
      }
    }
  }
  return sources;
}

bool TensorView::Expand(const Elements& target) {
  if (target.size() > rank()) return false;
  const size_t first = rank() - target.size();
  for (size_t axis = first; axis < rank(); ++axis) {
    Atoms& atoms = axes_[axis];
    const Dim* const wanted = target[axis - first].AsDim();
    if (wanted == nullptr || wanted->number() < 0) return false;
    const auto size = SizeOf(atoms);
    if (wanted->Is(1) || size == *wanted) continue;
    if (size && size->Is(1) && wanted->IsNumber()) {
      atoms = {{*wanted, kRepeated, 0}};
    } else if (atoms.size() == 1 && !atoms[0].dim.IsNumber() && !wanted->IsNumber()) {
      atoms[0].dim = *wanted;  // Expand itself requires that two differently named dimensions are equal
    } else {
      return false;
    }
  }
  return true;
}

bool TensorView::Reshape(std::span<const std::optional<Dim>> target) {
  Atoms atoms;
  for (const Atoms& axis : axes_) atoms.insert(atoms.end(), axis.begin(), axis.end());
  std::vector<Atoms> axes(target.size());
  size_t begin = 0, end = target.size();
  const auto take = [&](size_t axis, bool from_back) {
    auto taken = Take(atoms, *target[axis], from_back);
    if (taken) axes[axis] = std::move(*taken);
    return taken.has_value();
  };
  for (; begin < end && target[begin]; ++begin) {
    if (!take(begin, false)) return false;
  }
  for (; end > begin && target[end - 1]; --end) {
    if (!take(end - 1, true)) return false;
  }
  if (end - begin > 1 || (begin == end && !atoms.empty())) return false;
  if (begin < end) axes[begin] = std::move(atoms);
  axes_ = std::move(axes);
  return true;
}

}  // namespace ortolan::match
