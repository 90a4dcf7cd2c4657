"""Finds the head of a decoder: the matrix product that computes the logits."""

from __future__ import annotations

from collections.abc import Callable

import onnx_ir as ir

from ortolan.errors import ModelError

from ..names import ORTOLAN_DOMAIN

LOGITS = "logits"
_HEADS = {
    "": ("MatMul",),
    "com.microsoft": ("MatMulNBits", "MatMulBnb4"),
    ORTOLAN_DOMAIN: ("W8A8MatMul", "W4A8MatMul", "SparseAMXMatMul", "VNNISpMM", "MaskedMatMul"),
}
# Operators after the head that compute each row alone, if all inputs but one are constants with one value or one row.
_BY_ROW = ("Identity", "Cast", "Add", "Sub", "Mul", "Div", "Tanh")


def select_rows(model: ir.Model, name: str, select: Callable[[ir.Value], ir.Node], rows: int | ir.SymbolicDim) -> None:
    """Let the head compute the logits of some tokens only.

    Args:
        model: A decoder whose output "logits" is float [batch, tokens, vocabulary]. It is changed.
        name: The model's name in error messages.
        select: Makes the node that returns some tokens, [batch, rows, width], of the head's input, [batch, tokens,
            width].
        rows: The number of tokens that `select` returns.

    Raises:
        ModelError: The head is not found, or another node reads its output.
    """
    graph = model.graph
    logits = find_logits(graph, name)
    head, values = find_head(logits, name)
    hidden = head.inputs[0]
    if hidden is None or _constant_of(hidden) is not None or (hidden.shape is not None and len(hidden.shape) != 3):
        found = "missing" if hidden is None else f"{hidden.name!r} of shape {hidden.shape}"
        raise ModelError(
            f"the first input of {name}'s head {head.name!r} is {found}, expected [batch, tokens, width]; export the "
            "model with its head behind the last layer"
        )
    _require_unread(graph, head, values, name)
    node = select(hidden)
    graph.insert_before(head, node)
    head.replace_input_with(0, node.outputs[0])
    for value in values:  # the inferred shapes are no longer right
        value.shape = None if value.shape is None else ir.Shape([value.shape[0], rows, *value.shape[2:]])


def find_logits(graph: ir.Graph, name: str) -> ir.Value:
    """Return the output "logits". Raises ModelError if it is missing or not [batch, tokens, vocabulary]."""
    logits = next((value for value in graph.outputs if value.name == LOGITS), None)
    if logits is None or logits.shape is None or len(logits.shape) != 3:
        outputs = ", ".join(f"{value.name} {value.shape}" for value in graph.outputs[:5])
        raise ModelError(
            f"{name} has outputs {outputs}, expected one 'logits' of shape [batch, tokens, vocabulary]; "
            "export a decoder"
        )
    if logits.shape[1] == 1:
        raise ModelError(f"{name} already returns the logits of one token: 'logits' has shape {logits.shape}")
    return logits


def _require_unread(graph: ir.Graph, head: ir.Node, values: list[ir.Value], name: str) -> None:
    """Raise ModelError if a value that will have only one token is read by another node, or is an output."""
    follower: ir.Node | None = None
    for value in values:
        others = [use.node for use in value.uses() if use.node is not follower]
        if others or (follower is not None and value in graph.outputs):
            reader = f"node {others[0].name!r}, a {others[0].op_type}, reads it" if others else "it is an output"
            raise ModelError(
                f"{value.name!r} of {name} cannot be cut to the last token: {reader}; expected only 'logits' to depend "
                "on the head"
            )
        follower = value.producer()
    for given in head.inputs[1:]:
        if given is not None and _constant_of(given) is None and len(given.shape or ()) == 3:
            raise ModelError(
                f"input {given.name!r} of {name}'s head {head.name!r} has a row for each token, which cannot be cut; "
                "give the model from before its layers were fused"
            )


def find_head(logits: ir.Value, name: str) -> tuple[ir.Node, list[ir.Value]]:
    """Return the head, and the values from the logits back to its output, which are computed row by row."""
    values = [logits]
    while (node := values[-1].producer()) is not None and node.op_type not in _HEADS.get(node.domain, ()):
        row = _only_row(node)
        if row is None:
            break
        values.append(row)
    if node is None or node.op_type not in _HEADS.get(node.domain, ()):
        found = "an input of the graph" if node is None else f"node {node.name!r}, a {node.op_type}"
        raise ModelError(
            f"'logits' of {name} come from {found}, expected a matrix product with the head's weights; export the "
            "model in floats, or with quantized weights as MatMulNBits"
        )
    return node, values


def _only_row(node: ir.Node) -> ir.Value | None:
    """Return the only input that differs between tokens, if the node computes each row alone; else None."""
    if node.domain != "" or node.op_type not in _BY_ROW:
        return None
    rows = [value for value in node.inputs if value is not None and _constant_of(value) is None]
    constants = (None if value is None else _constant_of(value) for value in node.inputs)
    alike = all(size == 1 for one in constants if one is not None for size in one.shape[:-1])
    return rows[0] if alike and len(rows) == 1 else None


def _constant_of(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the tensor of an initializer or of a dense Constant node, else None."""
    try:
        return ir.convenience.get_const_tensor(value)
    except ValueError:
        return None
