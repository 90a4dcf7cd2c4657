"""Weights fitted to calibration inputs, kept in a file, so that a search fits each layer once and not in every trial.

A fit depends on the layer's weight, the pass's options and the layer's inputs. A fit is reused only as long as layers
get the original model's inputs, that is before any layer is pruned or quantized. So a reused fit equals a new fit.
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
    """The result of fitting one layer.

    Attributes:
        weights: float32 [k, n], or integers with scales.
        rows: Number of input rows.
        error: Relative error of the layer's outputs.
    """

    weights: np.ndarray | QuantizedMatrix
    rows: int
    error: float | None = None


class Fits:
    """Fits of one model on the same feeds, by layer and options. The weights are not held in memory."""

    def __init__(self, folder: Path) -> None:
        """Create the file of weights in `folder`, which must outlive this object."""
        self._spill = TensorSpill(folder, "fitted.bin")
        self._known: dict[Hashable, _Stored] = {}

    def knows(self, key: Hashable) -> bool:
        """Return whether a fit is stored for this key."""
        return key in self._known

    def rows(self, key: Hashable) -> int:
        """Return the number of input rows of a fit."""
        return self._known[key].rows

    def read(self, key: Hashable) -> Fit:
        """Return a fit."""
        stored = self._known[key]
        arrays = {part: np.array(tensor.numpy()) for part, tensor in stored.tensors.items()}
        release_maps(list(stored.tensors.values()))
        if _WEIGHTS in arrays:
            return Fit(arrays[_WEIGHTS], stored.rows, stored.error)
        offsets = (arrays.get(part) for part in ("zero_points", "minimums", "subgroup_scales"))
        return Fit(QuantizedMatrix(arrays["q"], arrays["scales"], *offsets), stored.rows, stored.error)

    def keep(self, key: Hashable, fit: Fit) -> None:
        """Store a fit.

        Raises:
            OutputError: The file cannot be written.
        """
        weights = fit.weights
        parts = vars(weights) if isinstance(weights, QuantizedMatrix) else {_WEIGHTS: weights}
        tensors = {
            name: self._spill.add(f"{len(self._known)}.{name}", part, _TYPES[part.dtype.name])
            for name, part in parts.items()
            if part is not None
        }
        self._known[key] = _Stored(tensors, fit.rows, fit.error)

    def close(self) -> None:
        """Close the file."""
        self._spill.close()


@dataclass(frozen=True)
class _Stored:
    tensors: dict[str, ir.ExternalTensor]  # Fit.weights: the fields of QuantizedMatrix, or one tensor named _WEIGHTS
    rows: int
    error: float | None
