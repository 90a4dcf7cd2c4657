"""Finds scaled dot-product attention in a graph, or the reason why a similar subgraph cannot be replaced.

Three forms are found: decomposed, as in most exports (MatMul, scale, masks, Softmax, MatMul, with Reshapes and
Transposes that split and merge the heads); ONNX Runtime's MultiHeadAttention; ONNX's Attention (opset 23).
The inputs found are the outputs [batch, rows, width] of the query, key and value projections; the formula is in
ops/nomad_attention. If another operation changes or reads the split heads, the input is [batch, heads, rows, head
width] instead.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import onnx_ir as ir

from .attention_operands import (
    Operand,
    RefusedError,
    changes_nothing,
    describe,
    heads_operand,
    is_op,
    merged_heads,
    name_of,
    same_number,
    scalar,
    split_operand,
    whole_operand,
)
from .constants import DEFAULT_DOMAINS, constant_tensor
from .dimensions import Dimensions, int_attribute
from .fused_forms import why_left
from .sums import Shape

_MOST_SHAPE_NODES = 200
_OPERANDS = ("query", "key", "value")
_HIDDEN = -1e30  # a key whose mask is below this has a Softmax weight of 0


@dataclass(frozen=True)
class Mask:
    """A mask of the scores: floats that are added, or booleans that add `fill` to masked keys and 0 to other keys."""

    value: ir.Value
    fill: float | None = None  # None: a float mask
    hides: bool = True  # a boolean mask hides keys where it is true; if this is False, where it is false
    scale: float = 1.0  # factor of a float mask
    heads: int = 0  # number of heads if the mask is [batch x heads, queries, keys]
    windows: bool = False  # [1, windows, 1 or heads, queries, keys], for scores [batch x windows, heads, …]


@dataclass(eq=False)
class Attention:
    """Attention in the graph, with the inputs and output of the operator that can replace it."""

    node: ir.Node  # the Softmax, MultiHeadAttention or Attention
    query: ir.Value
    key: ir.Value
    value: ir.Value
    heads: int
    kv_heads: int
    scale: float  # 0: 1 / sqrt(head width)
    masks: tuple[Mask, ...]  # the sum of all masks is added to the scores
    causal: bool
    zero_hidden_rows: bool  # fully masked rows give zeros instead of NaN
    nodes: set[ir.Node]  # nodes that the operator replaces
    products: list[ir.Node] = field(default_factory=list)  # the two MatMuls of the attention
    output: ir.Value | None = None  # [batch, rows, width], or [batch, heads, rows, head width]
    head_dim: int = 0
    # Maps query, key, value or output to its entry of LAYOUTS if its layout is not [batch, rows, width].
    layouts: dict[str, str] = field(default_factory=dict)

    @property
    def names(self) -> list[str]:
        """Names of the Softmax or attention operator and of its MatMuls."""
        return [node.name for node in (self.node, *self.products) if node.name]


@dataclass(frozen=True, eq=False)
class NotAttention:
    """A node of a subgraph that resembles attention, with the reason why it is not replaced."""

    node: ir.Node
    reason: str
    cached: bool = True  # False: find_cached_attentions found no KV cache

    @property
    def names(self) -> list[str]:
        """Name of the node."""
        return [self.node.name or f"{self.node.op_type} that makes {self.node.outputs[0].name!r}"]


def find_attentions(graph: ir.Graph) -> list[Attention | NotAttention]:
    """Return attention and similar subgraphs of one graph, in graph order; If and Loop bodies are not searched."""
    dims = Dimensions(graph)
    found: list[Attention | NotAttention] = []
    for node in graph:
        match: Attention | None = None
        try:
            if node.op_type == "Softmax" and node.domain in DEFAULT_DOMAINS:
                match = _taken_apart(dims, node)
            elif node.op_type == "Attention" and node.domain in DEFAULT_DOMAINS:
                match = _onnx_attention(dims, node)
            elif node.op_type == "MultiHeadAttention" and node.domain == "com.microsoft":
                match = _multi_head_attention(dims, node)
            if match is not None and node.op_type != "Softmax":
                _check_uses(match)
        except RefusedError as refusal:
            found.append(NotAttention(node, str(refusal)))
        else:
            found += [match] if match is not None else []
    return found


# Operands that are taken as split heads instead of the output of their projection. Tried in this order: the first
# entry lets the operator replace most nodes, the last one fewest.
_SINGLE = "single"  # batch and heads are one axis, which is kept
_BY_HEADS = (
    (),
    ("key", "value"),
    ("query", "key", "value"),
    ("query", "key", "value", "output"),
    ("query", "key", "value", "output", _SINGLE),
)


def _taken_apart(dims: Dimensions, softmax: ir.Node) -> Attention | None:
    """Match decomposed attention with the first entry of _BY_HEADS that fits.

    Raises:
        RefusedError: No entry fits; the message is the reason against the first entry.
    """
    refusal: RefusedError | None = None
    for by_heads in _BY_HEADS:
        try:
            match = TakenApart(dims, softmax).match(by_heads)
            if match is not None:
                _check_uses(match)
            return match
        except RefusedError as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


class TakenApart:
    """Matcher of decomposed attention around one Softmax."""

    def __init__(self, dims: Dimensions, softmax: ir.Node) -> None:
        self._dims = dims
        self._softmax = softmax
        self._nodes: set[ir.Node] = {softmax}
        self._found: dict[ir.Value, ir.Node | None] = {}  # cache of _find_scores

    def match(self, by_heads: Collection[str] = ()) -> Attention | None:
        """Return the attention, or None if the Softmax has another purpose, such as a classifier's.

        by_heads: one entry of _BY_HEADS.
        """
        dims, softmax = self._dims, self._softmax
        weights, zero_hidden_rows = self._weights()
        context = next((use.node for use in weights.uses() if is_op(use.node, "MatMul") and use.idx == 0), None)
        scores = self._find_scores(softmax.inputs[0])
        if context is None or scores is None:
            return None
        rank = len(dims.shape(softmax.outputs[0]) or ())
        if int_attribute(softmax, "axis", -1) not in (-1, rank - 1):
            raise RefusedError("its Softmax is not over the last axis")
        self._nodes |= {context, scores}
        masks, scale = self._masks_and_scale(softmax.inputs[0], scores)
        query = self._operand(scores.inputs[0], "query", by_heads)
        key = self._operand(scores.inputs[1], "key", by_heads)
        value = self._operand(context.inputs[1], "value", by_heads)
        if _SINGLE in by_heads:
            self._refuse_other_sequences(masks, query)
        if len(dims.shape(scores.outputs[0]) or ()) == 3:
            one_axis = [mask.heads == 0 and self._has_sequences(mask) for mask in masks]
            masks = tuple(replace(m, heads=query.heads) if one else m for m, one in zip(masks, one_axis, strict=True))
        product, masks, zeroed = self._without_hidden_rows(context.outputs[0], masks)
        # With a second mask, a row may be fully masked. Its result then depends on the values of both masks, so the
        # causal mask is kept as a mask.
        causal = len(masks) == 1 and self._is_causal(masks[0])
        match = _joined(dims, softmax, (query, key, value), () if causal else masks, causal, self._nodes)
        if key.heads not in (1, query.heads):  # all query heads may share one key head
            raise RefusedError(f"it has {query.heads} query heads and {key.heads} key heads, expected equal counts")
        match.scale = scale * query.scale * key.scale
        if value.scale != 1:
            raise RefusedError("its values are scaled")
        match.zero_hidden_rows = zero_hidden_rows or zeroed
        match.products = [scores, context]
        try:
            if "output" in by_heads:
                raise RefusedError(f"{name_of(product)} has batch and heads in one axis")
            match.output = merged_heads(dims, product, query, self._nodes)
        except RefusedError:
            match.output = product
            if len(dims.shape(product) or ()) == 4:
                match.layouts["output"] = "by_heads"
            elif query.heads != 1:
                raise
        return match

    def _refuse_other_sequences(self, masks: Sequence[Mask], query: Operand) -> None:
        """Refuse a mask with a batch axis if the queries have batch and heads in one axis."""
        for mask in masks:
            shape = self._dims.shape(mask.value) or ()
            if len(shape) > 3 and shape[0] not in (1, query.batch):
                raise RefusedError(
                    f"its mask {name_of(mask.value)} has a batch axis, its queries have batch and heads in one"
                )

    def _operand(self, value: ir.Value | None, meaning: str, by_heads: Collection[str]) -> Operand:
        transposed = meaning == "key"
        refusal: RefusedError | None = None
        if meaning not in by_heads:
            try:
                return split_operand(self._dims, value, meaning, self._nodes, transposed)
            except RefusedError as error:
                refusal = error
        try:
            return heads_operand(self._dims, value, meaning, self._nodes, transposed, _SINGLE in by_heads)
        except RefusedError as error:
            raise refusal or error from None

    def _weights(self) -> tuple[ir.Value, bool]:
        """Return the input of the second MatMul, and whether NaN values of the Softmax are replaced by zeros."""
        softmax = self._beyond(self._softmax.outputs[0])
        users = {use.node for use in softmax.uses()}
        is_nan = next((node for node in users if is_op(node, "IsNaN")), None)
        if is_nan is None:
            return self._beyond(softmax, "Reshape"), False
        where = next((node for node in users if is_op(node, "Where") and node.inputs[2] is softmax), None)
        if where is None or where.inputs[0] is not is_nan.outputs[0] or self._dims.number(where.inputs[1]) != 0:
            raise RefusedError("NaN values of its Softmax are replaced in an unsupported way")
        self._nodes |= {is_nan, where}
        return self._beyond(where.outputs[0], "Reshape"), True

    def _beyond(self, value: ir.Value, *views: str) -> ir.Value:
        """Follow a value through Identity, same-type Cast, and Reshapes (if in `views`) that keep queries and keys."""
        while len(users := list(value.consumers())) == 1:
            moved = is_op(users[0], *views) and self._keeps_rows(users[0])
            if not moved and not changes_nothing(self._dims, users[0]):
                break
            self._nodes.add(users[0])
            value = users[0].outputs[0]
        return value

    def _without_hidden_rows(
        self, product: ir.Value, masks: tuple[Mask, ...]
    ) -> tuple[ir.Value, tuple[Mask, ...], bool]:
        """Return the output, the masks, and whether a Where sets fully masked rows of the output to zero.

        Exports of transformers 5 contain this Where. The returned mask is then boolean.
        """
        users = [use.node for use in product.uses() if is_op(use.node, "Where")]
        where = users[0] if len(users) == 1 and users[0].inputs[2] is product else None
        if where is None or where.inputs[0] is None or self._dims.number(where.inputs[1]) != 0 or len(masks) != 1:
            return product, masks, False
        visible = self._visible(masks[0])
        if visible is None or self._counted(where.inputs[0]) is not visible:
            return product, masks, False
        self._nodes.add(where)
        return where.outputs[0], (Mask(before_expand(self._dims, visible), -np.inf, hides=False),), True

    def _visible(self, mask: Mask) -> ir.Value | None:
        """Return the boolean `visible` if the mask is float(not visible) * lowest, else None."""
        product = mask.value.producer() if mask.fill is None else None
        if product is None or not is_op(product, "Mul"):
            return None
        index = next((i for i in range(2) if self._dims.number(product.inputs[i]) is not None), None)
        lowest = None if index is None else self._dims.number(product.inputs[index])
        if index is None or lowest is None or not lowest < _HIDDEN:
            return None
        opposite = _producer(product.inputs[1 - index], "Cast")
        negated = None if opposite is None else _producer(opposite.inputs[0], "Not")
        return None if negated is None else negated.inputs[0]

    def _counted(self, value: ir.Value) -> ir.Value | None:
        """Return the boolean `visible` if `value` is sum(float(visible), last axis) < 1, else None."""
        less = _producer(value, "Less")
        limit = None if less is None else self._dims.number(less.inputs[1])
        if less is None or limit is None or not 0 < limit <= 1:
            return None
        count = _producer(less.inputs[0], "ReduceSum")
        if count is None or int_attribute(count, "keepdims", 1) != 1 or len(count.inputs) != 2:
            return None
        cast = _producer(count.inputs[0], "Cast")
        visible = None if cast is None else cast.inputs[0]
        rank = len(self._dims.shape(visible) or ())
        last = self._dims.elements(count.inputs[1]) in ((-1,), (rank - 1,))
        return visible if last and self._dims.dtype(visible) == ir.DataType.BOOL else None

    def _find_scores(self, value: ir.Value | None) -> ir.Node | None:
        """Return the MatMul of queries and keys that this value adds scales and masks to, or None."""
        if value is None:
            return None
        if value not in self._found:
            self._found[value] = self._scores_behind(value)
        return self._found[value]

    def _scores_behind(self, value: ir.Value) -> ir.Node | None:
        node = value.producer()
        if node is None or node.domain not in DEFAULT_DOMAINS:
            return None
        if node.op_type == "MatMul":
            constant = any(constant_tensor(operand) is not None for operand in node.inputs)
            return None if constant else node
        if node.op_type in ("Reshape", "Cast"):
            moved = node.op_type == "Reshape" or changes_nothing(self._dims, node)
            return self._find_scores(node.inputs[0]) if moved else None
        if node.op_type not in ("Add", "Mul", "Div", "Where", "Identity", "Tanh"):
            return None
        products = [self._find_scores(operand) for operand in node.inputs]
        found = [product for product in products if product is not None]
        return found[0] if len(found) == 1 else None

    def _masks_and_scale(self, value: ir.Value | None, scores: ir.Node) -> tuple[tuple[Mask, ...], float]:
        """Return the masks between scores and Softmax in the order they are added, and the scale of the scores."""
        masks: list[Mask] = []
        scale = 1.0
        heads = 0
        while value is not None and (node := value.producer()) is not None and node is not scores:
            self._nodes.add(node)
            index = next(i for i, operand in enumerate(node.inputs) if self._find_scores(operand) is scores)
            value = node.inputs[index]
            if node.op_type in ("Identity", "Cast"):
                continue
            if node.op_type == "Tanh":
                raise RefusedError("its scores are capped by a Tanh (softcap), which NoMADAttention does not support")
            if node.op_type == "Reshape":
                ranks = self._ranks(node)
                if not self._keeps_rows(node):
                    raise RefusedError(f"{describe(node)}, which its scores pass through, is not supported")
                if ranks == (3, 4):
                    heads = self._split_scores(node)
                elif ranks == (4, 5):
                    masks = [replace(mask, windows=self._rank(mask) == 5) for mask in masks]
                elif ranks not in ((4, 3), (5, 4)):
                    raise RefusedError(f"{describe(node)}, which its scores pass through, is not supported")
                continue
            if node.op_type in ("Mul", "Div"):
                scale *= self._factor(node, index)
                continue
            mask = self._fill(node, index) if node.op_type == "Where" else Mask(_other(node, index))
            mask = _scaled(mask, scale)
            if mask.fill is not None or self._dims.number(mask.value) != 0:
                masks.insert(0, replace(mask, heads=heads) if self._has_sequences(mask) else mask)
        return tuple(masks), scale

    def _ranks(self, node: ir.Node) -> tuple[int, int]:
        """Return the ranks of a node's input and output."""
        before, after = (self._dims.shape(value) or () for value in (node.inputs[0], node.outputs[0]))
        return len(before), len(after)

    def _keeps_rows(self, node: ir.Node) -> bool:
        """Return whether a Reshape of scores keeps the axes of queries and keys, and of heads if a shape is 5-D."""
        before, after = (self._dims.shape(value) or () for value in (node.inputs[0], node.outputs[0]))
        if 5 in (len(before), len(after)):
            return before[-3:] == after[-3:]
        # Adding a mask can lose symbolic dimensions, so the shape of the MatMul is compared as well.
        product = self._find_scores(self._softmax.inputs[0])
        known = (before, (self._dims.shape(product.outputs[0]) or ()) if product is not None else ())
        return min(len(before), len(after)) > 2 and any(len(one) > 2 and one[-2:] == after[-2:] for one in known)

    def _rank(self, mask: Mask) -> int:
        return len(self._dims.shape(mask.value) or ())

    def _split_scores(self, node: ir.Node) -> int:
        """Return the number of heads that a Reshape splits off scores [batch x heads, queries, keys]."""
        after = self._dims.shape(node.outputs[0]) or ()
        if not isinstance(after[1], int):
            raise RefusedError(f"{describe(node)}, which its scores pass through, is not supported")
        return after[1]

    def _has_sequences(self, mask: Mask) -> bool:
        shape = self._dims.shape(mask.value)
        return shape is not None and len(shape) == 3 and shape[0] != 1

    def _is_causal(self, mask: Mask) -> bool:
        """Return whether the mask hides exactly the keys after each query: Where(tril(ones) == 0, -Inf, 0)."""
        where = mask.value.producer()
        if mask.fill is not None or where is None or not is_op(where, "Where"):
            return False
        equal = where.inputs[0].producer() if where.inputs[0] is not None else None
        fills = [self._dims.number(value) for value in where.inputs[1:]]
        hides = fills[0] is not None and fills[0] < _HIDDEN and fills[1] == 0
        if equal is None or not is_op(equal, "Equal") or not hides or self._dims.number(equal.inputs[1]) != 0:
            return False
        trilu = equal.inputs[0].producer() if equal.inputs[0] is not None else None
        if trilu is None or not is_op(trilu, "Trilu") or int_attribute(trilu, "upper", 1) or len(trilu.inputs) > 1:
            return False
        expand = trilu.inputs[0].producer() if trilu.inputs[0] is not None else None
        return expand is not None and is_op(expand, "Expand") and self._dims.number(expand.inputs[0]) == 1

    def _factor(self, node: ir.Node, index: int) -> float:
        number = scalar(self._dims, _other(node, index))
        if number is None or number == 0 or (node.op_type == "Div" and index == 1):
            raise RefusedError(f"{describe(node)} scales its scores by a factor that is not constant")
        return 1 / number if node.op_type == "Div" else number

    def _fill(self, node: ir.Node, index: int) -> Mask:
        """Return the mask of a Where that replaces masked scores by -Inf or the lowest float."""
        fill = self._dims.number(node.inputs[3 - index]) if index else None
        if fill is None or not fill < _HIDDEN:
            raise RefusedError(f"{describe(node)} replaces scores by a value other than -Inf or the lowest float")
        condition = node.inputs[0]
        assert condition is not None
        return Mask(before_expand(self._dims, condition), fill, hides=index == 2)


