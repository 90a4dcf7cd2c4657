"""A test case with stored outputs: a one-node model, its inputs, and the tolerance."""

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

    Args:
        calls: inputs of the session's calls, in order.
        rows: if set, the only call is repeated with the first n rows of the inputs named in `sliced`, for each n in
            ascending order. The output for n rows must equal the first n rows of the largest output, exactly or within
            the bound.
        exact: outputs that must have the bits stored for the instruction set: "y" in all calls, or "call 1: y" in one
            call.
        error: returns the largest error of the other outputs, as a number or an array of their shape (for all rows).
            Two outputs may differ by twice this. None: no bound.
        scalar_error: if set, y of the scalar kernel may differ by this from its stored value, because its last bits
            depend on the C library.
        carried: maps outputs to the inputs of the next call that get them.
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
        """Map the name of each constant of the model to its digest."""
        return {tensor.name: digest(numpy_helper.to_array(tensor)) for tensor in self.model.graph.initializer}

    def outputs(self, threads: int) -> Iterator[tuple[str, str, np.ndarray]]:
        """Yield the label, output name and array for each call or number of rows."""
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
        """Return the label of the call whose stored samples also cover this call."""
        return f"{self.rows[-1]} rows" if self.rows else label


def digest(*arrays: np.ndarray) -> str:
    """Return a digest of types, shapes and bytes; all NaNs count as equal."""
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
    """Return a model of one node.

    constants: uint16 arrays are bfloat16 bits. outputs: maps names to types; None: a float y.
    """
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
