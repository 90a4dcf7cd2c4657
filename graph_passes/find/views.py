"""Follows the dimensions of a tensor through a chain of Reshape and Transpose.

Exporters split and merge heads in several ways: [B, S, W] -> [B, S, H, D] -> [B, H, S, D], perhaps through [B H, S, D].
A View keeps the tensor's axes as lists of atoms; a Reshape splits and groups atoms without changing their order, a
Transpose permutes axes. Unsqueeze and Expand repeat key heads that several query heads share; this adds atoms whose
source is REPEATED.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import onnx_ir as ir

from .dimensions import Dimensions, permutation
from .sums import Dim, Element, Product, Shape

REPEATED = -1


class Atom:
    """A factor of a dimension. Split atoms are replaced by their parts."""

    def __init__(self, dim: Dim, source: int, stride: int = 1) -> None:
        self.dim = dim
        self.source = source  # axis of the original tensor, or REPEATED
        self.stride = stride  # distance along that axis between two elements of the atom


class View:
    """A tensor's axes as lists of atoms."""

    def __init__(self, shape: Shape) -> None:
        self.axes = [[Atom(dim, axis)] for axis, dim in enumerate(shape)]

    def apply(self, node: ir.Node, dims: Dimensions) -> bool:
        """Apply a Reshape, Transpose, Unsqueeze or Expand; return False if its effect is unknown."""
        if node.op_type == "Transpose":
            self.permuted(*permutation(node, len(self.axes)))
        elif node.op_type == "Reshape":
            target = dims.reshape_target(node)
            return target is not None and self._reshape(target)
        elif node.op_type == "Unsqueeze":
            return self._unsqueeze(dims.elements(node.inputs[1]))
        elif node.op_type == "Expand":
            return self._expand(dims.elements(node.inputs[1]))
        return True

    def dim(self, axis: int) -> int | None:
        """Return the size of an axis if it is an integer, else None."""
        sizes = [atom.dim for atom in self.axes[axis] if isinstance(atom.dim, int)]
        return math.prod(sizes) if len(sizes) == len(self.axes[axis]) else None

    def split_heads(self, heads: int, head_dim: int) -> View | None:
        """Split [batch, rows, width] to [batch, rows, heads, head_dim]; None if the width differs."""
        dims = [axis[0].dim for axis in self.axes[:2]]
        return self if self._reshape([*dims, heads, head_dim]) and len(self.axes) == 4 else None

    def sequences_apart(self) -> None:
        """Split [batch x heads, rows, width] to [batch, heads, rows, width]."""
        if len(self.axes) == 3 and len(self.axes[0]) == 2:
            self.axes[:1] = [[atom] for atom in self.axes[0]]

    def permuted(self, *axes: int) -> View:
        """Permute the axes."""
        self.axes = [self.axes[axis] for axis in axes]
        return self

    def repeated(self, axis: int, times: int) -> View:
        """Repeat each element along an axis `times` times in a row."""
        self.axes[axis].append(Atom(times, REPEATED, 0))
        return self

    def merged(self, axis: int) -> View:
        """Merge an axis with the next one."""
        self.axes[axis : axis + 2] = [self.axes[axis] + self.axes[axis + 1]]
        return self

    def sources(self) -> list[list[tuple[int, int]]]:
        """Return the parts of each axis in order, as pairs (original axis, stride along it).

        Two views of one tensor are equal if their sources are equal. Parts of size 1 are omitted.
        """
        found = []
        for axis in self.axes:
            atoms: list[Atom] = []
            for atom in axis:
                last = atoms[-1] if atoms else None
                span = atom.stride * atom.dim if isinstance(atom.dim, int) else None
                if last is not None and (last.source, last.stride) == (atom.source, span):
                    atoms[-1] = Atom(None, atom.source, atom.stride)
                elif atom.dim != 1:
                    atoms.append(atom)
            found.append([(atom.source, atom.stride) for atom in atoms])
        return found

    def _unsqueeze(self, axes: Sequence[Element] | None) -> bool:
        if axes is None or not all(isinstance(axis, int) for axis in axes):
            return False
        rank = len(self.axes) + len(axes)
        for axis in sorted(axis % rank for axis in axes if isinstance(axis, int)):
            self.axes.insert(axis, [Atom(1, REPEATED, 0)])
        return True

    def _expand(self, target: Sequence[Element] | None) -> bool:
        if target is None or len(target) > len(self.axes):
            return False
        wanted = [1] * (len(self.axes) - len(target)) + list(target)
        for index, (axis, dim) in enumerate(zip(self.axes, wanted, strict=True)):
            if dim == 1 or (len(axis) == 1 and axis[0].dim == dim) or (dim is not None and self.dim(index) == dim):
                continue
            if len(axis) == 1 and self.dim(index) is None and dim is not None and not isinstance(dim, int):
                # The Expand itself requires that two differently named dimensions are equal.
                self.axes[index] = [Atom(dim, axis[0].source, axis[0].stride)]
                continue
            if self.dim(index) != 1 or not isinstance(dim, int):
                return False
            self.axes[index] = [Atom(dim, REPEATED, 0)]
        return True

    def _reshape(self, target: Sequence[Dim | None]) -> bool:
        atoms = [atom for axis in self.axes for atom in axis]
        open_axes = [axis for axis, dim in enumerate(target) if dim is None or dim == -1]
        if len(open_axes) > 1:
            return False
        split = open_axes[0] if open_axes else len(target)
        front = [_take(atoms, dim, 0) for dim in target[:split]]
        back = [_take(atoms, dim, -1) for dim in reversed(target[split + 1 :])]
        if any(axis is None for axis in (*front, *back)) or (atoms and not open_axes):
            return False
        middle = [atoms] if open_axes else []
        self.axes = [axis for axis in (*front, *middle, *reversed(back)) if axis is not None]
        return True


def _take(atoms: list[Atom], dim: Dim | None, end: int) -> list[Atom] | None:
    """Remove the atoms whose product is `dim` from one end (0 or -1) of the list and return them, or None."""
    if isinstance(dim, Product) and atoms and atoms[end].dim != dim:
        nearest, other = (dim.times, dim.dim) if end else (dim.dim, dim.times)
        first, second = _take(atoms, nearest, end), _take(atoms, other, end)
        if first is None or second is None:
            return None
        return second + first if end else first + second
    if not isinstance(dim, int):
        return [atoms.pop(end)] if atoms and atoms[end].dim == dim else None
    if dim == 1:
        return [atoms.pop(end)] if atoms and atoms[end].dim == 1 else []
    taken: list[Atom] = []
    left = dim
    while left > 1:
        size = atoms[end].dim if atoms else None
        if not isinstance(size, int) or size == 0:
            return None
        atom = atoms.pop(end)
        if left % size == 0:
            left //= size
        elif size % left == 0:
            outer, inner = (size // left, left) if end else (left, size // left)
            parts = Atom(outer, atom.source, atom.stride * inner), Atom(inner, atom.source, atom.stride)
            rest, atom = parts if end else parts[::-1]
            atoms.insert(len(atoms) if end else 0, rest)
            left = 1
        else:
            return None
        taken.insert(0 if end else len(taken), atom)
    return taken
