"""Attention and QAttention, which contain their query, key and value layers: bits as in the optimized file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import pytest
from onnx import helper

import ortolan

from ..ops.single_node import assert_same_bits
from ..passes.small_models import op_types, relative_error, run
from ..passes.test_fused_forms import LOWEST, B, H, K, S, W, add_attribute, attention_model, masks, random, set_mask
from .sessions import claimed, needs_provider, plain_session, provider_session
from .test_context import check_round_trip

pytestmark = needs_provider

PRECISION = "ep.ortolanexecutionprovider.precision"


def session_of(model: onnx.ModelProto, precision: str = "bf16", threads: int = 1) -> ort.InferenceSession:
    return provider_session(model, threads, **{PRECISION.replace(".", "__"): precision})


def optimized(model: onnx.ModelProto, weights: str, feeds: dict[str, np.ndarray], **options: Any) -> onnx.ModelProto:
    report = ortolan.optimize_onnx(
        model, weights=weights, ignore=(), calibration=[feeds],
        options={"may_grow": True, "verify.seconds": 0.0, **options},
    )  # fmt: skip
    assert report.model is not None and op_types(report.model).count("NoMADAttention") == 1
    return report.model


def check(model: onnx.ModelProto, feeds: dict[str, np.ndarray], precision: str, threads: int = 1) -> None:
    """Check the bits of the optimized file, and that a sequence alone has the bits of the batch."""
    session = session_of(model, precision, threads)
    assert claimed(session) == ["fused"]
    (y,) = session.run(None, feeds)
    assert_same_bits(y, run(optimized(model, precision, feeds), feeds, library=True)[0])
    for b in range(len(feeds["x"])):
        alone = {name: array[b : b + 1] if array.shape[0] == B else array for name, array in feeds.items()}
        assert_same_bits(session.run(None, alone)[0][0], y[b])
    assert relative_error(plain_session(model).run(None, feeds)[0], y) < 0.05


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize(
    "given", [{}, {"bias": False}, {"scale": 0.3}, {"unidirectional": 1}, {"widths": (32, 32, 32)}, {"added": (B, H)}]
)
def test_float_attention(given: dict[str, Any], precision: str) -> None:
    check(*attention_model(**given), precision)


