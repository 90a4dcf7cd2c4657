"""Run an encoder only on tokens that are not padding.

The tokens that attention_mask keeps are packed after the inputs, all sequences one after the other. Layers work on
[1, kept tokens, width], rotary embedding on [1, heads, kept tokens, width], and each sequence attends only to itself.
At the end, tokens return to their positions. Inputs and outputs keep names and shapes. Outputs with a vector per token
are 0 at positions without a token.

If an output has a vector for each position, masked positions may be read: a late-interaction model (ColBERT) masks the
tokens that expand a query, and reads their vectors. Then only masked positions with the padding token are removed. The
remaining masked positions are kept: they attend to the unmasked tokens, and no token attends to them.

This is the last pass that changes the model. find/token_rows.py finds the part that can run on packed tokens.
measure/padding_masks.py runs the nodes that compute attention masks, to find out which tokens they mask. A mask must
mask the removed tokens; a mask that masks no other tokens is removed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from ortolan.errors import listing
from ortolan.progress import Stage

from ..find.constants import constant_tensor, remove_unused
from ..find.dimensions import Dimensions
from ..find.node_checks import integer_attribute
from ..find.token_rows import NotByTokensError, TokenRows, find_token_rows, reduced_axes
from ..measure.feeds import has_past
from ..measure.padding_masks import MaskError, PaddingMasks, sources_of
from ..names import ORTOLAN_DOMAIN, PADDING_KEY
from ..operators.nodes import declare_operators, fill_missing, new_initializer, nodes_of, put_function
from ..operators.nomad_attention_function import (
    OP_TYPE,
    PACKED_INPUTS,
    PACKED_OP_TYPE,
    nomad_attention_function,
    uses_of,
)
from ..operators.packed_tokens import PACK, UNPACK, packed_tokens_function
from ..options import PassOptions, takes
from ..text.nodes import Nodes
from ..text.padding import UnknownPaddingError, read_padding_id
from ..text.sentence_folder import folder_of
from .context import RecipePass
from .normalize import require_normalized

_MASK_NAME = "attention_mask"
_IDS_NAME = "input_ids"
_MASK, _KEPT = PACKED_INPUTS.index("mask"), PACKED_INPUTS.index("kept")


@dataclass(frozen=True)
class UnpadOptions(PassOptions):
    """Options of pass `unpad`."""

    # Token id of padding. None: read from the files next to the model.
    pad_token_id: int | None = field(default=None, metadata=takes("int", low=0, none=True))
    # Treat every masked position as padding, even if it has another token than the padding token.
    drop_hidden: bool = field(default=False, metadata=takes("bool"))


@dataclass(frozen=True)
class _Read:
    """Masked positions whose vectors consumers outside the packed part read."""

    first: bool  # the first position of each sequence
    others: bool  # all other positions except padding
    outputs: list[str]  # outputs of the model with a vector for each position
    pad: int | None = None  # token id of padding; None: every masked position is padding

    @property
    def positions(self) -> slice:
        return slice(None) if self.others else slice(int(self.first))


class UnpadPass(RecipePass):
    """Skip padding tokens. If that is not possible, a note gives the reason."""

    options_type = UnpadOptions
    options: UnpadOptions

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "unpad")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Rewrite the model to run on packed tokens."""
        context = self.context
        context.progress(Stage.UNPAD, 0, 1)
        nodes = nodes_of(model, OP_TYPE)
        changes = False
        if context.dry_run:
            context.note("whether padding can be skipped is found after layers have been replaced")
        elif nodes and not has_past(model):
            try:
                self._unpad(model, nodes)
                model.metadata_props[PADDING_KEY] = "left out"
                changes = True
            except (NotByTokensError, MaskError) as error:
                context.note(f"padding is not skipped: {error}")
        context.progress(Stage.UNPAD, 1, 1)
        return ir.passes.PassResult(model, modified=changes)

    def _unpad(self, model: ir.Model, attentions: Sequence[ir.Node]) -> None:
        given = _input(model, _MASK_NAME)
        if given is None or given.shape is None or len(given.shape) != 2:
            raise NotByTokensError(f"the model has no input {_MASK_NAME!r} [batch, tokens]")
        for node in attentions:
            _check(model, node)
        rows = find_token_rows(attentions)
        read = self._read(model, rows, PaddingMasks(model, given))
        pad = read.pad
        masks, own, first_tokens = _masks(model, given, attentions, read.positions)
        causal = {node for node, mask in own.items() if mask is not None and masks.is_causal(mask)}
        declare_operators(model)
        kept = self._kept(model, given, first_tokens, read.first, pad)
        self._enter(model, rows, kept, self._in_front(model, kept, masks.rotations(rows.entries)))
        self._resize(model, rows)
        self._leave(model, rows, kept)
        for node in attentions:
            node.op_type = PACKED_OP_TYPE
            node.resize_inputs(_KEPT + 1)
            node.replace_input_with(_MASK, None if node in causal else own[node])
            if node in causal:
                node.attributes["causal"] = ir.AttrInt64("causal", 1)
            node.replace_input_with(_KEPT, kept)
        neutral = {name: np.zeros(1, np.float32) for name in ("mask", "key", "value")}
        fill_missing(attentions, PACKED_INPUTS, (), lambda _: neutral, lambda name: self.context.new_name(model, name))
        masks.remove_unused()
        if first_tokens is not None:  # its node may come after the new consumers
            model.graph.sort()
        for value, layout in rows.layouts.items():
            if value.shape is not None:
                value.shape = ir.Shape([None] * layout.rank)
        model.functions.pop((ORTOLAN_DOMAIN, OP_TYPE, ""), None)
        if self.context.portable:
            opset = model.opset_imports[""]
            put_function(model, nomad_attention_function(opset, uses_of(attentions)))
            for op_type in (PACK, UNPACK):
                put_function(model, packed_tokens_function(op_type, opset))
        layers = self.context.layers
        layers.unpadded, layers.zero_at_padding, layers.pad_token_id = True, read.outputs, pad
        hidden = "masked positions" if pad is None else f"masked positions with token {pad}"
        self.context.note(
            f"padding is skipped: {len(rows.nodes)} nodes, {len(attentions)} of them attention, do not run on {hidden}"
            + (f"; {', '.join(read.outputs)} is 0 there" if read.outputs else "")
        )

    def _read(self, model: ir.Model, rows: TokenRows, masks: PaddingMasks) -> _Read:
        outputs = [value.name or "" for value in rows.exits if value.is_graph_output()]
        by_tokens = [
            use.node.name or ""
            for value in rows.exits
            for use in value.uses()
            if use.node not in rows.nodes and _depends_on_tokens(use.node)
        ]
        pad = None
        if outputs and not self.options.drop_hidden:
            pad = self._pad_token(model, f"output {listing(outputs)} has a vector for each position")
        elif by_tokens:
            pad = self._pad_token(model, f"{by_tokens[0]!r} chooses a position by the tokens")
        first = [self._check_exit(value, rows, masks, pad) for value in rows.exits]
        return _Read(any(first), pad is not None, outputs, pad)

    def _pad_token(self, model: ir.Model, why: str) -> int:
        """Return the padding token, or raise NotByTokensError. why: the reason why it is needed."""
        ids = _input(model, _IDS_NAME)
        if ids is None or ids.shape is None or len(ids.shape) != 2:
            problem = f"the model has no input {_IDS_NAME!r} [batch, tokens]"
        elif self.options.pad_token_id is not None:
            return self.options.pad_token_id
        else:
            try:
                return read_padding_id(folder_of(self.context.source.path))
            except UnknownPaddingError as error:
                problem = (
                    f"{error}; put config.json and the tokenizer's files next to the model, or set unpad.pad_token_id"
                )
        raise NotByTokensError(
            f"{why}, and the padding token is unknown: {problem}; set unpad.drop_hidden if masked positions are not "
            "read"
        )

    def _kept(
        self, model: ir.Model, given: ir.Value, first_tokens: ir.Value | None, reads_first: bool, pad: int | None
    ) -> ir.Value:
        """Return int64 [batch, tokens]: 0 at padding, negative at tokens that are kept but masked, else positive.

        first_tokens: unmasked tokens [batch, 1, 1, tokens]; None: `given`, the attention_mask. reads_first: the first
        token of each sequence is never padding. pad: token id of padding; None: every masked position is padding.
        """
        front = model.graph[0]

        def made(
            op_type: str, *inputs: ir.Value, dtype: ir.DataType = ir.DataType.INT64, **attributes: int
        ) -> ir.Value:
            value = self._insert(model, front, ir.node(op_type, inputs, attributes), f"{_MASK_NAME}/kept", given)
            value.dtype = dtype
            return value

        def cast(value: ir.Value, dtype: ir.DataType) -> ir.Value:
            return value if value.dtype == dtype else made("Cast", value, dtype=dtype, to=dtype)

        numbers = partial(self._int64, model)
        boolean = ir.DataType.BOOL
        if pad is None and first_tokens is None:
            kept = cast(given, ir.DataType.INT64)
        else:
            seen, kept = cast(given, boolean), numbers(0)
            if pad is not None:
                ids = _input(model, _IDS_NAME)
                assert ids is not None
                is_pad = made("Equal", cast(ids, ir.DataType.INT64), numbers(pad), dtype=boolean)
                kept = made("Where", is_pad, kept, numbers(-1))
            if first_tokens is not None:
                kept = made("Where", seen, numbers(-1), kept)
                seen = made("Squeeze", first_tokens, numbers(1, 2), dtype=boolean)
            kept = made("Where", seen, numbers(1), kept)
        if not reads_first:
            return kept
        zero, one, end = numbers(0), numbers(1), numbers(np.iinfo(np.int64).max)
        first, others = made("Slice", kept, zero, one, one), made("Slice", kept, one, end, one)
        first = made("Where", cast(first, boolean), first, numbers(-1))
        return made("Concat", first, others, axis=1)

    def _check_exit(self, value: ir.Value, rows: TokenRows, masks: PaddingMasks, pad: int | None) -> bool:
        """Check that consumers outside the packed part do not read positions without a token.

        Returns:
            True if they read the first token of each sequence, regardless of attention_mask.

        Raises:
            NotByTokensError: a consumer may read such positions.
        """
        if _dtype(value) not in (None, ir.DataType.FLOAT):
            raise NotByTokensError(f"{value.name!r} has a vector per token, but is not float32")
        if rows.layouts[value].tokens != 1:
            raise NotByTokensError(f"{value.name!r} [batch, heads, tokens, width] has consumers besides attention")
        reads_first = False
        for node in (use.node for use in value.uses() if use.node not in rows.nodes):
            if node.op_type == "Shape":
                continue
            if _takes_first(node, value):
                reads_first = True
            elif not _replaces_hidden(node, value, masks) and not _takes_tokens(node, value, masks, pad):
                raise NotByTokensError(f"{node.op_type} {node.name!r} may read positions without a token")
        return reads_first

    def _in_front(self, model: ir.Model, kept: ir.Value, rotations: Collection[ir.Value]) -> dict[ir.Value, ir.Value]:
        """Return the mask by which tables of rotary embedding are packed: `kept` without the padding in front.

        Rotary embedding depends only on distances, so that every sequence may start at the table's first row. Otherwise
        the last bits of its answer would depend on the padding in front.
        """
        if not rotations:
            return {}
        made = Nodes(model.opset_imports[""], self.context.new_name(model, f"{_MASK_NAME}/in_front"))
        seen = made.cast(made.cast(kept, ir.DataType.BOOL), ir.DataType.INT64)
        counted = made.op("CumSum", seen, made.integer(1))
        before = made.sum(made.cast(made.op("Equal", counted, made.integer(0)), ir.DataType.INT64), 1, keepdims=1)
        length = made.op("Slice", made.op("Shape", kept), made.ints(1), made.ints(2))
        rotated = made.op("Mod", made.op("Add", made.count_to(length), before), length)
        front = made.op("GatherElements", seen, rotated, axis=1)
        front.dtype = ir.DataType.INT64
        last = kept.producer()
        model.graph.insert_before(model.graph[0] if last is None else _after(last), made.nodes)
        return dict.fromkeys(rotations, front)

    def _enter(self, model: ir.Model, rows: TokenRows, kept: ir.Value, in_front: Mapping[ir.Value, ir.Value]) -> None:
        """Pack the values that the packed part reads. in_front: the masks of values that are not packed by `kept`."""
        for value, (rank, layout) in rows.entries.items():
            users = [(use.node, use.idx) for use in value.uses() if use.node in rows.nodes]
            first = min((node for node, _ in users), key=list(model.graph).index)
            read = value
            if layout.rank > rank:  # equal for all sequences
                axes = self._int64(model, *range(layout.rank - rank))
                read = self._insert(model, first, ir.node("Unsqueeze", [value, axes]), f"{value.name}/of_all", value)
            swapped = list(range(layout.rank))
            swapped[1], swapped[layout.tokens] = layout.tokens, 1
            if layout.tokens != 1:
                node = ir.node("Transpose", [read], {"perm": swapped})
                read = self._insert(model, first, node, f"{value.name}/tokens_in_front", value)
            packed = ir.node(PACK, [in_front.get(value, kept), read], domain=ORTOLAN_DOMAIN)
            result = self._insert(model, first, packed, f"{value.name}/packed", value)
            if layout.tokens != 1:
                node = ir.node("Transpose", [result], {"perm": swapped})
                result = self._insert(model, first, node, f"{value.name}/packed_behind", value)
            for node, index in users:
                node.replace_input_with(index, result)

    def _resize(self, model: ir.Model, rows: TokenRows) -> None:
        """Replace sizes of padded sequences in the shapes of views by those of packed sequences."""
        constants: dict[tuple[int, ...], ir.Value] = {}
        for node, sizes in rows.sizes.items():
            padded = node.inputs[1]
            assert padded is not None
            if tuple(sizes) not in constants:
                constants[tuple(sizes)] = self._int64(model, *sizes)
            node.replace_input_with(1, constants[tuple(sizes)])
            remove_unused(padded)

    def _leave(self, model: ir.Model, rows: TokenRows, kept: ir.Value) -> None:
        """Unpack the values that the rest of the model reads."""
        for value in rows.exits:
            node = value.producer()
            assert node is not None and value.name is not None
            users = [(use.node, use.idx) for use in value.uses() if use.node not in rows.nodes]
            unpacked = ir.node(UNPACK, [kept, value], domain=ORTOLAN_DOMAIN, name=f"{value.name}/unpack")
            (result,) = unpacked.outputs
            # The unpacked value takes the name and the known shape of the padded one.
            result.name, value.name = value.name, self.context.new_name(model, f"{value.name}/packed")
            result.dtype, result.shape = ir.DataType.FLOAT, value.shape
            model.graph.insert_after(node, unpacked)
            for user, index in users:
                user.replace_input_with(index, result)
            if rows.layouts[value].rank == 3:
                self._sum_in_order(model, result)
            outputs = model.graph.outputs
            for index, output in enumerate(outputs):
                if output is value:
                    outputs[index] = result

    def _sum_in_order(self, model: ir.Model, tokens: ir.Value) -> None:
        """Make sums over masked tokens add up from the first token to the last.

        The order of ReduceSum depends on the number of tokens, so padding would change the last bits of a text's
        vector.
        """
        products = [node.outputs[0] for node in tokens.consumers() if node.op_type in ("Mul", "Where")]
        for product in products:
            for node in product.consumers():
                if node.op_type != "ReduceSum" or reduced_axes(node) not in ([1], [-2]):
                    continue
                made = Nodes(model.opset_imports[""], self.context.new_name(model, f"{product.name}/in_order"))
                node.replace_input_with(0, made.summed_in_order(product, 1))
                model.graph.insert_before(node, made.nodes)

    def _int64(self, model: ir.Model, *numbers: int) -> ir.Value:
        name = self.context.new_name(model, f"{_MASK_NAME}/numbers")
        return new_initializer(model.graph, ir.Tensor(np.array(numbers, np.int64), name=name))

    def _insert(self, model: ir.Model, before: ir.Node, node: ir.Node, name: str, like: ir.Value) -> ir.Value:
        (value,) = node.outputs
        node.name = value.name = self.context.new_name(model, name)
        # Older versions of ONNX Runtime assume that outputs without a type are float.
        dtype = like.dtype or Dimensions(model.graph).dtype(like)
        if dtype is not None:
            value.dtype = dtype
        model.graph.insert_before(before, node)
        return value


