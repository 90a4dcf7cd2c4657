"""Test tools.random_gguf: its files are imported, and their weights are small and not constant."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortolan
from ortolan.engine import Engine, Request
from ortolan.engine.model import PagedModel
from ortolan.models.gguf import read_gguf

from ..models import gguf_file

tool = pytest.importorskip("tools.random_gguf")


@pytest.mark.parametrize("weights", tool.TYPES)
@pytest.mark.parametrize(
    "shape",
    [
        tool.Shape(2, 64, 256, 4, 2, 16, 500, tied=True),
        tool.Shape(2, 64, 256, 4, 2, 16, 500, tied=False),
        tool.Shape(2, 256, 256, 4, 2, 32, 500, tied=True, experts=6, experts_used=2),
    ],
    ids=["tied", "untied", "experts"],
)
def test_the_file_can_be_served(tmp_path: Path, weights: str, shape: Any) -> None:
    gguf_file.write(tmp_path / "tokenizer.gguf", table="Q8_0")
    path = tmp_path / "random.gguf"
    tool.write_random_gguf(shape, "small", path, tmp_path / "tokenizer.gguf", weights)
    _, arrays = read_gguf(path)
    for name, array in arrays.items():
        values = np.asarray(array)
        if values.ndim > 1:
            assert abs(values.mean()) < 0.005 and 0.01 < values.std() < 0.03, name
    ortolan.import_gguf(path, tmp_path / "folder", serve=True)
    with Engine(PagedModel.open(tmp_path / "folder", cache_bytes=1 << 20)) as engine:
        stream = engine.submit(Request((1, 2, 3), max_tokens=5))
        assert sum(len(output.tokens) for output in stream) == 5
