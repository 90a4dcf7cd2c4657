"""Run checks in a separate process that has AMX, emulated if necessary."""

from __future__ import annotations

from .emulator import run_python


def check(code: str) -> None:
    done = run_python(code)
    assert done.returncode == 0, done.stderr