def _after(node: ir.Node) -> ir.Node:
    """Return the next node of the graph."""
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    nodes = list(graph)
    return nodes[nodes.index(node) + 1]


def _input(model: ir.Model, name: str) -> ir.Value | None:
    return next((value for value in model.graph.inputs if value.name == name), None)


def _check(model: ir.Model, node: ir.Node) -> None:
    if node.graph is not model.graph:
        raise NotByTokensError(f"attention {node.name!r} is in a branch")
    if len(node.inputs) > _KEPT:
        raise NotByTokensError(f"attention {node.name!r} has a cache")


def _masks(
    model: ir.Model, given: ir.Value, attentions: Sequence[ir.Node], read_if_hidden: slice
) -> tuple[PaddingMasks, dict[ir.Node, ir.Value | None], ir.Value | None]:
    """Return the padding masks, the mask that each attention still needs, and the mask of first tokens.

    The last one (`PaddingMasks.find_first_tokens`) marks the unmasked tokens; None: attention_mask marks them.

    Raises:
        MaskError: a mask does not mask the removed tokens.
    """

    def beside(masks: PaddingMasks) -> dict[ir.Node, ir.Value | None]:
        return {node: masks.beside_padding(node.inputs[_MASK]) for node in attentions}

    masks = PaddingMasks(model, given, read_if_hidden)
    try:
        return masks, beside(masks), None
    except MaskError:
        first_tokens = masks.find_first_tokens(attentions[0].inputs[_MASK])
        if first_tokens is None:
            raise
    masks = PaddingMasks(model, given, slice(None), first_tokens)
    return masks, beside(masks), first_tokens


