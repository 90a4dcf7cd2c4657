"""Tests of the report on tests and kernels that cannot run on this CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from ortolan import _native

from . import instructions

ALL = ["scalar", "avx2", "avx512bw", "avx512vnni", "avx512", "avx512bf16"]


def test_skips_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_info", lambda: {"detected_features": ["scalar", "avx2"]})
    instructions.require("avx2", "this")
    reasons = []
    for who in ("one kernel", "one kernel", "another"):
        with pytest.raises(pytest.skip.Exception) as skipped:
            instructions.require("avx512", who)
        reasons.append(f"Skipped: {skipped.value}")
    first, second, kernels = instructions.summary([*reasons, "Skipped: no curl"])
    assert first == "2 skipped for missing instructions: one kernel needs avx512, this CPU has scalar, avx2"
    assert second == "1 skipped for missing instructions: another needs avx512, this CPU has scalar, avx2"
    assert "sparse_amx_matmul avx512bf16" in kernels and " avx2," not in kernels


def test_emulated_kernels_are_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_info", lambda: {"detected_features": ALL})
    assert instructions.summary([]) == []


def test_the_sanitizer_build_may_be_that_of_a_lesser_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_info", lambda: {"detected_features": ALL})
    assert instructions.sanitized() == ["scalar", "avx2", "avxvnni", "avx512bw", "avx512", "avx512bf16", "amx"]
    assert instructions.sanitized("avx2") == ["scalar", "avx2", "avxvnni"]


def test_a_row_of_amx_without_a_test_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_native, "cpu_info", lambda: {"detected_features": ALL})
    rows = instructions.kernel_rows() | {"sorting amx": "amx", "sorting avx512": "avx512"}
    monkeypatch.setattr(instructions, "kernel_rows", lambda: rows)
    (line,) = instructions.summary([])
    assert line.startswith("1 kernels no test can run") and line.endswith(": sorting amx")


@pytest.mark.parametrize("row", instructions.AMX_ROWS)
def test_rows_of_amx_are_asked_for(row: str) -> None:
    assert instructions.kernel_rows().get(row, "amx") == "amx"  # Arm builds have no AMX rows
    text = (Path(__file__).parent / "amx" / instructions.AMX_ROWS[row]).read_text(encoding="utf-8")
    assert f'"{row.partition(" ")[2]}"' in text
