"""The benchmark of the model zoo, without Optimum. Tests that need Optimum are in tests/zoo."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from ortolan.benchmarks.result import BenchOptions
from ortolan.benchmarks.zoo import run
from ortolan.errors import OrtolanError
from ortolan.models.zoo import ARCHITECTURES, BASE, SMALL


def test_names_are_checked_first() -> None:
    with pytest.raises(OrtolanError, match="the zoo has no dodo, expected bert, distilbert"):
        run(BenchOptions(kinds=("bert", "dodo")))


@pytest.mark.skipif(
    find_spec("torch") is not None and find_spec("optimum.exporters") is not None, reason="Optimum is installed"
)
def test_without_optimum_it_says_what_to_install() -> None:
    with pytest.raises(OrtolanError, match=r"pip install 'optimum-onnx\[onnxruntime\]"):
        run(BenchOptions(kinds=("bert",)))


def test_configurations_of_both_sizes() -> None:
    names = [one.name for one in ARCHITECTURES]
    assert len(set(names)) == len(names) >= 40
    for architecture in ARCHITECTURES:
        assert architecture.config(SMALL).keys() == architecture.config(BASE).keys()
