"""Linear layers y = x W in several runtimes, with enough copies of a layer that no cache holds all weights.

    python -P serve.py layers.py '{"threads": 1, "cpus": [0]}'

A model is an .npy file with W, float32 [k, n]. Work is {"inputs": PATH}, an .npy file with x, float32 [rows, k]. A pass
runs each copy once on x. The answer is y [rows, n] of the last copy, which has exactly the weights W; the other copies
may differ in some bytes. All engines have an option "copies", the number of copies.

The engines' docstrings name the packages that they need. Interpreters run this file as a script, without Ortolan except
for the first two engines. Runtimes are imported when a layer is opened.
"""

from __future__ import annotations

import importlib
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

if TYPE_CHECKING:
    from . import ggml
    from .engine import Engine, EngineWorker, Made, arguments, megabytes, with_data
else:
    import ggml
    from engine import Engine, EngineWorker, Made, arguments, megabytes, with_data

_PACKED_FOR = 128  # number of rows, on which oneDNN's layout may depend
_WEIGHT_BYTES = 128  # smaller constants are shapes


class LayersEngine(Engine):
    """Copies of a layer."""

    @classmethod
    def make(cls, model: Path, folder: Path, threads: int, **options: Any) -> Made:
        """Convert one layer; all copies are made from it."""
        made = cls.convert(model, folder, options)
        return replace(made, opened={**made.opened, "copies": options["copies"]})

    @classmethod
    @abstractmethod
    def convert(cls, model: Path, folder: Path, options: Mapping[str, Any]) -> Made:
        """Convert one layer into a folder.

        Raises:
            ValueError: The format is unknown.
        """

    @abstractmethod
    def bind(self, x: np.ndarray) -> Any:
        """Return the argument of `run`: all copies on x [rows, k], converted to the layer's input type, untimed."""

    def prepare(self, work: Mapping[str, Any]) -> list[Any]:
        """Return the only part: all copies on the inputs."""
        return [self.bind(np.load(work["inputs"]))]


class OnnxLayers(LayersEngine):
    """An ONNX file of one node, run as a session with many copies of it.

    These engines need Ortolan, whose benchmarks make the copies.
    """

    modules = ("onnx", "onnxruntime", "ortolan.benchmarks.cold_layers")
    shares = False  # True if the runtime packs equal weights once for all copies

    def __init__(self, threads: int, path: str, copies: int) -> None:
        cold = importlib.import_module("ortolan.benchmarks.cold_layers")
        node, k, self._n = read_layer(path)
        nodes = [node.with_arrays(arrays) for arrays in cold.cold_copies(node.arrays, copies, distinct=self.shares)]
        self._session, self._weights = cold.layers_session(nodes, k, self._n, threads)
        self._bind_layers = cold.bind_layers

    def bind(self, x: np.ndarray) -> Any:
        """Return the binding of the session to x, and y."""
        return self._bind_layers(self._session, x, self._n)

    def run(self, part: Any) -> np.ndarray:
        """Return the last copy's answer."""
        binding, y = part
        self._session.run_with_iobinding(binding)
        return np.asarray(y)


class OnnxRuntime(OnnxLayers):
    """Layers in ONNX Runtime (onnxruntime).

    Option `form`: "fp32"; "nbits", with `bits` and `block_size`; or "int8" (activations and weights).
    """

    packages = ("onnxruntime",)
    shares = True

    @classmethod
    def convert(cls, model: Path, folder: Path, options: Mapping[str, Any]) -> Made:
        """Convert one layer."""
        form, onnx = options["form"], importlib.import_module("onnx")
        source, path = one_layer(model, folder / "fp32.onnx"), folder / "layer.onnx"
        if form == "fp32":
            path, call = source, "MatMul"
        elif form == "nbits":
            quantizers = importlib.import_module("onnxruntime.quantization.matmul_nbits_quantizer")
            settings = {"bits": options["bits"], "block_size": options["block_size"], "accuracy_level": 4}
            quantizer = quantizers.MatMulNBitsQuantizer(onnx.load(source), **settings)
            quantizer.process()
            onnx.save(quantizer.model.model, path)
            call = f"MatMulNBitsQuantizer({arguments(settings)})"
        elif form == "int8":
            quantization = importlib.import_module("onnxruntime.quantization")
            quantization.quantize_dynamic(source, folder / "dynamic.onnx", per_channel=True)
            _fuse(folder / "dynamic.onnx", path)
            call = "quantize_dynamic(per_channel=True), which runs as DynamicQuantizeMatMul"
        else:
            raise ValueError(f"unknown form {form!r}; expected fp32, nbits or int8")
        return Made({"path": str(path)}, call, megabytes(*with_data(path)))


