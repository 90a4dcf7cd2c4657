"""Find the 4-bit format in which a float weight was stored before, such as the weights of a GGUF file.

Dequantized weights are values of their old format. That format keeps them exactly, and another one would round
them a second time. Formats are tried from the fewest to the most bits; minimums represent Q4_1, and the other two Q4_0
and the zero points of GPTQ and AWQ.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ...names import GROUP_SIZES
from .grid import Quantization, dequantize
from .mse import round_mse

_ROWS = max(GROUP_SIZES)  # inputs of a sampled run, which holds whole groups of every size
_RUNS, _COLUMNS = 3, 64  # number of sampled runs, and of sampled columns
_TOLERANCE = 2.0**-10  # largest error of a weight on a grid, relative to its column's largest weight in the run


def find_stored_grid(matrix: np.ndarray, otherwise: Quantization) -> Quantization | None:
    """Return a 4-bit format without subgroups that keeps W exactly, if `otherwise` does not.

    Args:
        matrix: W, float32 [k, n], finite. Only a sample of it is read.
        otherwise: The format that W would be rounded to.

    Returns:
        None if there is no such format, or if `otherwise` keeps W exactly as well.
    """
    parts = list(_samples(matrix))
    # Groups of 32 with minimums represent almost any other grid, so one search rejects most weights.
    finest = Quantization(4, GROUP_SIZES[0], symmetric=False, minimum=True)
    if not _keeps(parts[:1], finest) or _keeps(parts, otherwise):
        return None
    formats = (
        form
        for size in reversed(GROUP_SIZES)
        for form in (
            Quantization(4, size),
            Quantization(4, size, symmetric=False),
            Quantization(4, size, symmetric=False, minimum=True),
        )
    )
    return next((form for form in formats if _keeps(parts, form)), None)


def _samples(matrix: np.ndarray) -> Iterator[np.ndarray]:
    k, n = matrix.shape
    runs = -(-k // _ROWS)
    for run in sorted({*np.linspace(0, runs - 1, _RUNS, dtype=int)}):
        yield np.ascontiguousarray(matrix[run * _ROWS : (run + 1) * _ROWS, :: -(-n // _COLUMNS)])


def _keeps(parts: list[np.ndarray], form: Quantization) -> bool:
    for part in parts:
        error = np.abs(dequantize(round_mse(part, form), form.group_size, form.subgroup_size) - part)
        if (error > np.float32(_TOLERANCE) * np.abs(part).max(axis=0)).any():
            return False
    return True
