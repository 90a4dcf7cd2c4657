"""Locates Ortolan's execution provider, with the functions that ONNX Runtime recommends for provider packages."""

from __future__ import annotations

from ortolan.provider import PROVIDER, library_with_provider


def get_library_path() -> str:
    """Return the library's path for `onnxruntime.register_execution_provider_library`.

    Raises:
        ortolan.LibraryError: The library was built without the provider.
    """
    return library_with_provider()


def get_ep_name() -> str:
    """Return the provider's name."""
    return PROVIDER


def get_ep_names() -> list[str]:
    """Return the names of all providers of the library."""
    return [PROVIDER]
