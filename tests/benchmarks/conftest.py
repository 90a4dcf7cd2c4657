"""Fixtures for tests of benchmarks: short runs and small caches."""

import pytest

from ortolan.benchmarks import side_by_side


@pytest.fixture(autouse=True)
def small_caches(monkeypatch):
    """Use few copies of each layer, as if caches were small.

    No test asserts that weights are cold. Copies for a server's L3 cache would take gigabytes and most of the time.
    """
    for module in ("cold_layers", "dense_peers"):
        monkeypatch.setattr(f"ortolan.benchmarks.{module}.copies_to_stay_cold", lambda size: 3)
    monkeypatch.setattr("ortolan.benchmarks.stream_reader.last_level_cache_bytes", lambda: 2**16)


@pytest.fixture
def short(monkeypatch):
    """Return a function that shortens a benchmark: short({"q": (70, 40)}) measures only this layer, in few rounds."""
    monkeypatch.setattr(side_by_side, "QUICK_SECONDS", 0.0)
    monkeypatch.setattr("ortolan.graph_passes.measure.timing._WARM_UP_SECONDS", 0.0)
    return lambda layers: monkeypatch.setattr(side_by_side, "LAYERS", layers)