class Ortolan(OnnxLayers):
    """Layers optimized by Ortolan (onnxruntime, ortolan). Option `choices`: arguments of optimize_onnx."""

    packages = ("ortolan", "onnxruntime")

    @classmethod
    def convert(cls, model: Path, folder: Path, options: Mapping[str, Any]) -> Made:
        """Convert one layer."""
        ortolan, choices = importlib.import_module("ortolan"), options["choices"]
        source, path = one_layer(model, folder / "fp32.onnx"), folder / "layer.onnx"
        ortolan.optimize_onnx(source, path, **choices)
        return Made({"path": str(path)}, f"optimize_onnx({arguments(choices)})", megabytes(*with_data(path)))


def one_layer(weights: Path, path: Path) -> Path:
    """Write the ONNX model MatMul(x, W) and return its path."""
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
    """Return the only node of a file with its constants, and k and n."""
    onnx = importlib.import_module("onnx")
    cold = importlib.import_module("ortolan.benchmarks.cold_layers")
    graph = onnx.load(path).graph
    types = [node.op_type for node in graph.node]
    if len(types) != 1 or graph.node[0].input[0] != graph.input[0].name:
        raise ValueError(f"{path} has the nodes {', '.join(types)}; expected one node, which reads the graph's input")
    (node,) = graph.node
    constants = {one.name: onnx.numpy_helper.to_array(one) for one in graph.initializer}
    attributes = {one.name: onnx.helper.get_attribute_value(one) for one in node.attribute}
    arrays = [constants[name] if name else None for name in node.input[1:]]
    k, n = (value.type.tensor_type.shape.dim[1].dim_value for value in (graph.input[0], graph.output[0]))
    return cold.Node(node.op_type, arrays, node.domain, attributes), k, n


def _fuse(path: Path, target: Path) -> None:
    """Write the graph into which ONNX Runtime optimizes a model when it opens it."""
    ort = importlib.import_module("onnxruntime")
    options = ort.SessionOptions()
    options.optimized_model_filepath = str(target)
    ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class Torch(LayersEngine):
    """Layers in PyTorch (torch).

    Option `form`, the format of weights and inputs: "bf16"; "packed bf16" (bf16 with weights in oneDNN's layout);
    "int8" (weights and activations); "int8 weights" (bf16 activations); or "int4" (weights in groups of `group_size`,
    bf16 activations).
    """

    packages = ("torch",)
    modules = ("torch",)

    @classmethod
    def convert(cls, model: Path, folder: Path, options: Mapping[str, Any]) -> Made:
        """Convert one layer."""
        form, torch = options["form"], importlib.import_module("torch")
        w, path = torch.from_numpy(np.load(model).T.copy()), folder / "layer.pt"
        if form in ("bf16", "packed bf16"):
            made, call = [w.bfloat16()], "torch.nn.functional.linear on bfloat16"
            if form == "packed bf16":
                call = "mkldnn._reorder_linear_weight, mkldnn._linear_pointwise: torch.compile's, frozen, on bfloat16"
        elif form == "int8":
            made, call = _torch_int8(w), "quantize_dynamic(per_channel_dynamic_qconfig), backends.quantized 'onednn'"
        elif form == "int8 weights":
            scales = (w.abs().amax(1) / 127).bfloat16()
            made = [torch.round(w / scales.float()[:, None]).clamp(-127, 127).to(torch.int8), scales]
            call = "torch.ops.aten._weight_int8pack_mm on bfloat16"
        elif form == "int4":
            made = _torch_int4(w, options["group_size"])
            call = f"torch.ops.aten._weight_int4pack_mm_for_cpu, groups of {options['group_size']}, on bfloat16"
        else:
            raise ValueError(f"unknown form {form!r}; expected bf16, packed bf16, int8, int8 weights or int4")
        torch.save(made, path)
        opened = {"path": str(path), "form": form, "group_size": options.get("group_size")}
        return Made(opened, call, megabytes(path))

    def __init__(self, threads: int, path: str, copies: int, form: str, group_size: int | None) -> None:
        self._torch, self._form, self._group_size = importlib.import_module("torch"), form, group_size
        self._torch.set_num_threads(threads)
        self._torch.backends.quantized.engine = "onednn"
        with self._torch.inference_mode():
            # Each copy is loaded separately, because clones of a module would share packed weights.
            self._layers = [self._layer(*self._torch.load(path, weights_only=False)) for _ in range(copies)]

    def _layer(self, *made: Any) -> Callable[[Any], Any]:
        aten, mkldnn = self._torch.ops.aten, self._torch.ops.mkldnn
        if self._form == "int8":
            module: Callable[[Any], Any] = made[0]
            return module
        if self._form == "int8 weights":
            return lambda x: aten._weight_int8pack_mm(x, *made)
        if self._form == "int4":
            numbers, scales = made
            return lambda x: aten._weight_int4pack_mm_for_cpu(x, numbers, self._group_size, scales)
        if self._form == "bf16":
            return lambda x: self._torch.nn.functional.linear(x, *made)
        packed = mkldnn._reorder_linear_weight(made[0], _PACKED_FOR)
        return lambda x: mkldnn._linear_pointwise(x, packed, None, "none", [], "")

    def bind(self, x: np.ndarray) -> Any:
        """Return the layer's inputs."""
        given = self._torch.from_numpy(x)
        return given if self._form == "int8" else given.bfloat16()

    def run(self, part: Any) -> np.ndarray:
        """Return the last copy's answer."""
        with self._torch.inference_mode():
            for layer in self._layers:
                y = layer(part)
        return np.asarray(y.float().numpy())


