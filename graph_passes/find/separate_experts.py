"""Joins the experts of a mixture that an exporter wrote as separate layers, to one node MoE of ONNX Runtime.

Optimum writes a loop over all experts. Expert e computes the tokens whose slots TopK gave to it:

    slot, token = NonZero(OneHot(TopK(router))[e])
    y[token] += (silu(x[token] Gate_e) * x[token] Up_e) Down_e * weights[token, slot]

weights are the selected elements of Softmax(router), perhaps divided by their sum, or the Softmax over the selected
elements. A block is joined only if every node has its part in this formula; shapes are proven by Dimensions.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from .constants import constant_tensor, lazy
from .dimensions import Dim, Dimensions
from .experts import MOE, WEIGHTS_BY_EXPERT
from .fused_writer import Writer, required
from .linear import Linear, linears_in, node_name
from .node_checks import MICROSOFT_DOMAIN, UnfitError, expect, integer_attribute, is_op, node_input
from .quantized_weight import MAX_INPUTS, too_wide

_VIEWS = ("Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity")
_MOST_VIEWS = 16  # limit of a chain of views, because a malformed model may contain cycles
_MOST_FACTORS = 8
_MOST_EXPANDS = 4
_MOST_TERMS = 8  # limit of the terms of a sum for each expert


@dataclass(frozen=True, eq=False)
class SeparateExperts:
    """A mixture of experts that are separate layers."""

    name: str
    last: ir.Node  # computes the sum over the experts
    x: ir.Value  # [tokens, hidden]
    logits: ir.Value  # [tokens, experts]
    selected: int
    normalizes: bool  # weights of the selected experts sum to 1
    layers: list[tuple[Linear, Linear, Linear]]  # gate, up and down of each expert


@dataclass(frozen=True)
class LeftExperts:
    """A mixture that cannot be joined, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class _Selection:
    """The tokens of one expert: a NonZero."""

    node: ir.Node
    top: ir.Node  # the TopK
    expert: int
    token: int  # the row of NonZero that holds the tokens; the other row holds their slots
    rows: Dim  # number of tokens of this expert


def join_experts(
    model: ir.Model,
    new_name: Callable[[str], str],
    why_left: Callable[[str, list[Linear]], str | None] = lambda name, layers: None,
) -> list[LeftExperts]:
    """Join mixtures in place, and return the mixtures that are left.

    why_left: Return why the mixture with this name and these layers should be left; None if it should be joined.
    """
    left, sums = list[LeftExperts](), dict[ir.Value, ir.Value]()
    for found in list(find_separate_experts(model)):
        if isinstance(found, LeftExperts):
            left.append(found)
            continue
        found = replace(found, name=new_name(found.name))
        reason = why_left(found.name, [linear for layers in found.layers for linear in layers])
        if reason is None:
            old = found.last.outputs[0]
            sums[old] = _join(found, sums.get(found.x, found.x), new_name)
            model.opset_imports.setdefault(MICROSOFT_DOMAIN, 1)
        else:
            left.append(LeftExperts(found.name, reason))
    return left


def find_separate_experts(model: ir.Model) -> Iterator[SeparateExperts | LeftExperts]:
    """Yield the mixtures of the model whose experts are separate layers."""
    graphs = [graph for graph in model.graphs() if any(is_op(node, "NonZero") for node in graph)]
    linears = {linear.output: linear for linear in linears_in(model)} if graphs else {}
    for graph in graphs:
        reader = _Reader(graph, linears)
        mixtures: dict[ir.Node, list[tuple[ir.Node, _Selection]]] = {}
        for node in graph:
            if is_op(node, "ScatterElements", "ScatterND"):
                try:
                    selection = reader.scattered(node)
                except UnfitError:
                    continue
                mixtures.setdefault(selection.top, []).append((node, selection))
        for top, scatters in mixtures.items():
            try:
                yield reader.read(top, scatters)
            except UnfitError as reason:
                yield LeftExperts(node_name(top), str(reason))


