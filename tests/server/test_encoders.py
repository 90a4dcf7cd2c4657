"""Embeddings and reranking, with a small model, also beside a decoder."""

from __future__ import annotations

import base64
import threading

import numpy as np
import onnx_ir as ir
import pytest

pytest.importorskip("starlette")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from ortolan.engines import EncoderEngine  # noqa: E402
from ortolan.models import tiny  # noqa: E402
from ortolan.server.application import Application  # noqa: E402
from ortolan.server.settings import Limits, ServerSettings  # noqa: E402

from ..text.reranker import write_reranker  # noqa: E402
from ..text.wordpiece_file import write_wordpiece  # noqa: E402
from .scripted import running, scripted_application, wait_for  # noqa: E402

LIMITS = Limits(texts=8, text_characters=100)


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    tokenizer = write_wordpiece(folder / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=106), folder / "model.onnx")  # the embedding lacks the last token, ’
    return EncoderEngine(folder / "model.onnx", tokenizer, max_tokens=12)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reranker")
    tokenizer = write_wordpiece(folder / "tokenizer.json")
    write_reranker(folder, vocab_size=256)
    return EncoderEngine(folder / "model.onnx", tokenizer, max_tokens=12)


def opened(engine, limits=LIMITS):
    return TestClient(Application(ServerSettings("small", limits=limits), encoder=engine).asgi)


def test_openais_client(engine):
    expected = engine.encoder.encode(["The cat.", "unable"])
    application = Application(ServerSettings("small"), encoder=engine)
    with running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        made = client.embeddings.create(model="any", input=["The cat.", "unable"])  # as base64, the client's default
        np.testing.assert_array_equal(np.array([one.embedding for one in made.data], np.float32), expected)
        one = client.embeddings.create(model="any", input="unable", encoding_format="float", dimensions=4)
        cut = expected[1, :4] / np.linalg.norm(expected[1, :4])
        np.testing.assert_allclose(one.data[0].embedding, cut, rtol=1e-6)
        assert one.model == "small"
        assert one.usage.prompt_tokens == one.usage.total_tokens == len(engine.encoder.tokenize(["unable"])[0])


def test_tokens(engine):
    (tokens,) = engine.encoder.tokenize(["The cat."])
    with opened(engine) as client:
        for given in (list(tokens.ids), [list(tokens.ids)]):
            data = client.post("/v1/embeddings", json={"input": given}).json()["data"]
            np.testing.assert_array_equal(np.float32(data[0]["embedding"]), engine.encoder.encode(["The cat."])[0])


def test_base64(engine):
    with opened(engine) as client:
        asked = {"input": "unable", "encoding_format": "base64"}
        data = client.post("/v1/embeddings", json=asked).json()["data"][0]["embedding"]
        np.testing.assert_array_equal(
            np.frombuffer(base64.b64decode(data), "<f4"), engine.encoder.encode(["unable"])[0]
        )


REFUSED = [
    ({}, 400, "input"),
    ({"input": []}, 400, "input"),
    ({"input": 7}, 400, "input"),
    ({"input": ["a", 7]}, 400, "input[1]"),
    ({"input": [1, "a"]}, 400, "input[0]"),
    ({"input": [[]]}, 400, "input[0]"),
    ({"input": [[True]]}, 400, "input[0]"),
    ({"input": [[10**12]]}, 400, "input"),
    ({"input": [["a"]]}, 400, "input[0]"),
    ({"input": "a", "dimensions": 0}, 400, "dimensions"),
    ({"input": "a", "dimensions": 9999}, 400, "dimensions"),
    ({"input": "a", "encoding_format": "hex"}, 400, "encoding_format"),
    ({"input": ["a"] * 9}, 413, None),
    ({"input": "a" * 101}, 413, "input[0]"),
]