def _replaces_hidden(node: ir.Node, value: ir.Value, masks: PaddingMasks) -> bool:
    """Return True if a node multiplies the value by 0, or replaces it, at masked positions."""
    if node.op_type == "Mul":
        return any(masks.is_at_hidden(False, factor, value) for factor in node.inputs if factor is not value)
    if node.op_type != "Where" or list(node.inputs).count(value) != 1:
        return False
    return masks.is_at_hidden(node.inputs[1] is not value, node.inputs[0], value)


def _dtype(value: ir.Value) -> ir.DataType | None:
    graph = value.graph
    return value.dtype or (None if graph is None else Dimensions(graph).dtype(value))


def _choosers(node: ir.Node) -> list[ir.Node]:
    """Return the nodes that read some positions of the first input of `node`: itself, or Gathers after a Flatten."""
    if node.domain != "":
        return []
    if node.op_type == "Flatten" and integer_attribute(node, "axis", 1) == 2:
        users = [use.node for use in node.outputs[0].uses()]
        by_row = [one for one in users if one.op_type == "Gather" and integer_attribute(one, "axis", 0) == 0]
        return by_row if len(by_row) == len(users) else []
    return [node] if node.op_type in ("GatherND", "GatherElements") else []


def _depends_on_tokens(node: ir.Node) -> bool:
    indices = [one.inputs[1] for one in _choosers(node)]
    found = [one for value in indices if value is not None for one in sources_of(value, by_shapes=False)]
    return any(one.name == _IDS_NAME for one in found)