class _Reader:
    """Reads the mixtures of one graph. Every method raises UnfitError if its part of the formula is not found."""

    def __init__(self, graph: ir.Graph, linears: dict[ir.Value, Linear]) -> None:
        self._dims, self._linears = Dimensions(graph), linears

    def read(self, top: ir.Node, scatters: Sequence[tuple[ir.Node, _Selection]]) -> SeparateExperts:
        """Return the mixture that a TopK routes to."""
        tokens, selected = self._shape(top.outputs[1], 2)
        by_expert = {selection.expert: (node, selection) for node, selection in scatters}
        count = len(by_expert)
        expect(sorted(by_expert) == list(range(count)) and len(scatters) == count > 1,
               f"it adds results of experts {sorted(selection.expert for _, selection in scatters)}")  # fmt: skip
        layers, xs, weights = [], set[ir.Value](), set[ir.Value]()
        for expert in range(count):
            node, selection = by_expert[expert]
            try:
                found, x, weight = self._expert(required(node, 2), selection, tokens, selected)
            except UnfitError as reason:
                raise UnfitError(f"expert {expert}: {reason}") from None
            layers.append(found)
            xs.add(x)
            weights.add(weight)
        expect(len(xs) == len(weights) == 1, "its experts differ in their inputs or weights")
        gate, _, down = layers[0]
        for three in layers:
            for each, like in zip(three, (gate, gate, down), strict=True):
                fits = (each.k, each.n, each.bias_value is None) == (like.k, like.n, like.bias_value is None)
                expect(fits, f"layer {each.name!r} has another shape than that of expert 0")
                is_float = each.dtype == ir.DataType.FLOAT and each.int4 is None and each.int8 is None
                expect(is_float, f"the weight of {each.name!r} is not float32")
                expect(each.k <= MAX_INPUTS, too_wide(each.k))
        hidden = gate.k
        expect((down.k, down.n) == (gate.n, hidden), "its layers do not fit each other")
        (x,), (weight,) = xs, weights
        logits, normalizes = self._router(weight, top)
        expect(self._sizes(logits) == (tokens, count), f"its router does not have {count} columns")
        for value in (x, logits):
            expect(self._dims.dtype(value) == ir.DataType.FLOAT, f"{value.name!r} is not float32")
        last = self._sum([node for node, _ in scatters], x, (tokens, hidden))
        _expect_closed([selection.node for _, selection in scatters], last)
        if not isinstance(selected, int) or not 1 <= selected <= count:
            raise UnfitError(f"it selects {selected} of {count} experts")
        return SeparateExperts(_name(layers, top), last, x, logits, selected, normalizes, layers)

    def scattered(self, node: ir.Node) -> _Selection:
        """Return the selection whose tokens are the rows that a ScatterElements or ScatterND changes."""
        indices, updates = required(node, 1), self._shape(required(node, 2), 2)
        if node.op_type == "ScatterND":
            column = indices
        else:
            expect(integer_attribute(node, "axis", 0) == 0, "it scatters along another axis")
            expand = self._made_directly(indices, "Expand")
            expect(self._sizes(indices) == updates, "its indices and updates differ in shape")
            column = required(expand, 0)
        selection, row = self._coordinate(column)
        expect(row == selection.token, "its indices are not tokens")
        fits = self._shape(column, 2) == (selection.rows, 1) and updates[0] == selection.rows
        expect(fits, "its results have another number of rows than its tokens")
        return selection

    def _shape(self, value: ir.Value, rank: int) -> tuple[Dim, ...]:
        shape = self._sizes(value)
        if shape is None or len(shape) != rank:
            raise UnfitError(f"{value.name!r} has shape {shape}, expected {rank} axes")
        return shape

    def _sizes(self, value: ir.Value, depth: int = 0) -> tuple[Dim, ...] | None:
        """Return the shape of a value. Expand to the shape of other rows, or of their first row, keeps known sizes."""
        node = value.producer()
        if node is not None and is_op(node, "Expand") and depth < _MOST_EXPANDS:
            like = required(node, 1).producer()
            source, others = (
                required(node, 0),
                None if like is None or not is_op(like, "Shape") else node_input(like, 0),
            )
            if others is not None:
                own, other = self._sizes(source, depth + 1), self._sizes(others, depth + 1)
                if own is not None and other is not None and len(own) == len(other) == 2:
                    rows = own[0] if self._is_first_row(others) else other[0]
                    if own[0] == rows and own[1] in (1, other[1]):
                        return rows, other[1]
        return self._dims.shape(value)

    def _is_first_row(self, value: ir.Value) -> bool:
        """Return whether a value is rows[0:1]. Without rows, no expert has tokens, so Expand to its shape is valid."""
        node = value.producer()
        if node is None or not is_op(node, "Slice"):
            return False
        starts, ends, axes, steps = (self._dims.elements(node_input(node, index)) for index in (1, 2, 3, 4))
        is_first = starts in ((0,), (0, 0)) and axes in ((0,), (0, 1)) and ends is not None and ends[0] == 1
        return is_first and (node_input(node, 4) is None or steps in ((1,), (1, 1)))

    def _root(self, value: ir.Value) -> ir.Value:
        """Return the value with the same elements in the same order, from which views compute this one."""
        for _ in range(_MOST_VIEWS):
            node = value.producer()
            if node is None or not is_op(node, *_VIEWS, "Cast", "Expand") or node_input(node, 0) is None:
                break
            source = required(node, 0)
            if node.op_type == "Cast" and self._dims.dtype(source) != self._dims.dtype(value):
                break
            if node.op_type == "Expand" and self._sizes(source) != self._sizes(value):
                break
            value = source
        return value

    def _made_by(self, value: ir.Value, *op_types: str) -> ir.Node:
        """Return the node of one of these types that computes a value or what it is a view of."""
        return self._made_directly(self._root(value), *op_types)

    def _made_directly(self, value: ir.Value, *op_types: str) -> ir.Node:
        """Return the node that computes a value, which must have one of these types."""
        node = value.producer()
        if node is None or not is_op(node, *op_types):
            raise UnfitError(f"{value.name!r} is not computed by {' or '.join(op_types)}")
        return node

    def _integer(self, value: ir.Value | None) -> int:
        """Return the only element of a value, if it is known."""
        elements = self._dims.elements(value)
        if elements is None or len(elements) != 1 or not isinstance(elements[0], int):
            raise UnfitError("an index is not constant")
        return int(elements[0])

    def _coordinate(self, value: ir.Value) -> tuple[_Selection, int]:
        """Return the selection and row of its NonZero that a value consists of."""
        root = self._root(value)
        node = self._made_by(root, "Split", "Gather", "Slice")
        source = required(node, 0)
        if node.op_type == "Slice":
            start, axis = self._integer(node_input(node, 1)), self._integer(node_input(node, 3))
            step = node_input(node, 4)
            expect(step is None or self._integer(step) == 1, "its Slice has a step other than 1")
        else:
            axis = integer_attribute(node, "axis", 0)
            start = self._integer(required(node, 1)) if node.op_type == "Gather" else root.index() or 0
        expect(-2 <= start < 2 and -2 <= axis < 2, f"index {start} on axis {axis} is out of range")
        axis, start = axis % 2, start % 2
        if node.op_type != "Gather":
            expect(self._shape(root, 2)[axis] == 1 and self._shape(source, 2)[axis] == 2, "it has several rows")
        swap = source.producer()
        if swap is not None and is_op(swap, "Transpose"):
            expect(_permutation(swap, 2) == [1, 0], "it is not transposed")
            source, axis = required(swap, 0), 1 - axis
        expect(axis == 0, "it is a column of NonZero")
        return self._selection(self._made_directly(source, "NonZero")), start

    def _selection(self, node: ir.Node) -> _Selection:
        """Read a NonZero of the elements of TopK that are one expert."""
        mask = required(node, 0)
        shape, rows = self._shape(mask, 2), self._shape(node.outputs[0], 2)[1]
        for _ in range(_MOST_VIEWS):
            cast = self._root(mask).producer()
            if cast is None or not is_op(cast, "Cast"):
                break
            mask = required(cast, 0)  # from int64 to bool
        maker = self._made_by(mask, "Equal", "Gather")
        if maker.op_type == "Equal":
            chosen, number = (required(maker, index) for index in (0, 1))
            if constant_tensor(chosen) is not None:
                chosen, number = number, chosen
            top, expert, token = self._selected(chosen), self._integer(number), 0
        else:
            source, axis = required(maker, 0), integer_attribute(maker, "axis", 0) % 3
            axes, swap = [0, 1, 2], source.producer()
            if swap is not None and is_op(swap, "Transpose"):
                axes, source = _permutation(swap, 3), required(swap, 0)
            one_hot = self._made_directly(source, "OneHot")
            expect(integer_attribute(one_hot, "axis", -1) in (-1, 2), "its OneHot has another axis")
            expect(self._dims.elements(node_input(one_hot, 2)) == (0, 1), "its OneHot has other values")
            expect(axes[axis] == 2, "it does not select an expert")
            experts = self._integer(node_input(one_hot, 1))
            top, expert = self._selected(required(one_hot, 0)), self._integer(required(maker, 1))
            expert += experts if expert < 0 else 0
            token = [at for index, at in enumerate(axes) if index != axis].index(0)
        slots = self._shape(top.outputs[1], 2)
        expect(shape == (slots if token == 0 else slots[::-1]), "its mask has another shape")
        return _Selection(node, top, expert, token, rows)

    def _selected(self, value: ir.Value) -> ir.Node:
        """Return the TopK whose indices a value holds."""
        node = self._made_by(value, "TopK")
        axis, largest = integer_attribute(node, "axis", -1), integer_attribute(node, "largest", 1)
        shape = self._shape(node.outputs[1], 2)
        fits = self._root(value) is node.outputs[1] and self._sizes(value) == shape
        expect(
            fits and axis in (-1, 1) and largest == 1 and isinstance(shape[1], int), "its TopK does not select experts"
        )
        return node

    def _expert(
        self, update: ir.Value, selection: _Selection, tokens: Dim, selected: Dim
    ) -> tuple[tuple[Linear, Linear, Linear], ir.Value, ir.Value]:
        """Return an expert's layers, the input of all experts, and the weights [tokens, selected]."""
        product = self._made_by(update, "Mul")
        down, weight = self._layer_and_other(product)
        rows = selection.rows
        fits = self._sizes(down.output) == (rows, down.n) == self._sizes(product.outputs[0])
        expect(fits, "its results have another number of rows than its tokens")
        expect(self._sizes(weight) == (rows, 1), "its weights do not have one column")
        gated = self._made_by(down.x, "Mul")
        up, activated = self._layer_and_other(gated)
        gate = self._silu(activated)
        for each in (gate, up):
            expect(self._sizes(each.x) == (rows, each.k), "the input of its layers has another shape")
        expect(self._sizes(down.x) == (rows, down.k), "the input of its layers has another shape")
        x = self._rows(gate.x, selection, tokens, gate.k)
        expect(up.k == gate.k and x is self._rows(up.x, selection, tokens, gate.k), "its layers differ in their inputs")
        return (gate, up, down), x, self._weights(weight, selection, (tokens, selected))

    def _layer_and_other(self, product: ir.Node) -> tuple[Linear, ir.Value]:
        """Return the linear layer among the factors of a Mul, and the other factor."""
        factors = required(product, 0), required(product, 1)
        for factor, other in (factors, factors[::-1]):
            linear = self._linears.get(self._root(factor))
            if linear is not None:
                return linear, other
        raise UnfitError(f"no factor of {node_name(product)!r} is a linear layer")

    def _silu(self, value: ir.Value) -> Linear:
        """Return the layer g of g * Sigmoid(g)."""
        product = self._made_by(value, "Mul")
        gate, sigmoid = self._layer_and_other(product)
        found = self._made_by(sigmoid, "Sigmoid")
        expect(self._root(required(found, 0)) is gate.output, "its activation is not SiLU")
        shapes = {self._sizes(one) for one in (gate.output, sigmoid, product.outputs[0], value)}
        expect(len(shapes) == 1, "its activation is not SiLU")
        return gate

    def _rows(self, value: ir.Value, selection: _Selection, tokens: Dim, hidden: int) -> ir.Value:
        """Return x of x[token]."""
        node = self._made_by(value, "Gather")
        source, axis = required(node, 0), integer_attribute(node, "axis", 0)
        self._expect_row(required(node, 1), selection, selection.token)
        shape = self._sizes(source)
        expect((shape, axis) in (((tokens, hidden), 0), ((1, tokens, hidden), 1)), "its input has another shape")
        if axis == 1:
            source = required(self._made_directly(source, *_VIEWS), 0)
        expect(self._sizes(source) == (tokens, hidden), "its input has another shape")
        return source

    def _expect_row(self, value: ir.Value, selection: _Selection, row: int) -> None:
        """Check that a value is a row of the selection, as a vector."""
        found, index = self._coordinate(value)
        expect(found.node is selection.node and index == row, "it reads tokens of another expert")
        expect(self._sizes(value) == (selection.rows,), "its indices are not a vector")

    def _weights(self, value: ir.Value, selection: _Selection, shape: tuple[Dim, Dim]) -> ir.Value:
        """Return w of w[token, slot]: either from its flat elements, or by GatherND."""
        node = self._made_by(value, "Gather", "GatherND")
        source, indices = required(node, 0), required(node, 1)
        if node.op_type == "GatherND":
            expect(integer_attribute(node, "batch_dims", 0) == 0 and self._sizes(source) == shape, "its weights differ")
            pair = self._made_directly(indices, "Concat")
            expect(len(pair.inputs) == 2 and integer_attribute(pair, "axis") in (-1, 1), "its weights differ")
            for index, row in ((0, selection.token), (1, 1 - selection.token)):
                found, at = self._coordinate(required(pair, index))
                fits = self._sizes(required(pair, index)) == (selection.rows, 1)
                expect(fits and found.node is selection.node and at == row, "its weights are those of other tokens")
        else:
            flat = self._sizes(source)
            is_flat = flat is not None and (len(flat) == 1 or flat[1:] == (1,))
            expect(is_flat and integer_attribute(node, "axis", 0) == 0, "its weights are not flat")
            total = self._made_by(indices, "Add")
            terms = required(total, 0), required(total, 1)
            slot, scaled = terms if _is_made_by(self._root(terms[1]), "Mul") else terms[::-1]
            self._expect_row(slot, selection, 1 - selection.token)
            product = self._made_by(scaled, "Mul")
            token, width = (required(product, index) for index in (0, 1))
            if self._dims.elements(token) == (shape[1],):
                token, width = width, token
            self._expect_row(token, selection, selection.token)
            expect(self._dims.elements(width) == (shape[1],), "its weights are those of other tokens")
        root = self._root(source)
        expect(self._sizes(root) == shape, "its weights have another shape")
        return root

    def _router(self, weights: ir.Value, top: ir.Node) -> tuple[ir.Value, bool]:
        """Return the router's logits, and whether the weights of the selected experts sum to 1."""
        node, normalizes = weights.producer(), False
        if node is not None and is_op(node, "Div"):
            weights, total = self._root(required(node, 0)), self._made_by(required(node, 1), "ReduceSum")
            axes, shape = self._dims.elements(node_input(total, 1)), self._shape(weights, 2)
            source, divisor = required(total, 0), required(node, 1)
            is_sum = axes in ((-1,), (1,)) and integer_attribute(total, "keepdims", 1) == 1
            is_sum = is_sum and self._root(source) is weights and self._sizes(source) == shape
            expect(is_sum and self._sizes(divisor) == (shape[0], 1), "its weights are divided by another sum")
            normalizes = True
        ranked = self._root(required(top, 0))
        if weights is top.outputs[0]:
            return self._softmax_of(ranked), normalizes
        node = self._made_by(weights, "Softmax", "GatherElements")
        if node.op_type == "Softmax":
            expect(self._softmax_of(weights) is top.outputs[0], "its weights are not those of the selected experts")
            return ranked, True
        expect(integer_attribute(node, "axis", 0) in (-1, 1), "its weights are not those of the selected experts")
        expect(self._selected(required(node, 1)) is top, "its weights are not those of the selected experts")
        every = self._root(required(node, 0))
        expect(self._sizes(required(node, 0)) == self._sizes(every), "its weights are selected from another shape")
        logits = self._softmax_of(every)
        expect(ranked in (every, logits), "it selects experts by other values than their weights")
        return logits, normalizes

    def _softmax_of(self, value: ir.Value) -> ir.Value:
        """Return the input of a Softmax over the last axis of a matrix."""
        node = self._made_by(value, "Softmax")
        expect(integer_attribute(node, "axis", -1) in (-1, 1), "its Softmax has another axis")
        root = self._root(required(node, 0))
        expect(self._shape(node.outputs[0], 2) == self._sizes(root), "its Softmax has another axis")
        return root

    def _sum(self, scatters: list[ir.Node], x: ir.Value, shape: tuple[Dim, int]) -> ir.Node:
        """Return the node that computes the sum of all scattered results, which starts with zeros."""
        left, zeros = set(scatters), list[ir.Value]()
        value = scatters[0].outputs[0]
        waiting, visits = [value], 0
        while True:
            while waiting:
                one = waiting.pop()
                node, visits = one.producer(), visits + 1
                expect(visits <= _MOST_TERMS * len(scatters), "its sum has too many terms")
                if node is not None and node in left:
                    left.remove(node)
                    waiting.append(_data_of(node))
                elif node is not None and is_op(node, "Add"):
                    waiting += [required(node, 0), required(node, 1)]
                else:
                    expect(_is_zero(one), f"its sum has another term, {one.name!r}")
                    zeros.append(one)
            if not left:
                break
            visits += 1
            users = [use.node for use in value.uses() if _adds(use.node, use.idx)]
            expect(
                len(users) == 1 and (is_op(users[0], "Add") or users[0] in left),
                "its results are not added to each other",
            )
            if is_op(users[0], "Add"):
                waiting = [one for one in users[0].inputs if one is not None and one is not value]
            else:
                _data_of(users[0])
                left.remove(users[0])
            value = users[0].outputs[0]
        self._check_zeros(zeros, x, shape)
        last = value.producer()
        assert last is not None
        return last

    def _check_zeros(self, zeros: list[ir.Value], x: ir.Value, shape: tuple[Dim, int]) -> None:
        """Check that zeros have the shape of the result. The number of their rows may be computed by Mul."""
        rows = {shape[0]}
        source = self._sizes(self._root(x))
        for value in zeros:
            node, found = value.producer(), self._sizes(value)
            if node is None or found is None or source is None or source[-1] != shape[1]:
                continue
            sizes = required(node, 1 if node.op_type == "Expand" else 0).producer()
            factors = self._factors(required(sizes, 0)) if sizes is not None and is_op(sizes, "Concat") else None
            if factors == _counted(source[:-1]):
                rows.add(found[0])
        for value in zeros:
            found = self._sizes(value)
            fits = found is not None and len(found) == 2 and found[0] in rows and found[1] == shape[1]
            expect(fits, f"its sum starts with {value.name!r}, which has another shape")

    def _factors(self, value: ir.Value) -> Counter[Dim] | None:
        """Return the factors of a product that is one integer; None if they are unknown."""
        factors, waiting = list[Dim](), [value]
        for _ in range(_MOST_FACTORS):
            if not waiting:
                return _counted(factors)
            one = self._root(waiting.pop())
            node, elements = one.producer(), self._dims.elements(one)
            if node is not None and is_op(node, "Mul"):
                waiting += [required(node, 0), required(node, 1)]
            elif elements is not None and len(elements) == 1 and elements[0] is not None:
                factors.append(elements[0])
            else:
                return None
        return None


