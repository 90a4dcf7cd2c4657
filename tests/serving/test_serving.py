"""Ray Serve: rejected settings and requests, and requests to replicas on the loopback interface."""

from __future__ import annotations

import asyncio
import gc
import http.client
import json
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx_ir as ir
import pytest

from ortolan.benchmarks.serving import _BAD, check_refusals, kill_replica, run_load
from ortolan.engines import EncoderEngine, GenerationEngine, RequestError
from ortolan.models import tiny

from ..text.reranker import write_reranker
from ..text.wordpiece_file import write_wordpiece

ray = pytest.importorskip("ray")
pytest.importorskip("fastapi")

from ray import serve  # noqa: E402
from starlette.requests import ClientDisconnect  # noqa: E402

from ortolan.serving import (  # noqa: E402
    EmbeddingConfig,
    GenerationConfig,
    _ended,
    _EventResponse,
    _events,
    _Runner,
    _stream,
    embeddings,
    generation,
    model_name,
)
from ortolan.serving_requests import (  # noqa: E402
    EmbeddingRequest,
    GenerationRequest,
    OpenAIEmbeddingRequest,
    RerankRequest,
    parse_request,
)

from .ray_cluster import ray_cluster  # noqa: E402


def test_requests_that_are_taken():
    assert parse_request('{"texts": ["é", ""]}'.encode(), EmbeddingRequest).texts == ["é", ""]
    assert parse_request(b'{"prompt": "a", "temperature": 1}', GenerationRequest).temperature == 1


@pytest.mark.parametrize("name", [name for name in _BAD if name not in ("too many texts", "long text", "large body")])
def test_requests_that_are_refused(name):
    body, status = _BAD[name]
    with pytest.raises(RequestError) as refused:
        parse_request(body, EmbeddingRequest)
    assert refused.value.status == status


SETTINGS = [{"top_p": 0}, {"temperature": -1}, {"max_new_tokens": 0}, {"max_seconds": 0}, {"max_seconds": "1"}]


@pytest.mark.parametrize("body", [[], {"prompt": ""}, {"prompt": 1}, *({"prompt": "a", **wrong} for wrong in SETTINGS)])
def test_generation_requests_that_are_refused(body):
    with pytest.raises(RequestError) as refused:
        parse_request(json.dumps(body).encode(), GenerationRequest)
    assert refused.value.status == 422


def test_deeply_nested_json_is_refused():
    with pytest.raises(RequestError) as refused:
        parse_request(b"[" * 100_000, EmbeddingRequest)
    assert refused.value.status == 400


def test_a_failure_in_the_midst_of_a_stream():
    async def events():
        yield "second"
        raise ValueError("secret")

    async def read():
        return [event async for event in _stream("first", events())]

    first, second, last = asyncio.run(read())
    assert (first, second) == ("first", "second")
    assert list(json.loads(last.removeprefix("data: "))) == ["error"]
    assert "secret" not in last


@pytest.mark.parametrize("sent", [0, 1, 2])
def test_a_client_that_goes_away_ends_its_generation_at_once(sent):
    """A generation stops even if its generator is still referenced and therefore not garbage-collected."""

    async def run():
        pieces = asyncio.Queue()
        work = asyncio.create_task(asyncio.sleep(60))
        for piece in ("a", "b", "c"):
            pieces.put_nowait(piece)
        events = _events(pieces, work)
        response = _EventResponse(await anext(events), events)
        messages = []

        async def send(message):
            if len(messages) == sent:
                raise OSError("gone")
            messages.append(message)

        with pytest.raises(ClientDisconnect):
            await response({"type": "http", "asgi": {"spec_version": "2.4"}}, None, send)
        assert len(messages) == sent
        await asyncio.wait([work], timeout=300)
        assert work.cancelled()

    asyncio.run(run())


def test_a_failure_that_nobody_waits_for_is_not_logged_by_asyncio():
    told = []

    async def fail():
        raise ValueError("wrong")

    async def run(read):
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context["message"]))
        work = asyncio.create_task(fail())
        if read:
            work.add_done_callback(_ended)
        await asyncio.sleep(0.01)
        del work
        gc.collect()

    asyncio.run(run(read=False))
    assert told == ["Task exception was never retrieved"]
    asyncio.run(run(read=True))
    assert len(told) == 1


