"""Copies of a linear layer with separate weights that together exceed all caches, for benchmarks with cold weights."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import ml_dtypes
import numpy as np
import onnxruntime as ort
from onnx import StringStringEntryProto, TensorProto, helper, numpy_helper

from ortolan.graph_passes.measure.timing import copies_to_stay_cold

from ..session import register

Run = Callable[[], object]
Bind = Callable[[np.ndarray], Run]

_ALIGNMENT = 64
# ORT requires that constants of up to this size are inside the model.
_INLINE_BYTES = 128
_FLOATS = (np.float32, np.float32)


@dataclass(frozen=True)
class TimedLayer:
    """One way to compute a linear layer: `copies` layers, each with `stored_bytes` of weights.

    open(threads) prepares it for all inputs. It returns a function of x [m, k], which returns the call to time. The
    call runs all copies on x.
    """

    copies: int
    stored_bytes: int
    open: Callable[[int], Bind]


@dataclass(frozen=True)
class Node:
    """An operator, y = op_type(x, *constants). A constant None is a missing input."""

    op_type: str
    constants: Sequence[np.ndarray | None]
    domain: str = ""
    attributes: Mapping[str, Any] = field(default_factory=dict)

    @property
    def arrays(self) -> list[np.ndarray]:
        """The constants that are present."""
        return [constant for constant in self.constants if constant is not None]

    @property
    def stored_bytes(self) -> int:
        """Bytes of the constants."""
        return sum(array.nbytes for array in self.arrays)

    def with_arrays(self, arrays: Sequence[np.ndarray]) -> Node:
        """Return the same operator on other constants."""
        left = iter(arrays)
        return replace(self, constants=[None if constant is None else next(left) for constant in self.constants])


def cold_copies(arrays: Sequence[np.ndarray], copies: int, *, distinct: bool = False) -> list[list[np.ndarray]]:
    """Return `copies` times the arrays of a layer, each in separate memory, aligned as in a saved model.

    distinct: Make the first two bytes of every array differ between copies, because ORT shares packed weights that are
        equal. The last copy keeps its bytes.
    """
    offsets = np.cumsum([0] + [-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays])
    # NumPy would request huge pages, which neither ORT's own copies nor a mapped model have.
    buffer = np.frombuffer(mmap.mmap(-1, max(int(offsets[-1]), _ALIGNMENT) * copies), np.uint8)
    result = []
    for i, memory in enumerate(buffer.reshape(copies, -1)):
        copy = []
        for array, offset in zip(arrays, offsets, strict=False):
            target = memory[offset : offset + array.nbytes]
            target[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            if distinct:
                number = copies - 1 - i
                target[:2] ^= np.array((number % 256, number // 256), np.uint8)[: array.nbytes]
            copy.append(target.view(array.dtype).reshape(array.shape))
        result.append(copy)
    return result


def ort_candidate(
    node: Node, k: int, n: int, *, distinct: bool = False, types: tuple[type, type] = _FLOATS
) -> TimedLayer:
    """Return one session with copies of the node, which all read x [m, k] and write [m, n].

    distinct: See `cold_copies`. types: Types of x and y. For uint8, x is converted by `to_bytes`.
    """
    copies = cold_copies(node.arrays, copies_to_stay_cold(node.stored_bytes), distinct=distinct)
    nodes = [node.with_arrays(arrays) for arrays in copies]

    def open_session(threads: int) -> Bind:
        session, values = layers_session(nodes, k, n, threads, types)

        def bind(x: np.ndarray) -> Run:
            binding, _ = bind_layers(session, to_bytes(x) if types[0] is np.uint8 else x, n, types[1])

            def run(_keep: object = values) -> None:
                session.run_with_iobinding(binding)

            return run

        return bind

    return TimedLayer(len(nodes), node.stored_bytes, open_session)


def bind_layers(
    session: ort.InferenceSession, x: np.ndarray, n: int, y_type: type = np.float32
) -> tuple[ort.IOBinding, np.ndarray]:
    """Bind x as the input of layers_session, and y [m, n] as the output of all layers.

    All layers share one output with the same alignment as in a model, which also reuses the memory of its activations.
    """
    # y is allocated and written beforehand: a fresh output costs page faults, and unwritten pages are not resident.
    ((y,),) = cold_copies([np.ones((len(x), n), y_type)], 1)
    value = ort.OrtValue.ortvalue_from_numpy(y)
    binding = session.io_binding()
    binding.bind_cpu_input("x", x)
    for output in session.get_outputs():
        binding.bind_ortvalue_output(output.name, value)
    return binding, y


def to_bytes(x: np.ndarray) -> np.ndarray:
    """Quantize to uint8 with zero point 128 and scale 1 / 40, which suits normally distributed values."""
    q: np.ndarray = np.clip(np.rint(x * 40) + 128, 0, 255).astype(np.uint8)
    return q


def layers_session(
    nodes: Sequence[Node], k: int, n: int, threads: int, types: tuple[type, type] = _FLOATS
) -> tuple[ort.InferenceSession, list[Any]]:
    """Return a session x -> y0, y1, …, one per node, and objects to keep alive: it reads their data in place."""
    graph_nodes, initializers = [], []
    names: list[str] = []
    values: list[ort.OrtValue] = []
    for i, node in enumerate(nodes):
        inputs = ["x"]
        for j, constant in enumerate(node.constants):
            inputs.append("" if constant is None else f"w{i}.{j}")
            if constant is None:
                continue
            if constant.nbytes < _INLINE_BYTES:
                initializers.append(numpy_helper.from_array(constant, inputs[-1]))
                continue
            dtype = helper.np_dtype_to_tensor_dtype(constant.dtype)
            initializers.append(_declared(inputs[-1], dtype, constant.shape))
            names.append(inputs[-1])
            bits = constant.view(np.uint16) if constant.dtype == ml_dtypes.bfloat16 else constant
            values.append(ort.OrtValue.ortvalue_from_numpy_with_onnx_type(bits, dtype))
        graph_nodes.append(helper.make_node(node.op_type, inputs, [f"y{i}"], domain=node.domain, **node.attributes))
    x_type, y_type = (helper.np_dtype_to_tensor_dtype(np.dtype(one)) for one in types)
    graph = helper.make_graph(
        graph_nodes,
        "layers",
        [helper.make_tensor_value_info("x", x_type, ["m", k])],
        [helper.make_tensor_value_info(f"y{i}", y_type, ["m", n]) for i in range(len(nodes))],
        initializers,
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    # The threads of one candidate must not spin while another is timed.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    options.add_external_initializers(names, values)
    register(options)
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session, [values, nodes]


_OPSETS = {"": 17, "com.microsoft": 1, "ai.ortolan": 1}


def _declared(name: str, dtype: int, shape: tuple[int, ...]) -> TensorProto:
    """Return an initializer whose data come from the session options."""
    tensor = TensorProto(name=name, data_type=dtype, dims=shape, data_location=TensorProto.EXTERNAL)
    tensor.external_data.append(StringStringEntryProto(key="location", value="memory"))
    return tensor
