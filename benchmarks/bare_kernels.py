"""Access to kernels without their operators, for some measurements. Only builds with ORTOLAN_TESTING have them."""

from __future__ import annotations

from types import ModuleType

from ..errors import OrtolanError


def bare_kernels() -> ModuleType | None:
    """Return ortolan._testing, or None if it is not built."""
    try:
        from .. import _testing
    except ImportError:
        return None
    return _testing


def required_kernels() -> ModuleType:
    """Return ortolan._testing.

    Raises:
        OrtolanError: It is not built.
    """
    kernels = bare_kernels()
    if kernels is None:
        raise OrtolanError(
            "this benchmark times bare kernels, which packages do not contain; build Ortolan in a source tree: "
            "pip install --config-settings=cmake.define.ORTOLAN_TESTING=ON ."
        )
    return kernels
