"""Damaged models in sessions with the provider (fuzz.py): no crash, no hang, no wrong answer."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from . import fuzz
from .sessions import needs_provider

pytestmark = needs_provider

MODELS = 150


@pytest.mark.slow
@pytest.mark.parametrize("part", range(4))
def test_damaged_models_give_an_error_or_right_answers(part: int, tmp_path: Path) -> None:
    report = fuzz.run(1 + part * MODELS, MODELS, tmp_path)
    assert not report.wrong, "\n".join(report.wrong)
    assert sum(report.counts.values()) == MODELS
    # Not too many models are damaged beyond use, and enough are claimed.
    assert report.counts["no session"] > MODELS // 10 and report.counts["taken, answered"] > MODELS // 10


def test_a_crash_and_a_hang_are_told_with_their_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The report lists crashes and hangs, and the remaining models run.

    Seeds 3 and 4 crash, 4 even without the provider. Seed 6 hangs.
    """
    code = """
        import os, signal, sys, time
        first, end, plain = int(sys.argv[1]), int(sys.argv[2]), len(sys.argv) > 3
        for seed in range(first, end):
            print("begin", seed, flush=True)
            if seed == 4 or (seed == 3 and not plain):
                os.kill(os.getpid(), signal.SIGKILL)
            if seed == 6 and not plain:
                time.sleep(60)
            print("end", seed, *([] if plain else ["no damage", "taken, answered"]), sep="\\t", flush=True)
    """

    def start(first: int, end: int, errors: Any, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", textwrap.dedent(code), str(first), str(end), *more]
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors)

    monkeypatch.setattr(fuzz, "start", start)
    report = fuzz.run(1, 8, tmp_path, seconds=2)
    assert report.counts == {"taken, answered": 5, "crash or hang": 2, "crash of ONNX Runtime's own": 1}
    assert [line.split(" (")[0] for line in report.wrong] == ["crash or hang: seed 3", "crash or hang: seed 6"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3.onnx", "6.onnx"]
