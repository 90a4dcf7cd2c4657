"""Chats and completions through the application, with openai's client and in raw HTTP."""

from __future__ import annotations

import json
import math
import re
import threading

import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

from starlette.testclient import TestClient  # noqa: E402

from ortolan.engine.grammar import GrammarTokenizer, TokenGrammar  # noqa: E402
from ortolan.server.grammars import calls_grammar, with_thoughts  # noqa: E402
from ortolan.server.tool_calls import QWEN_CODER  # noqa: E402
from ortolan.server.xml_calls import parameter_types  # noqa: E402

from .scripted import (  # noqa: E402
    ASSISTANT,
    CHATML,
    END,
    START,
    echo,
    events,
    last_message,
    make_tokenizer,
    running,
    scripted_application,
)

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather of a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'


def reply(prompt: str) -> str:
    """Answer as a model with tools and thoughts does."""
    said = last_message(prompt)
    if "<|im_start|>tool\n" in prompt:
        return f"It is {said}."
    if said == "weather?":
        return f"Let me see.\n{CALL}\n{CALL.replace('Oslo', 'Rome')}"
    if said.startswith("think"):
        return "<think>\nHm.\n</think>\n\nYes."
    return said


@pytest.fixture(scope="module")
def client():
    with scripted_application(reply) as application, running(application) as server:
        yield openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def http():
    with scripted_application(reply) as application, TestClient(application.asgi) as http:
        http.application = application
        yield http


def say(text, **more):
    return {"model": "any", "messages": [{"role": "user", "content": text}], **more}


def test_a_chat(client):
    answer = client.chat.completions.create(**say("Hallo, Ünïcode 🦆!"))
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content) == ("assistant", "Hallo, Ünïcode 🦆!")
    assert choice.finish_reason == "stop"
    assert answer.object == "chat.completion"
    assert answer.model == "scripted"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.completion_tokens == len("Hallo, Ünïcode 🦆!".encode()) + 1  # and the end token


def test_a_chat_in_a_stream(client):
    stream = client.chat.completions.create(**say("Hi 🦆", stream=True, stream_options={"include_usage": True}))
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hi 🦆"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == "stop"
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 8


def test_a_conversation_with_tools(client):
    messages = [{"role": "user", "content": "weather?"}]
    answer = client.chat.completions.create(model="any", messages=messages, tools=[WEATHER]).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content == "Let me see."
    calls = answer.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)["city"]) for call in calls] == [
        ("weather", "Oslo"),
        ("weather", "Rome"),
    ]
    assert calls[0].id != calls[1].id
    messages += [
        answer.message,
        {"role": "tool", "tool_call_id": calls[0].id, "content": "cold"},
        {"role": "tool", "tool_call_id": calls[1].id, "content": [{"type": "text", "text": "hot"}]},
    ]
    final = client.chat.completions.create(model="any", messages=messages, tools=[WEATHER]).choices[0]
    assert (final.message.content, final.finish_reason, final.message.tool_calls) == ("It is hot.", "stop", None)


def test_tool_calls_in_a_stream(client):
    names, arguments = {}, {}
    with client.chat.completions.stream(**say("weather?", tools=[WEATHER])) as stream:
        for chunk in stream:
            for call in (chunk.chunk.choices[0].delta.tool_calls or []) if chunk.type == "chunk" else []:
                names[call.index] = names.get(call.index, "") + (call.function.name or "")
                arguments.setdefault(call.index, []).append(call.function.arguments)
    assert names == {0: "weather", 1: "weather"}
    assert "".join(arguments[1]) == '{"city": "Rome"}'
    assert len(arguments[0]) > 5
    final = stream.get_final_completion().choices[0]
    assert final.finish_reason == "tool_calls"
    assert final.message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_only_one_call(client):
    for stream in (False, True):
        made = client.chat.completions.create(
            **say("weather?", tools=[WEATHER], parallel_tool_calls=False, stream=stream)
        )
        calls = (
            [call for chunk in made for call in chunk.choices[0].delta.tool_calls or [] if call.id]
            if stream
            else made.choices[0].message.tool_calls
        )
        assert len(calls) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"weather", "time"}), ({"type": "function", "function": {"name": "time"}}, {"time"})],
)
def test_calls_that_must_be_made(client, choice, names, stream):
    """The model would answer with text, but the grammar leaves it only calls."""
    asked = say("hello", tools=[WEATHER, TIME], tool_choice=choice, max_tokens=200, stream=stream, temperature=0)
    made = client.chat.completions.create(**asked)
    if stream:
        found = [chunk.choices[0].delta for chunk in made]
        name = next(delta.tool_calls[0].function.name for delta in found if delta.tool_calls)
        assert not any(delta.content for delta in found)
    else:
        name = made.choices[0].message.tool_calls[0].function.name
        assert made.choices[0].message.content is None
    assert name in names


