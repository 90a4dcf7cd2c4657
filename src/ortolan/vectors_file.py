"""Vectors to a .npy file, piece by piece: the file is there when it is complete, or not at all."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import numpy as np

from .errors import OutputError


def check_place(path: Path) -> None:
    """Raises OutputError where no vectors can be written."""
    if path.suffix != ".npy":
        raise OutputError(f"cannot write {str(path)!r}: expected a name that ends in .npy")
    if path.is_dir():
        raise OutputError(f"cannot write {str(path)!r}: it is a folder")
    if not path.absolute().parent.is_dir():
        raise OutputError(f"cannot write {str(path)!r}: its folder does not exist")


def write_vectors(path: Path, pieces: Iterable[np.ndarray]) -> tuple[int, int]:
    """Writes float32 [rows, width] as numpy.load reads it, and returns that shape; a file of that name is replaced.

    pieces: [rows, width] each, of one width; one piece is in memory at a time. Raises OutputError, and what pieces
    raises; then nothing is left behind.
    """
    check_place(path)
    try:
        with tempfile.TemporaryDirectory(
            prefix=f".{path.name}.ortolan-", dir=path.absolute().parent, ignore_cleanup_errors=True
        ) as work:
            written = Path(work) / path.name
            with written.open("wb") as file:
                rows = width = 0
                for piece in pieces:
                    if not file.tell():
                        _write_header(file, 0, piece.shape[1])
                    file.write(np.ascontiguousarray(piece, "<f4").data)
                    rows, width = rows + len(piece), piece.shape[1]
                file.seek(0)
                _write_header(file, rows, width)
            os.replace(written, path)
    except OSError as error:
        raise OutputError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    return rows, width


def _write_header(file: BinaryIO, rows: int, width: int) -> None:
    """NumPy leaves space in it for any number of rows."""
    array_header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, array_header)