def test_a_thread_is_free_when_it_has_ended_not_when_its_caller_has():
    """Otherwise the next request would wait for the thread, and its time limit would not cover the wait."""
    begun, end = threading.Event(), threading.Event()

    def step():
        begun.set()
        assert end.wait(60)

    async def run():
        runner = _Runner(1)
        caller = asyncio.create_task(runner(step))
        await asyncio.to_thread(begun.wait, 60)
        caller.cancel()
        await asyncio.wait([caller])
        assert caller.cancelled()
        with pytest.raises(RequestError, match=r"no free thread within 0\.05 s") as refused:
            await asyncio.wait_for(runner(int, "1", seconds=0.05), 30)
        assert refused.value.status == 504
        waiting = asyncio.create_task(runner(int, "2"))
        end.set()
        assert await waiting == 2

    try:
        asyncio.run(run())
    finally:
        end.set()


@pytest.mark.parametrize("how", ["returns", "raises", "cancelled", "not begun"])
def test_a_thread_is_freed_once(how):
    def fail():
        raise ValueError("wrong")

    async def run():
        runner = _Runner(1)
        if how == "returns":
            assert await runner(int, "1") == 1
        elif how == "raises":
            with pytest.raises(ValueError, match="wrong"):
                await runner(fail)
        elif how == "cancelled":
            end = threading.Event()
            caller = asyncio.create_task(runner(end.wait, 60))
            await asyncio.sleep(0)
            caller.cancel()
            await asyncio.wait([caller])
            end.set()
        else:
            runner._pool.shutdown()
            with pytest.raises(RuntimeError, match="shutdown"):
                await runner(int, "1")
        await asyncio.wait_for(runner._free.acquire(), 60)
        await asyncio.sleep(0.05)
        assert runner._free.locked()

    asyncio.run(run())


LONG = 100_000  # tokens, which take minutes
KNOWN, UNKNOWN = "the cat", "un’"  # the models below have no embedding for tokens of UNKNOWN


class Cluster(NamedTuple):
    """Embeddings at / and /autoscaled, and generation at /generation, with models from `folder`."""

    port: int
    folder: Path

    def ask(self, path, body=None):
        """Return (status, JSON) of a POST, or of a GET if `body` is None."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET" if body is None else "POST", path, None if body is None else json.dumps(body))
        response = connection.getresponse()
        said = response.status, json.loads(response.read())
        connection.close()
        return said

    def metric(self, name, **tags):
        """Return a metric of Ray's Prometheus endpoint, summed over replicas."""
        (node,) = ray.nodes()
        connection = http.client.HTTPConnection(node["NodeManagerAddress"], node["MetricsExportPort"], timeout=60)
        connection.request("GET", "/metrics")
        lines = connection.getresponse().read().decode().splitlines()
        connection.close()
        found = [re.fullmatch(rf"{name}{{(.*)}} (\S+)", line) for line in lines]
        wanted = {f'{tag}="{value}"' for tag, value in tags.items()}
        return sum(float(match[2]) for match in found if match and wanted <= {*match[1].split(",")})


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    tokenizer = write_wordpiece(folder / "tokenizer.json", truncation=None)
    ir.save(tiny.tiny_bert(vocab_size=106), folder / "encoder.onnx")
    ir.save(tiny.tiny_llama(seed=4), folder / "decoder.onnx")
    write_reranker(folder / "reranker", vocab_size=256)
    encoder = {"model": str(folder / "encoder.onnx"), "tokenizer": str(tokenizer), "max_tokens": 16}
    decoder = {"model": str(folder / "decoder.onnx"), "tokenizer": str(tokenizer), "max_new_tokens": LONG}
    with ray_cluster(_system_config={"metrics_report_interval_ms": 500}) as port:
        serve.run(embeddings(EmbeddingConfig(**encoder, replicas=2, max_texts=128)))
        small = EmbeddingConfig(**encoder, batch_tokens=64, max_waiting_tokens=64)
        serve.run(embeddings(small), name="small", route_prefix="/small")
        reranker = EmbeddingConfig(model=str(folder / "reranker/model.onnx"), tokenizer=str(tokenizer))
        serve.run(embeddings(reranker), name="reranker", route_prefix="/reranker")
        scaled = embeddings(EmbeddingConfig(**encoder, min_replicas=2, max_replicas=3))
        serve.run(scaled, name="autoscaled", route_prefix="/autoscaled")
        config = GenerationConfig(**decoder, max_prompt_tokens=50, max_context=LONG, max_seconds=60)
        serve.run(generation(config), name="generation", route_prefix="/generation")
        yield Cluster(port, folder)