def test_a_function_without_parameters_gets_no_arguments(client):
    for function in ({}, {"parameters": None}, {"parameters": {}}, {"strict": True}):
        tool = {"type": "function", "function": {"name": "time", **function}}
        made = client.chat.completions.create(
            **say("hello", tools=[tool], tool_choice="required", max_tokens=200, temperature=0)
        )
        assert {call.function.arguments for call in made.choices[0].message.tool_calls} == {"{}"}


def test_a_required_call_beside_a_response_format(client):
    tool = {"type": "function", "function": {"name": "time"}}
    asked = say("hello", tools=[tool], tool_choice="required", max_tokens=200, temperature=0)
    made = client.chat.completions.create(**asked, response_format={"type": "json_object"})
    assert made.choices[0].message.tool_calls


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut(http, stream):
    for most in range(1, 16):
        asked = say("hello", tools=[WEATHER], tool_choice="required", max_tokens=most, temperature=0, stream=stream)
        answer = http.post("/v1/chat/completions", json=asked)
        if stream:
            found = [one["choices"][0] for one in events(answer.text)[:-1]]
            content = "".join(one["delta"].get("content") or "" for one in found)
        else:
            found = answer.json()["choices"]
            content = found[0]["message"]["content"] or ""
        assert (content, found[-1]["finish_reason"]) == ("", "length")


def test_tool_choice_none_shows_no_tools(http):
    answer = http.post("/v1/chat/completions", json=say("weather?", tools=[WEATHER], tool_choice="none")).json()
    assert answer["choices"][0]["message"]["content"].endswith(CALL.replace("Oslo", "Rome"))
    assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def thinking():
    application = scripted_application(reply, template=CHATML + "{# </think> #}")
    with application as opened, TestClient(opened.asgi) as http:
        yield http


def test_thoughts(thinking):
    message = thinking.post("/v1/chat/completions", json=say("think")).json()["choices"][0]["message"]
    assert (message["reasoning_content"], message["content"]) == ("Hm.", "Yes.")
    found = events(thinking.post("/v1/chat/completions", json=say("think", stream=True)).text)[:-1]
    deltas = [one["choices"][0]["delta"] for one in found]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == "Hm."
    assert "".join(delta.get("content", "") for delta in deltas) == "Yes."


def test_thinking_can_be_turned_off(thinking):
    asked = say("hello", chat_template_kwargs={"enable_thinking": False})
    ids = thinking.post("/tokenize", json=asked).json()["tokens"]
    assert thinking.post("/detokenize", json={"tokens": ids}).json()["prompt"].endswith("<think>\n\n</think>\n\n")


