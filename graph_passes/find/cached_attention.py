"""Finds attention with a KV cache in decoders, or the reason why a similar subgraph cannot be replaced.

The caches are graph inputs [batch, kv_heads, past, head width], and graph outputs with the new tokens appended. Four
forms are found: ONNX Runtime's GroupQueryAttention, written by the GenAI model builder; decomposed, as in most exports
(Concat with the past, repeated heads for grouped queries, and the nodes that attention.py finds); ONNX Runtime's
MultiHeadAttention; ONNX's Attention (opset 23).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from .attention import Mask, NotAttention, TakenApart, check_mask, check_uses, scale_attribute
from .attention_operands import (
    Operand,
    RefusedError,
    changes_nothing,
    describe,
    is_op,
    merged_heads,
    name_of,
    split_operand,
    through_views,
)
from .dimensions import Dimensions, head_size, int_attribute
from .views import View

_VIEWS = ("Reshape", "Transpose", "Identity", "Unsqueeze", "Expand")
_GROUP_QUERY_ATTRIBUTES = ("num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "scale")
_GROUP_QUERY_INPUTS = {9: "position_ids", 10: "attention_bias", 11: "head_sink"}
# Attributes of features that NoMADAttention lacks, with the values that disable the feature.
_OFF: dict[str, tuple[object, ...]] = {
    "local_window_size": (-1,),
    "softcap": (0.0,),
    "smooth_softmax": (0, -1),
    "causal": (1,),
    "sliding_window_cache": (0,),
    "qk_output": (0,),
    "qk_matmul_output_mode": (0,),
    "softmax_precision": (0, 1),
    "k_quant_type": ("NONE",),
    "v_quant_type": ("NONE",),
    "kv_cache_bit_width": (0,),
}


class _NoCacheError(RefusedError):
    """The attention has no cache."""


@dataclass(eq=False)
class CachedAttention:
    """Attention with a KV cache.

    query, key and value are each [batch, rows, heads x width] or [batch, heads, rows, width]. key and value are None if
    `query` contains all three. The past caches are graph inputs, the present caches graph outputs.
    """

    node: ir.Node  # the Softmax or the attention operator
    query: ir.Value
    key: ir.Value | None
    value: ir.Value | None
    past_key: ir.Value
    past_value: ir.Value
    present_key: ir.Value
    present_value: ir.Value
    heads: int
    kv_heads: int
    head_dim: int
    nodes: set[ir.Node]  # nodes that the operator replaces
    output: ir.Value  # [batch, rows, heads x width]
    scale: float = 0.0  # 0: 1 / sqrt(head width)
    masks: tuple[Mask, ...] = ()  # the sum of all masks is added to the scores
    causal: bool = False
    zero_hidden_rows: bool = False
    lengths: ir.Value | None = None  # int32, tokens of each sequence minus 1; None: past + rows for all
    cos: ir.Value | None = None  # table of the rotary embedding, [positions, head width / 2]
    sin: ir.Value | None = None
    interleaved: bool = False
    products: list[ir.Node] = field(default_factory=list)

    @property
    def names(self) -> list[str]:
        """Names of the Softmax or attention operator and of its MatMuls."""
        return [node.name for node in (self.node, *self.products) if node.name]


def find_cached_attentions(graph: ir.Graph) -> list[CachedAttention | NotAttention]:
    """Return cached attention and similar subgraphs of one graph, in graph order, without If and Loop bodies."""
    dims = Dimensions(graph)
    found: list[CachedAttention | NotAttention] = []
    for node in graph:
        match: CachedAttention | None = None
        try:
            if node.op_type == "GroupQueryAttention" and node.domain == "com.microsoft":
                match = _group_query(dims, node)
            elif is_op(node, "Softmax"):
                match = _CachedTakenApart(dims, node).find()
            elif node.op_type == "MultiHeadAttention" and node.domain == "com.microsoft":
                match = _multi_head(dims, node)
            elif is_op(node, "Attention"):
                match = _onnx_attention(dims, node)
            if match is not None:
                _check(dims, match)
        except RefusedError as refusal:
            found.append(NotAttention(node, str(refusal), not isinstance(refusal, _NoCacheError)))
        else:
            found += [match] if match is not None else []
    return found


# ---- operators -------------------------------------------------------------------------------------------------------


def _group_query(dims: Dimensions, node: ir.Node) -> CachedAttention:
    inputs = _padded(node.inputs, 12)
    outputs = _padded(node.outputs, 3)
    for name, attribute in node.attributes.items():
        if name not in _GROUP_QUERY_ATTRIBUTES and attribute.value not in _OFF.get(name, ()):
            raise RefusedError(f"it has {name} {attribute.value!r}, which NoMADAttention does not support")
    rotary = int_attribute(node, "do_rotary", 0) == 1
    for index, value in enumerate(inputs[: len(node.inputs)]):
        if index > 8 and value is not None:
            raise RefusedError(f"it has an input {_GROUP_QUERY_INPUTS.get(index, index)}")
    past_key, past_value, present_key, present_value = _cache(inputs[3:5], outputs[1:3])
    query, lengths = inputs[0], inputs[5]
    packed = inputs[1] is None
    if query is None or lengths is None or packed != (inputs[2] is None):
        raise RefusedError("an input is missing")
    head_dim = _head_dim(dims, past_key)
    cos, sin = (inputs[7], inputs[8]) if rotary else (None, None)
    tables = [dims.shape(table) for table in (cos, sin) if table is not None]
    if rotary and (len(tables) != 2 or any(shape is None or shape[-1] != head_dim // 2 for shape in tables)):
        raise RefusedError(
            f"its rotary tables have shapes {tables}, expected [positions, {head_dim // 2}] for whole heads"
        )
    return CachedAttention(
        node,
        query,
        inputs[1],
        inputs[2],
        past_key,
        past_value,
        present_key,
        present_value,
        int_attribute(node, "num_heads", 0),
        int_attribute(node, "kv_num_heads", 0),
        head_dim,
        {node},
        node.outputs[0],
        scale_attribute(node),
        causal=True,
        lengths=lengths,
        cos=cos,
        sin=sin,
        interleaved=int_attribute(node, "rotary_interleaved", 0) == 1,
    )


def _multi_head(dims: Dimensions, node: ir.Node) -> CachedAttention:
    inputs, outputs = _padded(node.inputs, 10), _padded(node.outputs, 4)
    caches = _cache(inputs[6:8], outputs[1:3])
    for index, meaning in ((3, "bias"), (4, "key_padding_mask"), (8, "past_sequence_length"), (9, "cache_indirection")):
        if inputs[index] is not None:
            raise RefusedError(f"it has an input {meaning}")
    if outputs[3] is not None:
        raise RefusedError("it outputs its scores")
    query, key, value = inputs[:3]
    if query is None or any(one is None or len(dims.shape(one) or ()) != 3 for one in inputs[:3]):
        raise RefusedError("its query, key and value are not known to be [batch, rows, width] each")
    heads = int_attribute(node, "num_heads", 0)
    match = CachedAttention(
        node, query, key, value, *caches, heads, heads, _head_dim(dims, caches[0]), {node}, node.outputs[0]
    )
    match.scale = scale_attribute(node)
    match.masks = (Mask(inputs[5]),) if inputs[5] is not None else ()
    match.causal = int_attribute(node, "unidirectional", 0) == 1
    return match


def _onnx_attention(dims: Dimensions, node: ir.Node) -> CachedAttention:
    inputs, outputs = _padded(node.inputs, 7), _padded(node.outputs, 4)
    nodes = {node}
    if inputs[4] is None and outputs[1] is None and len(dims.shape(inputs[1]) or ()) == 4:
        pasts = [_past_operand(dims, inputs[place], name, nodes) for place, name in ((1, "key"), (2, "value"))]
        inputs[1], inputs[2] = (one.new for one in pasts)
        inputs[4:6], outputs[1:3] = [one.past for one in pasts], [one.present for one in pasts]
        if any(one.scale != 1 for one in pasts):
            raise RefusedError("its inputs are scaled")
    caches = _cache(inputs[4:6], outputs[1:3])
    for name in ("softcap", "qk_matmul_output_mode"):
        if name in node.attributes and node.attributes[name].value not in _OFF[name]:
            raise RefusedError(f"it has {name} {node.attributes[name].value!r}, which NoMADAttention does not support")
    if outputs[3] is not None or inputs[6] is not None:
        raise RefusedError("it outputs its scores" if outputs[3] is not None else "it has an input nonpad_kv_seqlen")
    query, key, value = inputs[:3]
    shapes = [dims.shape(one) for one in inputs[:3]]
    ranks = {len(shape) if shape is not None else None for shape in shapes}
    if query is None or ranks not in ({3}, {4}):
        raise RefusedError("its query, key and value are not all known to be 3-D, or all 4-D")
    past = dims.shape(caches[0])
    heads, kv_heads = (int_attribute(node, name, 0) for name in ("q_num_heads", "kv_num_heads"))
    by_heads = shapes[0] if ranks == {4} else None
    if by_heads is not None:
        if not isinstance(by_heads[1], int) or past is None or not isinstance(past[1], int):
            raise RefusedError("the number of its heads is not known before it runs")
        heads, kv_heads = by_heads[1], past[1]
    head_dim = _head_dim(dims, caches[0])
    match = CachedAttention(node, query, key, value, *caches, heads, kv_heads, head_dim, nodes, node.outputs[0])
    if by_heads is not None:
        operand = Operand(query, by_heads[0], by_heads[2], heads, head_dim)
        match.output = merged_heads(dims, node.outputs[0], operand, match.nodes)
    match.scale = scale_attribute(node)
    if inputs[3] is not None:
        is_bool = dims.dtype(inputs[3]) == ir.DataType.BOOL
        match.masks = (Mask(inputs[3], -np.inf, hides=False) if is_bool else Mask(inputs[3]),)
    match.causal = int_attribute(node, "is_causal", 0) == 1
    return match


# ---- decomposed attention --------------------------------------------------------------------------------------------


class _CachedTakenApart(TakenApart):
    def find(self) -> CachedAttention | None:
        """Return the attention, or None if the Softmax has another purpose, such as a classifier's."""
        dims, softmax = self._dims, self._softmax
        weights, zero_hidden_rows = self._weights()
        context = next((use.node for use in weights.uses() if is_op(use.node, "MatMul") and use.idx == 0), None)
        scores = self._find_scores(softmax.inputs[0])
        if context is None or scores is None:
            return None
        if int_attribute(softmax, "axis", -1) not in (-1, len(dims.shape(weights) or ()) - 1):
            raise RefusedError("its Softmax is not over the last axis")
        self._nodes |= {context, scores}
        masks, scale = self._masks_and_scale(softmax.inputs[0], scores)
        product, masks, zeroed = self._without_hidden_rows(context.outputs[0], masks)
        key = _past_operand(dims, scores.inputs[1], "key", self._nodes, transposed=True)
        value = _past_operand(dims, context.inputs[1], "value", self._nodes)
        query = self._query(scores.inputs[0])
        if any(one.heads not in (query.heads, 1) for one in (key, value)):
            raise RefusedError(
                f"it has {query.heads} query heads, but its keys and values are repeated to {key.heads} and "
                f"{value.heads} heads, expected equal counts"
            )
        if value.scale != 1:
            raise RefusedError("its values are scaled")
        new_key = _folded(dims, key.new, "key", self._nodes)
        return CachedAttention(
            softmax,
            query.base,
            new_key,
            _folded(dims, value.new, "value", self._nodes),
            key.past,
            value.past,
            key.present,
            value.present,
            query.heads,
            key.kv_heads,
            key.head_dim,
            self._nodes,
            merged_heads(dims, product, query, self._nodes),
            scale * query.scale * key.scale,
            masks,
            zero_hidden_rows=zero_hidden_rows or zeroed,
            products=[scores, context],
        )

    def _query(self, value: ir.Value | None) -> Operand:
        """Return the output of the query projection, or the split heads if another operation changes them."""
        dims = self._dims
        try:
            return split_operand(dims, value, "query", self._nodes)
        except RefusedError:
            chain, scale, value = through_views(dims, value, ())
            merge = None if value is None else value.producer()
            before = dims.shape(merge.inputs[0]) if merge is not None and is_op(merge, "Reshape") else None
            after = dims.shape(value)
            if merge is not None and before is not None and len(before) == 4 and (after or ())[1:] == before[2:]:
                chain.append(merge)  # merges batch and heads to one axis
                value = merge.inputs[0]
            self._nodes.update(chain)
            shape = dims.shape(value)
            if value is None or shape is None or len(shape) != 4:
                raise
            if not isinstance(shape[1], int) or not isinstance(shape[3], int):
                raise RefusedError("the number of its heads is not known before it runs") from None
            return Operand(value, shape[0], shape[2], shape[1], shape[3], scale)


