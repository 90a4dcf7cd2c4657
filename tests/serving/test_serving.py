"""Ray Serve: what is refused, and requests to replicas on the loopback."""

from __future__ import annotations

import http.client
import json

import onnx_ir as ir
import pytest

from ortolan.benchmarks.serving import _BAD, check_refusals, free_port, run_load
from ortolan.engines import RequestError
from ortolan.models import tiny

from ..text.wordpiece_file import write_wordpiece

ray = pytest.importorskip("ray")
pytest.importorskip("fastapi")

from ortolan.serving import (  # noqa: E402
    EmbeddingConfig,
    EmbeddingRequest,
    GenerationRequest,
    embeddings,
    parse_request,
)


def test_requests_that_are_taken():
    assert parse_request('{"texts": ["é", ""]}'.encode(), EmbeddingRequest).texts == ["é", ""]
    assert parse_request(b'{"prompt": "a", "temperature": 1}', GenerationRequest).temperature == 1


@pytest.mark.parametrize("name", [name for name in _BAD if name not in ("too many texts", "long text", "large body")])
def test_requests_that_are_refused(name):
    body, status = _BAD[name]
    with pytest.raises(RequestError) as refused:
        parse_request(body, EmbeddingRequest)
    assert refused.value.status == status


WRONG = [{"prompt": ""}, {"prompt": "a", "top_p": 0}, {"prompt": "a", "temperature": -1}, [], {"prompt": 1}]


@pytest.mark.parametrize("body", [*WRONG, {"prompt": "a", "max_new_tokens": 0}])
def test_generation_requests_that_are_refused(body):
    with pytest.raises(RequestError) as refused:
        parse_request(json.dumps(body).encode(), GenerationRequest)
    assert refused.value.status == 422


def test_deeply_nested_json_is_refused():
    with pytest.raises(RequestError) as refused:
        parse_request(b"[" * 100_000, EmbeddingRequest)
    assert refused.value.status == 400


def test_two_replicas(tmp_path):
    from ray import serve

    tokenizer = write_wordpiece(tmp_path / "tokenizer.json")
    ir.save(tiny.tiny_bert(vocab_size=256), tmp_path / "model.onnx")
    port = free_port()
    ray.init(num_cpus=3, object_store_memory=80 << 20, include_dashboard=False, logging_level="warning")
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        config = EmbeddingConfig(
            model=str(tmp_path / "model.onnx"), tokenizer=str(tokenizer), max_tokens=16, replicas=2
        )
        serve.run(embeddings(config))
        assert check_refusals(port) == {name: str(status) for name, (_, status) in _BAD.items()}
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
        connection.request("GET", "/health")
        assert json.loads(connection.getresponse().read())["status"] == "ok"
        result = run_load(port, clients=4, seconds=3, retries=0)
        assert result.milliseconds
        assert not result.failures
    finally:
        serve.shutdown()
        ray.shutdown()
