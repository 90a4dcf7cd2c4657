"""Answers of a form: JSON, JSON of a schema, or the strings of a pattern, a list or a grammar."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import orjson

from .answering import compiled
from .errors import ApiError
from .fields import Fields, refuse, shown
from .foreign_fields import FORMS, STRUCTURED, STRUCTURED_FIELDS
from .grammars import choice_grammar, json_grammar, own_grammar, regex_grammar, with_thoughts

if TYPE_CHECKING:
    from ..engine import Grammar
    from .generation import Generator
    from .settings import Limits

_TYPES = ("text", "json_object", "json_schema")
FORMAT = "response_format"
_JSON_OBJECT = {"type": "object"}


@dataclass(frozen=True)
class Form:
    """The form that an answer must have.

    Attributes:
        param: The field that asks for it.
        rules: Returns rules with the rule `body`. It may take long, and raise ArgumentError or ApiError.
    """

    param: str
    rules: Callable[[], str]


def response_form(body: Fields, limits: Limits) -> Form | None:
    """Return the form that a request asks for; None for any text.

    Raises:
        ApiError: 400 for a wrong value, or if two fields ask for a form.
    """
    found = [_response_format(body, limits)]
    found += [_form(body, name, kind, limits) for name, kind in FORMS.items()]
    if (nested := body.fields(STRUCTURED)) is not None:
        _refuse_unknown(nested)
        found += [_form(nested, kind, kind, limits) for kind in ("json", "regex", "choice", "grammar")]
        if nested.boolean("json_object"):
            found.append(_json_form(nested.path("json_object"), _JSON_OBJECT))
        nested.refuse_unless("structural_tag", why="send tools, or json")
        nested.refuse_unless("whitespace_pattern", why="leave it out; JSON has the spaces of Python's json.dumps")
        nested.refuse_unless("disable_additional_properties", False, why="send additionalProperties in the schema")
    forms = [one for one in found if one is not None]
    if len(forms) > 1:
        first, second = (one.param for one in forms[:2])
        raise ApiError(400, f"{first} and {second} both set the form of the answer, expected one of them", param=second)
    return forms[0] if forms else None


def _refuse_unknown(nested: Fields) -> None:
    """Raise ApiError 400 for an unknown field: a misspelled one would leave the answer without its form."""
    for name in nested.given:
        if name not in STRUCTURED_FIELDS:
            raise ApiError(
                400,
                f"{STRUCTURED} has the field {shown(name)}, expected one of {', '.join(STRUCTURED_FIELDS)}",
                param=STRUCTURED,
            )


def _response_format(body: Fields, limits: Limits) -> Form | None:
    given = body.fields(FORMAT)
    if given is None:
        return None
    given.require("type", " or ".join(f'"{one}"' for one in _TYPES))
    kind = given.choice("type", "text", _TYPES)
    if kind == "text":
        return None
    if kind == "json_object":  # llama.cpp takes a schema here
        return _form(given, "schema", "json", limits) or _json_form(FORMAT, _JSON_OBJECT)
    named = given.fields("json_schema")
    form = None if named is None else _form(named, "schema", "json", limits)
    if form is None:
        raise ApiError(
            400, f"{FORMAT}.json_schema.schema is missing, expected a JSON schema", param=f"{FORMAT}.json_schema"
        )
    return form


def _json_form(param: str, schema: dict[str, Any]) -> Form:
    return Form(param, partial(json_grammar, schema))


def _form(body: Fields, name: str, kind: str, limits: Limits) -> Form | None:
    """Return the form that one field asks for; None without the field."""
    if (given := body.get(name)) is None:
        return None
    path, most = body.path(name), limits.schema_bytes
    size = len(given.encode()) if isinstance(given, str) else len(orjson.dumps(given))
    if size > most:
        raise ApiError(400, f"{path} has {size} bytes, expected at most {most}; simplify it", param=path)
    if kind == "json":
        return _json_form(path, _schema(path, given))
    if kind == "choice":
        if not isinstance(given, list) or not given or not all(isinstance(one, str) for one in given):
            raise body.refuse(name, "an array of strings")
        return Form(path, partial(choice_grammar, given))
    if not isinstance(given, str) or not given:
        raise body.refuse(name, "a regular expression" if kind == "regex" else "a grammar in Lark or GBNF")
    if kind == "regex":
        return Form(path, partial(regex_grammar, given))
    return Form(path, partial(own_grammar, given))


def _schema(path: str, given: Any) -> dict[str, Any]:
    schema = given
    if isinstance(given, str):
        try:
            schema = orjson.loads(given)
        except orjson.JSONDecodeError:
            raise refuse(path, given, "a JSON schema") from None
    if not isinstance(schema, dict):
        raise refuse(path, given, "a JSON schema")
    return schema


async def response_grammar(body: Fields, generator: Generator, limits: Limits) -> Grammar | None:
    """Return the compiled grammar of an answer without thoughts; None for any text."""
    form = response_form(body, limits)
    if form is None:
        return None
    return await compiled(generator, lambda: with_thoughts(form.rules(), None, "free", ()), form.param)
