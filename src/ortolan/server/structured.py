"""response_format: answers that are JSON, or JSON of a schema."""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from .answering import compiled
from .errors import ApiError
from .fields import Fields
from .grammars import json_grammar, with_thoughts

if TYPE_CHECKING:
    from ..engine import Grammar
    from .generation import Generator
    from .settings import Limits

_TYPES = ("text", "json_object", "json_schema")
FORMAT = "response_format"
SCHEMA = f"{FORMAT}.json_schema.schema"  # the only part that may fail to compile


def response_body(body: Fields, limits: Limits) -> str | None:
    """Return the grammar of the answer that response_format asks for; None for any text.

    Raises:
        ApiError: 400 for a wrong value.
    """
    given = body.fields(FORMAT)
    if given is None:
        return None
    given.require("type", " or ".join(f'"{one}"' for one in _TYPES))
    kind = given.choice("type", "text", _TYPES)
    if kind == "text":
        return None
    if kind == "json_object":
        return json_grammar({"type": "object"})
    named = given.fields("json_schema")
    schema = named.fields("schema") if named is not None else None
    if named is None or schema is None:
        raise ApiError(400, f"{SCHEMA} is missing, expected a JSON schema", param=f"{FORMAT}.json_schema")
    if len(orjson.dumps(schema.given)) > limits.schema_bytes:
        raise ApiError(
            400, f"{FORMAT} has a schema of more than {limits.schema_bytes} bytes; send a smaller one", param=FORMAT
        )
    return json_grammar(schema.given)


async def response_grammar(body: Fields, generator: Generator, limits: Limits) -> Grammar | None:
    """Return the compiled grammar of response_format, for an answer without thoughts; None for any text."""
    source = response_body(body, limits)
    if source is None:
        return None
    return await compiled(generator, with_thoughts(source, None, "free", ()), SCHEMA)
