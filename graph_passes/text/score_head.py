"""Reduces the head of a decoder that judges pairs of texts to the score of a reranker."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, listing

from ..find.constants import constant_tensor, remove_unused
from ..find.head import LOGITS, find_head, find_logits, select_rows
from .nodes import Nodes


def keep_score(model: ir.Model, name: str, true: int, false: int | None) -> None:
    """Let a decoder return one score for each sequence, float32 [batch, 1], as its output "logits".

    The score is the logit of token `true`, minus that of token `false` if it is given, for the last token that
    attention_mask does not mask. The head keeps only these columns.

    Args:
        model: A decoder without a cache whose output "logits" is float [batch, tokens, vocabulary]. It is changed.
        name: The model's name in error messages.
        true: A token.
        false: A token, or None.

    Raises:
        ModelError: The head is not found, has no float weights, or another node reads its output.
    """
    graph = model.graph
    logits = find_logits(graph, name)
    mask = next((value for value in graph.inputs if value.name == "attention_mask"), None)
    if mask is None or any((value.name or "").startswith("past_key_values") for value in graph.inputs):
        raise ModelError(
            f"{name} has inputs {listing(value.name or '' for value in graph.inputs)}, expected attention_mask and no "
            "cache; export it without a cache (optimum-cli export onnx --task text-generation)"
        )
    tokens = [true] if false is None else [true, false]
    head, values = find_head(logits, name)
    _keep_columns(graph, head, values, tokens, name)
    nodes = Nodes(model.opset_imports[""], "/score")
    last = _last_token(nodes, mask)

    def select(hidden: ir.Value) -> ir.Node:
        kept = nodes.op("GatherND", hidden, last, batch_dims=1)
        kept.type = hidden.type
        made = nodes.nodes
        graph.insert_before(head, made[:-1])
        return made[-1]

    select_rows(model, name, select, 1)
    after = Nodes(model.opset_imports[""], "/score/logits")
    score = logits
    if false is not None:
        score = after.op("Sub", *after.many("Split", 2, logits, after.ints(1, 1), axis=2))
    score = after.op("Squeeze", score, after.ints(1))
    graph.extend(after.nodes)
    logits.name, score.name = f"{LOGITS}/of_tokens", LOGITS
    batch = None if logits.shape is None else logits.shape[0]
    logits.shape = None
    score.type, score.shape = logits.type, ir.Shape([batch, 1])
    graph.outputs[list(graph.outputs).index(logits)] = score


def _last_token(nodes: Nodes, mask: ir.Value) -> ir.Value:
    """Return the position of the last unmasked token, int64 [batch, 1, 1]; 0 if all are masked."""
    length = nodes.op("Slice", nodes.op("Shape", mask), nodes.ints(1), nodes.ints(2))
    seen = nodes.cast(nodes.cast(mask, ir.DataType.BOOL), ir.DataType.INT64)
    last = nodes.op("ArgMax", nodes.op("Mul", seen, nodes.count_to(length)), axis=1, keepdims=1)
    return nodes.op("Unsqueeze", last, nodes.ints(2))


def _keep_columns(graph: ir.Graph, head: ir.Node, values: Sequence[ir.Value], tokens: Sequence[int], name: str) -> None:
    """Keep the columns of these tokens in the head's weight, and in the constants of the operators after it."""
    weight = head.inputs[1]
    node = None if weight is None else weight.producer()
    is_turned = node is not None and node.op_type == "Transpose" and node.domain == ""
    table = None if weight is None else constant_tensor(node.inputs[0] if is_turned and node is not None else weight)
    if head.op_type != "MatMul" or table is None or len(table.shape) != 2:
        raise ModelError(
            f"the head {head.name!r} of {name} is not a MatMul with a float weight; export the model in floats"
        )
    columns = table.numpy().T if is_turned else table.numpy()
    if max(tokens) >= columns.shape[1]:
        raise ModelError(f"the head of {name} has {columns.shape[1]} tokens, expected token {max(tokens)} among them")
    width = columns.shape[1]
    kept: list[tuple[ir.Node, int, np.ndarray]] = [(head, 1, columns[:, tokens])]
    for value in values:
        follower = value.producer()
        if follower is None or follower is head:
            continue
        for index, given in enumerate(follower.inputs):
            constant = None if given is None else constant_tensor(given)
            if constant is not None and constant.shape and constant.shape[-1] == width:
                kept.append((follower, index, constant.numpy()[..., tokens]))
    for follower, index, array in kept:
        old = follower.inputs[index]
        tensor = ir.Tensor(np.ascontiguousarray(array), name=f"{LOGITS}/kept/{follower.name}_{index}")
        value = ir.Value(
            name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape), const_value=tensor
        )
        graph.register_initializer(value)
        follower.replace_input_with(index, value)
        assert old is not None
        remove_unused(old)
    for value in values:
        value.shape = None if value.shape is None else ir.Shape([*value.shape[:-1], len(tokens)])
