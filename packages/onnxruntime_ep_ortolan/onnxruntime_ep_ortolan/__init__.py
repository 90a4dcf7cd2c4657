"""Locates Ortolan's execution provider, with the functions that ONNX Runtime recommends for provider packages."""

from __future__ import annotations

import ortolan
from ortolan.provider import PROVIDER


def get_library_path() -> str:
    """Return the library's path for `onnxruntime.register_execution_provider_library`."""
    return ortolan.get_library_path()


def get_ep_name() -> str:
    """Return the provider's name."""
    return PROVIDER


def get_ep_names() -> list[str]:
    """Return the names of all providers of the library."""
    return [PROVIDER]
