"""Chat templates: messages and tools to a prompt, as transformers renders them.

A template is a program in the model's folder. It runs in a sandbox that keeps it from files and Python's internals. The
limits on time, products and the prompt's length stop accidents, not every template that wants to fill the memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ModelError
from .errors import ApiError

if TYPE_CHECKING:
    from jinja2 import Environment, Template

_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_MOST_SECONDS = 5.0  # of rendering one prompt
_MOST_CHARACTERS = 1 << 20  # of a template
_MOST_PROMPT = 1 << 22  # characters of a prompt, by default


class _TemplateRefusal(Exception):
    """A message that the template raised with raise_exception."""


class ChatTemplate:
    """The chat template of a model's folder.

    Attributes:
        source: The template's text; with several templates, the one named "default".
        takes_tools: A template reads the variable `tools`.
    """

    def __init__(
        self,
        templates: Mapping[str, str],
        special_tokens: Mapping[str, str] | None = None,
    ) -> None:
        """Compile the templates.

        Args:
            templates: Templates by name: "default", and optionally "tool_use", which is used if tools are given.
            special_tokens: Variables such as bos_token.

        Raises:
            ModelError: A template is not valid Jinja, or there is no default one.
        """
        if "default" not in templates:
            raise ModelError('the folder has chat templates, but no "default" one; name one of them "default"')
        self.source = templates["default"]
        self._special = dict(special_tokens or {})
        environment = _environment()
        self._templates = {name: _compiled(environment, name, text) for name, text in templates.items()}
        self.takes_tools = any("tools" in text for text in templates.values())
        self._knows_developer = any("developer" in text for text in templates.values())

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        most_characters: int = _MOST_PROMPT,
    ) -> str:
        """Return the prompt.

        Args:
            messages: Messages whose content is text, and whose calls of tools have parsed arguments.
            tools: Definitions of tools in OpenAI's format.
            variables: More variables of the template, such as enable_thinking.
            add_generation_prompt: End the prompt with the beginning of the assistant's answer.
            most_characters: The longest prompt.

        Raises:
            ApiError: 400 if the template refuses the messages, fails, or the prompt is too long.
        """
        name = "tool_use" if tools and "tool_use" in self._templates else "default"
        given = {
            **self._special,
            **(variables or {}),
            "messages": [self._known_role(message) for message in messages],
            "tools": list(tools) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return _rendered(self._templates[name], given, most_characters)
        except ApiError:
            raise
        except _TemplateRefusal as error:
            raise ApiError(
                400, f"messages: the model's chat template refuses them: {error}", param="messages"
            ) from None
        # A template is a program of the model's author, which can fail in any way on messages it did not expect.
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"[:500]
            raise ApiError(
                400, f"messages: the model's chat template failed on them ({reason})", param="messages"
            ) from None

    def _known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """Return the message; OpenAI's newer name for the role system becomes the one that the template knows."""
        known = dict(message)
        if known["role"] == "developer" and not self._knows_developer:
            known["role"] = "system"
        return known


def _rendered(template: Template, given: Mapping[str, Any], most: int) -> str:
    end, pieces, length = time.monotonic() + _MOST_SECONDS, [], 0
    for piece in template.generate(given):
        pieces.append(piece)
        length += len(piece)
        if length > most:
            raise ApiError(400, f"messages: the prompt has more than {most} characters; send fewer")
        if time.monotonic() > end:
            raise ApiError(400, f"messages: the chat template ran for more than {_MOST_SECONDS:g} s; send fewer")
    return "".join(pieces)


def read_template_file(path: Path) -> str:
    """Return the text of a Jinja file.

    Raises:
        ModelError: The file cannot be read, or is not valid Jinja.
    """
    text = _read_text(path)
    _compiled(_environment(), str(path), text)
    return text


def read_chat_template(folder: Path, file: Path | None = None) -> ChatTemplate | None:
    """Return the chat template of a folder as transformers finds it; None if it has no template.

    A file chat_template.jinja (and additional_chat_templates/*.jinja) has precedence over chat_template.json and
    tokenizer_config.json.

    Args:
        folder: The folder.
        file: A Jinja file that replaces the folder's templates. Special tokens are still those of the folder.

    Raises:
        ModelError: A file is malformed.
    """
    config = {**_read_json(folder / "special_tokens_map.json"), **_read_json(folder / "tokenizer_config.json")}
    if file is not None:
        return ChatTemplate({"default": read_template_file(file)}, _special_tokens(config))
    templates: dict[str, str] = {}
    found = _read_json(folder / "chat_template.json").get("chat_template") or config.get("chat_template")
    if isinstance(found, str):
        templates["default"] = found
    elif isinstance(found, list):
        for one in found:
            if not isinstance(one, dict) or not isinstance(one.get("template"), str):
                raise ModelError(
                    f"chat_template of {str(folder)!r} has an entry without template, expected name, template"
                )
            templates[str(one.get("name"))] = one["template"]
    elif found is not None:
        raise ModelError(f"chat_template of {str(folder)!r} is {type(found).__name__}, expected a text or a list")
    if (path := folder / "chat_template.jinja").is_file():
        templates["default"] = _read_text(path)
    for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
        templates[path.stem] = _read_text(path)
    return ChatTemplate(templates, _special_tokens(config)) if templates else None


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the texts of the special tokens in tokenizer_config.json."""
    found = {}
    for name in (*_TOKENS, *(key for key in config if key.endswith("_token"))):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            found[name] = token
    return found


def _read_text(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(_MOST_CHARACTERS + 1)
    except (OSError, UnicodeDecodeError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or error
        raise ModelError(f"chat template {str(path)!r} cannot be read: {reason}") from None
    return text


def _read_json(path: Path) -> dict[str, Any]:
    from ortolan.graph_passes.text.tokenizer_file import read_json

    return dict(read_json(path))


def _environment() -> Environment:
    """Return Jinja's sandbox with the settings, filters and functions that transformers gives to templates."""
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """The block {% generation %} marks the assistant's answers for training; here it only shows its content."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class Sandbox(ImmutableSandboxedEnvironment):
        """The sandbox, without products and powers that fill the memory."""

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            """Compute a product or a power of small values."""
            sizes = [len(one) if isinstance(one, str | list | tuple) else abs(one) for one in (left, right)]
            if max(sizes) > _MOST_CHARACTERS or (operator == "**" and sizes[1] > 64):
                raise ValueError(f"{operator} of values that are too large")
            if sizes[0] * sizes[1] > _MOST_CHARACTERS and not all(
                isinstance(one, int | float) for one in (left, right)
            ):
                raise ValueError(f"{operator} makes a text or list that is too long")
            return super().call_binop(context, operator, left, right)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _compiled(environment: Environment, name: str, text: str) -> Template:
    from jinja2 import TemplateError, TemplateSyntaxError

    if len(text) > _MOST_CHARACTERS:
        raise ModelError(f"chat template {name!r} has more than {_MOST_CHARACTERS} characters")
    try:
        return environment.from_string(text)
    except (TemplateError, RecursionError, SyntaxError) as error:
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError | SyntaxError) else ""
        raise ModelError(f"chat template {name!r} is not valid Jinja: {line}{error}") from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without Jinja's escapes for HTML, which models were not trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise _TemplateRefusal(str(message)[:500])


def _now(form: str) -> str:
    return datetime.now().strftime(form)