def _counted(factors: Sequence[Dim]) -> Counter[Dim]:
    return Counter(factor for factor in factors if factor != 1)


def _is_made_by(value: ir.Value, op_type: str) -> bool:
    node = value.producer()
    return node is not None and is_op(node, op_type)


def _permutation(node: ir.Node, rank: int) -> list[int]:
    attr = node.attributes.get("perm")
    if attr is None:
        return list(range(rank))[::-1]
    found = list(attr.as_ints())
    expect(sorted(found) == list(range(rank)), "its Transpose has another rank")
    return found


def _adds(node: ir.Node, index: int) -> bool:
    """Return whether a node adds to its input with this index."""
    return is_op(node, "Add") or (is_op(node, "ScatterElements", "ScatterND") and index == 0)


def _data_of(node: ir.Node) -> ir.Value:
    """Return the data of a scatter after checking that it adds to them; without a reduction, they must be zeros."""
    attr, data = node.attributes.get("reduction"), required(node, 0)
    kind = "none" if attr is None else attr.as_string()
    expect(kind == "add" or (kind == "none" and _is_zero(data)), "its results are not added to each other")
    return data


def _is_zero(value: ir.Value) -> bool:
    """Return whether all elements are known to be 0, by a ConstantOfShape or an Expand."""
    node = value.producer()
    if node is None or not is_op(node, "ConstantOfShape", "Expand"):
        return False
    if node.op_type == "Expand":
        tensor = constant_tensor(node_input(node, 0))
    else:
        attr = node.attributes.get("value")
        if attr is None:
            return True
        tensor = attr.as_tensor()
    return tensor is not None and tensor.size == 1 and not tensor.numpy().any()