def before_expand(dims: Dimensions, value: ir.Value) -> ir.Value:
    """Return the mask before it is expanded to the shape of the scores, which broadcasting does anyway."""
    while (node := value.producer()) is not None and node.inputs[0] is not None:
        if not is_op(node, "Expand") and not changes_nothing(dims, node):
            break
        value = node.inputs[0]
    return value


def _scaled(mask: Mask, scale: float) -> Mask:
    """Return a mask whose sum with the scores is multiplied by `scale`."""
    if mask.fill is None:
        return replace(mask, scale=scale)
    if not mask.fill * scale < _HIDDEN:
        raise RefusedError("its scores are scaled after masking, so that the mask hides no keys")
    return replace(mask, fill=mask.fill * scale)


def _joined(
    dims: Dimensions,
    node: ir.Node,
    operands: Sequence[Operand],
    masks: tuple[Mask, ...],
    causal: bool,
    nodes: set[ir.Node],
) -> Attention:
    """Check that the shapes of queries, keys, values and masks fit, and return the attention."""
    query, key, value = operands
    if not query.head_dim == key.head_dim == value.head_dim:
        widths = [operand.head_dim for operand in operands]
        raise RefusedError(f"head widths of its queries, keys and values are {widths}, expected equal widths")
    if key.heads != value.heads or query.heads % key.heads:
        heads = [operand.heads for operand in operands]
        raise RefusedError(
            f"its queries, keys and values have {heads} heads, expected equal numbers of key and value heads that "
            "divide the number of query heads"
        )
    # The second MatMul guarantees equal numbers of keys and values.
    if not (same_number(query.batch, key.batch) and same_number(query.batch, value.batch)):
        raise RefusedError("its queries, keys and values are not known to have the same batch")
    if causal and query.rows != key.rows:
        raise RefusedError("it is causal, but its numbers of queries and keys may differ")
    for mask in masks:
        check_mask(dims, mask, (query.batch, query.heads, query.rows, key.rows))
    layouts = {name: one.layout for name, one in zip(_OPERANDS, operands, strict=True) if one.layout != "by_rows"}
    return Attention(
        node,
        query.base,
        key.base,
        value.base,
        query.heads,
        key.heads,
        0.0,
        masks,
        causal,
        False,
        nodes,
        head_dim=query.head_dim,
        layouts=layouts,
    )


