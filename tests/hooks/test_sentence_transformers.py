"""sentence-transformers and fastembed with folders that Ortolan has optimized.

Skipped if these packages are not installed.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ortolan

from .folders import TEXTS, write_bert, write_sentence_encoder

sentence_transformers = pytest.importorskip("sentence_transformers")
pytest.importorskip("optimum.onnxruntime", reason="needs optimum-onnx[onnxruntime]")


from ..provider.sessions import needs_provider  # noqa: E402

PLAIN = {"provider": "CPUExecutionProvider"}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def kwargs() -> dict[str, Any]:
    return {"session_options": ortolan.register(), **PLAIN}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """Folders: `exported` by sentence-transformers, and `fast`, optimized to int8."""
    root = tmp_path_factory.mktemp("sentence")
    write_sentence_encoder(root / "model")
    exported = sentence_transformers.SentenceTransformer(str(root / "model"), backend="onnx", model_kwargs=dict(PLAIN))
    exported.save_pretrained(str(root / "exported"))
    ortolan.optimize_onnx(root / "exported", root / "fast", weights="int8")
    return {name: root / name for name in ("model", "exported", "fast")}


def test_sentence_transformers_give_the_vectors_of_embed(folders: Mapping[str, Path]) -> None:
    model = sentence_transformers.SentenceTransformer(str(folders["fast"]), backend="onnx", model_kwargs=kwargs())
    found = model.encode(TEXTS)
    # PyTorch sums the squares of a vector in another order than NumPy, so that lengths differ by a bit.
    np.testing.assert_array_max_ulp(found, ortolan.embed(TEXTS, folders["fast"]), maxulp=2)
    np.testing.assert_array_equal(found, np.concatenate([model.encode([text]) for text in TEXTS]))
    torch = sentence_transformers.SentenceTransformer(str(folders["model"]), device="cpu")
    assert (found * torch.encode(TEXTS)).sum(axis=1).min() > 0.999


def test_sentence_transformers_without_our_options(folders: Mapping[str, Path]) -> None:
    """Without Ortolan's session options, the operators run as portable ONNX functions."""
    model = sentence_transformers.SentenceTransformer(str(folders["fast"]), backend="onnx", model_kwargs=dict(PLAIN))
    assert (model.encode(TEXTS) * ortolan.embed(TEXTS, folders["fast"])).sum(axis=1).min() > 0.999


def test_cross_encoder(tmp_path: Path) -> None:
    write_bert(tmp_path / "reranker", "BertForSequenceClassification", num_labels=1)
    exported = sentence_transformers.CrossEncoder(
        str(tmp_path / "reranker"), backend="onnx", model_kwargs=dict(PLAIN), device="cpu"
    )
    exported.save_pretrained(str(tmp_path / "exported"))
    ortolan.optimize_onnx(tmp_path / "exported", tmp_path / "fast", weights="int8")
    model = sentence_transformers.CrossEncoder(
        str(tmp_path / "fast"), backend="onnx", model_kwargs=kwargs(), device="cpu"
    )
    scores = model.predict([(TEXTS[0], text) for text in TEXTS])
    ranked = ortolan.rerank(TEXTS[0], TEXTS, tmp_path / "fast")
    np.testing.assert_allclose([one.score for one in ranked], np.sort(scores)[::-1], atol=1e-6)
    assert np.ptp(scores) > 1e-4


def add_to_fastembed(name: str) -> None:
    fastembed = pytest.importorskip("fastembed")
    described = pytest.importorskip("fastembed.common.model_description")
    fastembed.TextEmbedding.add_custom_model(
        model=name,
        pooling=described.PoolingType.MEAN,
        normalization=True,
        sources=described.ModelSource(url="file://local"),
        dim=64,
        model_file="onnx/model.onnx",
    )


def test_fastembed_by_a_class(folders: Mapping[str, Path]) -> None:
    add_to_fastembed("local/fast")
    from fastembed.text.custom_text_embedding import CustomTextEmbedding

    class OrtolanEmbedding(CustomTextEmbedding):
        @classmethod
        def add_extra_session_options(cls, session_options: Any, extra_options: Any) -> None:
            super().add_extra_session_options(session_options, extra_options)
            ortolan.register(session_options)

    expected = ortolan.embed(TEXTS, folders["fast"])
    model = OrtolanEmbedding("local/fast", specific_model_path=str(folders["fast"]), threads=1)
    found = np.stack(list(model.embed(TEXTS)))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    np.testing.assert_array_equal(found, np.stack([next(iter(model.embed([text]))) for text in TEXTS]))
    plain = CustomTextEmbedding("local/fast", specific_model_path=str(folders["fast"]), threads=1)
    bodies = np.stack(list(plain.embed(TEXTS)))
    # Functions and operators round differently: attention by a bit on CPUs without bf16 dot products.
    assert (bodies != found).any(), "its options know the operators, too: docs say that they do not"
    assert (bodies * expected).sum(axis=1).min() > 0.999


@needs_provider
def test_fastembed_by_the_provider(folders: Mapping[str, Path]) -> None:
    add_to_fastembed("local/exported")
    from fastembed import TextEmbedding

    ortolan.register_provider()
    providers = [("OrtolanExecutionProvider", {"precision": "int8"})]
    model = TextEmbedding("local/exported", specific_model_path=str(folders["exported"]), providers=providers)
    assert model.model.model.get_providers()[0] == "OrtolanExecutionProvider"
    found = np.stack(list(model.embed(TEXTS)))
    assert (found * ortolan.embed(TEXTS, folders["fast"])).sum(axis=1).min() > 0.999
