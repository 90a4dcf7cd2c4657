"""Conversations with a decoder in this process: `ortolan chat` and `ortolan generate`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .engine import Request, SamplingOptions
from .errors import ArgumentError, OrtolanError
from .server.answer_parser import AnswerForm, AnswerParser
from .server.pieces import CONTENT
from .server.reasoning import prompt_state

if TYPE_CHECKING:
    from .engine import Engine
    from .server.model_folder import ModelFolder
    from .server.pieces import Piece

# llama.cpp's defaults, for models that recommend nothing: small ones answer badly when any token may be drawn. The
# server keeps OpenAI's defaults.
_SAMPLING = {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.05}


@dataclass(frozen=True)
class AnswerOptions:
    """Options of answers. None: the model's recommendation, from generation_config.json, or else llama.cpp's default.

    Attributes:
        max_tokens: The most tokens of an answer. Default: what the context has room for.
        temperature: 0 takes the likeliest token.
        top_p: As for `SamplingOptions`.
        seed: As for `SamplingOptions`.
    """

    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def sampling(self, defaults: Mapping[str, float]) -> SamplingOptions:
        """Return the options for the engine."""
        chosen: dict[str, Any] = {**(defaults or _SAMPLING), "seed": self.seed}
        if "top_k" in chosen:
            chosen["top_k"] = int(chosen["top_k"])
        for name in ("temperature", "top_p"):
            if (value := getattr(self, name)) is not None:
                chosen[name] = value
        return SamplingOptions(**chosen)


def answer_prompt(
    engine: Engine,
    folder: ModelFolder,
    prompt: tuple[int, ...],
    options: AnswerOptions,
    note: Callable[[str], None] | None = None,
    *,
    chat: bool = False,
) -> Iterator[str]:
    """Yield the text of an answer as it arrives. If the caller stops early, the engine stops too.

    Args:
        engine: The engine.
        folder: The model's folder.
        prompt: Token ids.
        options: How the answer is drawn.
        note: Called with a line if the context or `max_tokens` cut the answer.
        chat: Whether the prompt is a conversation, for errors and notes.

    Raises:
        ArgumentError: The prompt does not fit into the context.
        OrtolanError: The model failed.
    """
    room = engine.context - len(prompt)
    what, advice = "prompt", "shorten the prompt, or set a larger --context"
    if chat:
        what, advice = "conversation", "begin a new conversation with /new, or set a larger --context"
    if room < 1:
        raise ArgumentError(
            f"the {what} has {len(prompt)} tokens, expected fewer than the context's {engine.context}; {advice}"
        )
    most = room if options.max_tokens is None else min(options.max_tokens, room)
    request = Request(prompt, most, options.sampling(folder.sampling), end_tokens=folder.end_tokens)
    stream = engine.submit(request)
    try:
        for output in stream:
            if output.finish_reason == "error":
                raise OrtolanError(f"the answer failed: {output.error}")
            if output.text:
                yield output.text
            if output.finish_reason == "length" and note is not None:
                full = f"the context of {engine.context} tokens is full; {advice}"
                note(f"the answer was cut: {f'--max-tokens is {most}' if most == options.max_tokens else full}")
    finally:
        stream.cancel()


def complete(
    engine: Engine,
    folder: ModelFolder,
    prompt: str,
    options: AnswerOptions,
    note: Callable[[str], None] | None = None,
) -> Iterator[str]:
    """Yield the answer to one prompt: a chat of one message, if the model has a chat template, else a continuation.

    note: as for `answer_prompt`.
    """
    if folder.template is None:
        return answer_prompt(engine, folder, folder.encode(prompt, whole=True), options, note)
    pieces = _answer_messages(engine, folder, [{"role": "user", "content": prompt}], options, note)
    return (piece.text for piece in pieces if piece.kind == CONTENT)


def _answer_messages(
    engine: Engine,
    folder: ModelFolder,
    messages: list[dict[str, Any]],
    options: AnswerOptions,
    note: Callable[[str], None] | None,
    *,
    chat: bool = False,
) -> Iterator[Piece]:
    """Yield the pieces of an answer to messages, as the chat template renders them; see `answer_prompt`."""
    if folder.template is None:
        raise OrtolanError("the model's folder has no chat template; use ortolan generate")
    prompt = folder.template.render(messages)
    opened = folder.thoughts is not None and prompt_state(prompt, folder.thoughts) == "opened"
    parser = AnswerParser(AnswerForm(folder.thoughts, opened))
    for text in answer_prompt(engine, folder, folder.encode(prompt, whole=False), options, note, chat=chat):
        yield from parser.feed(text)
    yield from parser.finish()


@dataclass
class Conversation:
    """A chat in which messages and answers follow each other.

    Attributes:
        engine: The engine. Its prefix cache keeps the conversation so far.
        folder: Tokenizer and chat template.
        options: How answers are drawn.
        messages: The messages so far.
    """

    engine: Engine
    folder: ModelFolder
    options: AnswerOptions = field(default_factory=AnswerOptions)
    messages: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str, note: Callable[[str], None] | None = None) -> Generator[tuple[str, str]]:
        """Add a message, and yield the answer's pieces: ("reasoning" or "content", text).

        The answer becomes part of the conversation when it has ended. If it is stopped or fails, the message is
        removed.

        Args:
            text: The message.
            note: As for `answer_prompt`.

        Raises:
            OrtolanError: The model has no chat template, or the template refuses the messages.
            ArgumentError: The conversation does not fit into the context.
        """
        self.messages.append({"role": "user", "content": text})
        ended, said = False, []
        try:
            for piece in _answer_messages(self.engine, self.folder, self.messages, self.options, note, chat=True):
                said.append(piece)
                yield piece.kind, piece.text
            ended = True
        finally:
            if ended:
                content = "".join(piece.text for piece in said if piece.kind == CONTENT)
                self.messages.append({"role": "assistant", "content": content})
            else:
                self.messages.pop()