def check_mask(dims: Dimensions, mask: Mask, scores: Shape) -> None:
    """Check that a mask broadcasts against the scores."""
    shape, dtype = dims.shape(mask.value), dims.dtype(mask.value)
    if shape is not None and mask.heads:
        shape = scores[0], mask.heads, *shape[1:]
    if shape is not None and mask.windows:
        shape = scores[0], *shape[2:]
    if shape is None or len(shape) > len(scores):
        raise RefusedError(f"the shape of its mask {name_of(mask.value)} is {shape or 'unknown'}, expected at most 4-D")
    for dim, wanted in zip(reversed(shape), reversed(scores), strict=False):
        # Different symbolic dimensions are accepted, because the model itself adds the mask to the scores.
        if isinstance(dim, int) and dim not in (1, wanted):
            raise RefusedError(
                f"its mask {name_of(mask.value)} has a dimension of {dim}, expected 1 or the dimension of the scores"
            )
    wanted_type = ir.DataType.FLOAT if mask.fill is None else ir.DataType.BOOL
    if dtype != wanted_type:
        raise RefusedError(f"its mask {name_of(mask.value)} is {dtype.name if dtype else 'of unknown type'}")


def _onnx_attention(dims: Dimensions, node: ir.Node) -> Attention:
    inputs = [*node.inputs, *[None] * 7]
    _expect_no_cache(node, inputs[4:7])
    if "softcap" in node.attributes and node.attributes["softcap"].as_float() != 0:
        raise RefusedError("its scores are capped (softcap)")
    nodes = {node}
    split = len(dims.shape(inputs[0]) or ()) == 4
    meanings = {"query": "q_num_heads", "key": "kv_num_heads", "value": "kv_num_heads"}
    if split:
        operands = [split_operand(dims, one, meaning, nodes) for one, meaning in zip(inputs, meanings, strict=False)]
    else:
        heads = [int_attribute(node, name, 0) for name in meanings.values()]
        operands = [
            whole_operand(dims, one, meaning, count)
            for one, meaning, count in zip(inputs[:3], meanings, heads, strict=True)
        ]
    masks: tuple[Mask, ...] = ()
    if inputs[3] is not None:
        is_bool = dims.dtype(inputs[3]) == ir.DataType.BOOL
        masks = (Mask(inputs[3], -np.inf, hides=False) if is_bool else Mask(inputs[3]),)
    match = _joined(dims, node, operands, masks, int_attribute(node, "is_causal", 0) == 1, nodes)
    match.scale = scale_attribute(node) * operands[0].scale * operands[1].scale
    if operands[2].scale != 1 or (match.scale == 0 and operands[0].scale * operands[1].scale != 1):
        raise RefusedError("its inputs are scaled")
    output = node.outputs[0]
    match.output = merged_heads(dims, output, operands[0], nodes) if split else output
    return match