def test_thoughts_before_a_structured_answer(thinking):
    schema = {"type": "object", "properties": {"a": {"enum": [1]}}, "required": ["a"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    asked = say("think", response_format=form, temperature=0)
    message = thinking.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert json.loads(message["content"]) == {"a": 1}


def test_thoughts_before_a_call_that_must_be_made(thinking):
    asked = say("think", tools=[TIME], tool_choice="required", max_tokens=300, temperature=0)
    message = thinking.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm."
    assert message["tool_calls"][0]["function"]["name"] == "time"


@pytest.mark.parametrize("stream", [False, True])
def test_structured_answers(client, stream):
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Bob"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}}
    made = client.chat.completions.create(**say("who?", response_format=form, stream=stream, temperature=0))
    text = (
        "".join(chunk.choices[0].delta.content or "" for chunk in made) if stream else made.choices[0].message.content
    )
    person = json.loads(text)
    assert person["name"] in ("Ada", "Bob")
    assert 10 <= person["age"] <= 99
    assert text == json.dumps(person)  # the spaces of TokenGrammar.from_json_schema


GBNF = r"""
root ::= item ("-" item)*
item ::= [x-z] | "1/2" # a comment
"""
FORMS = [
    ({"guided_json": {"enum": ["x"]}}, '"x"'),
    ({"guided_json": '{"enum": ["x"]}'}, '"x"'),
    ({"json_schema": {"enum": [5]}}, "5"),
    ({"response_format": {"type": "json_object", "schema": {"enum": [5]}}}, "5"),
    ({"guided_regex": r"x/[0-9]{2}\/é"}, r"x/\d\d/é"),
    ({"guided_regex": "^a\nb$"}, "a\nb"),
    ({"guided_regex": "a\\\nb"}, "a\nb"),
    ({"guided_regex": "a\\\\\nb"}, r"a\\\nb"),
    ({"guided_choice": ["é🦆\n", 'z"']}, 'é🦆\n|z"'),
    ({"guided_choice": [f"choice {number}" for number in range(3000)]}, r"choice \d+"),
    ({"guided_choice": ["x", "xy", ""]}, "x|xy|"),
    ({"guided_grammar": "start: WORD\nWORD: /[x-z]{3}/"}, "[x-z]{3}"),
    ({"grammar": GBNF, "n_predict": 1}, "x|y|z|1"),
    ({"structured_outputs": {"json": {"enum": ["x"]}}}, '"x"'),
    ({"structured_outputs": {"regex": "x{3}"}}, "xxx"),
    ({"structured_outputs": {"choice": ["x"]}}, "x"),
    ({"structured_outputs": {"grammar": 'start: "x"'}}, "x"),
    ({"structured_outputs": {"json_object": True}, "n_predict": 1}, r"\{"),
]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("asked", "pattern"), FORMS)
def test_forms_of_answers_as_other_servers_name_them(http, path, asked, pattern):
    prompt = say("hello") if path == "/v1/chat/completions" else {"prompt": "hello"}
    answer = http.post(path, json={"n_predict": 60, **prompt, "temperature": 0, **asked})
    choice = answer.json()["choices"][0]
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    assert re.fullmatch(pattern, text), text
    assert choice["finish_reason"] == ("length" if "n_predict" in asked else "stop")


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        (r"\d{2}", "[0-9]{2}"),
        (r"[\d.]{2}", "[0-9.]{2}"),
        (r"\D{2}", "٣٣"),
        (r"[^\d]{2}", "٣٣"),
        (r"[\D]{2}", "٣٣"),
        (r"\\d", r"\\d"),
    ],
)
def test_digits_of_regular_expressions_are_those_of_ascii(http, pattern, said):
    asked = say("٣٣", guided_regex=pattern, temperature=0)
    text = http.post("/v1/chat/completions", json=asked).json()["choices"][0]["message"]["content"]
    assert re.fullmatch(said, text), text


def test_a_form_after_thoughts(thinking):
    message = thinking.post("/v1/chat/completions", json=say("think", grammar=GBNF, max_tokens=30)).json()
    message = message["choices"][0]["message"]
    assert message["reasoning_content"] == "Hm." and message["content"][0] in "xyz1"


def test_names_of_fields_in_other_servers(http, monkeypatch):
    seen = []
    submit = http.application.engine.submit
    monkeypatch.setattr(http.application.engine, "submit", lambda one: seen.append(one) or submit(one))
    http.post("/v1/completions", json={"prompt": "aa", "n_predict": 3, "repeat_penalty": 1.5})
    http.post("/v1/completions", json={"prompt": "aa", "n_predict": 3, "max_tokens": 4, "repetition_penalty": 2})
    assert [(one.max_tokens, one.sampling.repetition_penalty) for one in seen] == [(3, 1.5), (4, 2)]


