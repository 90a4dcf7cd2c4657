"""The interface of an operator that can replace a linear layer."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from ..files.model_file import to_bytes
from ..files.spill import TensorSpill
from ..find.epilogue import Activation
from ..find.quantized_weight import QuantizedWeight
from ..measure.sessions import open_quietly
from ..names import MINIMUM_IR_VERSION, ORTOLAN_DOMAIN
from ..weights.quantizers.fixed_range import FixedRange
from ..weights.quantizers.grid import Quantization
from .nodes import constant_value, in_order

_OPSET = 17


@dataclass(frozen=True)
class PackedTensor:
    """A constant input of an operator. The bits of bf16 values are held as uint16."""

    array: np.ndarray
    dtype: ir.DataType


def stored_tensor(spill: TensorSpill, name: str, packed: PackedTensor) -> ir.TensorProtocol:
    """Return a tensor for an initializer of this name, with its data on disk."""
    if packed.array.size == 0:  # ONNX does not support empty external tensors
        return ir.Tensor(packed.array, name=name, dtype=packed.dtype)
    return spill.add(name, packed.array, packed.dtype)


@dataclass(frozen=True)
class Stored:
    """The number of weights that a packed matrix stores, and whether they are 2:4 sparse.

    2:4 sparse: of each four consecutive inputs of an output, at most two have a non-zero weight.
    """

    count: int
    beyond_two_four: str = "its weights are not 2:4 sparse"  # why the weights are not 2:4 sparse; "" if they are

    @property
    def is_two_four(self) -> bool:
        """True if the weights are 2:4 sparse."""
        return not self.beyond_two_four


# Maps the names of an operator's inputs to the constants that hold a weight.
PackedWeight = Mapping[str, PackedTensor]


@dataclass(frozen=True)
class LayerWeight:
    """The weight of a linear layer that an operator will hold."""

    matrix: np.ndarray  # W, float32 [k, n]; dequantized if the weight is quantized
    quantized: QuantizedWeight | None = None
    x_range: FixedRange | None = None  # quantization range of the layer's input; None: computed at run time
    x_threshold: float = 0.0  # operators that mask inputs treat |x| <= x_threshold as 0


def why_not_groups(op_type: str, quantization: Quantization | None) -> str | None:
    """Return why an operator with one scale per column cannot hold 8-bit weights in groups; None for other weights."""
    if quantization is None or quantization.bits != 8 or quantization.group_size is None:
        return None
    return (
        f"is quantized to 8 bits in groups of {quantization.group_size}, which {op_type} does not support; "
        "W8A8MatMul does"
    )


class Replacement(abc.ABC):
    """An operator of Ortolan that can replace a linear layer and its epilogue (ops/matmul/linear_plan.h)."""

    op_type: ClassVar[str]
    input_names: ClassVar[Sequence[str]]  # names of the operator's inputs, in order
    # True if the operator supports fixed activation ranges and a hidden layer (hidden.py).
    takes_ranges = False
    # True if the operator reads windows from the rows of its input (find/convolutions.py).
    takes_windows = False
    # True if the operator computes the epilogue (linear_function.py); if not, the bias is a separate node.
    has_epilogue = True
    # True if the operator applies thresholds to its inputs (activations.py): it has the attribute a_threshold.
    masks_inputs = False
    # Type in which weights that are not quantized are stored, if the operator supports several types.
    weights = "bf16"
    # Storage of the weights ("dense", "bitmap", "2:4"), if the operator supports several; None: chosen for each weight.
    storage: str | None = None
    # True if the operator keeps 4-bit and 8-bit integers that the model stores, and supports no other weights.
    keeps_stored = False

    @abc.abstractmethod
    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """Return why the operator cannot hold a weight of k inputs with this quantization; None if it can."""

    def why_not_matrix(self, matrix: np.ndarray) -> str | None:
        """Return why the operator cannot hold these unquantized weights; None if it can."""
        return None

    def why_not_quantized(self, quantized: QuantizedWeight) -> str | None:
        """Return why the operator cannot hold these quantized weights, which the model stores; None if it can."""
        return None

    def stored_weights(self, matrix: np.ndarray) -> Stored:
        """Return the count and sparsity of the weights that `pack` stores for this matrix."""
        return Stored(int(np.count_nonzero(matrix)))

    @abc.abstractmethod
    def pack(self, weight: LayerWeight) -> PackedWeight:
        """Return the operator's constant inputs that hold W."""

    @abc.abstractmethod
    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        """Return the bytes of `pack`'s result. If they depend on the positions of zeros, return an estimate."""

    def foreseen_storage(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> str | None:
        """Return the name of the storage that `pack` will choose, if the operator has several."""
        return None

    def storage_of(self, packed: Mapping[str, ir.TensorProtocol]) -> str | None:
        """Return the name of the storage of a packed weight, if the operator has several."""
        return None

    def inputs(
        self, x: ir.Value, packed: Mapping[str, ir.Value], bias: ir.Value | None, residual: ir.Value | None
    ) -> list[ir.Value | None]:
        """Return the node's inputs, in order."""
        return in_order(self.input_names, {"X": x, **packed, "bias": bias, "residual": residual})

    @abc.abstractmethod
    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """Return the node's attributes for a weight [k, n]. gated_columns: 0 unless the layer is gated (joined.py)."""

    def node_attributes(
        self,
        weight: LayerWeight,
        activation: Activation = Activation.NONE,
        gated_columns: int = 0,
        norm_epsilon: float = -1.0,
    ) -> list[ir.Attr]:
        """Return a node's attributes for this weight. norm_epsilon: negative if there is no LayerNormalization."""
        k, n = weight.matrix.shape
        attributes = self.attributes(k, n, weight.quantized, activation, gated_columns)
        if self.has_epilogue:
            attributes.append(ir.AttrFloat32("norm_epsilon", norm_epsilon))
        if self.masks_inputs:
            attributes.append(ir.AttrFloat32("a_threshold", weight.x_threshold))
        return attributes

    def run(self, x: np.ndarray, packed: Mapping[str, ir.TensorProtocol], weight: LayerWeight) -> np.ndarray:
        """Compute x W in ONNX Runtime, with a model of this operator alone.

        Args:
            x: float32 [m, k], rounded by the weight's x_range; x_threshold is not applied.
            packed: The packed weight.
            weight: The same weight, for its shape and ranges.
        """
        tensors = dict(packed)
        if weight.x_range is not None:
            ranges = range_arrays("x", weight.x_range)
            tensors |= {part: ir.Tensor(array, name=f"{part} of x") for part, array in ranges.items()}
        values = {part: constant_value(tensor) for part, tensor in tensors.items()}
        given = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(x.shape))
        inputs = self.inputs(given, values, None, None)
        attributes = self.node_attributes(dataclasses.replace(weight, x_threshold=0.0))
        node = ir.Node(ORTOLAN_DOMAIN, self.op_type, inputs, attributes, name="layer")
        node.outputs[0].name = "y"
        node.outputs[0].type = given.type
        graph = ir.Graph(
            [given], node.outputs, nodes=[node], initializers=list(values.values()),
            opset_imports={"": _OPSET, ORTOLAN_DOMAIN: 1}, name="layer",
        )  # fmt: skip
        model = ir.Model(graph, ir_version=MINIMUM_IR_VERSION)
        self.fill_inputs(model, lambda name: f"{name} of none")
        folders = {str(tensor.base_dir) for tensor in tensors.values() if isinstance(tensor, ir.ExternalTensor)}
        folder = Path(*folders) if folders else None
        session = open_quietly(to_bytes(model), library=True, data_folder=folder)
        (y,) = session.run(None, {"x": x})
        return np.asarray(y)

    @abc.abstractmethod
    def rounding_bound(self, x: np.ndarray, weight: LayerWeight) -> np.ndarray:
        """Return a bound on the difference between `run` and x W, for each output."""

    @abc.abstractmethod
    def typical_rounding(self, quantization: Quantization | None) -> float:
        """Return a typical ||run - x W|| / ||x W||, for layers whose inputs are not recorded."""

    @abc.abstractmethod
    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """Add neutral constants for inputs that nodes of the operator lack but must have.

        An ONNX function cannot test whether an input is present. So if one node of a model has an input, all nodes must
        have it. ONNX Runtime up to 1.23 also crashes if an input before the last one is missing. new_name makes unique
        names.
        """

    @abc.abstractmethod
    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """Return the operator as a function of standard operators, for all its nodes: the fallback without the library.

        Args:
            model: The model.
            opset: Its opset.
            unpack_once: Let ONNX Runtime unpack all weights when it loads the model, which is fast but needs much
                memory. False: each run unpacks the weights layer by layer.
        """


def range_arrays(prefix: str, fixed: FixedRange) -> dict[str, np.ndarray]:
    """Return the arrays of a range, for the inputs <prefix>_scale and <prefix>_zero_point."""
    return {f"{prefix}_scale": np.asarray(fixed.scale), f"{prefix}_zero_point": np.asarray(fixed.zero_point)}
