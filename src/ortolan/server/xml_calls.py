"""Tool calls in the XML of Qwen3-Coder, read while they arrive, and the grammar of calls that must be made.

    <function=weather>
    <parameter=city>
    Oslo
    </parameter>
    </function>

Values are bare text: only the tool's JSON schema tells 7 from "7".
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from ..engine.grammar import MOST_GRAMMAR_BYTES, json_expression
from .errors import ApiError
from .fields import shown
from .pieces import held_back

FUNCTION, PARAMETER = "<function=", "<parameter="
_FUNCTION_END, _PARAMETER_END = "</function>", "</parameter>"
_LONGEST_NAME = 256
_LINE = "\n"
_DEEPEST = 8  # references and alternatives of a schema that are followed
_WORDS: dict[str, Any] = {"true": True, "false": False, "null": None, "none": None}  # also as Python writes them
_TEXT_KEYWORDS = ("pattern", "format", "minLength", "maxLength", "not", "allOf", "if")  # of bare text: not enforced
_OBJECT_KEYWORDS = {
    *("type", "properties", "required", "additionalProperties", "title", "description"),
    *("$defs", "definitions", "$schema", "$id"),
}


class XmlCallReader:
    """Reads one call from <function=…> to </function>. A value of type string is told as it arrives.

    Attributes:
        name: The function's name, once it is known.
        done: The call has ended.
        failed: The text is not a call.
    """

    def __init__(self, schemas: Mapping[str, Any], known: Collection[str] | None = None, opened: bool = False) -> None:
        """Start a call.

        Args:
            schemas: The JSON schema of each function's parameters.
            known: Names that a call may have; None: any.
            opened: The text begins after `<function=`.
        """
        self._schemas, self._known = schemas, known
        self.name: str | None = None
        self.done = self.failed = False
        self._text = ""
        self._head = "" if opened else FUNCTION
        self._step = self._name if opened else self._start
        self._keys: set[str] = set()
        self._types: frozenset[str] = frozenset()
        self._value: list[str] = []
        self._dropped = False  # the value repeats a parameter
        self._pending: list[str] = []  # text of the arguments that was not yet taken

    @property
    def raw(self) -> str:
        """The text that was read until the name is known."""
        return self._text if self.name is None else ""

    def feed(self, text: str) -> str:
        """Read text until the call ends or fails; return the text that does not belong to it."""
        self._text += text
        while self._step():
            pass
        if not (self.done or self.failed):
            return ""
        # A text that is not a call keeps its head, so that it is not read as a call again.
        at = self._text.find(self._head) + len(self._head) if self.failed and self._step == self._name else 0
        rest, self._text = self._text[at:], self._text[:at]
        return rest

    def take_arguments(self) -> str:
        """Return the new text of the arguments."""
        text = "".join(self._pending)
        self._pending.clear()
        return text

    def _fail(self) -> bool:
        self.failed = True
        return False

    def _start(self) -> bool:
        text = self._text.lstrip()
        if text.startswith(FUNCTION):
            self._step = self._name
            return True
        return False if FUNCTION.startswith(text) else self._fail()

    def _name(self) -> bool:
        text = self._text[self._text.find(self._head) + len(self._head) :]
        name, end = _until_bracket(text)
        if end is None:
            return False
        if end != ">" or not name or (self._known is not None and name not in self._known):
            return self._fail()
        self.name, self._text = name, text.partition(">")[2]
        self._step = self._between
        return True

    def _between(self) -> bool:
        """Read what follows a name or a value: a parameter, or the end."""
        text = self._text.lstrip()
        if text.startswith(PARAMETER):
            self._text, self._step = text[len(PARAMETER) :], self._key
            return True
        if not text.startswith(_FUNCTION_END):
            if any(marker.startswith(text) for marker in (PARAMETER, _FUNCTION_END)):
                return False
            return self._end(self._text)  # other text: the model forgot the end
        return self._end(text[len(_FUNCTION_END) :])

    def _end(self, rest: str) -> bool:
        self._pending.append("}" if self._keys else "{}")
        self._text, self.done = rest, True
        return False

    def _key(self) -> bool:
        key, end = _until_bracket(self._text)
        if end is None:
            return False
        if end != ">" or not key:
            return self._end(PARAMETER + self._text)
        self._text = self._text.partition(">")[2]
        self._dropped = key in self._keys
        if not self._dropped:
            self._pending.append(f"{', ' if self._keys else '{'}{_dumps(key)}: ")
        self._keys.add(key)
        schema = self._schemas.get(self.name or "")
        self._types = parameter_types(schema if isinstance(schema, dict) else {}, key)
        self._value, self._step = [], self._begin_value
        return True

    @property
    def _streams(self) -> bool:
        return self._types == {"string"} and not self._dropped

    def _begin_value(self) -> bool:
        """Drop the line break after the tag."""
        if not self._text:
            return False
        self._text = self._text.removeprefix("\n")
        if self._streams:
            self._pending.append('"')
        self._step = self._in_value
        return True

    def _in_value(self) -> bool:
        value, ended, rest = self._text.partition(_PARAMETER_END)
        if ended:
            value, self._text = value.removesuffix("\n"), rest
        else:
            kept = len(value) - held_back(value, _PARAMETER_END)
            value, self._text = value[:kept], value[kept:]
        if self._streams:
            self._pending.append(_dumps(value)[1:-1])
        else:
            self._value.append(value)
        if not ended:
            return False
        if self._streams:
            self._pending.append('"')
        elif not self._dropped:
            self._pending.append(typed_value("".join(self._value), self._types))
        self._step = self._between
        return True


def _until_bracket(text: str) -> tuple[str, str | None]:
    """Return the name in front of ">", and the character after it; None if there must be more text first."""
    for position, character in enumerate(text[:_LONGEST_NAME]):
        if character in "<>\n":
            return text[:position].strip(), character
    return "", None if len(text) < _LONGEST_NAME else ""


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def parameter_types(schema: Mapping[str, Any], key: str) -> frozenset[str]:
    """Return the JSON types that a function's schema allows for a parameter; {"string"} if it does not tell."""
    found = schema.get("properties")
    properties = found if isinstance(found, dict) else {}
    return _types(properties.get(key, schema.get("additionalProperties")), schema) or frozenset({"string"})