@pytest.mark.parametrize("name", ["n_predict", "max_tokens"])
def test_no_limit_on_the_length_of_an_answer(http, name):
    text = "an answer of more than the usual 16 tokens"
    prompt = f"{START}user\n{text}{END}\n{ASSISTANT}"
    answer = http.post("/v1/completions", json={"prompt": prompt, name: -1}).json()["choices"][0]
    assert (answer["text"], answer["finish_reason"]) == (text, "stop")


def test_a_json_object(http):
    asked = {"prompt": '{"a": 1}' * 3, "response_format": {"type": "json_object"}, "max_tokens": 300}
    answer = http.post("/v1/completions", json=asked).json()["choices"][0]
    assert answer["text"].startswith("{")


def test_strict_tools_with_auto(http):
    """Text is free, but a call that begins must follow the schema: the model's own name of the city is not in it."""
    tool = json.loads(json.dumps(WEATHER))
    tool["function"] |= {"strict": True}
    tool["function"]["parameters"]["properties"]["city"] = {"enum": ["Paris"]}
    answer = http.post("/v1/chat/completions", json=say("weather?", tools=[tool], temperature=0, max_tokens=300)).json()
    message = answer["choices"][0]["message"]
    assert message["content"].startswith("Let me see.")
    assert json.loads(message["tool_calls"][0]["function"]["arguments"]) == {"city": "Paris"}


FORECAST = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Rome"]},
        "days": {"type": "integer", "minimum": 10, "maximum": 20},
        "note": {"type": "string", "maxLength": 3},
        "unit": {"anyOf": [{"$ref": "#/$defs/unit"}, {"type": "null"}]},
        "where": {
            "type": "object",
            "properties": {"x": {"const": 1}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["city", "days", "unit", "where"],
    "$defs": {"unit": {"type": "string", "const": "K"}},
}
WITHOUT_NOTE = {name: one for name, one in FORECAST["properties"].items() if name != "note"}
XML = CHATML.replace('{"name": …, "arguments": …}', "<function=name><parameter=key>value</parameter></function>")


@pytest.fixture(scope="module")
def coder():
    def answer(prompt):
        said = last_message(prompt)
        call = "<tool_call>\n<function=forecast>\n<parameter=city>\nOslo\n</parameter>\n</function>\n</tool_call>"
        return call if said == "weather?" else said

    with scripted_application(answer, template=XML) as application, TestClient(application.asgi) as http:
        yield http


def forecast(strict=False, **more):
    function = {"name": "forecast", "strict": strict, "parameters": {**FORECAST, **more}}
    return {"type": "function", "function": function}


def test_calls_in_xml(coder):
    answer = coder.post("/v1/chat/completions", json=say("weather?", tools=[forecast()])).json()["choices"][0]
    (call,) = answer["message"]["tool_calls"]
    assert (call["function"]["name"], call["function"]["arguments"]) == ("forecast", '{"city": "Oslo"}')
    assert answer["finish_reason"] == "tool_calls"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", ["hello", "weather?"])
def test_calls_in_xml_that_must_be_made(coder, said, stream):
    """The grammar leaves the model only values of the schema, as far as bare text can be restricted."""
    tool = forecast(properties=WITHOUT_NOTE)
    asked = say(said, tools=[tool], tool_choice="required", max_tokens=600, temperature=0, stream=stream)
    answer = coder.post("/v1/chat/completions", json={**asked, "parallel_tool_calls": False})
    if stream:
        deltas = [one["choices"][0]["delta"] for one in events(answer.text)[:-1]]
        calls = [delta["tool_calls"][0]["function"] for delta in deltas if "tool_calls" in delta]
        arguments = "".join(one["arguments"] for one in calls)
    else:
        arguments = answer.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]
    found = json.loads(arguments)
    assert found["city"] in ("Paris", "Rome") and 10 <= found["days"] <= 20
    assert found["unit"] in ("K", None) and found["where"] == {"x": 1}


