"""Writes ONNX graphs whose nodes are named as TorchScript exports name them: /encoder/layer.0/output/dense/MatMul."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from ..errors import OrtolanError

OPSET = 17
IR_VERSION = 8  # the one of ONNX 1.12, which introduced opset 17

# The additive mask of a position that must not be attended to. Not -inf: a row that is masked everywhere (padding)
# would turn into NaN in Softmax.
MASKED = np.float32(np.finfo(np.float32).min)

MICROSOFT_DOMAIN = "com.microsoft"  # ONNX Runtime's own operators

Shape = tuple[int, ...]

# Of a lazy tensor nothing is computed before the model is written.
Weight = np.ndarray | ir.LazyTensor


class ModelBuildError(OrtolanError):
    """Weights or a configuration from which no model can be built."""


def check_weights(weights: Mapping[str, Weight], expected: Mapping[str, Shape]) -> None:
    """Raises ModelBuildError unless every expected weight is there in the expected shape. Others are ignored."""
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
    """A float32 weight of this shape, computed anew each time that somebody asks for its numbers."""
    return ir.LazyTensor(
        lambda: ir.Tensor(np.ascontiguousarray(compute(), np.float32)),
        dtype=ir.DataType.FLOAT,
        shape=ir.Shape(shape),
    )


def transposed(weight: Weight) -> Weight:
    """Rows as columns."""
    if isinstance(weight, np.ndarray):
        return weight.T
    return lazy_weight(lambda: weight.numpy().T, weight.shape.numpy()[::-1])


def stacked(weights: Sequence[Weight]) -> Weight:
    """The rows of all, below each other."""
    if all(isinstance(weight, np.ndarray) for weight in weights):
        return np.concatenate(weights)
    rows = sum(weight.shape[0] for weight in weights)
    shape = (rows, *tuple(weights[0].shape)[1:])
    return lazy_weight(lambda: np.concatenate([np.asarray(weight) for weight in weights]), shape)


class GraphBuilder:
    """Collects nodes and initializers, naming them after the module they belong to."""

    def __init__(self) -> None:
        self._tape = ir.tape.Tape()
        self._modules: list[str] = []
        self._uses: Counter[str] = Counter()
        self._weights: dict[str, ir.Value] = {}

    @contextmanager
    def module(self, name: str) -> Iterator[None]:
        """Nodes made inside are named below `name` (dots stay: module("layer.0"))."""
        self._modules.append(name)
        try:
            yield
        finally:
            self._modules.pop()

    def node(
        self, op_type: str, *inputs: ir.Value | None, outputs: int = 1, domain: str = "", **attributes: object
    ) -> ir.Value:
        """Adds a node and returns its (first) output; the others are at `.producer().outputs`."""
        path = "/" + "/".join([*self._modules, op_type])
        count = self._uses[path]
        self._uses[path] += 1
        name = f"{path}_{count}" if count else path
        values = self._tape.op_multi_out(op_type, inputs, attributes, num_outputs=outputs, domain=domain, name=name)  # type: ignore[arg-type]
        for index, value in enumerate(values):
            value.name = f"{name}_output_{index}"
        return values[0]

    def constant(self, value: np.ndarray | np.generic | Sequence[int] | int) -> ir.Value:
        """Adds a Constant node (exports keep scalars and shapes so). Python integers become int64."""
        array = np.asarray(value, dtype=None if isinstance(value, (np.ndarray, np.generic)) else np.int64)
        return self.node("Constant", value=ir.tensor(array))

    def weight(self, name: str, weight: Weight) -> ir.Value:
        """Adds an initializer, once per name. The dtype is kept."""
        if name not in self._weights:
            tensor = ir.tensor(np.ascontiguousarray(weight)) if isinstance(weight, np.ndarray) else weight
            tensor.name = name
            self._weights[name] = self._tape.initializer(tensor)
        return self._weights[name]

    def linear(self, x: ir.Value, name: str, weight: Weight, bias: Weight | None = None) -> ir.Value:
        """x @ weight.T + bias as MatMul and Add, in a module of its own.

        name: the path of the weights, e.g. "encoder.layer.0.output.dense"; the module is called like its last part.
        weight: [out, in] as torch stores it; it becomes the initializer `{name}.weight_t`, [in, out].
        bias: [out].
        """
        with self.module(name.rpartition(".")[2]):
            y = self.node("MatMul", x, self.weight(f"{name}.weight_t", transposed(weight)))
            if bias is not None:
                y = self.node("Add", self.weight(f"{name}.bias", bias), y)
        return y

    def shape_of(self, x: ir.Value, axis: int) -> ir.Value:
        """The size of one axis of `x`, an int64 scalar."""
        return self.node("Gather", self.node("Shape", x), self.constant(axis), axis=0)

    def unsqueeze(self, x: ir.Value, *axes: int) -> ir.Value:
        """`x` with axes of size 1 inserted."""
        return self.node("Unsqueeze", x, self.constant(axes))

    def split_heads(self, x: ir.Value, heads: int, head_dim: int) -> ir.Value:
        """[batch, sequence, heads * head_dim] -> [batch, sequence, heads, head_dim]."""
        return self.node("Reshape", x, self.constant([0, 0, heads, head_dim]))

    def model(self, name: str, inputs: Sequence[ir.Value], outputs: Mapping[str, ir.Value]) -> ir.Model:
        """The finished model. Output values are renamed to the keys of `outputs`; their types must be set."""
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
    """A graph input; strings in `shape` are symbolic dimensions."""
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def set_type(value: ir.Value, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Gives a graph output its type, and returns it."""
    value.type = ir.TensorType(dtype)
    value.shape = ir.Shape(shape)
    return value
