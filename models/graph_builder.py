"""Writes ONNX graphs with node names as in TorchScript exports: /encoder/layer.0/output/dense/MatMul."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from ..errors import OrtolanError

OPSET = 17
IR_VERSION = 8  # the IR version of ONNX 1.12, which introduced opset 17

# Value of the additive mask. It is finite, because with -inf, Softmax returns NaN for a fully masked row (padding).
MASKED = np.float32(np.finfo(np.float32).min)

MICROSOFT_DOMAIN = "com.microsoft"  # ONNX Runtime's own operators

Shape = tuple[int, ...]

# A weight may be a lazy tensor, which is computed when the model is written.
Weight = np.ndarray | ir.LazyTensor


class ModelBuildError(OrtolanError):
    """No model can be built from the weights or the configuration."""


def check_weights(weights: Mapping[str, Weight], expected: Mapping[str, Shape]) -> None:
    """Check that every expected weight exists with the expected shape; other weights are ignored.

    Raises:
        ModelBuildError: A weight is missing or has another shape.
    """
    missing = [name for name in expected if name not in weights]
    if missing:
        found = ", ".join(list(weights)[:3])
        raise ModelBuildError(
            f"{len(missing)} of {len(expected)} weights are missing, the first is {missing[0]!r}; "
            f"found names like {found}: check the prefix of the names and num_hidden_layers"
        )
    for name, shape in expected.items():
        found_shape = tuple(weights[name].shape)
        if found_shape != shape:
            raise ModelBuildError(
                f"weight {name!r} has shape {found_shape}, expected {shape}; "
                "does the configuration belong to these weights?"
            )


def lazy_weight(compute: Callable[[], np.ndarray], shape: Sequence[int]) -> ir.LazyTensor:
    """Return a float32 weight of this shape that is computed anew each time it is read."""
    return ir.LazyTensor(
        lambda: ir.Tensor(np.asarray(compute(), np.float32)),  # a transpose of gigabytes is not copied
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(shape),
    )


def transposed(weight: Weight) -> Weight:
    """Return the transpose of a weight."""
    if isinstance(weight, np.ndarray):
        return weight.T
    return lazy_weight(lambda: weight.numpy().T, weight.shape.numpy()[::-1])


def stacked(weights: Sequence[Weight]) -> Weight:
    """Concatenate the rows of weights."""
    if all(isinstance(weight, np.ndarray) for weight in weights):
        return np.concatenate(weights)
    rows = sum(weight.shape[0] for weight in weights)
    shape = (rows, *tuple(weights[0].shape)[1:])
    return lazy_weight(lambda: np.concatenate([np.asarray(weight) for weight in weights]), shape)


def interleaved(first: Weight, second: Weight) -> Weight:
    """Return rows of two weights [experts, rows, …] in turns: [experts, 2 * rows, …]."""
    experts, rows, *others = first.shape if isinstance(first, np.ndarray) else first.shape.numpy()
    shape = (experts, 2 * rows, *others)

    def compute() -> np.ndarray:
        return np.stack([np.asarray(first), np.asarray(second)], axis=2).reshape(shape)

    return lazy_weight(compute, shape)


class GraphBuilder:
    """Collects nodes and initializers, named after their modules."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()
        self._modules: list[str] = []
        self._uses: Counter[str] = Counter()
        self._weights: dict[str, ir.Value] = {}

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Inside the with statement, name nodes below this module. Names may contain dots: `module("layer.0")`."""
        self._modules.append(name)
        try:
            yield
        finally:
            self._modules.pop()

    def node(
        self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", **attributes: object
    ) -> ir.Value:
        """Add a node and return its first output. All outputs are at `.producer().outputs`."""
        path = "/" + "/".join([*self._modules, op_type])
        count = self._uses[path]
        self._uses[path] += 1
        name = f"{path}_{count}" if count else path
        values = self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=outputs, domain=domain, name=name)  # type: ignore[arg-type]
        for index, value in enumerate(values):
            value.name = f"{name}_output_{index}"
        return values[0]

    def constant(self, value: np.ndarray | np.generic | Sequence[int] | int) -> ir.Value:
        """Add a Constant node, as exporters do for scalars and shapes. Python integers become int64."""
        array = np.asarray(value, dtype=None if isinstance(value, (np.ndarray, np.generic)) else np.int64)
        return self.node("Constant", value=ir.tensor(array))

    def weight(self, name: str, weight: Weight) -> ir.Value:
        """Add an initializer, once per name. The dtype is kept."""
        if name not in self._weights:
            tensor = ir.tensor(np.ascontiguousarray(weight)) if isinstance(weight, np.ndarray) else weight
            tensor.name = name
            self._weights[name] = self._tape.initializer(tensor)
        return self._weights[name]

    def linear(self, x: ir.Value, name: str, weight: Weight, bias: Weight | None = None) -> ir.Value:
        """Return x @ weight.T + bias as MatMul and Add, in a module of its own.

        Args:
            x: [..., in].
            name: Path of the weights, such as "encoder.layer.0.output.dense"; its last part names the module.
            weight: [out, in] as torch stores it; it becomes the initializer `{name}.weight_t`, [in, out].
            bias: [out].
        """
        with self.module(name.rpartition(".")[2]):
            y = self.node("MatMul", x, self.weight(f"{name}.weight_t", transposed(weight)))
            if bias is not None:
                y = self.node("Add", self.weight(f"{name}.bias", bias), y)
        return y

    def shape_of(self, x: ir.Value, axis: int) -> ir.Value:
        """Return one dimension of `x`, an int64 scalar."""
        return self.node("Gather", self.node("Shape", x), self.constant(axis), axis=0)

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        """Insert axes of size 1."""
        return self.node("Unsqueeze", x, self.constant(axes))

    def split_heads(self, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """Reshape [batch, sequence, heads * head_dim] to [batch, sequence, heads, head_dim]."""
        return self.node("Reshape", x, self.constant([0, 0, heads, head_dim]))

    def model(self, name: str, inputs: Sequence[ir.Value], outputs: Mapping[str, ir.Value]) -> ir.Model:
        """Return the finished model. Outputs are renamed to the keys of `outputs`; their types must be set."""
        for output_name, value in outputs.items():
            value.name = output_name
        domains = {node.domain for node in self._tape.nodes}
        graph = ir.Graph(
            inputs,
            list(outputs.values()),
            nodes=self._tape.nodes,
            initializers=self._tape.initializers,
            opset_imports={"": OPSET} | ({MICROSOFT_DOMAIN: 1} if MICROSOFT_DOMAIN in domains else {}),
            name=name,
        )
        return ir.Model(graph, ir_version=IR_VERSION, producer_name="ortolan.models")


def tensor_value(name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Return a graph input; strings in `shape` are symbolic dimensions."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def set_type(value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Set the type of a graph output, and return it."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(shape)
    return value
