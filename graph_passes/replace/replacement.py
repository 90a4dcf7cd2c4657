"""What an operator must offer to take the place of a linear layer."""

from __future__ import annotations

import abc
from typing import ClassVar

import numpy as np
import onnx_ir as ir

# Name, array and element type of each tensor, in the order of the operator's inputs after X.
PackedWeight = list[tuple[str, np.ndarray, ir.DataType]]


class Replacement(abc.ABC):
    """y = x W + bias by an operator of ours, whose weight is packed ahead of time."""

    # Each answer of `run` differs from that of x W by at most this share of |x| |W|.
    rounding: ClassVar[float]

    @abc.abstractmethod
    def pack(self, matrix: np.ndarray) -> PackedWeight:
        """Packs W, float32 [k, n]."""

    @abc.abstractmethod
    def packed_bytes(self, k: int, n: int, stored: int) -> int:
        """The size of what `pack` returns for `stored` weights that are not zero."""

    @abc.abstractmethod
    def attributes(self, k: int, n: int) -> list[ir.Attr]:
        """The attributes of the node."""

    @abc.abstractmethod
    def run(self, x: np.ndarray, packed: PackedWeight, k: int, n: int) -> np.ndarray:
        """What the operator answers without a bias, for x float32 [m, k]."""

    @abc.abstractmethod
    def function(self, opset: int, unpack_once: bool) -> ir.Function:
        """The operator in standard ONNX: what runs where our library is not registered.

        unpack_once: ONNX Runtime may unpack all weights when it loads the model, which is fast to run but takes much
        memory; otherwise it unpacks one layer after another in each run.
        """