def test_strict_calls_in_xml(coder):
    def ask(**more):
        tool = forecast(strict=True, **more)
        return coder.post("/v1/chat/completions", json=say("weather?", tools=[tool], max_tokens=1000, temperature=0))

    for more, keyword in (({}, "maxLength"), ({"minProperties": 1}, "minProperties")):
        error = ask(**more).json()["error"]
        assert error["param"] == "tools" and keyword in error["message"]
    answer = ask(properties=WITHOUT_NOTE).json()["choices"][0]["message"]
    assert json.loads(answer["tool_calls"][0]["function"]["arguments"])["city"] in ("Paris", "Rome")


def test_texts_in_xml_that_must_be_made():
    """Bare text may have any characters. An optional parameter may be missing."""
    tokenizer = make_tokenizer()
    prepared = GrammarTokenizer(tokenizer, vocabulary=tokenizer.get_vocab_size(), end_tokens=[0])
    body = calls_grammar(QWEN_CODER, [forecast()["function"]], ["<tool_call>", "</tool_call>"], several=True)
    start = TokenGrammar.from_lark(with_thoughts(body, None, "free", ()), prepared)
    ends = '<parameter=unit>\nnull\n</parameter>\n<parameter=where>\n{"x": 1}\n</parameter>\n</function>\n</tool_call>'
    for note in ("", "<parameter=note>\n\n</parameter>\n", "<parameter=note>\na </b>\n\n7 é</parameter>\n"):
        call = "<tool_call>\n<function=forecast>\n<parameter=city>\nRome\n</parameter>\n"
        call += f"<parameter=days>\n12\n</parameter>\n{note}{ends}"
        state = start.copy()
        for token in tokenizer.encode(f"{call}\n{call}", add_special_tokens=False).ids:
            state.advance(token)
        assert state.mask()[0] & 1  # the end token


@pytest.mark.parametrize(
    "parameters",
    [{}, {"type": "object"}, {"properties": 3}, {"properties": {"a": 3}, "required": 3}, {"required": [1]}],
)
def test_odd_schemas_of_calls_in_xml(coder, parameters):
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    asked = say("hello", tools=[tool], tool_choice="required", max_tokens=9)
    assert coder.post("/v1/chat/completions", json=asked).status_code == 200


@pytest.mark.parametrize("name", ["a>b", "<", "a\nb", "", " a", "x" * 256])
def test_names_of_parameters_that_calls_in_xml_cannot_have(coder, name):
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {name: {}}}}}
    refused = coder.post("/v1/chat/completions", json=say("hello", tools=[tool], tool_choice="required"))
    assert refused.status_code == 400
    assert "f has the parameter" in refused.json()["error"]["message"]


def test_log_probabilities_of_a_chat(client):
    answer = client.chat.completions.create(**say("é!", logprobs=True, top_logprobs=3))
    found = answer.choices[0].logprobs.content
    assert [bytes(one.bytes) for one in found] == [b"\xc3", b"\xa9", b"!", END.encode()]
    assert found[2].token == "!"
    assert all(-1e-6 < one.logprob <= 0 for one in found)
    assert [len(one.top_logprobs) for one in found] == [3] * 4
    assert found[2].top_logprobs[0].token == "!"
    chunks = client.chat.completions.create(**say("é!", logprobs=True, stream=True))
    streamed = [
        one
        for chunk in chunks
        for one in (chunk.choices[0].logprobs or found[:0]) and chunk.choices[0].logprobs.content
    ]
    assert [one.bytes for one in streamed] == [one.bytes for one in found]


def test_completions(client):
    answer = client.completions.create(model="any", prompt="aaaa", max_tokens=3)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("aaa", "length")
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 3)
    assert len(client.completions.create(model="any", prompt="aaaa").choices[0].text) == 16


