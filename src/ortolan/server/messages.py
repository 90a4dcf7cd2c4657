"""Messages and tools of a chat in OpenAI's format, as chat templates expect them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import orjson

from .errors import ApiError
from .fields import Fields
from .model_folder import ModelFolder
from .settings import Limits

_ROLES = ("system", "developer", "user", "assistant", "tool")
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_MOST_CALLS = 128  # in one message
_ONLY_TEXT = "this model takes text only"


@dataclass(frozen=True)
class ToolChoice:
    """The tools of a chat, and whether they must be called.

    Attributes:
        shown: The tools that the template shows, in OpenAI's format.
        functions: The functions that may be called.
        must: The answer is a call.
        strict: Arguments must follow the functions' schemas, also if the answer need not be a call.
        several: The answer may have more than one call.
    """

    shown: tuple[dict[str, Any], ...] = ()
    functions: tuple[dict[str, Any], ...] = ()
    must: bool = False
    strict: bool = False
    several: bool = True

    @property
    def schemas(self) -> dict[str, Any]:
        """The schemas of parameters of the functions that may be called, by name."""
        return {one["name"]: one.get("parameters") or {} for one in self.functions}


def read_messages(body: Fields, limits: Limits) -> list[dict[str, Any]]:
    """Return the messages of a chat for its template: contents are texts, arguments of calls are objects.

    Raises:
        ApiError: 400 for a wrong or unsupported value.
    """
    body.require("messages", "an array of messages")
    messages = [_message(one, limits) for one in body.objects("messages", limits.messages)]
    if not messages:
        raise ApiError(400, "messages is empty, expected at least one message", param="messages")
    return messages


def _message(given: Fields, limits: Limits) -> dict[str, Any]:
    given.require("role", " or ".join(f'"{role}"' for role in _ROLES))
    role = given.choice("role", "", _ROLES)
    message: dict[str, Any] = {"role": role}
    calls = given.objects("tool_calls", _MOST_CALLS) if role == "assistant" else []
    if calls:
        message["tool_calls"] = [_call(call, limits) for call in calls]
    if given.get("content") is None and role != "assistant":
        given.require("content", "a text")
    message["content"] = _content(given, limits)
    for name in ("name", "tool_call_id"):
        if (value := given.string(name, None, limits.stop_characters)) is not None:
            message[name] = value
    thoughts = given.string("reasoning_content", None, limits.characters) if role == "assistant" else None
    if thoughts is not None:
        message["reasoning_content"] = thoughts
    return message


def _content(given: Fields, limits: Limits) -> str:
    value = given.get("content")
    if not isinstance(value, list):
        return given.string("content", "", limits.characters)
    texts = []
    for part in given.objects("content", limits.messages):
        kind = part.get("type")
        if kind not in ("text", "refusal"):
            raise part.refuse("type", f'"text": {_ONLY_TEXT}')
        part.require(kind, "a string")
        texts.append(part.string(kind, "", limits.characters))
    return "\n".join(texts)


def _call(given: Fields, limits: Limits) -> dict[str, Any]:
    given.choice("type", "function", ("function",))
    function = given.fields("function")
    if function is None:
        raise given.refuse("function", "an object with name and arguments")
    function.require("name", "a string")
    name = function.string("name", "", limits.stop_characters)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = orjson.loads(arguments or "{}")
        except orjson.JSONDecodeError:
            arguments = None
    elif arguments is None:
        arguments = {}
    if not isinstance(arguments, dict):
        raise function.refuse("arguments", "a JSON object as a string")
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    identity = given.string("id", None, limits.stop_characters)
    return call if identity is None else {"id": identity, **call}


def read_tools(body: Fields, folder: ModelFolder, limits: Limits) -> ToolChoice:
    """Return the tools of a chat.

    Raises:
        ApiError: 400 for a wrong value, or if the model takes no tools.
    """
    for old in ("functions", "function_call"):
        body.refuse_unless(old, why="send tools and tool_choice instead, OpenAI's newer fields")
    tools = body.objects("tools", limits.tools)
    functions = [_function(tool) for tool in tools]
    names = [one["name"] for one in functions]
    if len(set(names)) < len(names):
        raise ApiError(400, "tools has two functions of the same name, expected different names", param="tools")
    if len(orjson.dumps([tool.given for tool in tools])) > limits.schema_bytes:
        raise ApiError(400, f"tools has more than {limits.schema_bytes} bytes; send fewer", param="tools")
    choice = _choice(body, names)
    if choice == "none":
        return ToolChoice()
    if folder.tool_family is None:
        raise ApiError(
            400,
            "tools is not supported by this model: its chat template shows no tools, or calls in an unknown form; "
            "expected no tools, or tool_choice none",
            param="tools",
        )
    must = choice != "auto"
    callable_ = [one for one in functions if choice in ("auto", "required") or one["name"] == choice[1]]
    return ToolChoice(
        tuple(dict(tool.given) for tool in tools),
        tuple(callable_),
        must,
        any(one.get("strict") is True for one in callable_),
        body.boolean("parallel_tool_calls", True) and not isinstance(choice, tuple),
    )


def _function(tool: Fields) -> dict[str, Any]:
    tool.choice("type", "function", ("function",))
    function = tool.fields("function")
    if function is None:
        raise tool.refuse("function", "an object with name and parameters")
    name = function.require("name", "a string")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise function.refuse("name", "1 to 64 letters, digits, dots, hyphens and underscores")
    function.string("description", None, 1 << 16)
    function.fields("parameters")
    function.boolean("strict")
    return dict(function.given)


def _choice(body: Fields, names: list[str]) -> Any:
    """Return "none", "auto", "required", or ("function", name)."""
    choice = body.get("tool_choice")
    if choice is None:
        return "auto" if names else "none"
    if choice in ("none", "auto", "required"):
        if not names and choice == "required":
            raise body.refuse("tool_choice", '"none" or "auto", because there are no tools')
        return choice if names else "none"
    named = body.fields("tool_choice") if isinstance(choice, dict) else None
    function = named.fields("function") if named is not None else None
    if named is None or function is None or named.get("type") != "function":
        raise body.refuse("tool_choice", '"none", "auto", "required" or a function')
    if function.get("name") not in names:
        raise function.refuse("name", "the name of a function in tools")
    return ("function", function.get("name"))
