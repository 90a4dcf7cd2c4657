"""Reads inputs and attributes of a node after checking their types and shapes, because a model is untrusted."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor

MICROSOFT_DOMAIN = "com.microsoft"


class UnfitError(Exception):
    """A node cannot be read or rewritten; the message becomes the reason in the report."""


def is_op(node: ir.Node, *op_types: str) -> bool:
    """Return whether a node is a standard operator of one of these types."""
    return node.op_type in op_types and node.domain in DEFAULT_DOMAINS


def node_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or None if it is missing."""
    return node.inputs[index] if index < len(node.inputs) else None


def makers(value: ir.Value, through: tuple[str, ...]) -> Iterator[ir.Node]:
    """Yield the node that computes a value, then the producers of first inputs, as long as types are in `through`."""
    node, seen = value.producer(), set[ir.Node]()
    while node is not None and node not in seen:  # a malformed model may contain cycles
        yield node
        seen.add(node)
        if node.op_type not in through or node.domain not in DEFAULT_DOMAINS:
            return
        source = node_input(node, 0)
        node = source.producer() if source is not None else None


def integer_attribute(node: ir.Node, name: str, default: int | None = None) -> int:
    """Return an integer attribute; without a default, a missing attribute raises UnfitError."""
    attr = node.attributes.get(name)
    if attr is None:
        if default is None:
            raise UnfitError(f"its attribute {name!r} is missing")
        return default
    expect(attr.type == ir.AttributeType.INT and not attr.is_ref(), f"its attribute {name!r} is not an integer")
    return attr.as_int()


def constant_input(
    node: ir.Node, index: int, what: str, types: tuple[ir.DataType, ...], *shapes: tuple[int, ...]
) -> ir.TensorProtocol:
    """Return the constant input of a node after checking that it has one of the types and shapes; no shapes: any."""
    value = node_input(node, index)
    if value is None:
        raise UnfitError(f"its input {what} is missing")
    tensor = constant_tensor(value)
    if tensor is None:
        raise UnfitError(f"its {what} {value.name!r} are not constant; export the model with constant {what}")
    expected = " or ".join(dtype.name for dtype in types)
    expect(tensor.dtype in types, f"its {what} {value.name!r} are {tensor.dtype.name}, expected {expected}")
    shape = tuple(tensor.shape.numpy())
    expected = " or ".join(str(list(one)) for one in shapes)
    expect(not shapes or shape in shapes, f"its {what} {value.name!r} have shape {list(shape)}, expected {expected}")
    return tensor


def expect(holds: bool, reason: str) -> None:
    """Raise UnfitError with the reason unless `holds`."""
    if not holds:
        raise UnfitError(reason)
