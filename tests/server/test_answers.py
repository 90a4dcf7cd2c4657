"""Answers in pieces: thoughts, tool calls of each family, and text that only looks like them."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("orjson")

from ortolan.server.pieces import ARGUMENTS, CALL, CONTENT, REASONING, held_back
from ortolan.server.reasoning import ReasoningParser, find_markers, prompt_state
from ortolan.server.tool_calls import HERMES, LLAMA, MISTRAL, PARSERS, QWEN_CODER, detect_family, new_call_id
from ortolan.server.xml_calls import typed_value

ARGUMENT = {"city": 'São "{Paulo}" \\ ]', "days": [1, {"a": None}], "x": -1.5e3}
ARGUED = json.dumps(ARGUMENT, ensure_ascii=False)
SCHEMA = {
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "array"},
        "x": {"anyOf": [{"type": "number"}, {"type": "null"}]},
    }
}
FUNCTIONS = {"weather": SCHEMA, "f": {}}


def joined(pieces):
    """Return thoughts, content and calls of an answer, each joined."""
    text = {REASONING: "", CONTENT: ""}
    calls = []
    for piece in pieces:
        if piece.kind == CALL:
            assert piece.call == len(calls)
            calls.append([piece.name, ""])
            assert piece.id
        elif piece.kind == ARGUMENTS:
            assert piece.call == len(calls) - 1
            calls[-1][1] += piece.text
        else:
            assert piece.text
            text[piece.kind] += piece.text
    return text[REASONING], text[CONTENT], [(name, arguments) for name, arguments in calls]


def parse(parser, text, cuts=()):
    pieces = []
    cuts = sorted({0, *(cut for cut in cuts if cut < len(text)), len(text)})
    for start, end in itertools.pairwise(cuts):
        pieces += parser.feed(text[start:end])
    return joined(pieces + parser.finish())


def every_cut(make, text):
    """Parse a text whole, in halves at each place, and in single characters; return the answer, which is the same."""
    found = parse(make(), text)
    for cut in range(1, len(text)):
        assert parse(make(), text, [cut]) == found, cut
    assert parse(make(), text, range(len(text))) == found
    return found


HERMES_CALL = f'<tool_call>\n{{"name": "weather", "arguments": {ARGUED}}}\n</tool_call>'
XML_CALL = f"""<function=weather>
<parameter=city>
{ARGUMENT["city"]}
</parameter>
<parameter=days>
{json.dumps(ARGUMENT["days"])}
</parameter>
<parameter=x>
-1500.0
</parameter>
</function>"""
CALLS = {
    HERMES: [
        (HERMES_CALL, "", 1),
        (f"Let me see.\n\n{HERMES_CALL}\n{HERMES_CALL}", "Let me see.", 2),
        (f'<tool_call>{{"arguments": {ARGUED}, "name": "weather"}}</tool_call>', "", 1),
        (f'<tool_call>{{"name": "weather", "arguments": {json.dumps(ARGUED)}}}</tool_call> Done now.', "Done now.", 1),
        (f'<tool_call>{{"name":"weather","id":7,"arguments":{ARGUED}}}', "", 1),
    ],
    QWEN_CODER: [
        (f"<tool_call>\n{XML_CALL}\n</tool_call>", "", 1),
        (
            f"Let me see.\n\n<tool_call>\n{XML_CALL}\n</tool_call>\n<tool_call>\n{XML_CALL}\n</tool_call>",
            "Let me see.",
            2,
        ),
        (f"a < b, <functional>.\n{XML_CALL}\n</tool_call>", "a < b, <functional>.", 1),
        (f"{XML_CALL}\n{XML_CALL} Done now.", "Done now.", 2),
        (f"<tool_call>{XML_CALL.removesuffix('</function>')}</tool_call> Done now.", "Done now.", 1),
        ("<tool_call>" + XML_CALL.replace(">\n", ">").replace("\n<", "<"), "", 1),
    ],
    MISTRAL: [
        (f'[TOOL_CALLS][{{"name": "weather", "arguments": {ARGUED}}}]', "", 1),
        (
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUED}}}, {{"name":"weather","arguments":{ARGUED}}}]',
            "",
            2,
        ),
        (f"Hm [x]. [TOOL_CALLS]weather[ARGS]{ARGUED}", "Hm [x].", 1),
        (f"[TOOL_CALLS]weather{ARGUED}[TOOL_CALLS]weather[CALL_ID]123456789[ARGS]{ARGUED}", "", 2),
    ],
    LLAMA: [
        (f'{{"name": "weather", "parameters": {ARGUED}}}', "", 1),
        (f'\n<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUED}}}', "", 1),
        (f'{{"name": "weather", "parameters": {ARGUED}}}; {{"name": "weather", "parameters": {ARGUED}}}', "", 2),
        (f'I call.<|python_tag|>{{"name": "weather", "parameters": {ARGUED}}}', "I call.", 1),
    ],
}


@pytest.mark.parametrize(("family", "text", "content", "calls"), [(f, *case) for f in CALLS for case in CALLS[f]])
def test_calls(family, text, content, calls):
    found = every_cut(lambda: PARSERS[family](FUNCTIONS), text)
    assert found == ("", content, [("weather", ARGUED)] * calls)


@pytest.mark.parametrize("family", CALLS)
def test_a_call_without_arguments(family):
    text = {
        HERMES: '<tool_call>{"name": "f"}</tool_call>',
        QWEN_CODER: "<tool_call>\n<function=f>\n</function>\n</tool_call>",
        MISTRAL: '[TOOL_CALLS][{"name": "f"}]',
        LLAMA: '{"name": "f"}',
    }
    assert every_cut(lambda: PARSERS[family]({"f": {}}), text[family]) == ("", "", [("f", "{}")])


NO_CALLS = {
    HERMES: [
        *("plain", "a <tool_cal", "<tool_call>not json</tool_call>", '<tool_call>{"name": 3}', "<tool_call>"),
        *('{"name": "f"}', '<tool_call>{"arguments": {}}</tool_call>', "ends in space ", '<tool_call>{"name": "f'),
        "<tool_call>}",
    ],
    QWEN_CODER: [
        *("plain", "a <tool_cal", "<tool_call>not XML</tool_call>", "<tool_call>", "<func", "<tool_call>\n<function=f"),
        *(
            "<function=unknown>",
            "<function=f",
            "<tool_call><function=>",
            "<function=<function=",
            "<tool_call>\n<function=f\n",
        ),
        "<function=" + "f" * 300 + ">",
    ],
    MISTRAL: [
        *("[TOOL_CALLS]", "[TOOL_CALLS][]", "[TOOL_CALLS]name only", "[TOOL", "[TOOL_CALLS][3]", "[TOOL_CALLS]{}"),
    ],
    LLAMA: [
        *('{"name": "unknown", "parameters": {}}', '{"a": 1}', "{", 'no {"name": "f"}', "{]", '{"name": "f'),
        "<|python_tag|>print()",
    ],
}


@pytest.mark.parametrize(("family", "text"), [(family, text) for family in NO_CALLS for text in NO_CALLS[family]])
def test_text_that_is_not_a_call_is_content(family, text):
    assert every_cut(lambda: PARSERS[family]({"f": {}}), text) == ("", text, [])


@pytest.mark.parametrize("family", CALLS)
def test_arguments_are_streamed(family):
    """The name is told before the arguments, and the arguments before they end."""
    parser, told = PARSERS[family](FUNCTIONS), []
    text = CALLS[family][0][0]
    for position, letter in enumerate(text):
        told += [(piece.kind, position) for piece in parser.feed(letter)]
    ended = text.index("1500") if "1500" in text else len(text)
    assert told[0][0] == CALL
    assert sum(kind == ARGUMENTS and position < ended for kind, position in told) > 10


def test_an_answer_that_is_cut_within_the_arguments():
    text = '<tool_call>{"name": "f", "arguments": {"a": "b'
    assert every_cut(lambda: PARSERS[HERMES]({"f": {}}), text) == ("", "", [("f", '{"a": "b')])


@pytest.mark.parametrize(
    ("family", "call"),
    [
        (HERMES, CALLS[HERMES][0][0]),
        *((QWEN_CODER, CALLS[QWEN_CODER][index][0].removesuffix(" Done now.")) for index in (0, 3)),
        *((MISTRAL, CALLS[MISTRAL][index][0]) for index in (0, 3)),
        (LLAMA, CALLS[LLAMA][3][0]),
    ],
)
def test_an_answer_that_is_cut_does_not_show_a_part_of_a_call(family, call):
    call = call.removeprefix("I call.")
    for end in range(1, len(call)):
        parser = PARSERS[family](FUNCTIONS)
        _, content, calls = joined(parser.feed("Well, " + call[:end]) + parser.finish(cut=True))
        assert content == "Well,"
        named = any(one in call[:end] for one in ('"weather"', "weather[ARGS]{", "=weather>"))
        assert named <= bool(calls)
    for text in ("Well, ", '{"a": 1', "a < b"):
        parser = PARSERS[family](FUNCTIONS)
        assert joined(parser.feed(text) + parser.finish(cut=True)) == ("", text, [])


XML_TEXT = st.lists(
    st.sampled_from(["<function=", "a", ">", "\n", "<parameter=", "</parameter>", "</function>", "<", "1"])
)


@given(
    st.sampled_from(sorted(CALLS)),
    st.text('[]{}"\\:, ab<|>/', max_size=30) | XML_TEXT.map("".join),
    st.lists(st.integers(1, 99)),
)
def test_any_text(family, text, cuts):
    marker = PARSERS[family].start
    known = {"a": {"properties": {"a": {"type": "integer"}}}}
    for answer in (
        text,
        marker + text,
        marker + "\n<function=a>\n<parameter=a>" + text,
        marker + '{"name": "a", "arguments": {' + text,
        '{"name":"a","parameters":' + text,
    ):
        found = parse(PARSERS[family](known), answer)
        assert parse(PARSERS[family](known), answer, cuts) == found
        if not found[2] and not (family == MISTRAL and marker in answer):
            assert re.sub(r"\s", "", found[1]) == re.sub(r"\s", "", answer)


KINDS = {
    "string": st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12),
    "integer": st.integers(),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
    "array": st.lists(st.integers() | st.text(max_size=4), max_size=3),
    "object": st.dictionaries(st.text(max_size=4), st.booleans(), max_size=3),
}


@given(st.data(), st.lists(st.sampled_from(sorted(KINDS)), max_size=5), st.lists(st.integers(1, 400)))
def test_xml_arguments_keep_their_types(data, kinds, cuts):
    """Read values that Qwen3-Coder's template wrote: objects and arrays in JSON, other values as Python's str()."""
    arguments = {f"p{number}": data.draw(KINDS[kind]) for number, kind in enumerate(kinds)}
    schema = {"properties": {f"p{number}": {"type": kind} for number, kind in enumerate(kinds)}}
    answer = "<tool_call>\n<function=f>\n"
    for key, value in arguments.items():
        text = json.dumps(value) if isinstance(value, dict | list) else str(value)
        answer += f"<parameter={key}>\n{text}\n</parameter>\n"
    answer += "</function>\n</tool_call>"
    thoughts, content, [(name, argued)] = parse(PARSERS[QWEN_CODER]({"f": schema}), answer, cuts)
    assert (thoughts, content, name, json.loads(argued)) == ("", "", "f", arguments)


@pytest.mark.parametrize(
    ("text", "types", "value"),
    [
        ("7", ["string"], "7"),
        ("7", ["integer"], 7),
        ("7", ["number"], 7),
        ("7.0", ["integer"], 7),
        ("7.5", ["integer"], "7.5"),
        (" True\n", ["boolean"], True),
        ("None", ["string", "null"], None),
        ("none yet", ["string", "null"], "none yet"),
        ('"quoted"', ["string", "null"], '"quoted"'),
        ('{"a": [1]}', ["object"], {"a": [1]}),
        ("{'a': 1}", ["object"], "{'a': 1}"),
        ("NaN", ["number"], "NaN"),
        ("1e999", ["number"], "1e999"),
        ("1e999", ["integer"], "1e999"),
        ("1" * 5000, ["integer"], "1" * 5000),
        ("[" * 100_000, ["array"], "[" * 100_000),
    ],
)
def test_typed_values(text, types, value):
    assert json.loads(typed_value(text, types)) == value


@pytest.mark.parametrize(
    ("schema", "value"),
    [
        ({}, "7"),
        ({"properties": {"p": {}}}, "7"),
        ({"properties": {"p": {"type": ["integer", "string"]}}}, 7),
        ({"properties": {"p": {"enum": [7, 8]}}}, 7),
        ({"properties": {"p": {"const": "7"}}}, "7"),
        ({"properties": {"p": {"$ref": "#/$defs/a~1b"}}, "$defs": {"a/b": {"type": "integer"}}}, 7),
        ({"properties": {"p": {"$ref": "#/nowhere/else"}}}, "7"),
        ({"properties": {"p": {"$ref": "#/properties/p"}}}, "7"),
        ({"properties": {"p": {"oneOf": [{"type": "null"}, {"allOf": [{"type": "number"}]}]}}}, 7),
        ({"properties": {"p": {"anyOf": [{"type": "number"}, {}]}}}, "7"),
        ({"additionalProperties": {"type": "integer"}}, 7),
        ({"properties": 3}, "7"),
    ],
)
def test_types_of_xml_arguments_come_from_the_schema(schema, value):
    answer = "<function=f><parameter=p>7</parameter><parameter=p>8</parameter></function>"
    assert json.loads(every_cut(lambda: PARSERS[QWEN_CODER]({"f": schema}), answer)[2][0][1]) == {"p": value}


TEMPLATES = [
    ("{% if tools %}<tool_call>\n<function=name>\n<parameter=key>\n{% endif %}", QWEN_CODER),
    ("{% if tools %}<tool_call>{% endif %}", HERMES),
    ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS]", MISTRAL),
    ('{% if tools %}{"name": function name, "parameters": dictionary}{% endif %}', LLAMA),
    ("{{ messages }}", None),
    ("{% if tools %}something else{% endif %}", None),
]


@pytest.mark.parametrize(("template", "family"), TEMPLATES)
def test_families(template, family):
    assert detect_family(template) == family


def test_ids():
    assert re.fullmatch("[A-Za-z0-9]{9}", new_call_id(MISTRAL))
    assert len({new_call_id(HERMES) for _ in range(100)}) == 100


THINK = find_markers("{{ '<think>' }}</think>")
THOUGHTS = [
    (False, "<think>\nHm. < b\n</think>\n\nYes.", "Hm. < b", "Yes."),
    (False, "\n<think>a</think>b</think>", "a", "b</think>"),
    (False, "<think></think>b", "", "b"),
    (False, "<think>never ends ", "never ends ", ""),
    (False, " <thin air", "", " <thin air"),
    (False, "<thi", "", "<thi"),
    (False, "no <think>a</think>", "", "no <think>a</think>"),
    (False, "", "", ""),
    (True, "\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
    (True, "a</thin", "a</thin", ""),
    (True, "</think>Yes", "", "Yes"),
]


@pytest.mark.parametrize(("opened", "text", "thought", "content"), THOUGHTS)
def test_thoughts(opened, text, thought, content):
    assert every_cut(lambda: ReasoningParser(THINK, opened), text) == (thought, content, [])


def test_markers_and_prompts():
    assert find_markers("plain") is None
    assert find_markers("plain", ["</think>"]) == THINK
    assert find_markers("[/THINK]").start == "[THINK]"
    assert [prompt_state(end, THINK) for end in ("a<think>\n", "<think>\n\n</think>\n\n", "a")] == [
        "opened",
        "closed",
        "free",
    ]


def test_text_that_waits():
    assert held_back("abc", "</think>") == 0
    assert held_back("abc </thi", "</think>") == 6
    assert held_back("abc \n", "</think>") == 2
    assert held_back("[", "[TOOL]", "[/THINK]") == 1
