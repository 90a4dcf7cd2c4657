"""Access to single kernels without operators, for benchmarks. Only builds with ORTOLAN_TESTING have this."""

from __future__ import annotations

from types import ModuleType

from ..errors import OrtolanError


def bare_kernels() -> ModuleType | None:
    """Return module ortolan._testing, or None in builds without it."""
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
