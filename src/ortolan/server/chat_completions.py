"""POST /v1/chat/completions: chats with tools, thoughts and structured answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..engine import Output, TokenLogprobs
from .answer_parser import AnswerForm, AnswerParser, WholeAnswer, delta
from .answering import Head, chat_logprobs, compiled, respond
from .errors import ApiError
from .fields import Fields, shown
from .foreign_fields import refuse_foreign
from .generation import Generator
from .grammars import calls_grammar, with_thoughts
from .http import client_host, read_body
from .messages import ToolChoice, read_messages, read_tools
from .model_folder import ModelFolder
from .pieces import CALL, Piece
from .reasoning import prompt_state
from .request_options import CommonOptions, ends_in_time, read_common
from .settings import Limits, ServerSettings
from .structured import Form, response_form
from .token_texts import TokenTexts

_MOST_VARIABLES = 64  # of a chat template, in one request
_TEXT_ONLY = "this server answers with text"


@dataclass(frozen=True)
class _Prompt:
    """The variables of a chat template.

    Attributes:
        messages: The messages.
        tools: The tools.
        variables: More variables.
    """

    messages: list[dict[str, Any]]
    tools: ToolChoice
    variables: dict[str, Any]


@dataclass(frozen=True)
class _Chat:
    """A chat that was read.

    Attributes:
        prompt: What the template gets.
        form: The form that the answer must have; None: any text.
        logprobs: The number of likeliest tokens whose log probabilities are wanted; None: no log probabilities.
        options: The other options.
    """

    prompt: _Prompt
    form: Form | None
    logprobs: int | None
    options: CommonOptions


async def chat(request: Request, generator: Generator, settings: ServerSettings) -> Response:
    """Answer a request."""
    body = await read_body(request, settings.limits)
    folder, loop = generator.folder, asyncio.get_running_loop()
    read = _read(body, generator, settings.limits, client_host(request))
    generator.check_room(read.options.n)
    prompt, tokens = await loop.run_in_executor(generator.preparing, _render, folder, settings.limits, read.prompt)
    markers = folder.thoughts
    state = "free" if markers is None else prompt_state(prompt, markers)
    grammar = None
    if (form := read.form) is not None:
        added = folder.added_tokens
        grammar = await compiled(generator, lambda: with_thoughts(form.rules(), markers, state, added), form.param)
    options, tools = read.options, read.prompt.tools
    answers = generator.submit([options.request(tokens, generator.engine.context, grammar)])
    answer_form = AnswerForm(
        markers,
        state == "opened",
        folder.tool_family if tools.functions else None,
        tools.schemas,
        tools.several,
    )
    choices = [_Choice(index, answer_form, generator.texts, read.logprobs) for index in range(options.n)]
    head = Head("chatcmpl", "chat.completion.chunk" if options.stream else "chat.completion", settings.name)
    first = [choice.first() for choice in choices]
    return await respond(request, generator, settings, options, answers, [choices], head, first)


def _read(body: Fields, generator: Generator, limits: Limits, host: str) -> _Chat:
    folder = generator.folder
    prompt = _read_prompt(body, folder, limits)
    tools = prompt.tools
    _refuse_unsupported(body)
    wanted = body.boolean("logprobs")
    most = body.integer("top_logprobs", 0, 0, limits.logprobs)
    if most and not wanted:
        raise ApiError(400, f"top_logprobs is {most}, expected none without logprobs true", param="top_logprobs")
    logprobs = most if wanted else None
    form = response_form(body, limits)
    # OpenAI accepts a response_format beside a call that is required: it is of content, which such an answer lacks.
    if form is not None and tools.functions and not (tools.must and form.param == "response_format"):
        choice = "asks for a call" if tools.must else "is auto"
        raise ApiError(
            400,
            f"{form.param} sets the form of the answer while tool_choice {choice}; expected one of them: send "
            "tool_choice none",
            param=form.param,
        )
    if tools.must or tools.strict:
        assert folder.tool_family is not None
        form = Form(
            "tools",
            partial(
                calls_grammar,
                folder.tool_family,
                tools.functions,
                folder.added_tokens,
                several=tools.several,
                optional=not tools.must,
            ),
        )
    return _Chat(
        prompt,
        form,
        logprobs,
        read_common(body, folder, limits, host, max_tokens=None, logprobs=logprobs),
    )


def _read_prompt(body: Fields, folder: ModelFolder, limits: Limits) -> _Prompt:
    if folder.template is None:
        raise ApiError(
            400, "the model's folder has no chat template, so it takes no messages; send a prompt to /v1/completions"
        )
    return _Prompt(read_messages(body, limits), read_tools(body, folder, limits), _variables(body))


def _refuse_unsupported(body: Fields) -> None:
    for name in ("audio", "prediction", "web_search_options"):
        body.refuse_unless(name, why=_TEXT_ONLY)
    body.refuse_unless("modalities", ["text"], why=_TEXT_ONLY)
    refuse_foreign(body, is_chat=True)


def _variables(body: Fields) -> dict[str, Any]:
    """Return variables of the chat template: chat_template_kwargs, as vLLM names them, and reasoning_effort."""
    given = body.fields("chat_template_kwargs")
    found = dict(given.given) if given is not None else {}
    if len(found) > _MOST_VARIABLES:
        raise ApiError(400, f"chat_template_kwargs has {len(found)} entries, expected at most {_MOST_VARIABLES}")
    for name, value in found.items():
        if not name.isidentifier():
            raise ApiError(400, f"chat_template_kwargs has {shown(name)}, expected names", param="chat_template_kwargs")
        if not isinstance(value, str | bool | int | float | None):
            raise ApiError(
                400,
                f"chat_template_kwargs.{name} is {shown(value)}, expected a string, a number, a boolean or null",
                param="chat_template_kwargs",
            )
    effort = body.string("reasoning_effort", None, 16)
    return found if effort is None else {"reasoning_effort": effort, **found}


def _render(
    folder: ModelFolder, limits: Limits, read: _Prompt, add_generation_prompt: bool = True
) -> tuple[str, tuple[int, ...]]:
    """Return the prompt of a chat, and its tokens."""
    assert folder.template is not None
    prompt = folder.template.render(
        read.messages, read.tools.shown, read.variables, add_generation_prompt, limits.characters
    )
    return prompt, folder.encode(prompt, whole=False)


async def chat_tokens(body: Fields, generator: Generator, limits: Limits) -> tuple[int, ...]:
    """Return the tokens of a chat's prompt."""
    read = _read_prompt(body, generator.folder, limits)
    begins_answer = body.boolean("add_generation_prompt", True)
    loop, folder = asyncio.get_running_loop(), generator.folder
    _, tokens = await loop.run_in_executor(generator.preparing, _render, folder, limits, read, begins_answer)
    return tokens


