"""Grammars of answers, in llguidance's variant of Lark: JSON schemas, and tool calls that must be made."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ..engine.grammar import json_expression
from ..errors import ArgumentError, one_line
from .errors import ApiError
from .reasoning import ThoughtMarkers
from .tool_calls import HERMES, LLAMA, MISTRAL, QWEN_CODER, TOOL_CALLS
from .xml_calls import xml_calls_rules

_TEXT = r"/(.|\n)*/"
_NO_PARAMETERS = {"type": "object", "additionalProperties": False}  # what a function without them has, as for OpenAI
_NAMED_TOKEN = re.compile(r"<[^<>\s]+>")
_LINE = "\n"
_ESCAPED = re.compile(r"\\.|[/\n]", re.DOTALL)  # in a regular expression, an escaped character or one to escape
# Digits are those of ASCII, as in JSON schemas: llguidance's \d has those of all scripts, which programs seldom read.
_IN_LARK = {"/": "\\/", "\n": "\\n", "\\\n": "\\n", r"\d": "[0-9]", r"\D": "[^0-9]"}
_MOST_GBNF, _MOST_GBNF_RULES = 1 << 14, 256


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Return the rule `body` for a JSON value of a schema, whose keywords must all be supported."""
    return f"body: {json_expression(schema)}\n"


def choice_grammar(choices: Sequence[str]) -> str:
    """Return the rule `body` for one of several strings.

    They are one terminal: a rule would make an item of the parser for each, which limits them to 2,000.
    """
    return f"body: CHOICE\nCHOICE: {' | '.join(json.dumps(one) for one in choices)}\n"


def regex_grammar(pattern: str) -> str:
    """Return the rule `body` for the strings that a regular expression matches as a whole."""
    written = _ESCAPED.sub(lambda found: _IN_LARK.get(found[0], found[0]), pattern)
    return f"body: /{written}/\n"


def own_grammar(grammar: str) -> str:
    """Return the rule `body` for a client's grammar, in llguidance's variant of Lark or in llama.cpp's GBNF.

    Raises:
        ArgumentError: The GBNF has errors or is too large.
    """
    from llguidance.gbnf_to_lark import gbnf_to_lark, is_lark_syntax

    if not is_lark_syntax(grammar):
        # The converter's time grows with the square of the rules.
        if len(grammar) > _MOST_GBNF or grammar.count("::=") > _MOST_GBNF_RULES:
            raise ArgumentError(
                f"the GBNF has more than {_MOST_GBNF} characters or {_MOST_GBNF_RULES} rules; simplify it, or send Lark"
            )
        try:
            grammar = gbnf_to_lark(grammar)
        except Exception as error:  # the converter has no common type
            raise ArgumentError(
                f"not a grammar in Lark, which has a rule start, or in GBNF: {one_line(error)}"
            ) from None
    return f"body: %lark {{\n{grammar}\n}}\n"


def calls_grammar(
    family: str,
    tools: Sequence[Mapping[str, Any]],
    added_tokens: Collection[str],
    *,
    several: bool,
    optional: bool = False,
) -> str:
    """Return the rule `body` for one or several calls.

    Args:
        family: The form of the calls.
        tools: The functions that may be called: `name`, and optionally `parameters`, a JSON schema.
        added_tokens: The tokenizer's added tokens, since a marker may be one token.
        several: Allow more than one call.
        optional: Allow text without calls, and text before and after calls.

    Raises:
        ApiError: 400 if calls are optional and no single token begins them, by which a grammar would know them; or if
            the family's form cannot enforce a keyword of a strict function.
    """
    marker = {HERMES: "<tool_call>", QWEN_CODER: "<tool_call>", MISTRAL: TOOL_CALLS}.get(family, "")
    if optional and marker not in added_tokens:
        raise ApiError(
            400,
            "tools: strict is not supported with tool_choice auto for this model, whose calls begin with text; "
            "expected strict false, or tool_choice required",
            param="tools",
        )
    # Without strict, keywords that cannot be enforced are ignored, as models without grammars would do.
    lenient = not any(tool.get("strict") is True for tool in tools)
    if family == QWEN_CODER:
        start, end = (_marker(text, added_tokens) for text in ("<tool_call>", "</tool_call>"))
        rules = xml_calls_rules(tools, start, end, several=several, lenient=lenient)
    else:
        rules = _json_calls_rules(family, tools, added_tokens, several, lenient)
    body = f"TEXT (calls TEXT){'*' if several else '?'}" if optional else "calls"
    return f"body: {body}\n{rules}"


def _json_calls_rules(
    family: str, tools: Sequence[Mapping[str, Any]], added_tokens: Collection[str], several: bool, lenient: bool
) -> str:
    """Return the rules `calls`, for families that write calls as JSON."""
    field = "parameters" if family == LLAMA else "arguments"
    call = json_expression({"anyOf": [_call_schema(tool, field) for tool in tools]}, lenient=lenient)

    def repeated(rule: str, separator: str) -> str:
        return f"{rule} ({json.dumps(separator)} {rule})*" if several else rule

    if family == HERMES:
        start, end = (_marker(text, added_tokens) for text in ("<tool_call>", "</tool_call>"))
        rules = f'calls: {repeated("call", _LINE)}\ncall: {start} "\\n" json "\\n" {end}\n'
    elif family == MISTRAL:
        rules = f'calls: {_marker(TOOL_CALLS, added_tokens)} "[" {repeated("json", ", ")} "]"\n'
    else:
        assert family == LLAMA
        rules = f"calls: {repeated('json', '; ')}\n"
    return f"{rules}json: {call}\n"


def _marker(text: str, added_tokens: Collection[str]) -> str:
    """Return a marker as llguidance spells it: a token in angle brackets by its name, anything else as text."""
    return text if _is_named(text, added_tokens) else json.dumps(text)


def _is_named(text: str, added_tokens: Collection[str]) -> bool:
    return text in added_tokens and _NAMED_TOKEN.fullmatch(text) is not None


def _call_schema(tool: Mapping[str, Any], field: str) -> dict[str, Any]:
    arguments = tool.get("parameters") or _NO_PARAMETERS
    return {
        "type": "object",
        "properties": {"name": {"const": tool["name"]}, field: arguments},
        "required": ["name", field],
        "additionalProperties": False,
    }


def with_thoughts(body: str, markers: ThoughtMarkers | None, state: str, added_tokens: Collection[str]) -> str:
    """Return a grammar for `body`, after the thoughts of a reasoning model.

    Args:
        body: Rules with the rule `body`.
        markers: The markers of thoughts, for reasoning models.
        state: How the prompt ends, see `prompt_state`.
        added_tokens: As for `calls_grammar`.
    """
    body = f"{body}TEXT: {_TEXT}\n"
    if markers is None or state == "closed":
        return f"start: body\n{body}"
    if _is_named(markers.end, added_tokens):
        thought = f"thought: TEXT {_marker(markers.end, added_tokens)}\n"
    else:
        thought = f"thought[lazy]: TEXT {json.dumps(markers.end)}\n"
    thought += "space: /\\n{0,2}/\n"
    if state == "opened":
        return f"start: thought space body\n{thought}{body}"
    start = _marker(markers.start, added_tokens)
    return f"start: body | {start} thought space body\n{thought}{body}"
