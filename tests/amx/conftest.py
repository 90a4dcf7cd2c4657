"""Session-wide fixtures that enable AMX in this process. Test ids contain [emulated] or [native]."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from .. import instructions
from . import emulator


@pytest.fixture(scope="session", params=[emulator.mode()])
def amx() -> Iterator[emulator.Emulator | None]:
    """Yield the emulator, or None if the CPU has AMX."""
    reason = emulator.why_unavailable()
    if reason is not None:
        pytest.skip(reason)
    instructions.require(instructions.AMX_EMULATOR, "the AMX emulator")
    with emulator.amx() as installed:
        yield installed


@pytest.fixture
def emulated(amx: emulator.Emulator | None) -> emulator.Emulator:
    """Return the emulator with its counts at zero."""
    if amx is None:
        pytest.skip("instructions run natively and are not counted")
    amx.reset_counts()
    return amx
