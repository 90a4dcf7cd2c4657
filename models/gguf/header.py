"""Checks all lengths in the header of a GGUF file against the file's size.

The package gguf trusts the lengths: an array of 2^60 elements in a short file would keep it busy forever.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ..graph_builder import ModelBuildError

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_STRING, _ARRAY = 8, 9
# Maps the type numbers of metadata values with a fixed size to this size, in bytes.
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_ALIGNMENT_KEY, _ALIGNMENT = b"general.alignment", 32
_ARCHITECTURE_KEY, _LENGTH_BYTES = b"general.architecture", 8
_UINT32 = 4
_MAX_AXES = 4
_MAX_ALIGNMENT = 1 << 20
# Limits, because larger counts would take long to read. Vocabularies have about 100,000 entries.
_MAX_ENTRIES = 1 << 16
_MAX_ELEMENTS = 1 << 22


class _Cursor:
    """A read position that cannot leave the file."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.position = data, 0

    def skip(self, count: int, what: str) -> int:
        """Advance by `count` bytes, and return where they start."""
        start = self.position
        if count > len(self.data) - start:
            raise _Malformed(f"it ends inside {what}, which has {count} bytes at byte {start}")
        self.position = start + count
        return start

    def number(self, form: str, what: str) -> int:
        (value,) = struct.unpack_from(f"<{form}", self.data, self.skip(struct.calcsize(form), what))
        return int(value)

    def text(self, what: str) -> bytes:
        length = self.number("Q", what)
        start = self.skip(length, what)
        return self.data[start : start + length]


class _Malformed(Exception):
    """The file is damaged; the message says how."""


class _NotGGUF(Exception):
    """The file has another format."""


def check_header(path: Path, check_architecture: Callable[[Path, str], None] | None = None) -> None:
    """Check that no part of a GGUF file extends beyond the end of the file.

    Args:
        path: The file.
        check_architecture: Called with the path and general.architecture as soon as that is read.

    Raises:
        ModelBuildError: The file is not a GGUF file, or it is damaged.
    """
    try:
        with path.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            _check(_Cursor(data), partial(check_architecture or _any_architecture, path))
    except FileNotFoundError:
        raise ModelBuildError(f"file {str(path)!r} does not exist") from None
    except OSError as error:
        raise ModelBuildError(f"{str(path)!r} cannot be read: {error.strerror or error}") from error
    except _NotGGUF:
        raise ModelBuildError(
            f"{os.fspath(path)!r} is not a GGUF file: it does not begin with 'GGUF'; for ONNX models: ortolan optimize"
        ) from None
    except (_Malformed, ValueError) as error:  # ValueError: an empty file cannot be mapped
        raise ModelBuildError(
            f"{os.fspath(path)!r} cannot be read as a GGUF file: {error}; download it again"
        ) from None


def _any_architecture(path: Path, name: str) -> None:
    pass


def _check(cursor: _Cursor, tell_architecture: Callable[[str], None]) -> None:
    start = cursor.skip(len(_MAGIC), "the magic number")
    if cursor.data[start : cursor.position] != _MAGIC:
        raise _NotGGUF
    version = cursor.number("I", "the version")
    if version not in _VERSIONS:
        raise _Malformed(f"its version is {version}, expected 2 or 3 (little endian)")
    tensors, pairs = cursor.number("Q", "the header"), cursor.number("Q", "the header")
    if max(tensors, pairs) > _MAX_ENTRIES:
        raise _Malformed(f"it has {tensors} tensors and {pairs} metadata entries, expected at most {_MAX_ENTRIES}")
    alignment = _ALIGNMENT
    for _ in range(pairs):
        key = cursor.text("a name in the metadata")
        what = repr(key.decode(errors="replace"))
        kind = cursor.number("I", what)
        before = cursor.position
        _skip_value(cursor, kind, what)
        if key == _ARCHITECTURE_KEY and kind == _STRING:
            tell_architecture(cursor.data[before + _LENGTH_BYTES : cursor.position].decode(errors="replace"))
        if key == _ALIGNMENT_KEY:
            alignment = struct.unpack_from("<I", cursor.data, before)[0] if kind == _UINT32 else 0
            if not 0 < alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
                raise _Malformed("its alignment is not a power of two")
    ends = [_tensor_end(cursor, alignment) for _ in range(tensors)]
    begin = -(-cursor.position // alignment) * alignment
    for name, end in ends:
        if begin + end > len(cursor.data):
            raise _Malformed(f"tensor {name!r} ends at byte {begin + end}, but the file has {len(cursor.data)} bytes")


def _skip_value(cursor: _Cursor, kind: int, what: str) -> None:
    if kind == _STRING:
        cursor.text(what)
    elif kind == _ARRAY:
        inner, count = cursor.number("I", what), cursor.number("Q", what)
        if count > _MAX_ELEMENTS:
            raise _Malformed(f"{what} is an array of {count} elements, expected at most {_MAX_ELEMENTS}")
        if inner == _STRING:
            for _ in range(count):
                cursor.text(what)
        elif inner in _SIZES:
            cursor.skip(_SIZES[inner] * count, what)
        else:
            raise _Malformed(f"{what} is an array of unknown type {inner}")
    elif kind in _SIZES:
        cursor.skip(_SIZES[kind], what)
    else:
        raise _Malformed(f"{what} is of unknown type {kind}")


def _tensor_end(cursor: _Cursor, alignment: int) -> tuple[str, int]:
    """Return the tensor's name, and the offset of its end relative to the end of the header."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    name = cursor.text("the name of a tensor").decode(errors="replace")
    what = f"tensor {name!r}"
    axes = cursor.number("I", what)
    if not 1 <= axes <= _MAX_AXES:
        raise _Malformed(f"{what} has {axes} axes, expected 1 to {_MAX_AXES}")
    shape = [cursor.number("Q", what) for _ in range(axes)]
    kind, offset = cursor.number("I", what), cursor.number("Q", what)
    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
    except (KeyError, ValueError):
        raise _Malformed(f"{what} is of type {kind}, which this version of the package gguf does not support") from None
    if 0 in shape or shape[0] % block or offset % alignment:
        raise _Malformed(f"{what} has shape {shape} at offset {offset}, expected rows of {block} values, aligned")
    count = 1
    for side in shape:  # no overflow, because these are Python integers
        count *= side
    return name, offset + count // block * size
