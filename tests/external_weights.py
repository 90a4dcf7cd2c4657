"""Make small test models store their weights in an external data file, as large models do."""

from __future__ import annotations

import pytest

from ortolan.graph_passes.files import model_file


def put_weights_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write even small weights to an external data file."""
    monkeypatch.setattr(model_file, "EMBED_LIMIT", 0)
    monkeypatch.setattr(model_file, "EXTERNAL_THRESHOLD", 1024)