def test_completions_of_several_prompts(client):
    prompts = ["aa", "bb", "cc"]
    answer = client.completions.create(model="any", prompt=prompts, n=2, max_tokens=2)
    assert [(one.index, one.text) for one in answer.choices] == [
        (0, "aa"), (1, "aa"), (2, "bb"), (3, "bb"), (4, "cc"), (5, "cc")
    ]  # fmt: skip
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (6, 12)
    texts = dict.fromkeys(range(6), "")
    for chunk in client.completions.create(model="any", prompt=prompts, n=2, max_tokens=2, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert list(texts.values()) == ["aa", "aa", "bb", "bb", "cc", "cc"]


def test_completions_of_tokens(http):
    ids = http.post("/tokenize", json={"prompt": "zz"}).json()["tokens"]
    for prompt, count in ((ids, 1), ([ids, ids], 2)):
        answer = http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2}).json()
        assert [one["text"] for one in answer["choices"]] == ["zz"] * count


def test_log_probabilities_of_completions(http):
    asked = {"prompt": "ab", "max_tokens": 3, "logprobs": 2}
    found = http.post("/v1/completions", json=asked).json()["choices"][0]["logprobs"]
    assert found["tokens"] == ["b", "b", "b"]
    assert found["text_offset"] == [0, 1, 2]
    assert [len(one) for one in found["top_logprobs"]] == [2] * 3
    chunks = events(http.post("/v1/completions", json={**asked, "stream": True}).text)[:-1]
    streamed = [one["choices"][0]["logprobs"] for one in chunks]
    assert [offset for one in streamed for offset in one["text_offset"]] == [0, 1, 2]
    assert [value for one in streamed for value in one["token_logprobs"]] == found["token_logprobs"]


def test_stop_strings(http):
    for stop, text in (("ll", "He"), (["zz", "o w"], "Hell"), ([], "Hello world")):
        answer = http.post("/v1/chat/completions", json=say("Hello world", stop=stop)).json()["choices"][0]
        assert (answer["message"]["content"], answer["finish_reason"]) == (text, "stop")


def test_logit_bias_and_penalties_reach_the_engine(http):
    token = http.post("/tokenize", json={"prompt": "q"}).json()["tokens"][0]
    asked = {"prompt": "aa", "max_tokens": 4, "logit_bias": {str(token): 100}}
    assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "qqqq"
    penalized = {"prompt": "aa", "max_tokens": 4, "repetition_penalty": 10, "temperature": 0}
    assert http.post("/v1/completions", json=penalized).json()["choices"][0]["text"] == "aaaa"  # 40 / 10 is still most


def test_seeds(http):
    asked = {"prompt": "aa", "max_tokens": 32, "temperature": 2, "logit_bias": {str(token): 38 for token in range(60)}}

    def text(seed, **more):
        found = http.post("/v1/completions", json={**asked, "seed": seed, **more}).json()["choices"]
        return [one["text"] for one in found]

    assert text(1) == text(1) != text(2)
    first, second = text(1, n=2)
    assert first == text(1)[0] != second


def test_defaults_come_from_the_models_folder():
    bias = {str(token): 38 for token in range(60)}
    with scripted_application(sampling={"temperature": 0.0}) as application, TestClient(application.asgi) as http:
        asked = {"prompt": "zz", "max_tokens": 32, "logit_bias": bias}
        assert http.post("/v1/completions", json=asked).json()["choices"][0]["text"] == "z" * 32
        text = http.post("/v1/completions", json={**asked, "temperature": 2}).json()["choices"][0]["text"]
        assert text != "z" * 32


def test_a_shared_prefix_is_computed_once(http):
    text = "A long preface. " * 20
    for _ in range(2):
        usage = http.post("/v1/chat/completions", json=say(text, max_tokens=2)).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] >= usage["prompt_tokens"] - 17