def _expect_closed(selections: list[ir.Node], last: ir.Node) -> None:
    """Check that nothing but the sum depends on the selections."""
    users: dict[ir.Node, list[ir.Node]] = {}  # of each node that depends on the selections
    waiting = list(selections)
    while waiting:
        node = waiting.pop()
        if node is not last and node not in users:
            users[node] = [use.node for value in node.outputs for use in value.uses()]
            waiting += users[node]
    inner, waiting = set[ir.Node](), [last]
    while waiting:
        node = waiting.pop()
        if node not in inner:
            inner.add(node)
            makers = (value.producer() for value in node.inputs if value is not None)
            waiting += [maker for maker in makers if maker is not None and maker in users]
    for node, found in users.items():
        closed = inner.issuperset(found) and not any(value.is_graph_output() for value in node.outputs)
        expect(node not in inner or closed, f"a result of {node.name!r} is used elsewhere, too")


def _name(layers: list[tuple[Linear, Linear, Linear]], top: ir.Node) -> str:
    """Return what the names of all experts begin with: .../mlp/experts for .../mlp/experts.0/down_proj/MatMul."""
    names = [linear.name for three in layers for linear in three]
    pairs = zip(min(names), max(names), strict=False)
    common = "".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    return common.rstrip("./_") or node_name(top)