def _takes_tokens(node: ir.Node, value: ir.Value, masks: PaddingMasks, pad: int | None) -> bool:
    """Return True if a node reads only positions with a token, such as the last token of each sequence."""
    choosers = _choosers(node)
    return node.inputs[0] is value and bool(choosers) and all(_is_at_tokens(one, value, masks, pad) for one in choosers)


def _is_at_tokens(node: ir.Node, value: ir.Value, masks: PaddingMasks, pad: int | None) -> bool:
    indices = node.inputs[1]
    if indices is None or indices is value:
        return False
    rows = integer_attribute(node, "batch_dims", 0) if node.op_type == "GatherND" else None
    if node.op_type == "GatherElements" and integer_attribute(node, "axis", 0) not in (1, -2):
        return False

    def positions(found: np.ndarray, batch: int, tokens: int) -> np.ndarray | None:
        number = np.arange(batch)[:, None]
        if node.op_type == "GatherElements":
            return found.reshape(batch, -1)
        if node.op_type == "Gather":
            found = found.reshape(batch, -1)
            return found % tokens if (found // tokens == number).all() else None
        found = found.reshape(batch, -1, found.shape[-1])
        if rows == 0 and found.shape[-1] == 2 and (found[..., 0] == number).all():
            return found[..., 1]
        return found[..., 0] if rows == 1 and found.shape[-1] == 1 else None

    return masks.are_at_tokens(indices, value, pad, positions)


def _takes_first(node: ir.Node, value: ir.Value) -> bool:
    """Return True if a node reads only the first token of each sequence."""
    if node.op_type == "Gather" and node.inputs[0] is value:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        index = constant_tensor(node.inputs[1])
        return axis == 1 and index is not None and not np.any(index.numpy())
    if node.op_type == "Slice" and node.inputs[0] is value:
        bounds = [constant_tensor(one) for one in node.inputs[1:]]
        return [None if one is None else one.numpy().tolist() for one in bounds[:3]] == [[0], [1], [1]]
    return False
