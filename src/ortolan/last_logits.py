"""keep_last_logits: a decoder that computes the logits of the last token alone, as hosts of prompts need them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.model_file import check_output, load_model, move_into_place, write_model
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.names import ORTOLAN_DOMAIN

from .errors import ModelError
from .progress import Progress, Stage, no_progress, told

_LOGITS = "logits"
_HEADS = {
    "": ("MatMul",),
    "com.microsoft": ("MatMulNBits", "MatMulBnb4"),
    ORTOLAN_DOMAIN: ("W8A8MatMul", "W4A8MatMul", "SparseAMXMatMul", "VNNISpMM", "MaskedMatMul"),
}
# Behind the head, of which each row is computed by itself where all other inputs are constants of one number or row.
_BY_ROW = ("Identity", "Cast", "Add", "Sub", "Mul", "Div", "Tanh")


def keep_last_logits(
    model: str | os.PathLike[str], output: str | os.PathLike[str], *, progress: Progress | None = None
) -> None:
    """Writes the decoder with logits [batch, 1, vocabulary]: those of the last token of each row of the call.

    A prompt's other logits are what only training and scoring read, and the head is a large part of a small model. Give
    the result to optimize_onnx, whose checks then compare these logits; or the result of optimize_onnx. Where rows of
    unequal lengths are run together, padding must stand in front.

    model: an ONNX file whose output "logits" is float [batch, tokens, vocabulary].
    output: the file to write; weights of 8 MiB and more go to `<output>.data`.
    progress: as optimize_onnx takes it.

    Raises ModelError where the head is not found, and OutputError.
    """
    source = load_model(model)
    target = Path(output)
    check_output(target, source)
    _slice_head(source.model, source.name)
    with told(progress or no_progress) as tell, work_folder(target) as folder:
        written = folder / target.name
        write_model(source.model, written, lambda done, total: tell(Stage.WRITE, done, total))
        move_into_place(written, target)


def _slice_head(model: ir.Model, name: str) -> None:
    graph = model.graph
    logits = next((value for value in graph.outputs if value.name == _LOGITS), None)
    if logits is None or logits.shape is None or len(logits.shape) != 3:
        outputs = ", ".join(f"{value.name} {value.shape}" for value in graph.outputs[:5])
        raise ModelError(
            f"{name} has outputs {outputs}, expected one 'logits' of shape [batch, tokens, vocabulary]; "
            "export a decoder"
        )
    if logits.shape[1] == 1:
        raise ModelError(f"{name} gives the logits of one token already: 'logits' has shape {logits.shape}")
    head = _head_of(logits, name)
    hidden = head.inputs[0]
    if hidden is None or hidden.const_value is not None or (hidden.shape is not None and len(hidden.shape) != 3):
        found = "nothing" if hidden is None else f"{hidden.name!r} of shape {hidden.shape}"
        raise ModelError(
            f"the first input of {name}'s head {head.name!r} is {found}, expected its inputs [batch, tokens, width]; "
            "export the model with its head behind the last layer"
        )
    _require_unread(graph, head, logits, name)
    # The last token: from -1 on to the largest number, of axis 1.
    bounds = {"start": [-1], "end": [np.iinfo(np.int64).max], "axis": [1]}
    values = [_constant(graph, f"{_LOGITS}/last/{key}", numbers) for key, numbers in bounds.items()]
    last = ir.node("Slice", [hidden, *values], name=f"{_LOGITS}/last", num_outputs=1)
    last.outputs[0].name, last.outputs[0].type = f"{_LOGITS}/last", hidden.type
    graph.insert_before(head, last)
    head.replace_input_with(0, last.outputs[0])
    value: ir.Value | None = logits
    while value is not None:  # what shape inference has found of them is no longer so
        value.shape = None if value.shape is None else ir.Shape([value.shape[0], 1, *value.shape[2:]])
        node = value.producer()
        value = None if node is None or node is head else node.inputs[0]


def _require_unread(graph: ir.Graph, head: ir.Node, logits: ir.Value, name: str) -> None:
    """Raises ModelError where anything else reads what would become that of one token."""
    value: ir.Value = logits
    while True:
        uses = [use.node for use in value.uses()]
        others = uses if value is logits else uses[1:]
        if others or (value is not logits and value in graph.outputs):
            reader = f"node {others[0].name!r}, a {others[0].op_type}, reads it" if others else "it is an output"
            raise ModelError(
                f"{value.name!r} of {name} cannot be that of the last token alone: {reader}; expected 'logits' alone "
                "to come from the head"
            )
        node = value.producer()
        assert node is not None
        if node is head:
            break
        assert node.inputs[0] is not None
        value = node.inputs[0]
    for given in head.inputs[1:]:
        if given is not None and given.const_value is None and len(given.shape or ()) == 3:
            raise ModelError(
                f"input {given.name!r} of {name}'s head {head.name!r} has a row for each token, expected none; "
                "give the model as it was before its layers were joined"
            )


def _head_of(logits: ir.Value, name: str) -> ir.Node:
    node = logits.producer()
    while node is not None and node.op_type not in _HEADS.get(node.domain, ()):
        others = [value for value in node.inputs[1:] if value is not None]
        by_row = node.domain == "" and node.op_type in _BY_ROW and all(map(_is_row, others))
        if not by_row:
            break
        first = node.inputs[0]
        node = None if first is None else first.producer()
    if node is None or node.op_type not in _HEADS.get(node.domain, ()):
        found = "an input of the graph" if node is None else f"node {node.name!r}, a {node.op_type}"
        raise ModelError(
            f"'logits' of {name} come from {found}, expected a matrix product with the head's weights; export the "
            "model in floats, or with weights of few bits as MatMulNBits"
        )
    return node


def _is_row(value: ir.Value) -> bool:
    """Whether it is a constant that is the same for each token."""
    if value.const_value is None:
        return False
    return all(size == 1 for size in value.const_value.shape[:-1])


def _constant(graph: ir.Graph, name: str, numbers: list[int]) -> ir.Value:
    tensor = ir.Tensor(np.array(numbers, np.int64), name=name)
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]), const_value=tensor)
    graph.register_initializer(value)
    return value
