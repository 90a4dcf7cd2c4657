"""`ortolan bench masked_matmul`: the compared operators give equal answers, all cases are measured, and plots."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ortolan.benchmarks import masked_matmul
from ortolan.benchmarks.masked_matmul import product_model, sparse_blocks, sparse_elements
from ortolan.benchmarks.result import BenchOptions
from ortolan.errors import OrtolanError
from ortolan.session import create_session


@pytest.fixture(autouse=True)
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masked_matmul, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(masked_matmul, "ROUNDS", 1)
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)


def test_both_sides_answer_alike() -> None:
    rng = np.random.default_rng(0)
    a, b = sparse_elements(rng, 50, 60, 0.8), sparse_blocks(rng, 60, 70, 0.8)
    found = [
        create_session(product_model(op).SerializeToString()).run(None, {"a": a, "b": b})[0]
        for op in ("MatMul", "MaskedMatMul")
    ]
    np.testing.assert_allclose(*found, atol=1e-5)


def test_shares_of_zeros() -> None:
    rng = np.random.default_rng(1)
    numbers, blocks = sparse_elements(rng, 300, 320, 0.8), sparse_blocks(rng, 300, 320, 0.8)
    assert abs((numbers == 0).mean() - 0.8) < 0.02 and abs((blocks == 0).mean() - 0.8) < 0.02
    of_blocks = (blocks.reshape(300, 20, 16) == 0).mean(2)
    assert set(np.unique(of_blocks)) == {0.0, 1.0}


def test_every_case_is_measured() -> None:
    result = masked_matmul.run(BenchOptions((1,), quick=True))
    assert {row.case["kind"] for row in result.rows} == set(masked_matmul.DEFAULT_KINDS)
    peers = {row.peer for row in result.rows}
    assert peers >= {"ort_matmul", "ortolan_dense_bf16", "ortolan_dense_int8"}
    assert all(row.ours.min_ms > 0 and row.peer_time.min_ms > 0 for row in result.rows)
    assert "deja_vu" in result.to_json()


def test_shapes_and_shares_that_are_given() -> None:
    options = BenchOptions((1, 2), cases=((20, 30, 40),), sparsity=(0.5, 0.7), kinds=("square",), quick=True)
    rows = [row for row in masked_matmul.run(options).rows if row.peer == "ort_matmul"]
    assert {(row.case["shape"], row.case["a"], row.threads) for row in rows} == {
        ("20x30x40", share, threads) for share in (0.5, 0.7) for threads in (1, 2)
    }
    assert len(rows) == 4


def test_the_heat_map_is_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    result = masked_matmul.run(BenchOptions((1,), quick=True, kinds=("heat_map",)))
    assert len(result.rows) == len(masked_matmul.QUICK_HEAT_MAP_SPARSITY) ** 2
    assert (tmp_path / "heat_map.png").stat().st_size > 1000


def test_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(OrtolanError, match="no kind 'round', expected one of square"):
        masked_matmul.run(BenchOptions(quick=True, kinds=("round",)))
    with pytest.raises(OrtolanError, match="leave out options about layers"):
        masked_matmul.run(BenchOptions(quick=True, layers=("q",)))
    monkeypatch.setattr(masked_matmul, "find_spec", lambda name: None)
    with pytest.raises(OrtolanError, match="matplotlib, which is not installed"):
        masked_matmul.run(BenchOptions(quick=True, kinds=("heat_map",)))
