"""The command line and the hooks take the arguments of the Python functions behind them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import ortolan
from ortolan import cli
from ortolan.graph_passes.forms import CHOICES
from ortolan.optimum import OrtolanOptimizer


def arguments(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def test_optimize() -> None:
    # options is --set; progress is the bar
    assert arguments(ortolan.optimize_onnx) - arguments(cli.optimize) == {"options", "progress"}


def test_search() -> None:
    assert arguments(ortolan.search) - arguments(cli.search) == {"shapes", "progress"}  # shapes is --shape


def test_optimum() -> None:
    taken = arguments(OrtolanOptimizer.optimize) | set(CHOICES)
    # Folders are written whole, with tokens as inputs.
    assert arguments(ortolan.optimize_onnx) - taken == {"model", "output", "budget", "prompt", "texts_in", "dry_run"}
