"""The application around the routes: keys, limits, refusals, failures, clients that go away, the end of the server."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import threading
import time

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from ortolan.errors import ArgumentError, OrtolanError  # noqa: E402
from ortolan.server.errors import FAILED  # noqa: E402
from ortolan.server.settings import Limits  # noqa: E402

from .scripted import events, running, scripted_application, wait_for  # noqa: E402


@pytest.fixture(scope="module")
def client():
    with scripted_application() as application, TestClient(application.asgi) as client:
        client.application = application
        yield client


def chat(text="Hi", **more):
    return {"messages": [{"role": "user", "content": text}], **more}


def schema(content):
    return chat(response_format={"type": "json_schema", "json_schema": {"schema": content}})


CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
TOOL = {"type": "function", "function": {"name": "f"}}
NAMED = {"type": "function", "function": {"name": "g"}}
CALLED = "messages[0].tool_calls[0].function"
LONG = {"function": {"name": "f", "description": "x" * 65000}}
CALL = {"function": {"name": "f", "arguments": "[1"}}
REFUSED = [
    (CHAT, {}, "messages", "missing"),
    (CHAT, {"messages": []}, "messages", "empty"),
    (CHAT, {"messages": "hi"}, "messages", "array of objects"),
    (CHAT, {"messages": ["hi"]}, "messages[0]", "an object"),
    (CHAT, {"messages": [{"content": "hi"}]}, "messages[0].role", "missing"),
    (CHAT, {"messages": [{"role": "robot", "content": "hi"}]}, "messages[0].role", '"robot"'),
    (CHAT, {"messages": [{"role": "user"}]}, "messages[0].content", "missing"),
    (CHAT, {"messages": [{"role": "user", "content": 7}]}, "messages[0].content", "7, expected a string"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0].type", "text"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [CALL]}]}, f"{CALLED}.arguments", "JSON"),
    (CHAT, {"messages": [{"role": "assistant", "tool_calls": [{}]}]}, CALLED, "name"),
    (CHAT, chat(temperature="hot"), "temperature", '"hot", expected a number from 0 to 2'),
    (CHAT, chat(temperature=3), "temperature", "3, expected"),
    (CHAT, chat(temperature=True), "temperature", "true"),
    (CHAT, chat(top_p=0), "top_p", "above 0"),
    (CHAT, chat(top_k=1.5), "top_k", "an integer"),
    (CHAT, chat(n=0), "n", "from 1"),
    (CHAT, chat(n=65), "n", "to 64"),
    (CHAT, chat(max_tokens=0), "max_tokens", "from 1"),
    (CHAT, chat(max_completion_tokens=-1), "max_completion_tokens", "from 1"),
    (CHAT, chat(max_tokens=5000), "max_tokens", "expected at most 2048"),
    (CHAT, chat("x" * 3000), None, "expected at most 2048"),
    (CHAT, chat(stop=[1]), "stop", "strings"),
    (CHAT, chat(stop=["x"] * 17), "stop", "17 entries"),
    (CHAT, chat(stop="x" * 300), "stop", "300 characters"),
    (CHAT, chat(seed="a"), "seed", "an integer"),
    (CHAT, chat(logit_bias={"x": 1}), "logit_bias", "token's id"),
    (CHAT, chat(logit_bias={"1": 101}), "logit_bias.1", "101"),
    (CHAT, chat(logit_bias={"999999": 1}), None, "999999"),
    (CHAT, chat(logit_bias={str(token): 1 for token in range(2000)}), "logit_bias", "2000 tokens"),
    (CHAT, chat(top_logprobs=2), "top_logprobs", "without logprobs"),
    (CHAT, chat(logprobs=True, top_logprobs=21), "top_logprobs", "to 20"),
    (CHAT, chat(stream="yes"), "stream", "true or false"),
    (CHAT, chat(functions=[{}]), "functions", "tools"),
    (CHAT, chat(modalities=["audio"]), "modalities", '["audio"], expected ["text"]'),
    (CHAT, chat(tools=[{"type": "code"}]), "tools[0].type", '"function"'),
    (CHAT, chat(tools=[{"function": {"name": "a b"}}]), "tools[0].function.name", "letters"),
    (CHAT, chat(tools=[TOOL, TOOL]), "tools", "same name"),
    (CHAT, chat(tools=[TOOL] * 200), "tools", "200 entries"),
    (CHAT, chat(tools=[LONG, NAMED | {"x": "y" * 999}]), "tools", "bytes"),
    (CHAT, chat(tools=[TOOL], tool_choice="maybe"), "tool_choice", "auto"),
    (CHAT, chat(tools=[TOOL], tool_choice=NAMED), "tool_choice.function.name", "in tools"),
    (CHAT, chat(tool_choice="required"), "tool_choice", "no tools"),
    (CHAT, chat(tools=[TOOL], response_format={"type": "json_object"}), "response_format", "tool_choice"),
    (CHAT, chat(response_format={}), "response_format.type", "missing"),
    (CHAT, chat(response_format={"type": "xml"}), "response_format.type", "json_schema"),
    (CHAT, chat(response_format={"type": "json_schema"}), "response_format.json_schema", "missing"),
    *(
        (path, {**schema(wrong), **asked}, "response_format.json_schema.schema", said)
        for path, asked in ((CHAT, {}), (COMPLETE, {"prompt": "a"}))
        for wrong, said in (({"type": "x"}, "Invalid type: x"), ({"uniqueItems": True}, 'keys: ["uniqueItems"]'))
    ),
    (CHAT, schema({"x": "y" * 70000}), "response_format.json_schema.schema", "70008 bytes"),
    (CHAT, chat(guided_json=[1]), "guided_json", "a JSON schema"),
    (CHAT, chat(guided_json="{"), "guided_json", "a JSON schema"),
    (CHAT, chat(json_schema={"type": "x"}), "json_schema", "Invalid type: x"),
    (CHAT, chat(guided_regex=""), "guided_regex", "a regular expression"),
    (COMPLETE, {"prompt": "a", "guided_regex": "("}, "guided_regex", "cannot be compiled"),
    (CHAT, chat(guided_choice=[]), "guided_choice", "an array of strings"),
    (CHAT, chat(guided_choice=["a", 1]), "guided_choice", "an array of strings"),
    (CHAT, chat(guided_grammar={}), "guided_grammar", "Lark or GBNF"),
    (COMPLETE, {"prompt": "a", "grammar": "root ::= b"}, "grammar", "Rule 'b' not found"),
    (CHAT, chat(grammar="root ::= " + "(" * 9000), "grammar", "cannot be compiled"),
    (CHAT, chat(grammar="root ::= " + "(" * 20000), "grammar", "16384 characters"),
    (CHAT, chat(grammar='root ::= "a"\n' * 257), "grammar", "256 rules"),
    (CHAT, chat(structured_outputs={"regex": 1}), "structured_outputs.regex", "a regular expression"),
    (CHAT, chat(structured_outputs={"structural_tag": "x"}), "structured_outputs.structural_tag", "tools"),
    (CHAT, chat(structured_outputs={"chioce": ["a"]}), "structured_outputs", '"chioce", expected one of json, regex'),
    (CHAT, chat(structured_outputs={"disable_additional_properties": True}),
     "structured_outputs.disable_additional_properties", "additionalProperties"),
    (CHAT, chat(structured_outputs=[1]), "structured_outputs", "an object"),
    (CHAT, chat(guided_regex="a", structured_outputs={"choice": ["b"]}), "structured_outputs.choice", "both"),
    (CHAT, chat(tools=[TOOL], guided_choice=["a"]), "guided_choice", "tool_choice none"),
    (CHAT, chat(tools=[TOOL], tool_choice="required", guided_choice=["a"]), "guided_choice", "asks for a call"),
    (CHAT, chat(tools=[TOOL], tool_choice=TOOL, structured_outputs={"regex": "a"}), "structured_outputs.regex", "call"),
    (CHAT, chat(n_predict=-2), "n_predict", "from 1"),
    (COMPLETE, {"prompt": "a", "repeat_penalty": 0}, "repeat_penalty", "above 0"),
    (COMPLETE, {"prompt": "a", "cache_prompt": "no"}, "cache_prompt", "true or false"),
    (CHAT, chat(repeat_last_n=64, repeat_penalty=1.1), "repeat_last_n", "64, expected -1: leave it out"),
    (CHAT, chat(repeat_last_n=64, presence_penalty=1), "repeat_last_n", "64, expected -1: leave it out"),
    (CHAT, chat(repeat_last_n=32), "repeat_last_n", "32, expected -1 or 64: leave it out"),
    (CHAT, chat(mirostat=2), "mirostat", "2, expected 0: "),
    (CHAT, chat(stop_token_ids=[7]), "stop_token_ids", "[7], expected []: send stop"),
    (CHAT, chat(add_special_tokens=True), "add_special_tokens", "chat template"),
    (CHAT, chat(include_reasoning=False), "include_reasoning", "expected true"),
    (CHAT, chat(reasoning_format="none"), "reasoning_format", "reasoning_content"),
    (CHAT, chat(return_token_ids=True), "return_token_ids", "/tokenize"),
    (CHAT, chat(return_tokens_as_token_ids=True), "return_tokens_as_token_ids", "/tokenize"),
    (COMPLETE, {"prompt": "a", "add_special_tokens": False}, "add_special_tokens", "send tokens"),
    (COMPLETE, {"prompt": "a", "return_tokens": True}, "return_tokens", "/tokenize"),
    (COMPLETE, {"prompt": "a", "post_sampling_probs": True}, "post_sampling_probs", "send logprobs"),
    (COMPLETE, {"prompt": "a", "response_fields": ["content"]}, "response_fields", "whole answer"),
    (CHAT, chat(chat_template="x"), "chat_template", "--chat-template"),
    (CHAT, chat(cache_salt=7), "cache_salt", "a string"),
    (CHAT, chat(chat_template_kwargs={"a b": 1}), "chat_template_kwargs", "names"),
    (CHAT, chat(chat_template_kwargs={"a": [1] * 40}), "chat_template_kwargs", "an array of 40"),
    (CHAT, chat(user=7), "user", "a string"),
    (COMPLETE, {}, "prompt", "missing"),
    (COMPLETE, {"prompt": []}, "prompt", "tokens"),
    (COMPLETE, {"prompt": {}}, "prompt", "tokens"),
    (COMPLETE, {"prompt": [[]]}, "prompt[0]", "tokens"),
    (COMPLETE, {"prompt": [1, "a"]}, "prompt[0]", "tokens"),
    (COMPLETE, {"prompt": ["a", 1]}, "prompt[1]", "a string"),
    (COMPLETE, {"prompt": [-1]}, "prompt[0]", "from 0"),
    (COMPLETE, {"prompt": [10**6]}, "prompt[0]", "1000000"),
    (COMPLETE, {"prompt": [1, 2**63]}, "prompt[0]", "9223372036854775808"),
    (COMPLETE, {"prompt": [[1], [True]]}, "prompt[1]", "true"),
    (COMPLETE, {"prompt": ["a"] * 65}, "prompt", "65 prompts"),
    (COMPLETE, {"prompt": ["a"] * 60, "n": 2}, "n", "answers together"),
    (COMPLETE, {"prompt": "a", "echo": True}, "echo", "not supported"),
    (COMPLETE, {"prompt": "a", "best_of": 3}, "best_of", "1"),
    (COMPLETE, {"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
    (COMPLETE, {"prompt": "a", "logprobs": -1}, "logprobs", "from 0"),
    ("/tokenize", {}, "prompt", "missing"),
    ("/detokenize", {"tokens": [10**9]}, "tokens", "from 0 to"),
    ("/detokenize", {"tokens": [True]}, "tokens", "from 0 to"),
]  # fmt: skip


@pytest.mark.parametrize(("path", "body", "param", "message"), REFUSED)
def test_refused_bodies(client, path, body, param, message):
    refused = client.post(path, json=body)
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (400, param, "invalid_request_error"), error
    assert message in error["message"]
    assert "expected" in error["message"] or "send" in error["message"] or "compiled" in error["message"]


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"", 400),
        (b"{", 400),
        (b"[]", 400),
        (b'"x"', 400),
        (b"\xff", 400),
        (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', 400),
        (b'{"a":' + b"[" * 900 + b"]" * 900 + b"}", 400),
        (b"[" * 100_000, 400),
        (b'{"prompt": NaN}', 400),
        (b'"' + b"x" * (5 << 20) + b'"', 413),
    ],
)
def test_bodies_that_are_not_taken(client, content, status):
    for path in (CHAT, COMPLETE, "/tokenize", "/detokenize"):
        refused = client.post(path, content=content)
        assert refused.status_code == status
        assert refused.json()["error"]["message"]


def test_a_body_in_latin_1(client):
    refused = client.post(COMPLETE, content='{"prompt": "é"}'.encode("latin-1"))
    message = refused.json()["error"]["message"]
    assert (refused.status_code, message) == (400, "the body is not valid UTF-8 (byte 12), expected JSON in UTF-8")


def test_null_and_unknown_fields_are_ignored(client):
    body = chat(temperature=None, tools=None, stop=None, stream_options=None, metadata={"a": "b"}, store=True, top_k=-1)
    body |= {"cache_prompt": True, "mirostat": 0, "typical_p": 1.0, "min_tokens": 0, "grammar": None, "n_probs": 0}
    body |= {"add_special_tokens": False, "include_reasoning": True, "reasoning_format": "auto", "response_fields": []}
    body |= {"repeat_last_n": 64, "repeat_penalty": 1.0}
    assert client.post(CHAT, json=body).status_code == 200
    body = {"prompt": "a", "add_special_tokens": True, "return_tokens": False, "reasoning_format": "none"}
    assert client.post(COMPLETE, json=body).status_code == 200


def test_unknown_paths_and_methods(client):
    for method, path, status in (("GET", "/nothing", 404), ("GET", CHAT, 405), ("GET", f"{CHAT}/", 404)):
        refused = client.request(method, path)
        assert refused.status_code == status
        assert refused.json()["error"]["message"]
    refused = client.get(CHAT)
    assert refused.headers["allow"] == "POST"
    assert refused.json()["error"]["message"] == f"GET {CHAT}: Method Not Allowed; expected POST"
    assert "this server has" in (found := client.get("/").json()["error"]["message"]) and CHAT in found
    for path in ("/chat/completions", "/models"):
        assert client.post(path, json={}).json()["error"]["message"].endswith("Not Found; base_url must end with /v1")


@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_turns_are_by_host_and_then_by_user(client, monkeypatch, path):
    seen = []
    submit = client.application.engine.submit
    monkeypatch.setattr(client.application.engine, "submit", lambda one: seen.append(one) or submit(one))
    body = {"prompt": "a"} if path == COMPLETE else chat()
    for more in ({}, {"user": "a"}, {"user": "a", "safety_identifier": "b"}):
        assert client.post(path, json={**body, **more}).status_code == 200
    assert [(one.client, one.user) for one in seen] == [("host testclient", user) for user in ("", "a", "b")]


def test_models(client):
    (model,) = client.get("/v1/models").json()["data"]
    assert (model["id"], model["object"], model["max_model_len"]) == ("scripted", "model", 2048)
    assert client.get("/v1/models/scripted").json() == model
    assert client.get("/v1/models/a/b").status_code == 404


def test_models_that_the_server_has_not(client):
    for path, body in (("/v1/embeddings", {"input": "x"}), ("/rerank", {"query": "x", "documents": ["y"]})):
        assert client.post(path, json=body).status_code == 404


def test_request_ids(client):
    assert client.get("/health", headers={"x-request-id": "a-1"}).headers["x-request-id"] == "a-1"
    for bad in ("a b", "x" * 200):
        assert len(client.get("/health", headers={"x-request-id": bad}).headers["x-request-id"]) == 32


def test_the_key():
    with scripted_application(api_key="sécret") as application, TestClient(application.asgi) as client:
        good = "Bearer sécret".encode()
        for given in (
            {},
            {"Authorization": "Bearer x"},
            {"Authorization": "sécret".encode()},
            {"Authorization": b"Basic " + good},
        ):
            for path in ("/v1/models", "/metrics", "/nothing"):
                refused = client.get(path, headers=given)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert client.get("/health").status_code == 200
        assert client.get("/v1/models", headers={"Authorization": good}).status_code == 200
        assert client.post(CHAT, json=chat(), headers={"Authorization": good}).status_code == 200


@pytest.mark.parametrize("origins", [("http://localhost:3000", "app://x"), ("*",)])
def test_web_pages_of_other_origins(origins):
    """A browser first asks without the key, and reads answers and errors only with the header."""
    asked = {"Origin": "app://x", "Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization, content-type, x-stainless-os"
    opened = scripted_application(api_key="secret", allow_origins=origins)
    with opened as application, TestClient(application.asgi) as client:
        allowed = client.options(CHAT, headers=asked)
        assert allowed.status_code == 200
        assert allowed.headers["access-control-allow-headers"] == asked["Access-Control-Request-Headers"]
        key = {"Authorization": "Bearer secret"}
        for more, status in ((key, 200), ({}, 401)):
            for stream in (False, True):
                answer = client.post(CHAT, json=chat(stream=stream), headers={"Origin": "app://x", **more})
                assert answer.status_code == status
                assert answer.headers["access-control-allow-origin"] in ("app://x", "*")
        refused = client.post(CHAT, json=chat(), headers={**key, "Origin": "http://other"})
        assert ("access-control-allow-origin" in refused.headers) == (origins == ("*",))


def test_web_pages_of_other_origins_are_not_allowed_by_default(client):
    asked = {"Origin": "http://x", "Access-Control-Request-Method": "POST"}
    assert client.options(CHAT, headers=asked).status_code == 405
    assert "access-control-allow-origin" not in client.post(CHAT, json=chat(), headers=asked).headers


def test_metrics(client):
    client.post(CHAT, json=chat())
    client.post(CHAT, content=b"{")
    client.get("/nothing")
    page = client.get("/metrics").text
    values = dict(line.rsplit(" ", 1) for line in page.splitlines() if not line.startswith("#"))
    assert float(values[f'ortolan_requests_total{{path="{CHAT}",status="200"}}']) >= 1
    assert float(values[f'ortolan_requests_total{{path="{CHAT}",status="400"}}']) >= 1
    assert float(values['ortolan_requests_total{path="other",status="404"}']) >= 1
    assert float(values["ortolan_generated_tokens_total"]) >= 3
    assert float(values["ortolan_queued_sequences"]) == 0
    assert float(values["ortolan_active_requests"]) == 0
    first = "ortolan_time_to_first_token_seconds"
    assert values[f'{first}_bucket{{le="+Inf"}}'] == values[f"{first}_count"]
    assert float(values[f"{first}_sum"]) > 0
    assert float(values['ortolan_finished_sequences_total{reason="stop"}']) >= 1


def test_a_model_that_fails():
    with scripted_application() as application, TestClient(application.asgi) as client:
        application.model.failing = True
        failed = client.post(CHAT, json=chat())
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        application.model.failing = True
        *_, error, done = events(client.post(CHAT, json=chat(stream=True)).text)
        assert (error["error"]["type"], done) == ("server_error", "[DONE]")
        assert "secret" not in failed.text + str(error)
        assert client.post(CHAT, json=chat()).json()["choices"][0]["message"]["content"] == "Hi"


@pytest.mark.parametrize(
    ("error", "status", "message"),
    [
        (ArgumentError("too complex"), 400, "too complex; simplify the schema or grammar"),
        (OrtolanError("the grammar fails"), 500, FAILED),
    ],
)
def test_grammars_that_fail(monkeypatch, error, status, message):
    def fail(_):
        raise error

    with scripted_application() as application, TestClient(application.asgi) as client:
        monkeypatch.setattr("ortolan.engine.grammar.TokenGrammar.mask", fail)
        answer = client.post(CHAT, json=chat(response_format={"type": "json_object"}))
        assert answer.status_code == status and answer.json()["error"]["message"] == message


def test_a_server_that_fails(monkeypatch):
    def fail(*_):
        raise ValueError("secret")

    with scripted_application() as application, TestClient(application.asgi) as client:
        monkeypatch.setattr("ortolan.server.chat_completions._read", fail)
        failed = client.post(CHAT, json=chat())
        assert (failed.status_code, failed.json()["error"]["type"]) == (500, "server_error")
        assert failed.headers["x-request-id"]
        assert "secret" not in failed.text


@pytest.mark.parametrize("stream", [False, True])
def test_the_log_has_the_reason_under_the_id(stream, caplog):
    with scripted_application() as application, TestClient(application.asgi) as client:
        application.model.failing = True
        client.post(CHAT, json=chat(stream=stream), headers={"x-request-id": "the-id"})
    assert any("request the-id failed: the model failed" in record.getMessage() for record in caplog.records)


def test_checks():
    with scripted_application(max_queue=1, max_sequences=1) as application:

        async def check():
            application.open()
            try:
                await application.check()
            finally:
                application.close()

        asyncio.run(check())
        assert application.engine.stats().generated_tokens == 1
        application.model.failing = True
        with pytest.raises(RuntimeError, match="failed"):
            asyncio.run(check())


def held(application):
    """Return the lock that keeps the model from running."""
    return application.model.hold


def test_a_full_queue():
    with scripted_application(max_queue=1, max_sequences=1) as application, running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with held(application):
            threads = [
                threading.Thread(target=lambda: client.chat.completions.create(model="x", **chat("a" * 50)))
                for _ in range(2)
            ]
            threads[0].start()
            wait_for(lambda: application.engine.stats().running_sequences == 1)
            threads[1].start()
            wait_for(lambda: application.engine.stats().queued_sequences == 1)
            application._generator.compile = None  # refused requests do not get so far
            with pytest.raises(openai.RateLimitError) as refused:
                client.chat.completions.create(model="x", **schema({"type": "object"}))
            assert int(refused.value.response.headers["Retry-After"]) >= 1
            assert refused.value.code == "queue_full"
            with pytest.raises(openai.RateLimitError):
                client.completions.create(model="x", prompt=["a", "b"])
        for thread in threads:
            thread.join()
        assert client.chat.completions.create(model="x", **chat()).choices[0].message.content == "Hi"
        assert application.engine.stats().rejected_requests >= 2


def test_several_prompts_are_refused_together():
    """If the second prompt does not fit into the queue, the first one does not run on."""
    with scripted_application(max_queue=1, max_sequences=1) as application, TestClient(application.asgi) as client:
        assert client.post(COMPLETE, json={"prompt": ["a" * 99, "b", "c", "d"], "max_tokens": 1000}).status_code == 429
        wait_for(lambda: application.engine.stats().running_sequences == 0)
        assert application.engine.stats().generated_tokens < 1000
        assert not application._generator._answers  # memory does not grow with refused requests


def test_too_many_requests_at_a_time():
    limits = Limits(requests=1)
    with scripted_application(limits=limits) as application, running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        with held(application):
            thread = threading.Thread(target=lambda: client.chat.completions.create(model="x", **chat()))
            thread.start()
            wait_for(lambda: application.drain.active == 1)
            with pytest.raises(openai.RateLimitError):
                client.models.list()
        thread.join()
        assert client.models.list().data[0].id == "scripted"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [CHAT, COMPLETE])
def test_a_client_that_goes_away_ends_its_answer(path, stream):
    body = {"prompt": ["a", "b"], "max_tokens": 2000} if path == COMPLETE else chat("a" * 1000)
    with scripted_application() as application, running(application) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"))
        with held(application):
            connection.request("POST", path, json.dumps({**body, "stream": stream}))
            wait_for(lambda: application.engine.stats().running_sequences >= 1)
            connection.close()
            wait_for(lambda: application.drain.active == 0)
        wait_for(lambda: application.engine.stats().running_sequences == 0)
        stats = application.engine.stats()
        assert stats.finished["cancelled"] == (2 if path == COMPLETE else 1)
        assert stats.generated_tokens < 100
        assert stats.blocks_used == 0


def test_a_client_that_leaves_a_stream():
    with scripted_application() as application, running(application) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        stream = client.chat.completions.create(model="x", stream=True, **chat("a" * 1000))
        next(stream)
        next(stream)
        with held(application):
            stream.close()
            wait_for(lambda: application.drain.active == 0)
        wait_for(lambda: application.engine.stats().running_sequences == 0)
        assert application.engine.stats().finished["cancelled"] == 1


def test_a_client_that_stops_reading_loses_its_place():
    """The socket stays open, but the answer ends and the request counts no more."""
    limits = Limits(send_seconds=0.2)
    body = json.dumps({"prompt": "abc" * 40, "stream": True, "n": 32, "logprobs": 5, "max_tokens": 1900}).encode()
    head = f"POST {COMPLETE} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with (
        scripted_application(limits=limits, blocks=4096) as application,
        running(application) as server,
        socket.socket() as client,
    ):
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", int(server.url.rsplit(":", 1)[1])))
        client.sendall(head + body)
        wait_for(lambda: application.engine.stats().finished["cancelled"] > 0)
        wait_for(lambda: not application.engine.stats().running_sequences and not application.drain.active)


def test_a_stream_without_events_is_kept_open():
    with scripted_application(keep_alive_seconds=0.05) as application, running(application) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        with held(application):
            connection.request("POST", CHAT, json.dumps(chat(stream=True)))
            answer = connection.getresponse()
            seen = answer.read1()
            while b": waiting\n\n" not in seen:
                seen += answer.read1()
        assert events(answer.read().decode())[-1] == "[DONE]"


def test_the_time_limit():
    limits = Limits(seconds=0.2)
    with scripted_application(limits=limits) as application, TestClient(application.asgi) as client:
        with held(application):
            timer = threading.Timer(0.5, held(application).release)
            timer.start()
            late = client.post(CHAT, json=chat("a" * 40))
            timer.join()
            held(application).acquire()
        assert late.status_code in (200, 504)
        if late.status_code == 504:
            assert late.json()["error"]["code"] == "timeout"
        else:  # the first token was drawn in the step that was held
            assert late.json()["choices"][0]["finish_reason"] == "length"


def test_a_body_that_does_not_arrive():
    limits = Limits(body_seconds=0.1)
    with scripted_application(limits=limits) as application, running(application) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        connection.putrequest("POST", CHAT)
        connection.putheader("Content-Length", "100")
        connection.endheaders(b"{")
        assert connection.getresponse().status == 408


def test_the_end_of_the_server():
    """Requests that run are finished, new ones are refused, and /health tells load balancers."""
    with scripted_application() as application, running(application, drain_seconds=60) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        found = []
        with held(application):
            thread = threading.Thread(target=lambda: found.append(client.chat.completions.create(model="x", **chat())))
            thread.start()
            wait_for(lambda: application.engine.stats().running_sequences == 1)
            server.handle_exit(signal.SIGTERM, None)
            with pytest.raises(openai.InternalServerError) as refused:
                client.models.list()
            assert refused.value.response.headers["Retry-After"] == "1"
            connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
            connection.request("GET", "/health")
            health = connection.getresponse()
            assert (health.status, json.loads(health.read())["status"]) == (503, "draining")
            assert not server.should_exit
        thread.join()
        assert found[0].choices[0].message.content == "Hi"
        wait_for(lambda: server.should_exit)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("seconds", [0.1, 600])
def test_answers_are_cancelled_after_some_time_or_a_second_signal(stream, seconds):
    said = []
    with scripted_application() as application, running(application, seconds, said.append) as server:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        with held(application):
            connection.request("POST", CHAT, json.dumps(chat("a" * 1000, stream=stream)))
            wait_for(lambda: application.engine.stats().running_sequences == 1)
            server.handle_exit(signal.SIGINT, None)
            if seconds == 600:
                server.handle_exit(signal.SIGINT, None)
            time.sleep(0.5)
        answer = connection.getresponse()
        text = answer.read().decode()
        if stream:
            *_, error, done = events(text)
            assert (answer.status, done) == (200, "[DONE]")
        else:
            assert answer.status == 503
            error = json.loads(text)
        assert "shutting down" in error["error"]["message"]
        wait_for(lambda: server.should_exit)
        assert not server.force_exit
    assert said == [f"shutting down: 1 answer may take up to {seconds:g} s; Ctrl-C again stops at once"]


def test_a_third_signal_ends_at_once():
    with scripted_application() as application, running(application, drain_seconds=600) as server:
        for _ in range(3):
            server.handle_exit(signal.SIGINT, None)
        assert server.should_exit
        assert server.force_exit


def test_many_clients_at_once():
    with scripted_application(blocks=64, max_sequences=8) as application, running(application) as server:
        texts = [chr(97 + number % 26) * (number * 7 % 90 + 1) for number in range(40)]
        found = {}

        def ask(number):
            client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
            made = client.chat.completions.create(model="x", stream=number % 2 == 0, **chat(texts[number]))
            if number % 2 == 0:
                found[number] = "".join(chunk.choices[0].delta.content or "" for chunk in made)
            else:
                found[number] = made.choices[0].message.content

        threads = [threading.Thread(target=ask, args=[number]) for number in range(40)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert [found[number] for number in range(40)] == texts
        wait_for(lambda: application.engine.stats().blocks_used == 0)
        wait_for(lambda: application.drain.active == 0)


def test_prompts_of_templates_have_the_limit_on_characters():
    with scripted_application(limits=Limits(characters=100)) as application, TestClient(application.asgi) as client:
        said = [{"role": "user", "content": "x" * 40}] * 2
        for path in (CHAT, "/tokenize"):
            error = client.post(path, json={"messages": said}).json()["error"]
            assert "more than 100 characters" in error["message"]
            assert client.post(path, json={"messages": said[:1], "max_tokens": 1}).status_code == 200


def test_slow_schemas_do_not_delay_other_chats():
    release = threading.Event()

    def compile_slowly(_):
        release.wait(30)
        raise ArgumentError("too slow")

    with scripted_application() as application, TestClient(application.asgi) as client:
        application._generator.compile = compile_slowly
        body, found = schema({"type": "object"}), []
        slow = [threading.Thread(target=lambda: found.append(client.post(CHAT, json=body))) for _ in range(4)]
        for thread in slow:
            thread.start()
        try:
            wait_for(lambda: application.drain.active == 4)
            assert client.post(CHAT, json=chat(max_tokens=1)).status_code == 200
            assert not found
        finally:
            release.set()
        for thread in slow:
            thread.join()
        assert [answer.status_code for answer in found] == [400] * 4
