"""W4A8MatMul on OpenCL must give the bits of the CPU's kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.w4a8_matmul_function import Uses

from ...sampling import examples
from ..group_node import node_model
from ..groups import GroupLayer
from ..isa_process import each_isa
from ..single_node import save_at_odd_places, session
from .devices import Process, asked, assert_equal_bits, feeds, needs_opencl, sessions

pytestmark = needs_opencl
ROWS = (1, 2, 7, 8, 16, 33, 128)
KINDS: dict[str, dict[str, Any]] = {
    "symmetric": {"zero_points": False},
    "zero points": {},
    "fractions": {"fractions": True, "half": True},
    "minimums": {"minimums": True},
    "symmetric, float16": {"zero_points": False, "half": True},
    "zero points, float16": {"half": True},
    "minimums, float16": {"minimums": True, "half": True},
}


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_group(kind: str, group: int) -> None:
    k, n = 1000, 75
    rng = np.random.default_rng(group)
    layer = GroupLayer.random(rng, k, n, group, **KINDS[kind])
    cpu, device = sessions(node_model(layer, rng.standard_normal(n, dtype=np.float32)))
    for m in ROWS:
        (y,), (expected,) = (one.run(None, feeds(m, k)) for one in (device, cpu))
        assert_equal_bits(y, expected)


@examples(60)
@given(
    m=st.integers(1, 140),
    k=st.integers(1, 400),
    n=st.integers(1, 150),
    group=st.sampled_from([32, 128]),
    zero_points=st.booleans(),
    has_bias=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_size(m: int, k: int, n: int, group: int, zero_points: bool, has_bias: bool, seed: int) -> None:
    rng = np.random.default_rng(seed)
    layer = GroupLayer.random(rng, k, n, group, zero_points=zero_points)
    bias = rng.standard_normal(n, dtype=np.float32) if has_bias else None
    cpu, device = sessions(node_model(layer, bias))
    (y,), (expected,) = (one.run(None, feeds(m, k, seed)) for one in (device, cpu))
    assert_equal_bits(y, expected)


def test_numbers_that_are_not_finite_and_zeros() -> None:
    k, n = 300, 40
    cpu, device = sessions(node_model(GroupLayer.random(np.random.default_rng(1), k, n, 32, minimums=True)))
    x = np.random.default_rng(2).standard_normal((40, k), dtype=np.float32)
    x[0, 3], x[5, 200], x[9], x[20, :32] = np.inf, np.nan, 0, 1e-30
    y, expected = device.run(None, {"x": x})[0], cpu.run(None, {"x": x})[0]
    assert np.isnan(expected[0]).all() and np.isnan(expected[5]).all() and np.isfinite(expected[9]).all()
    assert_equal_bits(y, expected)


@pytest.mark.parametrize("activation", [Activation.NONE, Activation.SILU])
def test_gates_and_activations(activation: Activation) -> None:
    """The epilogue runs on the CPU, after the product on the device."""
    k, n = 96, 100
    rng = np.random.default_rng(3)
    layer = GroupLayer.random(rng, k, 2 * 112, 32, zero_points=False)
    uses = Uses(False, activations=frozenset({activation}), gated=True)
    bias = rng.standard_normal(2 * 112, dtype=np.float32)
    cpu, device = sessions(node_model(layer, bias, uses=uses, activation=activation, gated_columns=n))
    for m in (1, 7, 300):
        assert_equal_bits(device.run(None, feeds(m, k))[0], cpu.run(None, feeds(m, k))[0])


def test_norms() -> None:
    k, n = 96, 50
    model = node_model(GroupLayer.random(np.random.default_rng(5), k, n, 32, minimums=True))
    next(one for one in model.graph.node[0].attribute if one.name == "norm_epsilon").f = 1e-5
    cpu, device = sessions(model)
    for m in (1, 300):
        y, expected = device.run(None, feeds(m, k))[0], cpu.run(None, feeds(m, k))[0]
        np.testing.assert_allclose(y.mean(1), 1, atol=1e-5)  # norm_bias
        assert_equal_bits(y, expected)


def test_more_rows_than_the_device_takes_at_once() -> None:
    k, n, m = 8, 20000, 900
    assert 4 * m * n > 64 << 20  # kMostScratchBytes
    cpu, device = sessions(node_model(GroupLayer.random(np.random.default_rng(9), k, n, 32)))
    assert_equal_bits(device.run(None, feeds(m, k))[0], cpu.run(None, feeds(m, k))[0])


@pytest.mark.parametrize("shape", [(33, 50), (50,), (2, 33, 50)])
def test_residuals(shape: tuple[int, ...]) -> None:
    k, n = 96, 50
    rng = np.random.default_rng(4)
    layer = GroupLayer.random(rng, k, n, 32, zero_points=False)
    cpu, device = sessions(node_model(layer, residual=shape, activation=Activation.GELU))
    fed = {**feeds(33, k), "residual": rng.standard_normal(shape, dtype=np.float32)}
    assert_equal_bits(device.run(None, fed)[0], cpu.run(None, fed)[0])


def test_weights_at_any_address(tmp_path: Path) -> None:
    """Weights at unaligned addresses cannot be shared with the device, so they are copied."""
    layer = GroupLayer.random(np.random.default_rng(6), 200, 40, 32)
    model = node_model(layer)
    with asked("0"):
        expected = session(model).run(None, feeds(9, 200))[0]
    save_at_odd_places(model, tmp_path)
    with asked("force"):
        assert_equal_bits(session(tmp_path / "model.onnx").run(None, feeds(9, 200))[0], expected)


@each_isa
def test_whichever_kernel_packs_and_multiplies(isa: str, tmp_path: Path) -> None:
    """The packed weights and rows have the same layout for every instruction set."""
    model = node_model(GroupLayer.random(np.random.default_rng(7), 300, 40, 32))
    device = Process(model, tmp_path, ORTOLAN_OPENCL="force", ORTOLAN_ISA=isa)
    device.check(Process(model, tmp_path, ORTOLAN_OPENCL="0", ORTOLAN_ISA=isa))
    assert device.maps("libOpenCL") and not device.warnings


def test_the_faster_side_takes_calls_without_changing_them(tmp_path: Path) -> None:
    layer = GroupLayer.random(np.random.default_rng(8), 300, 40, 32)
    model = node_model(layer)
    rows = (1, 33) * 12
    measured = Process(model, tmp_path, rows, ORTOLAN_OPENCL="1")
    assert measured.maps("libOpenCL") and not measured.warnings
    measured.check(Process(model, tmp_path, rows, ORTOLAN_OPENCL="0"))
