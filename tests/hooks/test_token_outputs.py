"""Optimized ColBERT and SPLADE models in fastembed's own loaders; skipped if it is not installed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortolan
from ortolan.models import tiny

from ..text.late_folders import DOCUMENT, QUERY, write_colbert, write_json, write_splade

TEXTS = ["the cat, unaffable!", "sleep", "the sleeping cat under the unaffable cat"]
SPECIAL = {"pad": "[PAD]", "mask": "[MASK]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def with_ortolan(base: Any) -> Any:
    """Return fastembed's class with Ortolan's operators in its session options."""

    class WithOrtolan(base):  # type: ignore[misc]
        @classmethod
        def add_extra_session_options(cls, session_options: Any, extra_options: Any) -> None:
            super().add_extra_session_options(session_options, extra_options)
            ortolan.register(session_options)

    return WithOrtolan


def write_settings(folder: Path) -> None:
    """Write the files that fastembed reads."""
    tokens = {f"{name}_token": token for name, token in SPECIAL.items()}
    write_json(folder / "tokenizer_config.json", tokens | {"model_max_length": 64})
    write_json(folder / "special_tokens_map.json", tokens)


def test_fastembed_colbert(tmp_path: Path) -> None:
    colbert = pytest.importorskip("fastembed.late_interaction.colbert")
    sizes = {"query_length": 32, "document_length": 64}
    folder = write_colbert(tmp_path / "model", tiny.tiny_modernbert, in_graph=True, **sizes)
    write_settings(folder)
    ortolan.optimize_onnx(folder, tmp_path / "fast", weights="int8")
    added = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["added_tokens"]
    ids = {one["content"]: one["id"] for one in added}
    made = with_ortolan(colbert.Colbert)
    made.QUERY_MARKER_TOKEN_ID, made.DOCUMENT_MARKER_TOKEN_ID = ids[QUERY], ids[DOCUMENT]
    model = made("colbert-ir/colbertv2.0", specific_model_path=str(tmp_path / "fast"), threads=1)
    for found, expected in zip(model.embed(TEXTS), ortolan.embed_tokens(TEXTS, tmp_path / "fast"), strict=True):
        np.testing.assert_allclose(found, expected, atol=1e-6)
    queries = ortolan.embed_tokens(TEXTS, tmp_path / "fast", query=True)
    for found, expected in zip(model.query_embed(TEXTS), queries, strict=True):
        np.testing.assert_allclose(found / np.linalg.norm(found, axis=1, keepdims=True), expected, atol=1e-6)


def test_fastembed_splade(tmp_path: Path) -> None:
    splade = pytest.importorskip("fastembed.sparse.splade_pp")
    folder = write_splade(tmp_path / "model", modules=False)
    write_settings(folder)
    ortolan.optimize_onnx(folder, tmp_path / "fast", weights="int8")
    model = with_ortolan(splade.SpladePP)("prithivida/Splade_PP_en_v1", specific_model_path=str(tmp_path / "fast"))
    for found, expected in zip(model.embed(TEXTS), ortolan.embed_sparse(TEXTS, tmp_path / "fast"), strict=True):
        np.testing.assert_array_equal(found.indices, expected[0])
        np.testing.assert_allclose(found.values, expected[1], rtol=1e-6)
