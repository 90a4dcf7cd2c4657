"""Vectors in .npy files, written in pieces, or sparse vectors in an .npz file; a file appears when it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from ortolan.graph_passes.files.output import check_file, new_file

from .errors import OutputError

if TYPE_CHECKING:
    from .token_vectors import SparseVectors


def check_vectors_file(path: Path, suffix: str = ".npy") -> None:
    """Check that vectors can be written to a path.

    Raises:
        OutputError: The name does not end in `suffix`, or no file can be written there.
    """
    if path.suffix != suffix:
        raise OutputError(f"output {str(path)!r} must end in {suffix}")
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


def write_token_vectors(path: Path, pieces: Iterable[list[np.ndarray]], width: int) -> tuple[int, int]:
    """Write the token vectors of texts, each float32 [tokens, width], below each other to one file.

    The number of vectors of each text, int64 [texts], is written to a second file: NAME.lengths.npy beside NAME.npy.

    Returns:
        The numbers of texts and of vectors.

    Raises:
        OutputError: A file cannot be written. Nothing is left behind, also if `pieces` raises.
    """
    second = path.with_suffix(".lengths.npy")
    check_file(second)
    lengths: list[int] = []

    def joined() -> Iterator[np.ndarray]:
        for texts in pieces:
            lengths.extend(map(len, texts))
            yield from texts

    with new_file(second) as file:
        rows, _ = write_vectors(path, chain([np.empty((0, width), np.float32)], joined()))
        np.save(file, np.array(lengths, np.int64))
    return len(lengths), rows


def write_sparse(path: Path, vectors: SparseVectors) -> None:
    """Write sparse vectors to a file that scipy.sparse.load_npz reads, or replace it.

    Raises:
        OutputError: The file cannot be written.
    """
    with new_file(path) as file:
        np.savez(
            file,
            format=np.array(b"csr"),
            shape=np.array([len(vectors), vectors.width]),
            data=vectors.values,
            indices=vectors.indices,
            indptr=vectors.starts,
        )


def _write_header(file: BinaryIO, rows: int, width: int) -> None:
    """Write the header, in which NumPy reserves space for any number of rows."""
    array_header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
    np.lib.format.write_array_header_1_0(file, array_header)
