"""Vectors in an .npy file, written in pieces; the file appears when it is complete."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from ortolan.graph_passes.files.output import check_file, new_file

from .errors import OutputError


def check_vectors_file(path: Path) -> None:
    """Check that vectors can be written to a path.

    Raises:
        OutputError: The name does not end in .npy, or no file can be written there.
    """
    if path.suffix != ".npy":
        raise OutputError(f"output {str(path)!r} must end in .npy")
    check_file(path)


def write_vectors(path: Path, pieces: Iterable[np.ndarray]) -> tuple[int, int]:
    """Write vectors in pieces, each float32 [rows, width], to a file that numpy.load reads, or replace it.

    Returns:
        The shape (rows, width) of all vectors.

    Raises:
        OutputError: The file cannot be written. Nothing is left behind, also if `pieces` raises.
    """
    check_vectors_file(path)
    rows = width = 0
    with new_file(path) as file:
        for piece in pieces:
            if not file.tell():
                _write_header(file, 0, piece.shape[1])
            file.write(np.ascontiguousarray(piece, "<f4").data)
            rows, width = rows + len(piece), piece.shape[1]
        file.seek(0)
        _write_header(file, rows, width)
    return rows, width


def _write_header(file: BinaryIO, rows: int, width: int) -> None:
    """Write the header, in which NumPy reserves space for any number of rows."""
    array_header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, array_header)
