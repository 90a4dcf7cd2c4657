"""The path of the operator library."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from .errors import LibraryError

LIBRARY_NAME = "libortolan_ops.so"


def get_library_path() -> str:
    """Return the path of libortolan_ops.so, for any ONNX Runtime host: Python, C, C++, Triton.

    Raises:
        LibraryError: The library is missing.
    """
    # In an editable install, the library is beside the native module and not beside the Python files.
    native = find_spec("ortolan._native")
    package = find_spec("ortolan")
    paths = [] if package is None else package.submodule_search_locations or []
    folders = [*map(Path, paths), *([Path(native.origin).parent] if native and native.origin else [])]
    for folder in folders:
        if (folder / LIBRARY_NAME).is_file():
            return str(folder / LIBRARY_NAME)
    raise LibraryError(
        f"{LIBRARY_NAME} is not in {' or '.join(map(str, folders))}; reinstall Ortolan "
        "(in a source tree: pip install .)"
    )