def _types(
    schema: Any, root: Mapping[str, Any], depth: int = 0, known: dict[int, frozenset[str]] | None = None
) -> frozenset[str]:
    """Return the JSON types that a schema allows; empty if it does not tell.

    `known` has the results by the id of a schema. References can lead to a schema in very many ways.
    """
    known = {} if known is None else known
    if id(schema) not in known:
        known[id(schema)] = frozenset()  # for references to the schema from within itself
        known[id(schema)] = _read_types(schema, root, depth, known)
    return known[id(schema)]


def _read_types(schema: Any, root: Mapping[str, Any], depth: int, known: dict[int, frozenset[str]]) -> frozenset[str]:
    if not isinstance(schema, dict) or depth > _DEEPEST:
        return frozenset()
    if isinstance(reference := schema.get("$ref"), str):
        return _types(_resolved(reference, root), root, depth + 1, known)
    said = schema.get("type")
    if isinstance(said, str | list):
        return frozenset(one for one in ([said] if isinstance(said, str) else said) if isinstance(one, str))
    if isinstance(values := schema.get("enum"), list) or "const" in schema:
        return frozenset(_type(one) for one in (values if isinstance(values, list) else [schema["const"]]))
    for name in ("anyOf", "oneOf"):
        if isinstance(inner := schema.get(name), list):
            found = [_types(one, root, depth + 1, known) for one in inner]
            return frozenset().union(*found) if all(found) else frozenset()
    if isinstance(inner := schema.get("allOf"), list):
        return next(filter(None, (_types(one, root, depth + 1, known) for one in inner)), frozenset())
    return frozenset()


def _resolved(reference: str, root: Any) -> Any:
    """Return the part of a schema to which a reference such as "#/$defs/City" points; None if it is missing."""
    if not reference.startswith("#"):
        return None
    for name in reference.split("/")[1:]:
        root = root.get(name.replace("~1", "/").replace("~0", "~")) if isinstance(root, dict) else None
    return root


