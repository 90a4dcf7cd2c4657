"""What the tests of the single operators' benchmarks share: runs that take no time."""

import pytest

from ortolan.benchmarks import side_by_side


@pytest.fixture
def short(monkeypatch):
    """short({"q": (70, 40)}): few rounds over few copies of layers of these sizes."""
    monkeypatch.setattr(side_by_side, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    for module in ("cold_layers", "dense_peers"):
        monkeypatch.setattr(f"ortolan.benchmarks.{module}.copies_to_stay_cold", lambda size: 3)
    return lambda layers: monkeypatch.setattr(side_by_side, "LAYERS", layers)
