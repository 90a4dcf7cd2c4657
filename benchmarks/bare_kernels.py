"""Kernels by themselves: what some measurements time. Only builds with ORTOLAN_TESTING have them."""

from __future__ import annotations

from types import ModuleType

from ..errors import OrtolanError


def bare_kernels() -> ModuleType | None:
    """ortolan._testing, or None where it is not built."""
    try:
        from .. import _testing
    except ImportError:
        return None
    return _testing


def required_kernels() -> ModuleType:
    """The same. Raises OrtolanError where it is not built."""
    kernels = bare_kernels()
    if kernels is None:
        raise OrtolanError(
            "this benchmark times kernels by themselves, which packages do not have; build Ortolan in a source tree: "
            "pip install --config-settings=cmake.define.ORTOLAN_TESTING=ON ."
        )
    return kernels
