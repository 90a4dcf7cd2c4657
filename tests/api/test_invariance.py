"""A text has the same bytes alone and in any batch; reproducible models have them on every instruction set.

This file runs a few cases; `python -m tests.api.invariance` runs 10,000.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ortolan import _native

from .invariance import run_isa, sets_that_agree

ISAS = _native.cpu_info()["detected_features"]


@pytest.mark.slow
@pytest.mark.parametrize("isa", sorted({ISAS[0], ISAS[-1]}))
def test_answers_do_not_depend_on_the_batch(isa: str) -> None:
    run_isa(isa, 30)


@pytest.mark.slow
def test_answers_do_not_depend_on_the_instruction_set(tmp_path: Path) -> None:
    """The first and last instruction sets optimize their own models; all others run the last one's models."""
    folders = {isa: tmp_path / ("first" if isa == ISAS[0] else "last") for isa in ISAS}
    for folder in folders.values():
        folder.mkdir(exist_ok=True)
    sets_that_agree({isa: json.loads(run_isa(isa, 0, folders[isa])) for isa in reversed(ISAS)})


def test_a_set_that_differs_is_named() -> None:
    same, other = ({"bert, int8": "a", "bert, bf16 in the fastest order": last} for last in "bc")
    assert sets_that_agree({"avx2": same, "amx": other}) == {
        "bert, int8": [["avx2", "amx"]],
        "bert, bf16 in the fastest order": [["avx2"], ["amx"]],
    }
    with pytest.raises(AssertionError, match=r"bert, int8: the bytes differ between \[\['avx2'\], \['amx'\]\]"):
        sets_that_agree({"avx2": same, "amx": {**other, "bert, int8": "d"}})