def wait_for(condition, seconds=300):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.2)


def running_replicas(application):
    (deployment,) = serve.status().applications[application].deployments.values()
    return deployment.replica_states.get("RUNNING", 0)


@pytest.mark.parametrize("application", ["", "/autoscaled", "/generation"])
def test_health(cluster, application):
    status, said = cluster.ask(f"{application}/health")
    assert (status, said["status"]) == (200, "ok")
    status, said = cluster.ask(f"{application}/other")
    assert (status, list(said)) == (404, ["error"])


def test_embeddings_are_those_of_the_engine(cluster):
    engine = EncoderEngine(cluster.folder / "encoder.onnx", cluster.folder / "tokenizer.json", max_tokens=16)
    texts = [KNOWN, "", "cat " * 100]
    expected = engine.encoder.encode(texts)
    for application in ("", "/autoscaled"):
        status, said = cluster.ask(f"{application}/embed", {"texts": texts})
        assert status == 200
        assert said["embeddings"] == [pytest.approx(vector, abs=1e-5) for vector in expected.tolist()]


def test_what_embeddings_refuse(cluster):
    assert check_refusals(cluster.port) == {name: str(status) for name, (_, status) in _BAD.items()}


def test_openais_client(cluster):
    openai = pytest.importorskip("openai")
    texts = [KNOWN, "cat", "cat " * 100]
    engine = EncoderEngine(cluster.folder / "encoder.onnx", cluster.folder / "tokenizer.json", max_tokens=16)
    expected = engine.encoder.encode(texts)
    with openai.OpenAI(base_url=f"http://127.0.0.1:{cluster.port}/v1", api_key="none", max_retries=0) as client:
        assert [one.id for one in client.models.list()] == ["encoder"]
        found = client.embeddings.create(input=texts, model="any")
        assert [one.index for one in found.data] == [0, 1, 2]
        np.testing.assert_array_equal(np.array([one.embedding for one in found.data], np.float32), expected)
        count = sum(map(len, engine.encoder.tokenize(texts)))
        assert (found.model, found.usage.prompt_tokens, found.usage.total_tokens) == ("encoder", count, count)
        floats = client.embeddings.create(input=KNOWN, model="any", encoding_format="float")
        np.testing.assert_array_equal(np.float32(floats.data[0].embedding), expected[0])
        ids = engine.encoder.tokenize(texts)[0].ids
        for tokens in (ids, [ids]):
            (one,) = client.embeddings.create(input=tokens, model="any").data
            np.testing.assert_array_equal(np.float32(one.embedding), expected[0])
        (short,) = client.embeddings.create(input=KNOWN, model="any", dimensions=10).data
        np.testing.assert_allclose(short.embedding, expected[0, :10] / np.linalg.norm(expected[0, :10]), rtol=1e-6)
        for wrong, message in [
            ({"input": []}, "input has no text"),
            ({"input": [[]]}, "input has a text without tokens"),
            ({"input": [[10**9]]}, "1000000000"),
            ({"input": KNOWN, "dimensions": 10**6}, "dimensions is 1000000, expected at most"),
        ]:
            with pytest.raises(openai.UnprocessableEntityError, match=message) as refused:
                client.embeddings.create(model="any", **wrong)
            assert refused.value.type == "invalid_request_error"
        with pytest.raises(openai.InternalServerError, match="the server failed"):
            client.embeddings.create(input=UNKNOWN, model="any")
        with pytest.raises(openai.NotFoundError):
            client.files.list()
    status, said = cluster.ask("/rerank", {"query": KNOWN, "texts": [KNOWN]})
    assert (status, said) == (422, {"error": "model embeds texts and cannot score pairs; give a reranker"})