class _Choice:
    """One answer."""

    def __init__(self, index: int, form: AnswerForm, texts: TokenTexts, logprobs: int | None) -> None:
        self._index, self._texts = index, texts
        self._parser, self._whole = AnswerParser(form), WholeAnswer()
        self._wants_logprobs = logprobs is not None
        self._logprobs: list[TokenLogprobs] = []
        self._reason: str | None = None
        self._called = False

    def _entry(self, name: str, said: Any, found: list[TokenLogprobs]) -> dict[str, Any]:
        logprobs = chat_logprobs(self._texts, found) if self._wants_logprobs else None
        return {"index": self._index, name: said, "logprobs": logprobs, "finish_reason": self._reason}

    def first(self) -> dict[str, Any]:
        """Return the beginning of a stream, which names the role."""
        return self._entry("delta", {"role": "assistant", "content": ""}, [])

    def _pieces(self, output: Output) -> list[Piece]:
        """Return the pieces that an output completes."""
        pieces = self._parser.feed(output.text)
        if output.finish_reason is not None:
            pieces += self._parser.finish(cut=output.finish_reason != "stop")
        self._called |= any(piece.kind == CALL for piece in pieces)
        if output.finish_reason is not None:
            reason = ends_in_time(output.finish_reason)
            self._reason = "tool_calls" if self._called and reason == "stop" else reason
        return pieces

    def chunk(self, output: Output) -> list[dict[str, Any]]:
        pieces = self._pieces(output)
        reason, self._reason = self._reason, None
        self._logprobs += output.logprobs or ()
        said = []
        for piece in pieces:
            said.append(self._entry("delta", delta(piece), self._logprobs))
            self._logprobs = []
        if reason is not None:
            self._reason = reason
            said.append(self._entry("delta", {}, self._logprobs))
        return said

    def add(self, output: Output) -> None:
        self._whole.add(self._pieces(output))
        self._logprobs += output.logprobs or ()

    def result(self) -> dict[str, Any]:
        return self._entry("message", self._whole.message(), self._logprobs)
