"""A case: a model of one node, its inputs, and the tolerance against the stored answers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

import ortolan

Arrays = dict[str, np.ndarray]

THREADS = (1, 2)
ROWS = (1, 2, 3, 5, 16, 17, 70, 300)


@dataclass(frozen=True)
class Case:
    """A model, its inputs and the tolerance of its outputs.

    calls: Inputs of the session, one call after another.
    rows: If given, one call is repeated with only the first n rows of the inputs `sliced`, for each n, ascending.
        The answer for fewer rows is that for the first rows of more, exactly or within the bound.
    exact: Outputs that must have the bits stored for the instruction set: "y" in all calls, or "call 1: y" in one.
    error: Largest error of the other outputs, as an array of their shape (for all rows) or a number. Two answers differ
        by at most twice this. None: no bound.
    scalar_error: If given, y of the scalar kernel may differ within this error from its stored answer, because its last
        bits depend on the C library.
    carried: Outputs that are inputs of the next call.
    """

    name: str
    model: onnx.ModelProto
    calls: Sequence[Arrays]
    exact: frozenset[str] = frozenset({"y"})
    error: Callable[[], np.ndarray | float] | None = None
    rows: tuple[int, ...] = ()
    sliced: tuple[str, ...] = ("x",)
    carried: Mapping[str, str] = field(default_factory=dict)
    scalar_error: float | None = None

    def inputs_hash(self) -> str:
        return digest(*(call[name] for call in self.calls for name in sorted(call)))

    def tensor_hashes(self) -> dict[str, str]:
        """Return digests of the model's packed constants."""
        return {tensor.name: digest(numpy_helper.to_array(tensor)) for tensor in self.model.graph.initializer}

    def outputs(self, threads: int) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield a label, the output's name and the array of each call or number of rows."""
        session = new_session(self.model, threads)
        names = [output.name for output in session.get_outputs()]
        carried: Arrays = {}
        for label, feeds in self._labelled_calls():
            found = dict(zip(names, session.run(None, feeds | carried), strict=True))
            carried = {self.carried[name]: array for name, array in found.items() if name in self.carried}
            for name, array in found.items():
                yield label, name, array

    def _labelled_calls(self) -> Iterator[tuple[str, Arrays]]:
        if not self.rows:
            for i, call in enumerate(self.calls):
                yield f"call {i}", call
            return
        (call,) = self.calls
        for rows in self.rows:
            yield f"{rows} rows", {name: a[:rows] if name in self.sliced else a for name, a in call.items()}

    def is_exact(self, label: str, name: str) -> bool:
        return name in self.exact or f"{label}: {name}" in self.exact

    def sampled_label(self, label: str) -> str:
        """Return the label of the call whose answer contains this one's."""
        return f"{self.rows[-1]} rows" if self.rows else label


def digest(*arrays: np.ndarray) -> str:
    """Digest types, shapes and bytes; all NaNs count as equal."""
    total = hashlib.sha256()
    for a in arrays:
        if a.dtype.kind == "f":
            a = np.where(np.isnan(a), np.array(np.nan, a.dtype), a)
        total.update(f"{a.dtype}{a.shape}".encode() + np.ascontiguousarray(a).tobytes())
    return total.hexdigest()[:16]


def new_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    ortolan.register(options)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def one_node(
    op_type: str,
    inputs: Sequence[str],
    constants: Arrays,
    feeds: Arrays,
    outputs: Mapping[str, int] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one node. constants: uint16 means bfloat16. outputs: Their types; None: y, float."""
    types = {name: helper.np_dtype_to_tensor_dtype(array.dtype) for name, array in feeds.items()}
    node = helper.make_node(op_type, inputs, list(outputs or {"y": 0}), "node", domain="ai.ortolan", **attributes)
    graph = helper.make_graph(
        [node],
        "single",
        [helper.make_tensor_value_info(name, types[name], None) for name in inputs if name in feeds],
        [
            helper.make_tensor_value_info(name, kind, None)
            for name, kind in (outputs or {"y": TensorProto.FLOAT}).items()
        ],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in constants.items() if name in inputs],
    )
    return helper.make_model(
        graph, ir_version=8, opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid("ai.ortolan", 1)]
    )


def bfloat16(bits: np.ndarray) -> np.ndarray:
    return bits.view(ml_dtypes.bfloat16)
