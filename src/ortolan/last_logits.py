"""keep_last_logits: a decoder that computes only the logits of the last token, which is enough to generate."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.model_file import check_output, load_model, move_into_place, write_model
from ortolan.graph_passes.files.work_folder import work_folder
from ortolan.graph_passes.find.head import LOGITS, select_rows

from .progress import Progress, Stage, no_progress, told


def keep_last_logits(
    model: str | os.PathLike[str], output: str | os.PathLike[str], *, progress: Progress | None = None
) -> None:
    """Write a decoder that returns logits [batch, 1, vocabulary], those of the last token of each row.

    Only training and scoring need the other logits of a prompt, and the head is a large part of a small model. Call
    this function on the result of `optimize_onnx`. In the other order, `optimize_onnx` verifies only the last token and
    refuses a perplexity limit with calibration data. If rows of unequal lengths are run together, padding must come
    first.

    Args:
        model: An ONNX file whose output "logits" is float [batch, tokens, vocabulary].
        output: The file to write. Weights of 8 MiB and more are written to `<output>.data`.
        progress: As for `optimize_onnx`.

    Raises:
        ArgumentTypeError: The model or the output is not a path.
        ModelError: The head is not found.
        OutputError: The output cannot be written.
    """
    source = load_model(model)
    target = Path(output)
    check_output(target, source)
    _keep_last(source.model, source.name)
    with told(progress or no_progress) as tell, work_folder(target) as folder:
        written = folder / target.name
        write_model(source.model, written, lambda done, total: tell(Stage.WRITE, done, total))
        move_into_place(written, target)


def _keep_last(model: ir.Model, name: str) -> None:
    # Slice [-1:] of axis 1: the last token.
    bounds = {"start": [-1], "end": [np.iinfo(np.int64).max], "axis": [1]}

    def last(hidden: ir.Value) -> ir.Node:
        given = [_constant(model.graph, f"{LOGITS}/last/{key}", bound) for key, bound in bounds.items()]
        node = ir.node("Slice", [hidden, *given], name=f"{LOGITS}/last", num_outputs=1)
        node.outputs[0].name, node.outputs[0].type = f"{LOGITS}/last", hidden.type
        return node

    select_rows(model, name, last, 1)


def _constant(graph: ir.Graph, name: str, values: list[int]) -> ir.Value:
    tensor = ir.Tensor(np.array(values, np.int64), name=name)
    value = ir.Value(name=name, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape([1]), const_value=tensor)
    graph.register_initializer(value)
    return value