def test_schemas_of_calls_in_xml_that_refer_to_themselves():
    """Each alternative is read once, though references lead to it in 1000 ** 4 ways."""
    inner = [*({"$ref": "#/$defs/a"} for _ in range(1000)), {"const": "x"}]
    parameters = {"properties": {"city": {"$ref": "#/$defs/a"}}, "required": ["city"], "$defs": {"a": {"anyOf": inner}}}
    assert parameter_types(parameters, "city") == {"string"}
    body = calls_grammar(QWEN_CODER, [{"name": "f", "parameters": parameters}], (), several=False)
    assert '"<parameter=city>\\n" ("x")' in body


def test_schemas_of_calls_in_xml_that_make_a_large_grammar(coder):
    parameters = {
        "properties": {f"p{number}": {"$ref": "#/$defs/e"} for number in range(800)},
        "$defs": {"e": {"enum": [f"value {number}" for number in range(2000)]}},
    }
    tool = {"type": "function", "function": {"name": "forecast", "parameters": parameters}}
    answer = coder.post("/v1/chat/completions", json=say("hello", tools=[tool], tool_choice="required"))
    assert answer.status_code == 400
    assert "the grammar of the calls has more than 262144 bytes" in answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_requests_with_different_salts_share_no_prefix(http, path):
    text = f"A preface of {path}. " * 20

    def cached(**more):
        asked = {"prompt": text} if path == "/v1/completions" else say(text)
        answer = http.post(path, json={**asked, "max_tokens": 20, **more}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached() == 0 < cached()
    assert cached(cache_salt="a") == 0 < cached(cache_salt="a")
    assert cached(cache_salt="b") == 0
    assert cached(cache_salt="a" * 16) == 0
    assert cached(cache_salt="") == cached() == cached(cache_salt="a")
    assert cached(cache_prompt=False) == 0 == cached(cache_prompt=False) == cached(cache_prompt=False, cache_salt="a")


def test_names_of_tokens_are_looked_up_beside_the_event_loop(http, monkeypatch):
    threads = []

    def names(_, tokens):
        threads.append(threading.current_thread().name)
        return ["name"] * len(tokens)

    monkeypatch.setattr("ortolan.server.token_routes._names", names)
    found = http.post("/tokenize", json={"prompt": "ab", "return_token_strs": True}).json()
    assert found["token_strs"] == ["name", "name"]
    assert all(thread.startswith("ortolan-prepare") for thread in threads) and threads


def test_tokenize(http):
    found = http.post("/tokenize", json={"prompt": "é", "return_token_strs": True}).json()
    assert (found["count"], found["token_strs"], found["max_model_len"]) == (2, ["Ã", "©"], 2048)
    assert http.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "é"}
    chat = http.post("/tokenize", json=say("x", tools=[WEATHER])).json()["tokens"]
    text = http.post("/detokenize", json={"tokens": chat}).json()["prompt"]
    assert '"description": "The weather of a city"' in text
    assert text.endswith("<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n")
    without = http.post("/tokenize", json=say("x", add_generation_prompt=False)).json()["tokens"]
    assert http.post("/detokenize", json={"tokens": without}).json()["prompt"] == "<|im_start|>user\nx<|im_end|>\n"


def test_n_chats_in_a_stream(http):
    chunks = events(http.post("/v1/chat/completions", json=say("Hi", n=3, stream=True)).text)[:-1]
    texts = dict.fromkeys(range(3), "")
    for chunk in chunks:
        for choice in chunk["choices"]:
            texts[choice["index"]] += choice["delta"].get("content", "")
    assert list(texts.values()) == ["Hi"] * 3
    assert all(math.isfinite(chunk["created"]) for chunk in chunks)


def test_a_folder_without_a_template():
    with scripted_application(template=None) as application, TestClient(application.asgi) as http:
        refused = http.post("/v1/chat/completions", json=say("x"))
        assert refused.status_code == 400
        assert "/v1/completions" in refused.json()["error"]["message"]


def test_tools_that_a_model_cannot_call():
    template = "{{ messages[0].content }}<|im_start|>assistant\n"
    with scripted_application(echo, template=template) as application, TestClient(application.asgi) as http:
        refused = http.post("/v1/chat/completions", json=say("x", tools=[TIME]))
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "tools")
