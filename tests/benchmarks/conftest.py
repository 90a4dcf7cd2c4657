"""What the tests of the single operators' benchmarks share: runs that take no time."""

import pytest

from ortolan.benchmarks import side_by_side


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Copies of layers and buffers as if caches were small: no test asserts that weights are cold, and of a server's L3
    they take gigabytes and most of the time."""
    for module in ("cold_layers", "dense_peers"):
        monkeypatch.setattr(f"ortolan.benchmarks.{module}.copies_to_stay_cold", lambda size: 3)
    monkeypatch.setattr("ortolan.benchmarks.stream_reader.last_level_cache_bytes", lambda: 2**16)


@pytest.fixture
def short(monkeypatch):
    """short({"q": (70, 40)}): few rounds over layers of these sizes."""
    monkeypatch.setattr(side_by_side, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    return lambda layers: monkeypatch.setattr(side_by_side, "LAYERS", layers)
