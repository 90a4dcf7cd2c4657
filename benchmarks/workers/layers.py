"""Linear layers in several runtimes, y = x W: copies of one, so that no cache holds their weights.

    python -P serve.py layers.py '{"threads": 1, "cpus": [0]}'

A model is an .npy file, W float32 [k, n]. Work is {"inputs": PATH}, an .npy file, x float32 [rows, k]; a pass runs each
copy once on it, one after the other, and the answer is y [rows, n] of the last one, whose weights are exactly those
that were made; of the others some bytes differ. Options of all engines: copies, how many there are.

Which packages an engine needs stands at its class. This file is run by itself, never imported from a package, by
interpreters that have no Ortolan but for the first two engines; runtimes are imported where a layer is opened.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from engine import Engine, EngineWorker, Made, megabytes, with_data


class LayersEngine(Engine):
    """Copies of a layer."""

    @abstractmethod
    def bind(self, x: np.ndarray) -> Any:
        """What `run` takes: all copies on x [rows, k], which is rounded to what the layer takes here, untimed."""

    def prepare(self, work: Mapping[str, Any]) -> list[Any]:
        return [self.bind(np.load(work["inputs"]))]


class OnnxLayers(LayersEngine):
    """A file with one layer, a node, run as one session of so many. These engines need Ortolan: its benchmarks know
    how copies are made."""

    frees_weights = False  # those that it has packed
    modules = ("onnx", "onnxruntime", "ortolan.benchmarks.cold_layers")

    def __init__(self, threads: int, path: str, copies: int) -> None:
        cold = importlib.import_module("ortolan.benchmarks.cold_layers")
        node, k, self._n = read_layer(path)
        arrays = cold.cold_copies(node.arrays, copies, distinct=self.frees_weights)
        nodes = [node.with_arrays(one) for one in arrays]
        if self.frees_weights:
            self._session, _ = cold.layers_session(nodes, k, self._n, threads, inline_bytes=2**31)
        else:
            self._session, self._weights = cold.layers_session(nodes, k, self._n, threads)
        self._bind_layers = cold.bind_layers

    def bind(self, x: np.ndarray) -> Any:
        return self._bind_layers(self._session, x, self._n)

    def run(self, part: Any) -> np.ndarray:
        binding, y = part
        self._session.run_with_iobinding(binding)
        return np.asarray(y)


class OnnxRuntime(OnnxLayers):
    """onnxruntime. form: "fp32"; "nbits", with bits, block_size and symmetric; or "int8", activations and weights."""

    packages = ("onnxruntime",)
    frees_weights = True

    @classmethod
    def make(
        cls,
        model: Path,
        folder: Path,
        threads: int,
        *,
        copies: int,
        form: str,
        bits: int = 4,
        block_size: int = 32,
        symmetric: bool = False,
    ) -> Made:
        source, path = one_layer(model, folder / "fp32.onnx"), folder / "layer.onnx"
        onnx = importlib.import_module("onnx")
        if form == "fp32":
            path, call = source, "InferenceSession(MatMul)"
        elif form == "nbits":
            quantizers = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
            settings = {"bits": bits, "block_size": block_size, "is_symmetric": symmetric, "accuracy_level": 4}
            quantizer = quantizers.MatMulNBitsQuantizer(onnx.load(source), **settings)
            quantizer.process()
            onnx.save(quantizer.model.model, path)
            call = f"MatMulNBitsQuantizer({_arguments(settings)}), InferenceSession"
        elif form == "int8":
            quantization = importlib.import_module("onnxruntime.quantization")
            quantization.quantize_dynamic(source, folder / "dynamic.onnx", per_channel=True)
            _fuse(folder / "dynamic.onnx", path)
            call = "quantize_dynamic(per_channel=True), InferenceSession: DynamicQuantizeMatMul"
        else:
            raise ValueError(f"unknown form {form!r}; expected fp32, nbits or int8")
        return Made({"path": str(path), "copies": copies}, call, megabytes(*with_data(path)))


class Ortolan(OnnxLayers):
    """onnxruntime, ortolan. choices: arguments of optimize_onnx."""

    packages = ("ortolan", "onnxruntime")

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, *, copies: int, choices: Mapping[str, Any]) -> Made:
        ortolan = importlib.import_module("ortolan")
        source, path = one_layer(model, folder / "fp32.onnx"), folder / "layer.onnx"
        ortolan.optimize_onnx(source, path, **choices)
        call = f"optimize_onnx({_arguments(choices)}), create_session"
        return Made({"path": str(path), "copies": copies}, call, megabytes(*with_data(path)))


def one_layer(weights: Path, path: Path) -> Path:
    """Writes MatMul(x, W) as an ONNX file."""
    onnx = importlib.import_module("onnx")
    w = np.load(weights)
    k, n = w.shape
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "w"], ["y"], name="layer")],
        "layer",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, ["rows", k])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["rows", n])],
        [onnx.numpy_helper.from_array(w, "w")],
    )
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8), path)
    return path


def read_layer(path: str) -> tuple[Any, int, int]:
    """The node of a file that has no other, with its constants; k, n."""
    onnx = importlib.import_module("onnx")
    cold = importlib.import_module("ortolan.benchmarks.cold_layers")
    graph = onnx.load(path).graph
    types = [node.op_type for node in graph.node]
    if len(types) != 1 or graph.node[0].input[0] != graph.input[0].name:
        raise ValueError(
            f"{path} has the nodes {', '.join(types)}, expected one, whose first input is that of the file"
        )
    (node,) = graph.node
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    arrays = [constants[name] if name else None for name in node.input[1:]]
    k, n = (value.type.tensor_type.shape.dim[1].dim_value for value in (graph.input[0], graph.output[0]))
    return cold.Node(node.op_type, arrays, node.domain, attributes), k, n


def _fuse(path: Path, target: Path) -> None:
    """Writes what ONNX Runtime makes of a model when it opens it."""
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


def _arguments(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in settings.items())


class Worker(EngineWorker):
    engines: ClassVar[Mapping[str, type[Engine]]] = {
        "onnxruntime": OnnxRuntime,
        "ortolan": Ortolan,
    }