def _type(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    for kind, name in ((int, "integer"), (float, "number"), (str, "string"), (list, "array")):
        if isinstance(value, kind):
            return name
    return "object"


def typed_value(text: str, types: Collection[str]) -> str:
    """Return a value as JSON: of one of these types if the text is one, else as a string."""
    word = text.strip()
    try:
        value = _WORDS[word.lower()] if word.lower() in _WORDS else json.loads(word)
        kind = _type(value)
        if kind == "number" and value.is_integer() and "number" not in types:
            value, kind = int(value), "integer"
        if kind != "string" and (kind in types or (kind == "integer" and "number" in types)):
            return _dumps(value)
    except (ValueError, OverflowError, RecursionError):
        pass
    return _dumps(text)


def xml_calls_rules(tools: Sequence[Mapping[str, Any]], start: str, end: str, *, several: bool, lenient: bool) -> str:
    """Return the rules `calls`, in llguidance's variant of Lark.

    Args:
        tools: As for `calls_grammar`.
        start: The marker <tool_call>, as a grammar spells it.
        end: The marker </tool_call>.
        several: Allow more than one call.
        lenient: Ignore keywords that cannot be enforced.

    Raises:
        ApiError: 400 for a keyword that cannot be enforced, or if the rules are too large.
    """
    names = " | ".join(f"function{number}" for number in range(len(tools)))
    rules = [
        'calls: call ("\\n" call)*' if several else "calls: call",
        f'call: {start} "\\n" ({names}) "</function>\\n" {end}',
        f'text[lazy]: /(.|\\n)*/ "{_PARAMETER_END}"',
        f'other: "{PARAMETER}" /[^<>\\n]+/ ">\\n" text "\\n"',
    ]
    size = 0
    for number, tool in enumerate(tools):
        given = tool.get("parameters") or {"properties": {}}
        if not lenient and (unknown := given.keys() - _OBJECT_KEYWORDS):
            raise _refusal(tool["name"], sorted(unknown)[0])
        parts = [json.dumps(f"{FUNCTION}{tool['name']}>\n")]
        for part in _parameters(tool["name"], given, lenient):
            parts.append(part)
            size += len(part)
            if size > MOST_GRAMMAR_BYTES:  # many parameters may refer to one large definition
                raise ApiError(
                    400,
                    f"tools: the grammar of the calls has more than {MOST_GRAMMAR_BYTES} bytes; send fewer tools, or "
                    "simpler schemas",
                    param="tools",
                )
        rules.append(f"function{number}: {' '.join(parts)}")
    return "\n".join(rules) + "\n"


def _refusal(tool: str, keyword: str) -> ApiError:
    return ApiError(
        400,
        f"tools: {tool} has the keyword {keyword!r}, which this model's form of calls cannot enforce; expected a "
        "schema without it, or strict false",
        param="tools",
    )


def _parameters(tool: str, schema: Mapping[str, Any], lenient: bool) -> Iterator[str]:
    """Yield expressions for the parameters of a call, in the order of the schema."""
    properties, required = schema.get("properties"), schema.get("required")
    if not isinstance(properties, dict):
        yield "other*"
        return
    needed = {one: None for one in required if isinstance(one, str)} if isinstance(required, list) else {}
    known: dict[int, frozenset[str]] = {}
    for key in {**properties, **needed}:
        if not key or _until_bracket(f"{key}>") != (key, ">"):
            raise ApiError(
                400,
                f"tools: {tool} has the parameter {shown(key)}, which this model's form of calls cannot write; "
                f"expected a name of 1 to {_LONGEST_NAME - 1} characters without <, >, line breaks or outer spaces",
                param="tools",
            )
        given = properties.get(key)
        value = _value(tool, given if isinstance(given, dict) else {}, schema, lenient, known)
        part = f"{json.dumps(f'{PARAMETER}{key}>{_LINE}')} {value} {json.dumps(_LINE)}"
        yield part if key in needed else f"({part})?"


def _value(
    tool: str, schema: Mapping[str, Any], root: Mapping[str, Any], lenient: bool, known: dict[int, frozenset[str]]
) -> str:
    """Return an expression for a value, up to the end of its tag. known: as for `_types`."""
    end = json.dumps(_LINE + _PARAMETER_END)
    if "string" not in (_types(schema, root, known=known) or ("string",)):
        shared = {name: root[name] for name in ("$defs", "definitions") if name in root}
        return f"{json_expression({**shared, **schema}, lenient=lenient)} {end}"
    choices: list[Any] = []
    is_listed = True
    for one in _alternatives(schema, root):
        if not lenient and (unknown := next((name for name in _TEXT_KEYWORDS if name in one), None)):
            raise _refusal(tool, unknown)
        values = [None] if one.get("type") == "null" else [one["const"]] if "const" in one else one.get("enum")
        if isinstance(values, list):
            choices += values
        else:
            is_listed = False
    if not (choices and is_listed):
        return "text"
    texts = (json.dumps(one if isinstance(one, str) else json.dumps(one)) for one in choices)
    return f"({' | '.join(texts)}) {end}"


def _alternatives(
    schema: Any, root: Mapping[str, Any], depth: int = 0, seen: set[int] | None = None
) -> Iterator[Mapping[str, Any]]:
    """Yield the alternatives of a schema, each once: a value matches one of them. seen: ids of what was read."""
    seen = set() if seen is None else seen
    if not isinstance(schema, dict) or depth > _DEEPEST:
        yield {}
        return
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if isinstance(reference := schema.get("$ref"), str):
        yield from _alternatives(_resolved(reference, root), root, depth + 1, seen)
    elif isinstance(inner := schema.get("anyOf", schema.get("oneOf")), list):
        for one in inner:
            yield from _alternatives(one, root, depth + 1, seen)
    else:
        yield schema