def _torch_int8(w: Any) -> list[Any]:
    """Return a module that quantizes its inputs, with int8 weights and a scale per output."""
    torch, quantization = importlib.import_module("torch"), importlib.import_module("torch.ao.quantization")
    torch.backends.quantized.engine = "onednn"
    linear = torch.nn.Linear(w.shape[1], w.shape[0], bias=False)
    linear.weight.data = w
    settings = {torch.nn.Linear: quantization.per_channel_dynamic_qconfig}
    return [quantization.quantize_dynamic(torch.nn.Sequential(linear), settings)]


def _torch_int4(w: Any, group_size: int) -> list[Any]:
    """Return packed integers, and the scale and the midpoint (the value of integer 8) of each group."""
    torch = importlib.import_module("torch")
    groups = w.view(len(w), -1, group_size)
    least, most = groups.amin(-1), groups.amax(-1)
    scales = ((most - least) / 15).bfloat16()
    middles = (least + 8 * scales.float()).bfloat16()
    numbers = torch.round((groups - middles.float()[..., None]) / scales.float()[..., None]) + 8
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(numbers.clamp(0, 15).to(torch.int32).view(w.shape), 1)
    return [packed, torch.stack([scales.T, middles.T], -1).contiguous()]


class LlamaCpp(LayersEngine):
    """Layers in ggml (llama-cpp-python), in the buffer type that llama.cpp would choose. Option `form`: a ggml type."""

    packages = ("llama-cpp-python",)
    modules = ("llama_cpp",)

    @classmethod
    def convert(cls, model: Path, folder: Path, options: Mapping[str, Any]) -> Made:
        """Convert one layer."""
        form = options["form"]
        if form not in ggml.TYPES:
            raise ValueError(f"unknown form {form!r}; expected {', '.join(ggml.TYPES)}")
        w = np.ascontiguousarray(np.load(model).T)
        n, k = w.shape
        rows, path = ggml.quantize(form, w), folder / "layer.npy"
        np.save(path, rows)
        where = ggml.memory_for(form, k, n)
        call = f"ggml_quantize_chunk({form}), ggml_mul_mat on the CPU backend, weights in its buffer type {where}"
        return Made({"path": str(path), "form": form, "k": k}, call, rows.nbytes / 1e6)

    def __init__(self, threads: int, path: str, copies: int, form: str, k: int) -> None:
        self._products = ggml.Products(form, k, np.load(path), copies, threads)

    def bind(self, x: np.ndarray) -> Any:
        """Return the layer's inputs."""
        return self._products.bind(x)

    def run(self, part: Any) -> np.ndarray:
        """Return the last copy's answer."""
        graph, y = part
        self._products.compute(graph)
        return np.asarray(y)