def _multi_head_attention(dims: Dimensions, node: ir.Node) -> Attention:
    inputs = [*node.inputs, *[None] * 10]
    _expect_no_cache(node, inputs[6:10])
    for index, meaning in ((3, "bias"), (4, "key_padding_mask")):
        if inputs[index] is not None:
            raise RefusedError(why_left(node) or f"it has an input {meaning}")
    heads = int_attribute(node, "num_heads", 0)
    names = ("query", "key", "value")
    operands = [whole_operand(dims, one, name, heads) for one, name in zip(inputs[:3], names, strict=True)]
    masks = (Mask(before_expand(dims, inputs[5])),) if inputs[5] is not None else ()
    match = _joined(dims, node, operands, masks, int_attribute(node, "unidirectional", 0) == 1, {node})
    match.scale = scale_attribute(node)
    match.output = node.outputs[0]
    return match


def scale_attribute(node: ir.Node) -> float:
    """Return the `scale` attribute of an attention operator; 0 if it has none."""
    return node.attributes["scale"].as_float() if "scale" in node.attributes else 0.0


def _expect_no_cache(node: ir.Node, inputs: Sequence[ir.Value | None]) -> None:
    others = [value for value in node.outputs[1:] if value.uses() or value.is_graph_output()]
    if others or any(value is not None for value in inputs):
        raise RefusedError("it has a cache of keys and values")


