"""Ortolan's execution provider, by the names of ONNX Runtime's guidance for packages of providers."""

from __future__ import annotations

from ortolan.provider import PROVIDER, library_with_provider


def get_library_path() -> str:
    """For `onnxruntime.register_execution_provider_library`. Raises ortolan.LibraryError if it has no provider."""
    return library_with_provider()


def get_ep_name() -> str:
    return PROVIDER


def get_ep_names() -> list[str]:
    return [PROVIDER]
