"""Small models that are written as large ones are."""

from __future__ import annotations

import pytest

from ortolan.graph_passes.files import model_file


def put_weights_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights go to an external data file, also few and small ones."""
    monkeypatch.setattr(model_file, "EMBED_LIMIT", 0)
    monkeypatch.setattr(model_file, "EXTERNAL_THRESHOLD", 1024)
