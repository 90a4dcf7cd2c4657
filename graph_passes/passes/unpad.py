"""Runs an encoder on the tokens that are there: behind its inputs those that attention_mask keeps of all sequences are
put one behind the other, each layer works on [1, kept tokens, width], rotary embedding on [1, heads, kept tokens,
width], attention lets each sequence see itself alone, and at the end tokens return to their places. Inputs and outputs
keep names and shapes. At places without a token, an output that was by tokens is 0, whatever it was before.

It is the last pass that changes the model: token_rows.py finds what can run so among what the others have made. Which
tokens the masks of attention hide is found by running what computes them: a mask must hide those that are not kept, and
one that does nothing else goes (padding_masks.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.constants import constant_tensor, remove_dead
from ..find.dimensions import Dimensions
from ..find.token_rows import NotByTokensError, TokenRows, find_token_rows, reduced_axes
from ..measure.feeds import has_past
from ..measure.padding_masks import MaskError, PaddingMasks
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
from ..text.nodes import Nodes
from .context import RecipePass
from .normalize import require_normalized

_MASK_NAME = "attention_mask"
_MASK, _KEPT = PACKED_INPUTS.index("mask"), PACKED_INPUTS.index("kept")


class UnpadPass(RecipePass):
    """Leaves a model as it is, with a note, where it cannot be done."""

    def requires(self, model: ir.Model) -> None:
        require_normalized(model, "unpad")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        context.progress(Stage.UNPAD, 0, 1)
        nodes = nodes_of(model, OP_TYPE)
        changes = False
        if context.dry_run:
            context.note("whether padding can be left out is found when layers have been replaced")
        elif nodes and not has_past(model):
            try:
                self._unpad(model, nodes)
                model.metadata_props[PADDING_KEY] = "left out"
                changes = True
            except (NotByTokensError, MaskError) as error:
                context.note(f"padding is not left out: {error}")
        context.progress(Stage.UNPAD, 1, 1)
        return ir.passes.PassResult(model, modified=changes)

    def _unpad(self, model: ir.Model, attentions: Sequence[ir.Node]) -> None:
        given = {value.name: value for value in model.graph.inputs}.get(_MASK_NAME)
        if given is None or given.shape is None or len(given.shape) != 2:
            raise NotByTokensError(f"the model has no input {_MASK_NAME!r} [batch, tokens]")
        for node in attentions:
            _check(model, node)
        masks = PaddingMasks(model, given)
        own = {node: masks.beside_padding(node.inputs[_MASK]) for node in attentions}
        rows = find_token_rows(attentions)
        reads_first = [self._check_exit(value, rows, masks) for value in rows.exits]
        declare_operators(model)
        kept = self._kept(model, given, any(reads_first))
        if any(reads_first):  # some that count as there are hidden from others
            own = {node: node.inputs[_MASK] for node in attentions}
        self._enter(model, rows, kept)
        self._resize(model, rows)
        self._leave(model, rows, kept)
        for node in attentions:
            node.op_type = PACKED_OP_TYPE
            node.resize_inputs(_KEPT + 1)
            node.replace_input_with(_MASK, own[node])
            node.replace_input_with(_KEPT, kept)
        neutral = {name: np.zeros(1, np.float32) for name in ("mask", "key", "value")}
        fill_missing(attentions, PACKED_INPUTS, (), lambda _: neutral, lambda name: self.context.new_name(model, name))
        masks.remove_unused()
        for value, layout in rows.layouts.items():
            if value.shape is not None:
                value.shape = ir.Shape([None] * layout.rank)
        model.functions.pop((ORTOLAN_DOMAIN, OP_TYPE, ""), None)
        if self.context.portable:
            opset = model.opset_imports[""]
            put_function(model, nomad_attention_function(opset, uses_of(attentions)))
            for op_type in (PACK, UNPACK):
                put_function(model, packed_tokens_function(op_type, opset))
        self.context.layers.unpadded = True
        self.context.note(
            f"padding is left out: {len(rows.nodes)} nodes, {len(attentions)} of them attention, run on the tokens "
            "that attention_mask keeps; outputs are 0 where no token is"
        )

    def _kept(self, model: ir.Model, given: ir.Value, reads_first: bool) -> ir.Value:
        """attention_mask as int64. reads_first: the first token of each sequence is read, whether or not it is hidden
        from others, and so counts as one that is there."""
        front = model.graph[0]

        def made(op_type: str, *inputs: ir.Value, **attributes: int) -> ir.Value:
            value = self._insert(model, front, ir.node(op_type, inputs, attributes), f"{_MASK_NAME}/kept", given)
            value.dtype = ir.DataType.INT64
            return value

        kept = given if given.dtype == ir.DataType.INT64 else made("Cast", given, to=ir.DataType.INT64)
        if not reads_first:
            return kept
        zero, one, end = (self._numbers(model, number) for number in (0, 1, np.iinfo(np.int64).max))
        first, others = made("Slice", kept, zero, one, one), made("Slice", kept, one, end, one)
        return made("Concat", made("Max", first, one), others, axis=1)

    def _check_exit(self, value: ir.Value, rows: TokenRows, masks: PaddingMasks) -> bool:
        """Raises NotByTokensError if the rest of the graph may read of this value what is not there. Returns whether it
        reads of the first token of each sequence, whatever attention_mask says of it."""
        if value.dtype not in (None, ir.DataType.FLOAT):
            raise NotByTokensError(f"{value.name!r}, which is by tokens, is no float")
        if rows.layouts[value].tokens != 1:
            raise NotByTokensError(f"{value.name!r}, whose tokens are behind heads, is read by something else")
        reads_first = False
        for node in (use.node for use in value.uses() if use.node not in rows.nodes):
            if node.op_type == "Shape":
                continue
            if _takes_first(node, value):
                reads_first = True
            elif node.op_type != "Mul" or not any(
                masks.zeroes_hidden(factor, value) for factor in node.inputs if factor is not value
            ):
                raise NotByTokensError(f"{node.op_type} {node.name!r} may read places where no token is")
        return reads_first

    def _enter(self, model: ir.Model, rows: TokenRows, kept: ir.Value) -> None:
        """Packs what the part reads of the rest."""
        for value, (rank, layout) in rows.entries.items():
            users = [(use.node, use.idx) for use in value.uses() if use.node in rows.nodes]
            first = min((node for node, _ in users), key=list(model.graph).index)
            read = value
            if layout.rank > rank:  # the same for all sequences
                axes = self._numbers(model, *range(layout.rank - rank))
                read = self._insert(model, first, ir.node("Unsqueeze", [value, axes]), f"{value.name}/of_all", value)
            swapped = list(range(layout.rank))
            swapped[1], swapped[layout.tokens] = layout.tokens, 1
            if layout.tokens != 1:
                node = ir.node("Transpose", [read], {"perm": swapped})
                read = self._insert(model, first, node, f"{value.name}/tokens_in_front", value)
            packed = ir.node(PACK, [kept, read], domain=ORTOLAN_DOMAIN)
            result = self._insert(model, first, packed, f"{value.name}/packed", value)
            if layout.tokens != 1:
                node = ir.node("Transpose", [result], {"perm": swapped})
                result = self._insert(model, first, node, f"{value.name}/packed_behind", value)
            for node, index in users:
                node.replace_input_with(index, result)

    def _resize(self, model: ir.Model, rows: TokenRows) -> None:
        """Tells views that were told sizes of padded sequences those of packed ones."""
        constants: dict[tuple[int, ...], ir.Value] = {}
        for node, sizes in rows.sizes.items():
            padded = node.inputs[1]
            assert padded is not None
            if tuple(sizes) not in constants:
                constants[tuple(sizes)] = self._numbers(model, *sizes)
            node.replace_input_with(1, constants[tuple(sizes)])
            remove_dead(padded)

    def _leave(self, model: ir.Model, rows: TokenRows, kept: ir.Value) -> None:
        """Returns to their places what the rest reads of the part."""
        for value in rows.exits:
            node = value.producer()
            assert node is not None and value.name is not None
            users = [(use.node, use.idx) for use in value.uses() if use.node not in rows.nodes]
            unpacked = ir.node(UNPACK, [kept, value], domain=ORTOLAN_DOMAIN, name=f"{value.name}/unpack")
            (result,) = unpacked.outputs
            # The name, and what is known of the shape, are those of the padded value.
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
        """Makes sums over the tokens that a factor has left from the first to the last. The order of ReduceSum depends
        on how many there are, and with it the last bits of a text's vector on padding."""
        products = [node.outputs[0] for node in tokens.consumers() if node.op_type == "Mul"]
        for product in products:
            for node in product.consumers():
                if node.op_type != "ReduceSum" or reduced_axes(node) not in ([1], [-2]):
                    continue
                made = Nodes(model.opset_imports[""], self.context.new_name(model, f"{product.name}/in_order"))
                node.replace_input_with(0, made.summed_in_order(product, 1))
                model.graph.insert_before(node, made.nodes)

    def _numbers(self, model: ir.Model, *numbers: int) -> ir.Value:
        name = self.context.new_name(model, f"{_MASK_NAME}/numbers")
        return new_initializer(model.graph, ir.Tensor(np.array(numbers, np.int64), name=name))

    def _insert(self, model: ir.Model, before: ir.Node, node: ir.Node, name: str, like: ir.Value) -> ir.Value:
        (value,) = node.outputs
        node.name = value.name = self.context.new_name(model, name)
        # Older versions of ONNX Runtime take outputs of any type for floats.
        dtype = like.dtype or Dimensions(model.graph).dtype(like)
        if dtype is not None:
            value.dtype = dtype
        model.graph.insert_before(before, node)
        return value


def _check(model: ir.Model, node: ir.Node) -> None:
    """Raises NotByTokensError for attention of another form."""
    if node.graph is not model.graph:
        raise NotByTokensError(f"attention {node.name!r} lies in a branch")
    if len(node.inputs) > _KEPT:
        raise NotByTokensError(f"attention {node.name!r} has a cache")


def _takes_first(node: ir.Node, value: ir.Value) -> bool:
    """Whether a node takes the first token of each sequence, and nothing else."""
    if node.op_type == "Gather" and node.inputs[0] is value:
        axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 0
        index = constant_tensor(node.inputs[1])
        return axis == 1 and index is not None and not np.any(index.numpy())
    if node.op_type == "Slice" and node.inputs[0] is value:
        numbers = [constant_tensor(one) for one in node.inputs[1:]]
        return [None if one is None else one.numpy().tolist() for one in numbers[:3]] == [[0], [1], [1]]
    return False