class OpenVino(LayersEngine):
    """Layers in OpenVINO (openvino, nncf), with weights in fp16 by default.

    Options: `weights`, a mode of nncf.compress_weights, with `group_size` if it has groups; `settings`, further
    settings of compile_model.
    """

    packages = ("openvino", "nncf")
    modules = ("openvino",)

    @classmethod
    def convert(cls, model: Path, folder: Path, options: Mapping[str, Any]) -> Made:
        """Convert one layer."""
        ov, path, call = importlib.import_module("openvino"), folder / "layer.xml", "save_model"
        w = np.ascontiguousarray(np.load(model).T)  # [n, k], as in torch models
        x = ov.opset13.parameter([-1, w.shape[1]], np.float32, name="x")
        y = ov.opset13.matmul(x, ov.opset13.constant(w), False, True)
        network = ov.Model([ov.opset13.result(y)], [x], "layer")
        if "weights" in options:
            nncf, settings = importlib.import_module("nncf"), {}
            if "group_size" in options:
                # By default, nncf keeps the last layer in int8, which is the only layer here.
                settings = {"group_size": options["group_size"], "ratio": 1.0, "all_layers": True}
            mode = nncf.CompressWeightsMode[options["weights"]]
            network = nncf.compress_weights(network, mode=mode, **settings)
            call = f"nncf.compress_weights({arguments({'mode': options['weights'], **settings})}), save_model"
        ov.save_model(network, str(path))
        call = f"{call}, compile_model(xml, 'CPU', {cls._settings('threads', options['settings'])})"
        opened = {"path": str(path), "settings": options["settings"]}
        return Made(opened, call, megabytes(path, path.with_suffix(".bin")))

    @staticmethod
    def _settings(threads: int | str, settings: Mapping[str, str]) -> dict[str, Any]:
        of_all = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY", "ENABLE_CPU_PINNING": False}
        return {**of_all, **settings}

    def __init__(self, threads: int, path: str, copies: int, settings: Mapping[str, str]) -> None:
        self._ov = importlib.import_module("openvino")
        core = self._ov.Core()
        network = _openvino_copies(core.read_model(path), copies)
        self._request = core.compile_model(network, "CPU", self._settings(threads, settings)).create_infer_request()
        self._copies, self._n = copies, network.outputs[0].get_partial_shape()[1].get_length()

    def bind(self, x: np.ndarray) -> Any:
        """Return the layer's inputs."""
        y = np.ones((len(x), self._n), np.float32)
        self._request.set_input_tensor(self._ov.Tensor(x, shared_memory=True))
        for index in range(self._copies):
            self._request.set_output_tensor(index, self._ov.Tensor(y, shared_memory=True))
        return x, y

    def run(self, part: Any) -> np.ndarray:
        """Return the last copy's answer."""
        self._request.infer()
        return np.asarray(part[1])


def _openvino_copies(layer: Any, copies: int) -> Any:
    """Return a model x -> y, y, … of copies of a layer. Only the last one has exactly the layer's constants."""
    ov = importlib.import_module("openvino")
    x = ov.opset13.parameter(layer.inputs[0].get_partial_shape(), np.float32, name="x")
    results = []
    for number in reversed(range(copies)):
        copy = layer.clone()
        for node in copy.get_ordered_ops():
            if node.get_type_name() == "Constant" and node.get_byte_size() >= _WEIGHT_BYTES:
                numbers = node.data.reshape(-1).view(np.uint8).copy()
                numbers[:2] ^= np.array((number % 256, number // 256), np.uint8)
                tensor = ov.Tensor(numbers, ov.Shape(node.shape), node.get_element_type())
                constant = ov.op.Constant(tensor, shared_memory=False)
                constant.set_friendly_name(f"{node.get_friendly_name()}.{number}")
                _replace(node, constant)
        _replace(copy.get_parameters()[0], x)
        results.append(ov.opset13.result(copy.get_results()[0].input_value(0)))
    return ov.Model(results, [x], "layers")


def _replace(node: Any, other: Any) -> None:
    for target in list(node.output(0).get_target_inputs()):
        target.replace_source_output(other.output(0))


class Worker(EngineWorker):
    """The worker of linear layers."""

    engines: ClassVar[Mapping[str, type[Engine]]] = {
        "onnxruntime": OnnxRuntime,
        "ortolan": Ortolan,
        "torch": Torch,
        "llama.cpp": LlamaCpp,
        "openvino": OpenVino,
    }
