"""Runs the commands in this process."""

from __future__ import annotations

from typing import Any

from typer.testing import CliRunner, Result

from ortolan.cli import app

LIMITS = ("--threads", 1, "--context", 128, "--cache-memory", "4M", "--max-tokens", 8, "--temperature", 0)


def invoke(*arguments: Any, **options: Any) -> Result:
    """Return the result of a command with these arguments."""
    return CliRunner().invoke(app, list(map(str, arguments)), **options)
