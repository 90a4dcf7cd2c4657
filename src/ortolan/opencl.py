"""OpenCL devices on which W4A8MatMul can run, as libortolan_opencl.so finds them (docs/opencl.md)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from .errors import LibraryError
from .library import get_library_path

VARIABLE = "ORTOLAN_OPENCL"
LIBRARY_NAME = "libortolan_opencl.so"
# `opencl_devices` includes this text in the line of a device that is not a GPU.
NO_GPU = "no GPU"
# ops/opencl/interface.h
_VERSION = 1
_TEXT_BYTES = 1 << 16


class _Functions(ctypes.Structure):
    """The first fields of OrtolanOpenCl."""

    _fields_ = (
        ("version", ctypes.c_int64),
        ("list", ctypes.CFUNCTYPE(ctypes.c_int64, ctypes.c_char_p, ctypes.c_int64)),
    )


def opencl_devices() -> list[str]:
    """Return one line for each device; Ortolan uses the first. This loads the drivers into the process.

    Raises:
        LibraryError: There is no device; the message has the reason.
    """
    path = Path(get_library_path()).with_name(LIBRARY_NAME)
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryError(f"{path} cannot be loaded: {error}; reinstall Ortolan") from None
    library.OrtolanGetOpenCl.restype = ctypes.POINTER(_Functions)
    library.OrtolanGetOpenCl.argtypes = [ctypes.c_int64]
    functions = library.OrtolanGetOpenCl(_VERSION)
    if not functions:
        raise LibraryError(f"{path} belongs to another version of Ortolan; reinstall Ortolan")
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    count = functions.contents.list(text, _TEXT_BYTES)
    lines = text.value.decode(errors="replace")
    if count == 0:
        raise LibraryError(lines)
    return lines.splitlines()