def test_rerank(cluster):
    encoder = EncoderEngine(cluster.folder / "reranker/model.onnx", cluster.folder / "tokenizer.json").encoder
    texts = ["cat", "the the cat", KNOWN, ""]
    expected = encoder.score(KNOWN, texts)
    order = np.argsort(-expected).tolist()
    for path in ("/reranker/rerank", "/reranker/v1/rerank"):
        asked = {"model": "any", "query": KNOWN, "documents": [texts[0], {"text": texts[1]}, *texts[2:]], "top_n": 3}
        status, said = cluster.ask(path, {**asked, "return_documents": True})
        assert status == 200 and said["model"] == "reranker"
        assert [one["index"] for one in said["results"]] == order[:3]
        assert np.float32([one["relevance_score"] for one in said["results"]]).tolist() == expected[order[:3]].tolist()
        assert [one["document"]["text"] for one in said["results"]] == [texts[index] for index in order[:3]]
        assert cluster.ask(path, asked)[1]["results"][0].keys() == {"index", "relevance_score"}
    status, said = cluster.ask("/reranker/rerank", {"query": KNOWN, "texts": texts, "return_text": True})
    assert status == 200 and [(one["index"], one["text"]) for one in said] == [(index, texts[index]) for index in order]
    status, said = cluster.ask("/reranker/v1/embeddings", {"input": KNOWN, "model": "any"})
    assert status == 422 and "model is a reranker" in said["error"]["message"]


@pytest.mark.parametrize(
    "body",
    [
        {"query": "a"},
        {"query": "a", "texts": ["b"], "documents": ["b"]},
        {"query": "a", "texts": []},
        {"query": "a", "texts": [{"text": "b"}]},
        {"query": "a", "documents": [{"title": "b"}]},
        {"query": "a", "texts": ["b"], "raw_scores": True},
        {"query": "a", "documents": ["b"], "top_n": 0},
    ],
)
def test_rankings_that_are_refused(body):
    with pytest.raises(RequestError) as refused:
        parse_request(json.dumps(body).encode(), RerankRequest).given()
    assert refused.value.status == 422


@pytest.mark.parametrize("given", [None, 1, [1, "a"], [[1], "a"], [None], {"text": "a"}, [], [[]], [[1], []], [True]])
def test_inputs_of_openai_that_are_refused(given):
    with pytest.raises(RequestError) as refused:
        parse_request(json.dumps({"input": given}).encode(), OpenAIEmbeddingRequest).inputs()
    assert refused.value.status == 422


def test_names_of_models():
    assert [model_name(path) for path in ("/a/b.onnx", "/a/bge/model.onnx", "bge/", "/a/bge")] == ["b", *["bge"] * 3]


def test_too_many_waiting_tokens(cluster):
    """Excess requests get status 429 with the seconds to wait, before they are processed; the others are answered."""
    body = json.dumps({"input": ["cat " * 16] * 100, "model": "any"})

    def ask(_):
        connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)
        connection.request("POST", "/small/v1/embeddings", body)
        response = connection.getresponse()
        return response.status, response.getheader("Retry-After"), json.loads(response.read())

    with ThreadPoolExecutor(24) as clients:
        answers = list(clients.map(ask, range(48)))
    assert {status for status, _, _ in answers} == {200, 429}
    for status, wait, said in answers:
        if status == 429:
            assert int(wait) >= 1 and said["error"]["type"] == "rate_limit_error"
        else:
            assert len(said["data"]) == 100 and wait is None
    refused = sum(status == 429 for status, _, _ in answers)
    wait_for(lambda: cluster.metric("ray_ortolan_refused_total", application="small") == refused)
    assert cluster.ask("/small/embed", {"texts": [KNOWN]})[0] == 200


def test_a_bad_text_fails_alone(cluster):
    texts = [KNOWN] * 12 + [UNKNOWN] + [KNOWN] * 3
    name = "ray_ortolan_texts_total"
    before = cluster.metric(name, application="default")
    with ThreadPoolExecutor(len(texts)) as clients:
        answers = list(clients.map(lambda text: cluster.ask("/embed", {"texts": ["cat", text]}), texts))
    for text, (status, said) in zip(texts, answers, strict=True):
        assert (status, list(said)) == ((200, ["embeddings"]) if text == KNOWN else (500, ["error"]))
        assert text == KNOWN or said["error"].startswith("text 1 ")
    wait_for(lambda: cluster.metric(name, application="default") >= before + 2 * len(texts))


def test_autoscaling(cluster):
    assert running_replicas("autoscaled") == 2
    with pytest.raises(ValueError, match="max_replicas"):
        embeddings(EmbeddingConfig(model="model.onnx", min_replicas=3, max_replicas=2))


@pytest.mark.parametrize("how", [{}, {"temperature": 1.0, "top_k": 20, "top_p": 0.9, "seed": 3}])
def test_generation_gives_the_tokens_of_the_engine(cluster, how):
    expected = GenerationEngine(cluster.folder / "decoder.onnx", cluster.folder / "tokenizer.json").generate(
        KNOWN, 24, **how
    )
    name, tags = "ray_ortolan_generated_tokens_total", {"application": "generation", "deployment": "Generation"}
    before = cluster.metric(name, **tags)
    status, said = cluster.ask("/generation/generate", {"prompt": KNOWN, "max_new_tokens": 24, **how})
    assert (status, said) == (200, vars(expected))
    wait_for(lambda: cluster.metric(name, **tags) == before + expected.tokens)