@dataclass(frozen=True, eq=False)
class _PastOperand:
    """Keys or values: the cache with the new ones appended, repeated to `heads` for grouped queries."""

    past: ir.Value
    new: ir.Value
    present: ir.Value
    heads: int  # number of heads after the repetition
    kv_heads: int
    head_dim: int
    scale: float


def _past_operand(
    dims: Dimensions, value: ir.Value | None, meaning: str, nodes: set[ir.Node], transposed: bool = False
) -> _PastOperand:
    """Follow [batch, heads, tokens, head width] back to the Concat of the cache and new keys or values.

    transposed: the value is [batch, heads, head width, tokens].
    """
    chain, scale, value = through_views(dims, value, _VIEWS)
    concat = value.producer() if value is not None else None
    past = concat.inputs[0] if concat is not None and is_op(concat, "Concat") else None
    if concat is None or past is None or not past.is_graph_input():
        raise _NoCacheError(
            f"its {meaning} does not come from a cache: {name_of(value)} is not a Concat with a graph input"
        )
    present, new = concat.outputs[0], concat.inputs[1]
    for node in reversed(chain):
        if present.is_graph_output() or not changes_nothing(dims, node):
            break
        present = node.outputs[0]
    shape = dims.shape(present)
    if len(concat.inputs) != 2 or new is None or shape is None or len(shape) != 4:
        raise RefusedError(f"{describe(concat)}, its {meaning}, is not [batch, heads, past + new, head width]")
    kv_heads, head_dim = shape[1], shape[3]
    if int_attribute(concat, "axis", 0) % 4 != 2:
        raise RefusedError(f"{describe(concat)} appends to its {meaning} along an axis other than 2")
    if not isinstance(kv_heads, int) or not isinstance(head_dim, int):
        raise RefusedError(f"the number of heads of its {meaning} is not known before it runs")
    view = View(shape)
    for node in reversed(chain):
        if not view.apply(node, dims):
            raise RefusedError(f"{describe(node)}, which its {meaning} passes through, is not supported")
    view.sequences_apart()
    heads = view.dim(1) if len(view.axes) == 4 else None
    if heads is None or heads % kv_heads:
        raise RefusedError(f"the number of heads of its {meaning} is not known before it runs")
    expected = View(shape).repeated(1, heads // kv_heads)
    if transposed:
        expected = expected.permuted(0, 1, 3, 2)
    if view.sources() != expected.sources():
        raise RefusedError(f"heads of its {meaning} are not repeated as grouped queries need: each one consecutively")
    nodes.update([concat, *chain])
    return _PastOperand(past, new, present, heads, kv_heads, head_dim, scale)


def _folded(dims: Dimensions, value: ir.Value, meaning: str, nodes: set[ir.Node]) -> ir.Value:
    """Return the output of the projection if `value` is only its split heads, else `value`."""
    try:
        found: set[ir.Node] = set()
        operand = split_operand(dims, value, meaning, found)
    except RefusedError:
        return value
    if operand.scale != 1 or any(use.node not in nodes | found for node in found for use in node.outputs[0].uses()):
        return value
    nodes |= found
    return operand.base


# ---- shared by all forms ---------------------------------------------------------------------------------------------


def _padded(values: Sequence[ir.Value | None], count: int) -> list[ir.Value | None]:
    """Return at least `count` values, with None for omitted inputs or outputs."""
    given = [value if value is not None and value.name != "" else None for value in values]
    return [*given, *[None] * count]


def _cache(
    past: Sequence[ir.Value | None], present: Sequence[ir.Value | None]
) -> tuple[ir.Value, ir.Value, ir.Value, ir.Value]:
    past_key, past_value = past
    present_key, present_value = present
    if past_key is None or past_value is None or present_key is None or present_value is None:
        raise _NoCacheError("it has no cache of keys and values")
    return past_key, past_value, present_key, present_value


def _head_dim(dims: Dimensions, past: ir.Value) -> int:
    shape = dims.shape(past)
    found = shape[3] if shape is not None and len(shape) == 4 else None
    found = found if isinstance(found, int) else head_size(past)
    if not isinstance(found, int):
        raise RefusedError(f"the width of its heads is not known: its cache {name_of(past)} has shape {shape}")
    return found


def _check(dims: Dimensions, match: CachedAttention) -> None:
    if match.heads < 1 or match.kv_heads < 1 or match.heads % match.kv_heads:
        raise RefusedError(f"it has {match.heads} query heads, expected a multiple of its {match.kv_heads} key heads")
    pasts, presents = (match.past_key, match.past_value), (match.present_key, match.present_value)
    for past in pasts:
        if not past.is_graph_input() or past.is_initializer() or past.is_graph_output():
            raise RefusedError(f"its cache {name_of(past)} is not an input of the graph, or is also an output")
        if dims.dtype(past) != ir.DataType.FLOAT:
            dtype = dims.dtype(past)
            raise RefusedError(
                f"its cache {name_of(past)} is {dtype.name if dtype else 'of unknown type'}, expected FLOAT"
            )
        shape = dims.shape(past)
        if shape is None or len(shape) != 4 or shape[1] != match.kv_heads or _head_dim(dims, past) != match.head_dim:
            raise RefusedError(
                f"its cache {name_of(past)} has shape {shape}, expected [batch, {match.kv_heads}, tokens, "
                f"{match.head_dim}]"
            )
    for present in presents:
        if not present.is_graph_output():
            raise RefusedError(f"its cache {name_of(present)} is not an output of the graph")
    for mask in match.masks:
        check_mask(dims, mask, ("batch", match.heads, "rows", "tokens"))
    inputs = [match.query, match.key, match.value, match.lengths, *(mask.value for mask in match.masks)]
    check_uses(match.node, match.nodes, match.output, inputs, presents)
    for present in presents:
        for user in present.consumers():
            if user not in match.nodes:
                raise RefusedError(f"its cache {name_of(present)} is also used by {describe(user)}")
    for past in pasts:
        for user in past.consumers():
            if user not in match.nodes and not _asks_for_length(dims, user):
                raise RefusedError(f"its cache {name_of(past)} is also used by {describe(user)}")


def _asks_for_length(dims: Dimensions, node: ir.Node) -> bool:
    """Return whether a node is a Shape whose last dimension, the only one that changes, is not read."""
    if not is_op(node, "Shape"):
        return False
    end = node.attributes["end"].as_int() if "end" in node.attributes else None
    axes = list(range(4))[int_attribute(node, "start", 0) : end]
    if 3 not in axes:
        return True
    if node.outputs[0].is_graph_output():
        return False
    for user in node.outputs[0].consumers():
        picked: list[int] | None = None
        numbers = [dims.elements(value) for value in user.inputs[1:3]]
        if is_op(user, "Gather") and numbers[0] is not None:
            picked = [axes[one] for one in numbers[0] if isinstance(one, int) and -len(axes) <= one < len(axes)]
        elif is_op(user, "Slice") and len(user.inputs) < 5 and len(numbers) == 2 and None not in numbers:
            first, last = (one[0] if one else None for one in numbers)
            picked = axes[first:last] if isinstance(first, int) and isinstance(last, int) else None
        if picked is None or 3 in picked:
            return False
    return True
