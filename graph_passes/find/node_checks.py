"""Reads what a node is made of, checking types and shapes first: a model is untrusted."""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from .constants import DEFAULT_DOMAINS, constant_tensor

MICROSOFT_DOMAIN = "com.microsoft"


class UnfitError(Exception):
    """The reason why a node's weights cannot be kept. Readers catch it; its text goes into the report."""


def node_input(node: ir.Node, index: int) -> ir.Value | None:
    """Return an input, or None if it is missing."""
    return node.inputs[index] if index < len(node.inputs) else None


def makers(value: ir.Value, through: tuple[str, ...]) -> Iterator[ir.Node]:
    """The node that makes a value, and while it is a standard one of these types, what makes its first input."""
    node, seen = value.producer(), set[ir.Node]()
    while node is not None and node not in seen:  # in a malformed model, values may be made of themselves
        yield node
        seen.add(node)
        if node.op_type not in through or node.domain not in DEFAULT_DOMAINS:
            return
        source = node_input(node, 0)
        node = source.producer() if source is not None else None


def integer_attribute(node: ir.Node, name: str, default: int | None = None) -> int:
    """The node's attribute; without a default, it must be there."""
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
    """The constant that is this input of the node, of one of the types and shapes. No shapes: any."""
    value = node_input(node, index)
    if value is None:
        raise UnfitError(f"its input {what} is missing")
    tensor = constant_tensor(value)
    if tensor is None:
        raise UnfitError(f"its {what} {value.name!r} are not constant; export the model with them inside")
    expected = " or ".join(dtype.name for dtype in types)
    expect(tensor.dtype in types, f"its {what} {value.name!r} are {tensor.dtype.name}, expected {expected}")
    shape = tuple(tensor.shape.numpy())
    expected = " or ".join(str(list(one)) for one in shapes)
    expect(not shapes or shape in shapes, f"its {what} {value.name!r} have shape {list(shape)}, expected {expected}")
    return tensor


def expect(holds: bool, reason: str) -> None:
    """Raise UnfitError unless a condition holds."""
    if not holds:
        raise UnfitError(reason)
