"""Helpers for models quantized by ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx_ir as ir
from onnxruntime import quantization

from ortolan.graph_passes.find.linear import Linear, find_linears
from ortolan.graph_passes.find.quantized_forms import unify_quantized
from ortolan.graph_passes.operators.nodes import NewNames

FEEDS = [
    {
        "input_ids": np.random.default_rng(seed).integers(0, 101, (2, 12)),
        "attention_mask": np.ones((2, 12), np.int64),
        "token_type_ids": np.zeros((2, 12), np.int64),
    }
    for seed in range(3)
]


class Reader(quantization.CalibrationDataReader):
    """Reader of calibration feeds, by default feeds for a BERT."""

    def __init__(self, feeds: Sequence[Mapping[str, np.ndarray]] = FEEDS) -> None:
        self._left = list(feeds)

    def get_next(self) -> Mapping[str, np.ndarray] | None:
        return self._left.pop() if self._left else None


def layers_of(path: Path) -> dict[str, Linear]:
    """Return the linear layers with stored int8 weights, by name."""
    model = ir.load(path)
    unify_quantized(model, NewNames(model))
    return {found.name: found for found in find_linears(model) if isinstance(found, Linear)}