def test_a_stream(cluster):
    body = {"prompt": KNOWN, "max_new_tokens": 24}
    connection = http.client.HTTPConnection("127.0.0.1", cluster.port, timeout=60)
    connection.request("POST", "/generation/generate", json.dumps({**body, "stream": True}))
    response = connection.getresponse()
    assert response.getheader("Content-Type").startswith("text/event-stream")
    *events, end = response.read().decode().split("\n\n")
    assert end == ""
    *pieces, last = [json.loads(event.removeprefix("data: ")) for event in events]
    assert (200, last) == cluster.ask("/generation/generate", body)
    assert len(pieces) > 1
    assert "".join(piece["piece"] for piece in pieces) == last["text"]


REFUSED = {
    "prompt tokens": ({"prompt": "cat " * 50}, 413, "51 tokens, expected at most 50"),
    "context": (
        {"prompt": KNOWN, "max_new_tokens": LONG - 1},
        422,
        f"max_new_tokens is {LONG - 1}, expected at most {LONG - 3} ",
    ),
    "new tokens": ({"prompt": KNOWN, "max_new_tokens": LONG + 1}, 422, f"expected at most {LONG}"),
    "seconds": ({"prompt": KNOWN, "max_seconds": 61}, 422, "expected at most 60"),
    "characters": ({"prompt": "x" * 100_001}, 413, "100001 characters"),
    "body": ({"prompt": "x" * (1 << 20)}, 413, "bytes"),
    "form": ({"text": KNOWN}, 422, "prompt"),
    "failure": ({"prompt": UNKNOWN}, 500, "the server failed"),
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_what_generation_refuses(cluster, name, stream):
    body, expected, message = REFUSED[name]
    status, said = cluster.ask("/generation/generate", {**body, "stream": stream})
    assert (status, list(said)) == (expected, ["error"])
    assert message in said["error"]
    assert "Traceback" not in said["error"]


def test_a_deadline(cluster):
    """A running request returns its tokens so far at its deadline, and a waiting request stops waiting."""
    long = {"prompt": KNOWN, "max_new_tokens": LONG - 10, "max_seconds": 4}
    with ThreadPoolExecutor() as clients:
        first = clients.submit(cluster.ask, "/generation/generate", long)
        time.sleep(1)
        start = time.monotonic()
        status, said = cluster.ask("/generation/generate", {"prompt": KNOWN, "max_seconds": 0.5})
        assert not first.done() and time.monotonic() - start < 3
        assert (status, list(said)) == (504, ["error"])
        status, said = first.result()
    assert (status, said["finish_reason"]) == (200, "deadline")
    assert 0 < said["tokens"] < LONG


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_frees_its_thread(cluster, stream):
    name, tags = "ray_ortolan_generations_total", {"application": "generation", "finish_reason": "cancelled"}
    before = cluster.metric(name, **tags)
    gone = http.client.HTTPConnection("127.0.0.1", cluster.port)
    body = {"prompt": KNOWN, "max_new_tokens": LONG - 10, "stream": stream}
    gone.request("POST", "/generation/generate", json.dumps(body))
    if stream:
        gone.sock.recv(1)
    else:
        time.sleep(1)
    gone.close()
    # Without the cancellation, the generation would run for 60 s and this request would fail.
    status, said = cluster.ask("/generation/generate", {"prompt": KNOWN, "max_new_tokens": 3, "max_seconds": 20})
    assert (status, said["tokens"]) == (200, 3)
    wait_for(lambda: cluster.metric(name, **tags) == before + 1)


def test_a_killed_replica_costs_one_retry_at_most(cluster):
    killed = []
    timer = threading.Timer(1, lambda: killed.append(kill_replica()))
    timer.start()
    result = run_load(cluster.port, clients=4, seconds=4, retries=1)
    timer.join()
    assert killed and result.milliseconds
    assert not result.failures
    assert result.retried.keys() <= {"status 500", "status 408"}  # 408: Serve's timeout
    wait_for(lambda: running_replicas("default") == 2)
    assert cluster.ask("/embed", {"texts": [KNOWN]})[0] == 200
