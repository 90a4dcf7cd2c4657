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
from ..weights.quantizers.grid import QuantizedMatrix

_WEIGHTS = "weights"
_TYPES = {"float32": ir.DataType.FLOAT, "int8": ir.DataType.INT8, "uint8": ir.DataType.UINT8}


@dataclass(frozen=True)
class Fit:
    """weights: float32 [k, n], or whole numbers. rows: of inputs that they were fitted to. error: of the outputs."""

    weights: np.ndarray | QuantizedMatrix
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

    def rows(self, key: Hashable) -> int:
        """Of the inputs that keep() was given."""
        return self._known[key].rows

    def read(self, key: Hashable) -> Fit:
        """What keep() was given."""
        stored = self._known[key]
        arrays = {part: np.array(tensor.numpy()) for part, tensor in stored.tensors.items()}
        release_maps(list(stored.tensors.values()))
        if _WEIGHTS in arrays:
            return Fit(arrays[_WEIGHTS], stored.rows, stored.error)
        offsets = (arrays.get(part) for part in ("zero_points", "minimums"))
        return Fit(QuantizedMatrix(arrays["q"], arrays["scales"], *offsets), stored.rows, stored.error)

    def keep(self, key: Hashable, fit: Fit) -> None:
        """Raises OutputError where the file cannot be written."""
        weights = fit.weights
        parts = vars(weights) if isinstance(weights, QuantizedMatrix) else {_WEIGHTS: weights}
        tensors = {
            name: self._spill.add(f"{len(self._known)}.{name}", part, _TYPES[part.dtype.name])
            for name, part in parts.items()
            if part is not None
        }
        self._known[key] = _Stored(tensors, fit.rows, fit.error)

    def close(self) -> None:
        self._spill.close()


@dataclass(frozen=True)
class _Stored:
    tensors: dict[str, ir.ExternalTensor]  # the parts of Fit.weights: those of QuantizedMatrix, or _WEIGHTS
    rows: int
    error: float | None
