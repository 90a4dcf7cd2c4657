"""Runs a model in pieces, so that later layers see the effect of changes to earlier ones.

The model is cut before the first consumer of each wanted value. Each piece is a model: its inputs are the values that
cross the cut before it, its outputs the values that cross the cut after it. These values are stored in files, one file
per value and feed, as long as later pieces need them. So all layers together cost one run of the model. Running from
the beginning for each of n layers would cost about n / 2 runs.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from ortolan.errors import CalibrationError, OutputError, one_line

from ..files.spill import TensorSpill
from ..find.linear import Linear, layer_key
from .feeds import Feeds
from .sessions import open_quietly

_EMBEDDED = 1024  # smaller tensors (bytes) stay in the model file, where shape inference sees them


class Segments:
    """The inputs of layers, in graph order, and then outputs of the model.

    Use the object in a with statement, because it keeps files in `folder`.
    """

    def __init__(
        self,
        model: ir.Model,
        linears: Sequence[Linear],
        feeds: Sequence[Feeds],
        folder: Path,
        open_model: Callable[[Path], Any] = open_quietly,
        outputs: Sequence[ir.Value] = (),
        which_feeds: str = "calibration feeds",
    ) -> None:
        """Plan the pieces. Layers in subgraphs are left out, because their inputs cannot become outputs of a piece.

        Args:
            model: The model.
            linears: The layers whose inputs can be recorded.
            feeds: The feeds to run.
            folder: A new folder for the pieces and their values.
            open_model: Opens a session on the file of a piece.
            outputs: The outputs that `answers` returns: tensors of numbers.
            which_feeds: The feeds in error messages.
        """
        self._which_feeds = which_feeds
        self._model, self._feeds, self._folder, self._open = model, feeds, folder, open_model
        order = {node: index for index, node in enumerate(model.graph)}
        first: dict[ir.Value, ir.Node] = {}  # the first consumer of each wanted value
        for linear in linears:
            node = layer_key(linear).producer()
            assert node is not None
            produced_here = _produced_in(linear.x, model.graph)
            if node in order and produced_here and order[node] < order.get(first.get(linear.x, node), len(order)):
                first[linear.x] = node
            elif node in order and produced_here:
                first.setdefault(linear.x, node)
        self._stages = sorted(first.items(), key=lambda stage: order[stage[1]])
        self._outputs = list(outputs)
        self._constant = _constant_values(model.graph)
        self._stored: dict[ir.Value, int] = {}  # maps stored values to the numbers of their files

    @property
    def values(self) -> list[ir.Value]:
        """The values that can be recorded, in order."""
        return [x for x, _ in self._stages]

    def __enter__(self) -> Segments:
        try:
            self._folder.mkdir()
        except OSError as error:
            raise OutputError(f"cannot create the folder {str(self._folder)!r}: {error.strerror}") from error
        return self

    def __exit__(self, *_: object) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)

    def run(self, take: Callable[[ir.Value, np.ndarray], None]) -> Iterator[ir.Value]:
        """Yield each value after take(value, array) was called for each feed.

        Changes that the caller makes to the consumers of a yielded value affect all later values.
        """
        previous: ir.Node | None = None
        for number, (x, node) in enumerate(self._stages):
            nodes = list(self._model.graph)
            # The caller may have added and removed nodes, but must keep the consumers of the wanted values.
            order = {one: index for index, one in enumerate(nodes)}
            begin = 0 if previous is None else order[previous]
            later = [*(value for value, _ in self._stages[number + 1 :]), *self._outputs]
            _, crossing = self._needed(later, order, order[node])
            if later:  # the caller may change a layer so that it reads x instead of a rounded copy
                crossing = list(dict.fromkeys([x, *crossing]))
            for (found,) in self._run_piece(nodes, order, begin, [x], crossing):
                take(x, found)
            previous = node
            yield x

    def answers(self) -> Iterator[list[np.ndarray]]:
        """Yield the outputs for each feed, after `run` has ended."""
        nodes = list(self._model.graph)
        order = {one: index for index, one in enumerate(nodes)}
        begin = order[self._stages[-1][1]] if self._stages else 0
        yield from self._run_piece(nodes, order, begin, self._outputs, [])

    def _run_piece(
        self,
        nodes: Sequence[ir.Node],
        order: dict[ir.Node, int],
        begin: int,
        wanted: Sequence[ir.Value],
        crossing: Sequence[ir.Value],
    ) -> Iterator[list[np.ndarray]]:
        """Run the nodes from `begin` on, and yield the wanted values for each feed.

        Args:
            nodes: The nodes of the graph.
            order: Positions of the nodes.
            begin: Position of the first node that may run.
            wanted: The values to yield.
            crossing: The values that later pieces need; only these stay stored.
        """
        made = [value for value in dict.fromkeys([*wanted, *crossing]) if self._is_made(value)]
        needed, inputs = self._needed(made, order, begin)
        piece = [nodes[index] for index in sorted(needed)]
        session = None
        for number, feeds in enumerate(self._feeds):
            loaded = {value.name or "": self._load(value, number, feeds) for value in inputs}
            given = {name: array for name, array in loaded.items() if array is not None}
            arrays: dict[ir.Value, np.ndarray] = {}
            if made:
                if session is None:
                    session = self._open_piece(piece, given, [value.name or "" for value in made])
                names = [value.name or "" for value in made]
                try:
                    arrays = dict(zip(made, session.run(names, given), strict=True))
                except Exception as error:  # ONNX Runtime's exceptions share no base class
                    raise CalibrationError(
                        f"the model does not run on {self._which_feeds} {number + 1}: {one_line(error)}; check their "
                        "shapes and types"
                    ) from error
            yield [arrays[value] if value in arrays else self._known(value, number, feeds) for value in wanted]
            for value in crossing:
                if value in arrays:
                    self._store(value, number, arrays[value])
        for value in set(self._stored) - set(crossing):
            for number in range(len(self._feeds)):
                self._file(self._stored[value], number).unlink(missing_ok=True)
            del self._stored[value]

    def _is_made(self, value: ir.Value) -> bool:
        """Return whether a piece must compute the value: it is neither stored nor an input."""
        return value.producer() is not None and value not in self._stored

    def _needed(
        self, wanted: Sequence[ir.Value], order: dict[ir.Node, int], begin: int
    ) -> tuple[set[int], list[ir.Value]]:
        """Return the nodes at or after `begin` that compute the values, and the values before `begin` that they read.

        Nodes that only compute constants belong to every piece.
        """
        nodes: set[int] = set()
        inputs: dict[ir.Value, None] = {}
        waiting, seen = list(wanted), set[ir.Value]()
        while waiting:
            value = waiting.pop()
            if value in seen:
                continue
            seen.add(value)
            node = value.producer()
            if node is None:
                if value.is_graph_input():
                    inputs[value] = None
            elif order[node] < begin and value not in self._constant:
                inputs[value] = None
            else:
                nodes.add(order[node])
                waiting += _inputs_of(node, self._model.graph)
        return nodes, list(inputs)

    def _open_piece(self, piece: Sequence[ir.Node], given: dict[str, np.ndarray], outputs: Sequence[str]) -> Any:
        model = self._model
        graph = onnx.GraphProto(name="piece")
        graph.node.extend(ir.to_proto(node) for node in piece)
        for name, array in given.items():
            kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
            graph.input.append(onnx.helper.make_tensor_value_info(name, kind, None))
        graph.output.extend(onnx.ValueInfoProto(name=name) for name in outputs)
        sources = [value for node in piece for value in _inputs_of(node, model.graph)]
        with TensorSpill(self._folder, "weights.bin") as spill:
            for value in dict.fromkeys(sources):
                if value.is_initializer() and value.const_value is not None and (value.name or "") not in given:
                    tensor = value.const_value
                    small = tensor.dtype == ir.DataType.STRING or tensor.nbytes < _EMBEDDED
                    proto = _embedded(tensor) if small else _external(spill, tensor)
                    proto.name = value.name or ""
                    graph.initializer.append(proto)
        proto_of_model = onnx.ModelProto(ir_version=model.ir_version, graph=graph)
        for domain, version in model.opset_imports.items():
            proto_of_model.opset_import.append(onnx.helper.make_opsetid(domain, version))
        proto_of_model.functions.extend(ir.to_proto(function) for function in model.functions.values())
        path = self._folder / "piece.onnx"
        try:
            path.write_bytes(proto_of_model.SerializeToString())
        except OSError as error:
            raise OutputError(f"cannot write {str(path)!r}: {error.strerror}") from error
        return self._open(path)

    def _known(self, value: ir.Value, number: int, feeds: Feeds) -> np.ndarray:
        """Return a value that no node of the piece computes."""
        array = self._load(value, number, feeds)
        if array is None:
            assert value.const_value is not None
            array = value.const_value.numpy()
        return array

    def _load(self, value: ir.Value, number: int, feeds: Feeds) -> np.ndarray | None:
        """Return a stored value or an input; None for a graph input that keeps its default."""
        if value in self._stored:
            array: np.ndarray = np.load(self._file(self._stored[value], number), allow_pickle=False)
            return array
        return feeds.get(value.name or "")

    def _store(self, value: ir.Value, number: int, array: np.ndarray) -> None:
        index = self._stored.setdefault(value, max(self._stored.values(), default=-1) + 1)
        path = self._file(index, number)
        try:
            np.save(path, array, allow_pickle=False)
        except OSError as error:
            with suppress(OSError):
                path.unlink()
            raise OutputError(f"cannot write {str(path)!r}: {error.strerror}") from error

    def _file(self, index: int, number: int) -> Path:
        return self._folder / f"{index}-{number}.npy"


def _embedded(tensor: ir.TensorProtocol) -> onnx.TensorProto:
    proto = ir.to_proto(ir.Tensor(tensor.numpy(), dtype=tensor.dtype)) if tensor.dtype != ir.DataType.STRING else None
    return ir.to_proto(tensor) if proto is None else proto


def _external(spill: TensorSpill, tensor: ir.TensorProtocol) -> onnx.TensorProto:
    content = np.frombuffer(tensor.tobytes(), np.uint8)
    stored = spill.add("", content, ir.DataType.UINT8)
    proto = onnx.TensorProto(
        data_type=int(tensor.dtype), dims=tensor.shape.numpy(), data_location=onnx.TensorProto.EXTERNAL
    )
    for key, text in (("location", stored.location), ("offset", stored.offset), ("length", content.nbytes)):
        proto.external_data.add(key=key, value=str(text))
    return proto


def _produced_in(value: ir.Value, graph: ir.Graph) -> bool:
    node = value.producer()
    return (node.graph if node is not None else value.graph) is graph


def _inputs_of(node: ir.Node, graph: ir.Graph) -> list[ir.Value]:
    """Return the values of this graph that the node or its subgraphs use."""
    found = [value for value in node.inputs if value is not None]
    for attribute in node.attributes.values():
        if attribute.is_ref() or attribute.type not in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
            continue
        graphs = [attribute.as_graph()] if attribute.type == ir.AttributeType.GRAPH else attribute.as_graphs()
        for inner in graphs:
            found += [value for one in inner.all_nodes() for value in one.inputs if value is not None]
            found += list(inner.outputs)
    return [value for value in found if _produced_in(value, graph)]


def _constant_values(graph: ir.Graph) -> set[ir.Value]:
    """Return the values that nodes compute from constants alone."""
    constant: set[ir.Value] = set()
    for node in graph:
        sources = _inputs_of(node, graph)
        if all(value in constant or (value.is_initializer() and not value.is_graph_input()) for value in sources):
            constant.update(node.outputs)
    return constant
