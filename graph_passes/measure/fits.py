"""Weights that were fitted to calibration inputs, kept in a file: a search fits a layer once, not in every trial.

A fit depends on the layer's weight, on the options of the pass, and on what goes into the layer. So weights are kept
and used again only where the model still gives each layer the inputs that the original does: no layer was pruned or
quantized by an earlier pass, nor by the same one. What is used again is what a fit would give.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from ..files.model_file import release_maps
from ..files.spill import TensorSpill
from ..weights.quantizers.grid import Rounded

_TYPES = {"float32": ir.DataType.FLOAT, "int8": ir.DataType.INT8, "uint8": ir.DataType.UINT8}


@dataclass(frozen=True)
class Fit:
    """weights: float32 [k, n], or whole numbers. rows: of inputs that they were fitted to. error: of the outputs."""

    weights: np.ndarray | Rounded
    rows: int
    error: float | None = None


class Fits:
    """Of one model on the same feeds, by layer and options. Memory holds none of the weights."""

    def __init__(self, folder: Path) -> None:
        """folder: for the file of weights; it must exist as long as this does."""
        self._spill = TensorSpill(folder, "fitted.bin")
        self._known: dict[Hashable, _Stored] = {}

    def knows(self, key: Hashable) -> bool:
        return key in self._known

    def read(self, key: Hashable) -> Fit:
        """What keep() was given."""
        stored = self._known[key]
        arrays = [np.array(tensor.numpy()) for tensor in stored.tensors]
        release_maps(stored.tensors)
        if len(arrays) == 1:
            return Fit(arrays[0], stored.rows, stored.error)
        return Fit(Rounded(arrays[0], arrays[1], arrays[2] if len(arrays) == 3 else None), stored.rows, stored.error)

    def keep(self, key: Hashable, fit: Fit) -> None:
        """Raises OutputError where the file cannot be written."""
        parts: list[np.ndarray | None] = [fit.weights] if isinstance(fit.weights, np.ndarray) else []
        if isinstance(fit.weights, Rounded):
            parts = [fit.weights.q, fit.weights.scales, fit.weights.zero_points]
        tensors = [
            self._spill.add(f"{len(self._known)}.{number}", part, _TYPES[part.dtype.name])
            for number, part in enumerate(parts)
            if part is not None
        ]
        self._known[key] = _Stored(tensors, fit.rows, fit.error)

    def close(self) -> None:
        self._spill.close()


@dataclass(frozen=True)
class _Stored:
    tensors: list[ir.ExternalTensor]  # the parts of Fit.weights
    rows: int
    error: float | None
