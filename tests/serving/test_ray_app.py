"""The application of `ortolan serve` under Ray Serve, with replicas on this machine."""

from __future__ import annotations

import asyncio
import http.client
import json
import time

import onnx
import onnx_ir as ir
import pytest

ray = pytest.importorskip("ray")
openai = pytest.importorskip("openai")

from ray import serve  # noqa: E402

from ortolan.benchmarks.serving import _BAD, check_refusals  # noqa: E402
from ortolan.models import tiny  # noqa: E402
from ortolan.optimize import optimize_onnx  # noqa: E402
from ortolan.server.ray_app import RayConfig, Server, application, prefix_key  # noqa: E402

from ..passes.cached_llama import llama  # noqa: E402
from ..server.scripted import CHATML, END, events, make_tokenizer, wait_for  # noqa: E402
from ..text.wordpiece_file import write_wordpiece  # noqa: E402
from .ray_cluster import ray_cluster  # noqa: E402


@pytest.fixture(scope="module")
def decoder(tmp_path_factory):
    """Return the folder of a small decoder in the form for serving."""
    folder = tmp_path_factory.mktemp("models") / "small"
    folder.mkdir()
    tokenizer = make_tokenizer()
    onnx.save(
        llama("gqa", vocab_size=tokenizer.get_vocab_size(), max_position_embeddings=16_384), folder / "model.onnx"
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": END}))
    optimize_onnx(folder, folder.with_name("serving"), serve=True)
    return folder.with_name("serving")


@pytest.fixture(scope="module")
def url(decoder):
    """Start a cluster with two replicas of a small decoder; yield the address."""
    with ray_cluster() as port:
        config = RayConfig(model=str(decoder), name="small", replicas=2, cache_bytes=1 << 26)
        serve.run(application(config))
        write_wordpiece(decoder.with_name("tokenizer.json"))
        ir.save(tiny.tiny_bert(vocab_size=256), decoder.with_name("model.onnx"))
        encoder = RayConfig(model=str(decoder.with_name("model.onnx")), name="encoder", min_replicas=1, max_replicas=2)
        serve.run(application(encoder), name="encoder", route_prefix="/encoder")
        yield f"http://127.0.0.1:{port}"


@pytest.fixture
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def chat(text, **more):
    return {"model": "any", "messages": [{"role": "user", "content": text}], "max_tokens": 10, **more}


def test_the_type_of_the_cache():
    assert RayConfig(model="m").options().cache_type == "bfloat16"
    assert RayConfig(model="m", cache_type="int8").options().cache_type == "int8"
    with pytest.raises(ValueError, match="'bfloat16' or 'int8'"):
        RayConfig(model="m", cache_type="int4")


def test_replicas_share_weights_by_default():
    assert RayConfig(model="m").options().share_weights
    assert not RayConfig(model="m", share_weights=False).options().share_weights


@pytest.mark.parametrize("source", ["off", "lookup", "model"])
def test_the_drafts_of_a_replica(decoder, source):
    """A replica without a cluster drafts as its options say."""
    options = {"speculate": "off"} if source == "off" else {"draft_model": str(decoder)} if source == "model" else {}
    config = RayConfig(model=str(decoder), cache_bytes=1 << 24, cache_type="int8", **options)
    replica = Server.func_or_class(config.model_dump())
    engine = replica._application._generator.engine
    body = json.dumps({"prompt": "hi", "max_tokens": 40, "temperature": 0, "ignore_eos": True}).encode()
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "query_string": b"", "headers": []}
    status, messages = asyncio.run(answered_by(replica, scope | {"raw_path": b"", "root_path": ""}, body))
    assert status == 200 and json.loads(messages)["usage"]["completion_tokens"] == 40
    assert (engine.stats().drafted_tokens > 0) == (source != "off")
    drafter = None if source == "off" else engine._speculation._model
    assert (drafter is not None) == (source == "model")
    if drafter is not None:  # it has its own model, with a cache for as many tokens of the same type
        assert drafter.model is not engine.model and drafter.accuracy > 0.7
        assert (drafter.model.blocks, drafter.model.cache_type) == (engine.model.blocks, "int8")
    replica._stack.close()


async def answered_by(replica, scope, body):
    """Return the status and the content of a replica's answer."""
    start, *rest = [message async for message in replica.answer(scope, body)]
    return start["status"], b"".join(message.get("body", b"") for message in rest)


