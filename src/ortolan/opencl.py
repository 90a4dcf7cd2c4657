"""OpenCL devices, as libortolan_opencl.so sees them: where W4A8MatMul may run (docs/opencl.md)."""

from __future__ import annotations

import ctypes
from pathlib import Path

from .errors import LibraryError
from .library import get_library_path

VARIABLE = "ORTOLAN_OPENCL"
LIBRARY_NAME = "libortolan_opencl.so"
# In the line of a device that is none.
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
    """A line for each device, the one that Ortolan uses first.

    It loads the drivers into this process. Raises LibraryError where there is no device, with the reason.
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
        raise LibraryError(f"{path} is of another version of Ortolan; reinstall Ortolan")
    text = ctypes.create_string_buffer(_TEXT_BYTES)
    count = functions.contents.list(text, _TEXT_BYTES)
    lines = text.value.decode(errors="replace")
    if count == 0:
        raise LibraryError(lines)
    return lines.splitlines()