def _join(found: SeparateExperts, x: ir.Value, new_name: Callable[[str], str]) -> ir.Value:
    """Replace the separate layers by a MoE node of x, and return its output."""
    graph, count = found.last.graph, len(found.layers)
    assert isinstance(graph, ir.Graph)
    gate, _, down = found.layers[0]
    pairs = [(gate, up) for gate, up, _ in found.layers]
    first = [_in_turns(gate.matrix_as_it_is(), up.matrix_as_it_is()) for gate, up in pairs]
    second = [down.matrix_as_it_is() for *_, down in found.layers]

    def stored(name: str, array: Callable[[], np.ndarray], shape: Sequence[int]) -> ir.Value:
        tensor = lazy(array, ir.DataType.FLOAT, ir.Shape(shape), new_name(f"{found.name}.{name}"))
        value = ir.Value(name=tensor.name, type=ir.TensorType(tensor.dtype), shape=tensor.shape, const_value=tensor)
        graph.register_initializer(value)
        return value

    def weight(name: str, experts: list[Callable[[], np.ndarray]], n: int, k: int) -> ir.Value:
        return stored(name, lambda: np.stack([read().T for read in experts]), (count, n, k))

    fc1_bias = fc2_bias = None
    if gate.bias_value is not None:
        fc1 = np.stack([_in_turns(gate.bias, up.bias)() for gate, up in pairs])  # type: ignore[arg-type]
        fc1_bias = stored("gate_up_bias", lambda: fc1, fc1.shape)
    if down.bias_value is not None:
        fc2 = np.stack([down.bias() for *_, down in found.layers])  # type: ignore[misc]
        fc2_bias = stored("down_bias", lambda: fc2, fc2.shape)
    inputs = [
        x, found.logits, weight("gate_up", first, 2 * gate.n, gate.k), fc1_bias,
        weight("down", second, down.n, down.k), fc2_bias,
    ]  # fmt: skip

    def write(to: Writer) -> list[ir.Value | None]:
        y = to.op(
            MOE, *inputs, name="", domain=MICROSOFT_DOMAIN, dtype=ir.DataType.FLOAT,
            k=found.selected, normalize_routing_weights=int(found.normalizes), swiglu_fusion=1,
        )  # fmt: skip
        node = y.producer()
        assert node is not None
        node.attributes.add(ir.AttrString("activation_type", "swiglu"))
        node.name = found.name
        # Reading one expert from the stacked weights would read all of them.
        node.meta[WEIGHTS_BY_EXPERT] = first, second
        outputs.append(y)
        return [y]

    outputs = list[ir.Value]()
    Writer(found.last, {}, new_name).put(write)
    return outputs[0]


def _in_turns(gate: Callable[[], np.ndarray], up: Callable[[], np.ndarray]) -> Callable[[], np.ndarray]:
    """Return a function that reads columns of gate and up in turns."""

    def read() -> np.ndarray:
        pair = np.stack([gate(), up()], axis=-1)
        return pair.reshape(*pair.shape[:-2], -1)

    return read