def _check_uses(match: Attention) -> None:
    assert match.output is not None
    inputs = [match.query, match.key, match.value, *(mask.value for mask in match.masks)]
    check_uses(match.node, match.nodes, match.output, inputs)


def check_uses(
    center: ir.Node,
    nodes: set[ir.Node],
    output: ir.Value,
    inputs: Sequence[ir.Value | None],
    kept: Collection[ir.Value] = (),
) -> None:
    """Check that only `nodes` read the values that will be removed; graph outputs in `kept` are exempt.

    Other nodes whose results only removed nodes read, such as shape computations, are added to `nodes`.
    """
    last = output.producer()
    dead: set[ir.Node] = set()
    waiting = [(value, value, node) for node in nodes if node is not last for value in node.outputs]
    while waiting:
        value, inside, user = waiting.pop()
        if value.is_graph_output() and value not in kept:
            raise RefusedError(f"its intermediate value {name_of(inside)} is an output of the graph, or computes one")
        for node in value.consumers():
            if node in nodes or node in dead:
                continue
            first = node if value is inside else user
            if node.graph is not center.graph or len(dead) >= _MOST_SHAPE_NODES:
                raise RefusedError(f"its intermediate value {name_of(inside)} is also used by {describe(first)}")
            dead.add(node)
            waiting += [(output, inside, first) for output in node.outputs]
    nodes |= dead
    if any(value is not None and value.producer() in nodes for value in inputs):
        raise RefusedError("its mask is computed from its own intermediate values")


def _producer(value: ir.Value | None, op_type: str) -> ir.Node | None:
    """Return the node that computes this value if it has this type, else None."""
    node = None if value is None else value.producer()
    return node if node is not None and is_op(node, op_type) else None


def _other(node: ir.Node, index: int) -> ir.Value:
    value = node.inputs[1 - index]
    assert value is not None
    return value
