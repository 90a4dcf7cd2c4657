"""Bodies that hypothesis makes: each is answered or refused, and none fails the server."""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")
pytest.importorskip("llguidance")

from starlette.testclient import TestClient

from .scripted import CHATML, scripted_application

NAMES = [
    *("messages", "role", "content", "tool_calls", "function", "name", "arguments", "tools", "tool_choice", "prompt"),
    *("stream", "stream_options", "include_usage", "n", "logprobs", "top_logprobs", "stop", "seed", "response_format"),
    *("type", "json_schema", "schema", "max_tokens", "max_completion_tokens", "logit_bias", "temperature", "top_p"),
    *("top_k", "min_p", "repetition_penalty", "presence_penalty", "user", "parameters", "strict", "text", "tokens"),
    *(
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "structured_outputs",
        "json",
        "regex",
        "choice",
    ),
    *(
        "grammar",
        "n_predict",
        "repeat_penalty",
        "cache_prompt",
        "cache_salt",
        "properties",
        "required",
        "$ref",
        "anyOf",
    ),
    *("parallel_tool_calls", "chat_template_kwargs", "enable_thinking", "input", "query", "documents", "ignore_eos"),
]
WORDS = [
    *("user", "assistant", "tool", "system", "auto", "required", "none", "function", "text", "json_object", "object"),
    *("json_schema", "{}", "", "\0", "<tool_call>", "<think>", "<|im_start|>assistant\n", "é🦆", "a" * 50),
]
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 5),
    st.sampled_from([2**63, -(2**63), 10**30, 1e308, -1.5, 0.5]),
    st.sampled_from(WORDS),
    st.text(max_size=5),
)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=4), st.dictionaries(st.sampled_from(NAMES), inner, max_size=5)),
    max_leaves=25,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "system"]), "content": st.one_of(st.text(), scalars)},
        optional={"tool_calls": values, "name": scalars, "tool_call_id": scalars},
    ),
    min_size=1,
    max_size=3,
)
tools = st.lists(
    st.fixed_dictionaries(
        {"function": st.fixed_dictionaries({"name": st.sampled_from(["f", "g"])}, optional={"parameters": values})}
    ),
    max_size=2,
)
options = st.dictionaries(st.sampled_from(NAMES), values, max_size=4)
bodies = st.one_of(
    st.dictionaries(st.sampled_from(NAMES), values, max_size=6),
    st.builds(lambda said, more: {**more, "messages": said, "max_tokens": 8}, messages, options),
    st.builds(lambda said, found, choice, more: {**more, "messages": said, "tools": found, "tool_choice": choice,
                                                 "max_tokens": 8},
              messages, tools, st.sampled_from(["auto", "required", "none"]), options),
    st.builds(lambda said, more: {**more, "prompt": said, "max_tokens": 8}, st.text(max_size=9), options),
)  # fmt: skip
PATHS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/detokenize", "/v1/embeddings", "/rerank"]


@pytest.fixture(scope="module", params=["{# </think> #}", "{# <function= <parameter= #}"])
def client(request):
    template = request.param
    opened = scripted_application(template=CHATML + template)
    with opened as application, TestClient(application.asgi) as client:
        client.application = application
        yield client


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(path=st.sampled_from(PATHS), body=bodies)
def test_bodies(client, path, body):
    answer = client.post(path, content=json.dumps(body).encode())
    assert answer.status_code in (200, 400, 404), answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert '"server_error"' not in answer.text
        assert answer.text.endswith("data: [DONE]\n\n")
    elif answer.status_code != 200:
        assert answer.json()["error"]["message"]
    assert client.application.drain.active == 0


@settings(deadline=None)
@given(path=st.sampled_from(PATHS), content=st.binary(max_size=200))
def test_bytes(client, path, content):
    assert client.post(path, content=content).status_code in (400, 404)
