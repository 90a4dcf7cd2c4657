"""Finds out which keys a mask lets a decoder's tokens see, by computing it."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx
import onnx_ir as ir

from ortolan.errors import ModelError

from ..find.constants import opset_of
from ..measure.sessions import open_quietly, run_session

# Scores with less than this added count as hidden: exports add the lowest float, -inf, -1e4 or a similar number.
_HIDDEN = -1e3
_LONGEST = 1 << 16  # tokens with which windows are looked for, if the model has no limit
# (past tokens, tokens of the call) for which a mask must be causal.
_CALLS = ((0, 1), (0, 7), (5, 1), (11, 6))


def read_window(mask: ir.Value, name: str, context: int | None, is_causal: bool = False) -> int:
    """Return the number of latest keys that a token sees, its own included; 0: all.

    Args:
        mask: The value that attention adds to its scores, computed from the inputs of a decoder with a cache.
        name: The model's name in error messages.
        context: The most tokens of a sequence; None: unknown.
        is_causal: The attention hides later tokens itself.

    Raises:
        ModelError: The mask is not causal, with or without a window.
    """
    run = _Mask(mask, name)
    longest = (context or _LONGEST) - 1
    seen = int(run.rows(longest, 1).sum())
    window = 0 if seen == longest + 1 else seen
    for past, tokens in (*_CALLS, (longest, 1), (max(window - 2, 0), 5)):
        query, key = np.arange(past, past + tokens)[:, None], np.arange(past + tokens)
        expected = (key <= query) & ((key > query - window) | (window == 0))
        seen_keys = run.rows(past, tokens) & (key <= query) if is_causal else run.rows(past, tokens)
        if not np.array_equal(seen_keys, expected):
            raise ModelError(
                f"mask {mask.name!r} of {name} is not causal for {tokens} tokens after {past}: expected each token to "
                "see itself and the tokens before it, with or without a window; such a model cannot be served"
            )
    return window


class _Mask:
    """The nodes that compute a mask, as a model of their own."""

    def __init__(self, mask: ir.Value, name: str) -> None:
        graph = mask.graph
        assert isinstance(graph, ir.Graph)
        nodes, values = _sources(mask)
        self._inputs = [value for value in graph.inputs if value in values and not value.is_initializer()]
        initializers = [value.const_value for value in graph.initializers.values() if value in values]
        proto = onnx.helper.make_graph(
            [ir.to_proto(node) for node in graph if node in nodes],
            "mask",
            [ir.to_proto(value) for value in self._inputs],
            [onnx.helper.make_tensor_value_info(str(mask.name), mask.dtype or ir.DataType.FLOAT, None)],
            [ir.to_proto(tensor) for tensor in initializers if tensor is not None],
        )
        opsets = [onnx.helper.make_opsetid(domain, version) for domain, version in _opsets(graph)]
        model = onnx.helper.make_model(proto, opset_imports=opsets, ir_version=8)
        self._session, self._name = open_quietly(model.SerializeToString(), library=True), name

    def rows(self, past: int, tokens: int) -> np.ndarray:
        """Return whether each token of a call sees each key, bool [tokens, past + tokens]."""
        feeds = {value.name or "": self._feed(value, past, tokens) for value in self._inputs}
        (found,) = run_session(self._session, feeds, f"the mask of {self._name}", ModelError)
        assert found is not None
        shape = (1, 1, tokens, past + tokens)
        try:
            seen = np.broadcast_to(found > _HIDDEN, np.broadcast_shapes(found.shape, shape))
        except ValueError:
            raise ModelError(
                f"the mask of {self._name} has shape {list(found.shape)} for {tokens} tokens after {past}, expected "
                f"{list(shape)}"
            ) from None
        heads = seen.reshape(-1, *shape[2:])
        if (heads != heads[0]).any():
            raise ModelError(f"the mask of {self._name} differs between heads, expected one mask for all heads")
        return np.asarray(heads[0])

    def _feed(self, value: ir.Value, past: int, tokens: int) -> np.ndarray:
        if value.name == "input_ids":
            return np.zeros((1, tokens), np.int64)
        if value.name == "attention_mask":
            return np.ones((1, past + tokens), np.int64)
        if value.name == "position_ids":
            return np.arange(past, past + tokens, dtype=np.int64)[None]
        sizes = [dim if isinstance(dim, int) else None for dim in value.shape or ()]
        if len(sizes) != 4 or not sizes[1] or not sizes[3]:
            raise ModelError(
                f"the mask of {self._name} depends on input {value.name!r} of shape {value.shape}, expected input_ids, "
                "attention_mask, position_ids or a cache [batch, heads, tokens, head size]"
            )
        return np.zeros((1, sizes[1], past, sizes[3]), (value.dtype or ir.DataType.FLOAT).numpy())


def _sources(value: ir.Value) -> tuple[set[ir.Node], set[ir.Value]]:
    """Return the nodes and values that a value is computed from, itself included."""
    nodes: set[ir.Node] = set()
    values: set[ir.Value] = set()
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if one in values:
            continue
        values.add(one)
        if (node := one.producer()) is not None:
            nodes.add(node)
            waiting += [source for source in node.inputs if source is not None]
    return nodes, values


def _opsets(graph: ir.Graph) -> Iterator[tuple[str, int]]:
    yield "", opset_of(graph)
    yield from ((domain, version) for domain, version in graph.opset_imports.items() if domain)
