"""A text has the same bytes alone and in any batch: some cases. `python -m tests.api.invariance` runs 10,000."""

from __future__ import annotations

import pytest

from ortolan import _native

from .invariance import run_isa

ISAS = _native.cpu_info()["detected_features"]


@pytest.mark.parametrize("isa", sorted({ISAS[0], ISAS[-1]}))
def test_answers_do_not_depend_on_the_batch(isa: str) -> None:
    run_isa(isa, 30)
