"""PyLate ranks documents by vectors of optimized ColBERT models; skipped if it is not installed."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import ortolan

from ..text.late_folders import write_colbert

rank = pytest.importorskip("pylate.rank")

TEXTS = ["the cat, unaffable!", "sleep", "the sleeping cat under the unaffable cat"]


def test_pylate_ranks_by_vectors_of_embed_tokens(tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    ortolan.optimize_onnx(write_colbert(tmp_path / "model"), fast, weights="int8")
    queries = ortolan.embed_tokens(TEXTS[:2], fast, query=True)
    documents = [*ortolan.embed_tokens(TEXTS, fast)]
    ids = [[*range(len(TEXTS))]] * len(queries)
    ranked = rank.rerank(ids, [*queries], [documents] * len(queries))
    for query, found in zip(TEXTS[:2], ranked, strict=True):
        expected = ortolan.rerank(query, TEXTS, fast)
        assert [one["id"] for one in found] == [one.index for one in expected]
        np.testing.assert_allclose([one["score"] for one in found], [one.score for one in expected], rtol=1e-5)
