"""Model files that repeat one node, each copy with its own constants, for Ortolan's libraries of both revisions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import StringStringEntryProto, TensorProto, ValueInfoProto, helper, numpy_helper

from ortolan.benchmarks.cold_layers import Node
from ortolan.graph_passes.measure.machine import last_level_cache_bytes

Feeds = Mapping[str, np.ndarray]

# Size of a model's weights, in bytes. Both processes map the same file, so this is also their memory.
COLD_BYTES = 256 * 2**20
_MOST_COPIES = 128
# Maps a largest number of rows of x to the divisor of COLD_BYTES for models with at most that many rows. With more
# rows, layers are compute-bound, and copies need not be cold.
_PARTS = {4: 1, 16: 4}
_FEWEST_COPIES = 2
_ALIGNMENT = 64
_INLINE_BYTES = 128  # smaller constants must be inside the model file for ONNX Runtime
_OPSETS = {"": 17, "com.microsoft": 1, "ai.ortolan": 1}


@dataclass(frozen=True)
class TimedModel:
    """A model file, and how to run it: one run computes `copies` layers.

    The other fields are arguments of `feed` in worker.py.
    """

    path: Path
    copies: int = 1
    of_each_copy: tuple[str, ...] = ()
    in_place: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Row:
    """A model with feeds. Names are unique within an operator."""

    name: str
    feeds: Callable[[], Feeds]


@dataclass(frozen=True)
class Work:
    """A model and the rows of an operator that are measured with it. The model is written when its turn comes."""

    operator: str
    rows: tuple[Row, ...]
    write: Callable[[Path], TimedModel]


@dataclass(frozen=True)
class Layer:
    """One node.

    Attributes:
        inputs: Names in order, "" for an omitted input. Inputs that are not constants are fed.
        of_each_copy: Fed inputs that are separate for each copy.
        present: Maps an output to the input in `of_each_copy` whose memory it overwrites.
    """

    op_type: str
    inputs: tuple[str, ...]
    constants: Mapping[str, np.ndarray]
    attributes: Mapping[str, Any]
    y_type: type = np.float32
    of_each_copy: tuple[str, ...] = ()
    present: Mapping[str, str] = field(default_factory=dict)

    @property
    def cold_bytes(self) -> int:
        """Bytes of the constants."""
        return sum(array.nbytes for array in self.constants.values())


def layer_of(node: Node) -> Layer:
    """Return a benchmark's node as a layer on x and constants."""
    names = ["" if constant is None else f"w{j}" for j, constant in enumerate(node.constants)]
    constants = {name: array for name, array in zip(names, node.constants, strict=True) if array is not None}
    return Layer(node.op_type, ("x", *names), constants, node.attributes)


def copies_for(cold_bytes: int, rows: int) -> int:
    """Return the number of copies that makes weights cold, within the limits on memory and copies."""
    part = _part(rows)
    if part is None:
        return _FEWEST_COPIES
    wanted = min(COLD_BYTES, 4 * last_level_cache_bytes()) // part
    return max(_FEWEST_COPIES, min(_MOST_COPIES, -(-wanted // max(cold_bytes, 1))))


def _part(rows: int) -> int | None:
    return next((part for most, part in _PARTS.items() if rows <= most), None)


def layers_work(
    operator: str, name: str, make: Callable[[], Layer], k: int, batch: Sequence[int], copies: int | None = None
) -> list[Work]:
    """Return works that run the layer on x [rows, k] for each number of rows in `batch`.

    Numbers of rows with the same divisor in _PARTS share a model. `name` is the first part of the rows' names. Default
    number of copies: `copies_for`.
    """
    by_part: dict[int | None, list[int]] = {}
    for m in batch:
        by_part.setdefault(_part(m), []).append(m)

    def work(of_batch: list[int]) -> Work:
        def write(folder: Path) -> TimedModel:
            layer = make()
            return write_layers(layer, copies or copies_for(layer.cold_bytes, max(of_batch)), folder, {"x": (None, k)})

        rows = [Row(f"{name} m={m}", lambda m=m: {"x": normal(m, (m, k))}) for m in of_batch]  # type: ignore[misc]
        return Work(operator, tuple(rows), write)

    return [work(of_batch) for of_batch in by_part.values()]


def normal(seed: int, shape: Sequence[int]) -> np.ndarray:
    """Return normally distributed float32 values."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def write_layers(
    layer: Layer,
    copies: int,
    folder: Path,
    fed: Mapping[str, Sequence[int | None]],
    types: Mapping[str, type] | None = None,
) -> TimedModel:
    """Write folder/model.onnx with `copies` nodes, whose outputs are y0, y1 and so on.

    fed: Shapes of the inputs that are not constants; None is a dynamic dimension. types: Their types; default: float32.
    """
    types = types or {}
    graph_inputs = [
        _declared(f"{name}{i}" if name in layer.of_each_copy else name, types.get(name, np.float32), shape)
        for name, shape in fed.items()
        for i in range(copies if name in layer.of_each_copy else 1)
    ]
    nodes, initializers, outputs = [], [], []
    with (folder / "data").open("wb") as data:
        for i in range(copies):
            own = {name: f"{name}.{i}" for name in layer.constants} | {
                name: f"{name}{i}" for name in layer.of_each_copy
            }
            for name, array in layer.constants.items():
                initializers.append(_stored(own[name], array, data))
            names = {"y": layer.y_type} | {name: types.get(past, np.float32) for name, past in layer.present.items()}
            nodes.append(
                helper.make_node(
                    layer.op_type,
                    [own.get(name, name) for name in layer.inputs],
                    [f"{name}{i}" for name in names],
                    domain="ai.ortolan",
                    **layer.attributes,
                )
            )
            outputs += [_declared(f"{name}{i}", dtype, None) for name, dtype in names.items()]
    graph = helper.make_graph(nodes, "layers", graph_inputs, outputs, initializers)
    opsets = [helper.make_opsetid(domain, version) for domain, version in _OPSETS.items()]
    path = folder / "model.onnx"
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    in_place = {f"{name}{i}": f"{past}{i}" for name, past in layer.present.items() for i in range(copies)}
    return TimedModel(path, copies, layer.of_each_copy, in_place)


def _declared(name: str, dtype: type, shape: Sequence[int | None] | None) -> ValueInfoProto:
    dimensions = None if shape is None else [f"{name}.{i}" if size is None else size for i, size in enumerate(shape)]
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), dimensions)


def _stored(name: str, array: np.ndarray, data: Any) -> TensorProto:
    """Return the constant; append its bytes to the data file, aligned as in a saved model."""
    if array.nbytes < _INLINE_BYTES:
        return numpy_helper.from_array(array, name)
    data.write(bytes(-data.tell() % _ALIGNMENT))
    tensor = TensorProto(
        name=name,
        data_type=helper.np_dtype_to_tensor_dtype(array.dtype),
        dims=array.shape,
        data_location=TensorProto.EXTERNAL,
    )
    entries = {"location": "data", "offset": data.tell(), "length": array.nbytes}
    for key, value in entries.items():
        tensor.external_data.append(StringStringEntryProto(key=key, value=str(value)))
    data.write(np.ascontiguousarray(array).view(np.uint8).reshape(-1).data)
    return tensor