def test_answers(client):
    whole = client.chat.completions.create(**chat("hi", temperature=0))
    assert whole.model == "small"
    chunks = list(client.chat.completions.create(**chat("hi", temperature=0, stream=True)))
    assert "".join(one.choices[0].delta.content or "" for one in chunks) == whole.choices[0].message.content
    assert client.models.list().data[0].id == "small"


def test_refusals(client, url):
    with pytest.raises(openai.BadRequestError, match="temperature"):
        client.chat.completions.create(**chat("hi", temperature=7))
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="x", input="x")
    with pytest.raises(openai.APIStatusError) as refused:
        client.completions.create(model="x", prompt="x" * (5 << 20))
    assert refused.value.status_code == 413


def test_another_application_beside_it(url):
    client = openai.OpenAI(base_url=f"{url}/encoder/v1", api_key="none", max_retries=0)
    assert [one.id for one in client.models.list()] == ["encoder"]
    vectors = client.embeddings.create(model="x", input=["The cat.", "unable"]).data
    assert len(vectors) == 2
    found = check_refusals(int(url.rsplit(":")[-1]), "/encoder")
    assert found == {name: str(status) for name, (_, status) in _BAD.items()}


def test_a_conversation_stays_with_its_replica(client):
    """Each further turn finds all earlier ones in the prefix cache, for several conversations beside each other."""
    conversations = [[{"role": "user", "content": f"{number} " + "question " * 20}] for number in range(6)]
    for turn in range(4):
        for messages in conversations:
            answer = client.chat.completions.create(model="x", messages=messages, max_tokens=4)
            if turn:
                cached = answer.usage.prompt_tokens_details.cached_tokens
                assert cached >= answer.usage.prompt_tokens - 80
            messages += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": "more"}]
        time.sleep(3 if turn == 0 else 0)  # until the router knows what the replicas have seen


def test_keys():
    first = [{"role": "system", "content": "s"}, {"role": "user", "content": "a"}]
    longer = [*first, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    other = [first[0], {"role": "user", "content": "d"}]
    path = "/v1/chat/completions"
    keys = [prefix_key(path, json.dumps({"messages": one, "stream": True}).encode()) for one in (first, longer, other)]
    assert keys[0] == keys[1] != keys[2]
    assert prefix_key(path, json.dumps({"messages": first, "tools": [{}]}).encode()) not in keys
    prompts = ["a" * 2000, "a" * 3000, ["a" * 2000, "b"], "b"]
    keys = [prefix_key("/v1/completions", json.dumps({"prompt": one}).encode()) for one in prompts]
    assert keys[0] == keys[1] == keys[2] != keys[3]
    for bad in (b"", b"{", b"[]", b"{}", b'{"messages": 3}', b'{"prompt": {}}', b'{"messages": [3]}'):
        for where in (path, "/v1/completions", "/v1/embeddings"):
            assert isinstance(prefix_key(where, bad), str)


def cancelled(url):
    """Return the number of cancelled answers of the replica that answers."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("GET", "/metrics")
    page = connection.getresponse().read().decode()
    name = 'ortolan_finished_sequences_total{reason="cancelled"}'
    return float(next(line for line in page.splitlines() if line.startswith(name)).split()[1])


LONG = {"prompt": "once", "max_tokens": 16_000, "ignore_eos": True, "stream": True}


def test_a_client_that_goes_away_ends_its_answer(url):
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    connection.request("POST", "/v1/completions", json.dumps(LONG))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read(100)
    connection.close()
    wait_for(lambda: max(cancelled(url) for _ in range(8)) == 1)


def test_replicas_that_die(url, client):
    """A stream ends with an error that says what to do, and later requests are answered by new replicas."""
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=120)
    connection.request("POST", "/v1/completions", json.dumps(LONG))
    answer = connection.getresponse()
    assert answer.status == 200
    assert answer.read(100)
    killed = 0
    for actor in ray.util.list_named_actors(all_namespaces=True):
        if actor["name"].startswith("SERVE_REPLICA::default#Server#"):
            ray.kill(ray.get_actor(actor["name"], namespace=actor["namespace"]))
            killed += 1
    assert killed == 2
    *_, error, done = events(answer.read().decode())
    assert (error["error"]["type"], done) == ("server_error", "[DONE]")
    assert "send the request again" in error["error"]["message"]
    wait_for(lambda: answered(client), 120)


def answered(client):
    try:
        return client.completions.create(model="x", prompt="a", max_tokens=2).usage.completion_tokens >= 1
    except openai.APIStatusError as error:
        assert error.status_code in (429, 503)
        return False
