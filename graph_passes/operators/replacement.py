"""What an operator must offer to take the place of a linear layer."""

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
    """A constant input of an operator. bf16 values travel as uint16."""

    array: np.ndarray
    dtype: ir.DataType


def stored_tensor(spill: TensorSpill, name: str, packed: PackedTensor) -> ir.TensorProtocol:
    """For an initializer of this name; the numbers wait on disk."""
    if packed.array.size == 0:  # ONNX keeps no empty tensor outside of a model
        return ir.Tensor(packed.array, name=name, dtype=packed.dtype)
    return spill.add(name, packed.array, packed.dtype)


@dataclass(frozen=True)
class Stored:
    """What a packed weight holds of a matrix: how many numbers, and whether they are 2:4 sparse, that is, at most two
    of each four inputs of an output have a weight."""

    count: int
    beyond_two_four: str = "its weights are not 2:4 sparse"  # or where they are not; "": they are

    @property
    def is_two_four(self) -> bool:
        return not self.beyond_two_four


# By the name of the operator's input.
PackedWeight = Mapping[str, PackedTensor]


@dataclass(frozen=True)
class LayerWeight:
    """The weight that an operator is to take over."""

    matrix: np.ndarray  # W, float32 [k, n]; of a quantized weight what it stands for
    quantized: QuantizedWeight | None = None
    x_range: FixedRange | None = None  # of the layer's input; None: the operator's own
    x_threshold: float = 0.0  # inputs whose magnitude is not above it count as zero, if the operator masks them


def why_not_groups(op_type: str, quantization: Quantization | None) -> str | None:
    """Why an operator with a scale a column does not take these 8-bit weights, if they are in groups."""
    if quantization is None or quantization.bits != 8 or quantization.group_size is None:
        return None
    return (
        f"is quantized to 8 bits in groups of {quantization.group_size}, which {op_type} does not take; W8A8MatMul does"
    )


class Replacement(abc.ABC):
    """A layer and its epilogue (ops/matmul/linear_plan.h) by an operator of ours, its weight packed ahead of time."""

    op_type: ClassVar[str]
    input_names: ClassVar[Sequence[str]]  # of the operator, in order
    # Whether the operator takes fixed ranges of its activations, and a hidden layer (hidden.py).
    takes_ranges = False
    # Whether the operator computes what follows a layer (linear_function.py); if not, its bias is added behind it.
    has_epilogue = True
    # Whether the operator applies thresholds to its inputs (activations.py): it has the attribute a_threshold.
    masks_inputs = False
    # How weights that are not quantized are stored, where the operator has a choice.
    weights = "bf16"
    # How the operator lays out weights, where it has a choice; None: as suits them.
    storage: str | None = None
    # Whether the operator takes only numbers of 4 or 8 bits, also those that the model stores, where it has a choice.
    keeps_stored = False

    @abc.abstractmethod
    def why_not(self, k: int, quantization: Quantization | None) -> str | None:
        """Why the operator cannot hold a weight of k inputs that is quantized so, or is not, if it cannot."""

    def why_not_matrix(self, matrix: np.ndarray) -> str | None:
        """Why the operator cannot hold these weights, which are not quantized, if it cannot."""
        return None

    def why_not_quantized(self, quantized: QuantizedWeight) -> str | None:
        """Why the operator cannot hold these numbers, which the model stores, if it cannot."""
        return None

    def stored_weights(self, matrix: np.ndarray) -> Stored:
        """What the packed weight of this matrix holds, by which it is sparse or not."""
        return Stored(int(np.count_nonzero(matrix)))

    @abc.abstractmethod
    def pack(self, weight: LayerWeight) -> PackedWeight:
        """The constant inputs that hold W."""

    @abc.abstractmethod
    def packed_bytes(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> int:
        """The size of what `pack` returns. What hangs on where weights are that are not zero may be estimated, to some
        per cent."""

    def foreseen_storage(self, k: int, n: int, stored: Stored, quantization: Quantization | None) -> str | None:
        """The name of the storage that `pack` chooses, where the operator has several."""
        return None

    def storage_of(self, packed: Mapping[str, ir.TensorProtocol]) -> str | None:
        """The name of the storage of a packed weight, where the operator has several."""
        return None

    def inputs(
        self, x: ir.Value, packed: Mapping[str, ir.Value], bias: ir.Value | None, residual: ir.Value | None
    ) -> list[ir.Value | None]:
        """The inputs of the node, in order."""
        return in_order(self.input_names, {"X": x, **packed, "bias": bias, "residual": residual})

    @abc.abstractmethod
    def attributes(
        self, k: int, n: int, quantization: Quantization | None, activation: Activation, gated_columns: int
    ) -> list[ir.Attr]:
        """The attributes of the node, for a weight [k, n]. gated_columns: see joined.py; 0 otherwise."""

    def node_attributes(
        self,
        weight: LayerWeight,
        activation: Activation = Activation.NONE,
        gated_columns: int = 0,
        norm_epsilon: float = -1.0,
    ) -> list[ir.Attr]:
        """All attributes of a node with this weight; norm_epsilon: negative without a LayerNormalization."""
        k, n = weight.matrix.shape
        attributes = self.attributes(k, n, weight.quantized, activation, gated_columns)
        if self.has_epilogue:
            attributes.append(ir.AttrFloat32("norm_epsilon", norm_epsilon))
        if self.masks_inputs:
            attributes.append(ir.AttrFloat32("a_threshold", weight.x_threshold))
        return attributes

    def run(self, x: np.ndarray, packed: Mapping[str, ir.TensorProtocol], weight: LayerWeight) -> np.ndarray:
        """x W as ONNX Runtime computes it by the operator alone, for x float32 [m, k], rounded as the weight's x_range
        says; x_threshold is not applied."""
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
        """How far each answer of `run` may be from x W."""

    @abc.abstractmethod
    def typical_rounding(self, quantization: Quantization | None) -> float:
        """||run - x W|| / ||x W|| of an ordinary layer: what is expected where no inputs are recorded."""

    @abc.abstractmethod
    def fill_inputs(self, model: ir.Model, new_name: Callable[[str], str]) -> None:
        """Gives the operator's nodes constants that change nothing, for inputs that they lack and must have.

        An ONNX function cannot ask whether an input is there, so what one layer of a model has, all must have; and ONNX
        Runtime up to 1.21 crashes where one is left out in front of another. new_name makes a name that no value of the
        model has.
        """

    @abc.abstractmethod
    def function(self, model: ir.Model, opset: int, unpack_once: bool) -> ir.Function:
        """The operator in standard ONNX, for all of its nodes in this model: what runs without our library.

        unpack_once: ONNX Runtime may unpack all weights when it loads the model, which is fast to run but takes much
        memory; otherwise it unpacks one layer after another in each run.
        """


def range_arrays(prefix: str, fixed: FixedRange) -> dict[str, np.ndarray]:
    """The range as the inputs <prefix>_scale and <prefix>_zero_point."""
    return {f"{prefix}_scale": np.asarray(fixed.scale), f"{prefix}_zero_point": np.asarray(fixed.zero_point)}
