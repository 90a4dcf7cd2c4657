"""Read rows of a word table from the packed head that shares its weight, so that the weight is stored once.

ONNX Runtime GenAI's model builder shares the weight: GatherBlockQuantized reads rows of the weight of MatMulNBits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ...find.constants import constant_tensor, constant_values
from ...find.linear import Linear
from ...find.node_checks import MICROSOFT_DOMAIN, integer_attribute, node_input
from ...find.stored_int4 import is_matmul_nbits
from ...operators import w4a8_matmul_function as w4a8
from ...operators import w8a8_matmul_function as w8a8
from ...operators.embedding import StoredEmbedding
from ...operators.nodes import input_of, nodes_of
from ...operators.w4a8_matmul import quantization_of
from ..context import PassContext

_LOOKUP = "GatherBlockQuantized"
_DEFAULT_BLOCK = 128


@dataclass(frozen=True)
class SharedTable:
    """A head whose weight is also read by lookups of the main graph, found before the head is replaced."""

    head: Linear
    lookups: list[ir.Node]
    bits: int


def find_shared_tables(model: ir.Model, linears: Sequence[Linear]) -> list[SharedTable]:
    """Return the MatMulNBits layers whose integers, scales and zero points GatherBlockQuantized reads."""
    lookups = [
        node
        for node in model.graph
        if node.domain == MICROSOFT_DOMAIN and node.op_type == _LOOKUP and len(node.inputs) > 2
    ]
    found = []
    for linear in linears if lookups else ():
        if not is_matmul_nbits(linear.node) or linear.node.graph is not model.graph:
            continue
        own = [node for node in lookups if _reads_weight_of(node, linear)]
        if own:
            found.append(SharedTable(linear, own, integer_attribute(linear.node, "bits", 4)))
    return found


def _reads_weight_of(lookup: ir.Node, linear: Linear) -> bool:
    head, table = linear.node, constant_tensor(lookup.inputs[0])
    for name, default in (("gather_axis", 0), ("quantize_axis", 1)):
        if integer_attribute(lookup, name, default) != default:
            return False
    sizes = [(integer_attribute(lookup, "bits", 4), integer_attribute(lookup, "block_size", _DEFAULT_BLOCK))]
    sizes.append((integer_attribute(head, "bits", 4), integer_attribute(head, "block_size", 0)))
    if sizes[0] != sizes[1] or table is None or table.dtype != ir.DataType.UINT8:
        return False
    if list(table.shape.numpy()) != [linear.n, linear.k * sizes[0][0] // 8]:
        return False
    pairs = ((0, 1), (2, 2), (3, 3))  # integers, scales and zero points: input of the lookup, and of the head
    return all(_same(node_input(lookup, one), node_input(head, other)) for one, other in pairs)


def _same(one: ir.Value | None, other: ir.Value | None) -> bool:
    """Return True if two constants come from the same initializer, perhaps with another shape."""
    if one is None or other is None:
        return one is other
    roots = [{value for value in constant_values(value) if value.is_initializer()} for value in (one, other)]
    first, second = constant_tensor(one), constant_tensor(other)
    if first is None or second is None or not roots[0] & roots[1] or first.dtype != second.dtype:
        return False
    return first.size == second.size and np.array_equal(first.numpy().reshape(-1), second.numpy().reshape(-1))


def read_shared_tables(model: ir.Model, context: PassContext, op_type: str, tables: Sequence[SharedTable]) -> None:
    """Make lookups read the packed weight of their head, if it became W4A8MatMul or W8A8MatMul."""
    packed = {node.name: node for node in nodes_of(model, op_type) if node.graph is model.graph}
    for table in tables:
        head = packed.get(table.head.name)
        if head is None or op_type not in (w4a8.OP_TYPE, w8a8.OP_TYPE):
            continue
        inputs = w4a8.INPUTS if op_type == w4a8.OP_TYPE else w8a8.INPUTS
        constants = {name: value for name in inputs[1:] if (value := input_of(head, inputs, name)) is not None}
        name = table.lookups[0].name or ""
        stored = StoredEmbedding(
            name=name,
            rows=table.head.n,
            width=table.head.k,
            bits=table.bits,
            group_size=head.attributes["group_size"].as_int(),
            dtype=table.head.dtype,
            q=constants["weights"],
            scales=constants["scales"],
            zero_points=None,
            as_bf16=b"",
        )
        stored.add_lookups(table.lookups)

        def new_name(wanted: str) -> str:
            return context.new_name(model, wanted)

        if op_type == w8a8.OP_TYPE:
            stored.read_groups(constants["weights"], constants["scales"], model.graph, new_name)
        else:
            stored.read_few_bits(constants, quantization_of(head), model.graph, new_name)
        context.note(f"word embedding {name!r} is read from the weight of {head.name!r}, its tied head")
