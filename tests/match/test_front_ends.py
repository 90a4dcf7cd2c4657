"""Both front ends of the rules for attention accept and refuse the same graphs, with the same reasons.

tests/zoo compares exported models. The full run: python -m tests.match.front_ends --graphs 2000
"""

from __future__ import annotations

import onnx
import pytest

from .front_ends import compare, differences, onnx_ir_texts
from .mutations import sources

SAMPLE = 60


@pytest.mark.parametrize("number", range(len(sources())))
def test_small_graphs(number: int) -> None:
    assert differences(onnx.ModelProto.FromString(sources()[number])) == []


def test_mutated_graphs() -> None:
    counts, wrong = compare(range(1, 10 * SAMPLE), SAMPLE)
    assert not wrong, "\n".join(wrong)
    assert counts["compared"] == SAMPLE


def test_lines_have_all_fields() -> None:
    texts = [text for source in sources() for text in onnx_ir_texts(onnx.ModelProto.FromString(source))]
    for part in ("past key", "mask", "hides by", "shows by", "windows", "zero rows", "causal", "sin", "not supported"):
        assert any(part in text for text in texts), part
