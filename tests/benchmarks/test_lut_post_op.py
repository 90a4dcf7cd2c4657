"""`ortolan bench lut_post_op`: the compared operators give equal answers; refused options."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from ortolan.benchmarks import lut_post_op
from ortolan.benchmarks.lut_post_op import Peer, our_model, peer_model, peers
from ortolan.benchmarks.result import BenchOptions
from ortolan.errors import OrtolanError
from ortolan.session import create_session


@pytest.mark.parametrize("peer", peers(), ids=lambda peer: peer.name)
def test_both_sides_answer_alike(peer: Peer) -> None:
    model = peer_model(peer)
    onnx.checker.check_model(model)
    limits = np.iinfo(peer.x_type)
    x = np.arange(limits.min, limits.max + 1).astype(peer.x_type)
    found = [create_session(one.SerializeToString()).run(None, {"x": x})[0] for one in (model, our_model(model))]
    assert found[0].dtype == peer.y_type
    np.testing.assert_array_equal(*found)


def test_every_chain_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lut_post_op, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr(lut_post_op, "QUICK_ELEMENTS", (100, 7))
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    result = lut_post_op.run(BenchOptions((1, 2), quick=True))
    assert [(row.peer, row.threads, row.case["elements"]) for row in result.rows] == [
        (peer.name, threads, elements) for peer in peers() for threads in (1, 2) for elements in (100, 7)
    ]
    assert all(row.ours.min_ms > 0 and row.peer_time.min_ms > 0 for row in result.rows)
    assert "ort_qlinear_sigmoid" in result.to_json()


@pytest.mark.parametrize("option", [{"cases": ((1, 2, 3),)}, {"sparsity": (0.5,)}, {"layers": ("q",)}, {"batch": (1,)}])
def test_options_about_weights_are_refused(option: dict[str, tuple[object, ...]]) -> None:
    with pytest.raises(OrtolanError, match="LutPostOp has no weights"):
        lut_post_op.run(BenchOptions(quick=True, **option))