@pytest.mark.parametrize(("body", "status", "param"), REFUSED)
def test_refused_embeddings(engine, body, status, param):
    with opened(engine) as client:
        refused = client.post("/v1/embeddings", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (status, param), refused.text


def test_a_text_that_the_model_cannot_run(engine):
    with opened(engine) as client:
        failed = client.post("/v1/embeddings", json={"input": ["cat", "cat’"]})
        assert failed.status_code == 500
        assert "text 1" in failed.json()["error"]["message"]
        assert "Gather" not in failed.text
        assert client.post("/v1/embeddings", json={"input": "cat"}).status_code == 200


def test_a_full_queue(engine, monkeypatch):
    go, begun = threading.Event(), threading.Event()
    run = engine.run_each

    def wait(batch):
        begun.set()
        assert go.wait(60)
        return run(batch)

    monkeypatch.setattr(engine, "run_each", wait)
    application = Application(ServerSettings("small", limits=Limits(waiting_tokens=5)), encoder=engine)
    with running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        threads = [
            threading.Thread(target=lambda: client.embeddings.create(model="x", input=["The cat."])) for _ in range(2)
        ]
        threads[0].start()
        assert begun.wait(60)
        threads[1].start()
        wait_for(lambda: application._encoders._batches.waiting_tokens > 0)
        with pytest.raises(openai.RateLimitError) as refused:
            client.embeddings.create(model="x", input=["The cat sat."])
        assert int(refused.value.response.headers["Retry-After"]) >= 1
        go.set()
        for thread in threads:
            thread.join(60)
    assert b"ortolan_refused_texts_total 1.0" in application._metrics.page()


def test_reranking(reranker):
    texts = ["the cat", "a dog", "unable"]
    scores = reranker.encoder.score("A cat", texts)
    order = np.argsort(-scores).tolist()
    with opened(reranker) as client:
        asked = {"query": "A cat", "documents": [texts[0], {"text": texts[1], "id": 7}, texts[2]]}
        for path in ("/rerank", "/v1/rerank"):
            found = client.post(path, json={**asked, "return_documents": True}).json()
            assert [one["index"] for one in found["results"]] == order
            assert [one["document"]["text"] for one in found["results"]] == [texts[index] for index in order]
            np.testing.assert_allclose([one["relevance_score"] for one in found["results"]], scores[order], rtol=1e-6)
        assert found["model"] == "small"
        assert len(client.post("/rerank", json={**asked, "top_n": 1}).json()["results"]) == 1
        inference = client.post("/rerank", json={"query": "A cat", "texts": texts, "return_text": True}).json()
        assert [(one["index"], one["text"]) for one in inference] == [(index, texts[index]) for index in order]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"documents": ["a"]}, "query"),
        ({"query": 3, "documents": ["a"]}, "query"),
        ({"query": "q"}, "texts"),
        ({"query": "q", "documents": []}, "documents"),
        ({"query": "q", "documents": [3]}, "documents[0]"),
        ({"query": "q", "documents": [{}]}, "documents[0]"),
        ({"query": "q", "documents": ["a"], "texts": ["a"]}, "texts"),
        ({"query": "q", "texts": [{"text": "a"}]}, "texts[0]"),
        ({"query": "q", "texts": ["a"], "raw_scores": True}, "raw_scores"),
        ({"query": "q", "texts": ["a"], "top_n": 0}, "top_n"),
    ],
)
def test_refused_reranking(reranker, body, param):
    with opened(reranker) as client:
        refused = client.post("/rerank", json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, param), refused.text


def test_each_model_has_its_routes(engine, reranker):
    with opened(engine) as client:
        assert client.post("/rerank", json={"query": "q", "texts": ["a"]}).status_code == 404
        assert client.post("/v1/chat/completions", json={}).status_code == 404
    with opened(reranker) as client:
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 404


def test_beside_a_decoder(engine):
    with scripted_application(encoder=engine) as application, TestClient(application.asgi) as client:
        assert [one["id"] for one in client.get("/v1/models").json()["data"]] == ["scripted", "encoder"]
        assert client.post("/v1/embeddings", json={"input": "a"}).json()["model"] == "encoder"
        assert client.post("/v1/completions", json={"prompt": "aa"}).json()["model"] == "scripted"
        page = client.get("/metrics").text
        assert "ortolan_texts_total 1.0" in page
        assert "ortolan_generated_tokens_total 16.0" in page
