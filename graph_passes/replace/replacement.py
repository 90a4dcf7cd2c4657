"""What an operator must offer to take the place of a linear layer."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ..epilogue import Activation

if TYPE_CHECKING:
    from ..quantize import Quantization, QuantizedWeight


@dataclass(frozen=True)
class PackedTensor:
    """A constant input of an operator. bf16 values travel as uint16."""

    array: np.ndarray
    dtype: ir.DataType


# By the name of the operator's input.
PackedWeight = Mapping[str, PackedTensor]


@dataclass(frozen=True)
class LayerWeight:
    """The weight that an operator is to take over."""

    matrix: np.ndarray  # W, float32 [k, n]; of a quantized weight what it stands for
    quantized: QuantizedWeight | None = None


class Replacement(abc.ABC):
    """y = activation(x W + bias) + residual by an operator of ours, whose weight is packed ahead of time."""

    @abc.abstractmethod
    def why_not(self, weight: LayerWeight) -> str | None:
        """Why the operator cannot hold this weight, if it cannot."""

    @abc.abstractmethod
    def pack(self, weight: LayerWeight) -> PackedWeight:
        """The constant inputs that hold W."""

    @abc.abstractmethod
    def packed_bytes(self, k: int, n: int, stored: int, quantization: Quantization | None) -> int:
        """The size of what `pack` returns for `stored` weights that are not zero. What hangs on where they are may be
        estimated, to some per cent."""

    @abc.abstractmethod
    def inputs(
        self, x: ir.Value, packed: Mapping[str, ir.Value], bias: ir.Value | None, residual: ir.Value | None
    ) -> list[ir.Value | None]:
        """The inputs of the node, in order."""

    @abc.abstractmethod
    def attributes(self, k: int, n: int, quantization: Quantization | None, activation: Activation) -> list[ir.Attr]:
        """The attributes of the node."""

    @abc.abstractmethod
    def run(self, x: np.ndarray, packed: PackedWeight, weight: LayerWeight) -> np.ndarray:
        """x W as the operator computes it, for x float32 [m, k]."""

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
