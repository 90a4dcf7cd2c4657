"""The commands for decoders: `ortolan serve`, `ortolan chat` and `ortolan generate`."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .cli_output import print_error, print_step, progress_bar

if TYPE_CHECKING:
    from .conversation import AnswerOptions, Conversation
    from .engine import Engine
    from .server.model_folder import ModelFolder


class Drafts(StrEnum):
    """Sources of drafts of the next tokens."""

    LOOKUP = "lookup"
    OFF = "off"


class CacheTypes(StrEnum):
    """Types of keys and values in the KV cache."""

    BFLOAT16 = "bfloat16"
    INT8 = "int8"


Folder = Annotated[
    Path,
    typer.Argument(
        metavar="MODEL",
        help="A folder with a model, or a .gguf or .onnx file. A decoder is converted to the form for serving once, "
        "into the cache folder.",
        show_default=False,
    ),
]
Threads = Annotated[
    int | None, typer.Option(min=1, help="Threads of ONNX Runtime. Default: one for each core.", show_default=False)
]
Context = Annotated[
    int | None,
    typer.Option(
        min=1, help="The most tokens of a prompt and its answer. Default: the model's limit.", show_default=False
    ),
]
CacheMemory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="Memory of the KV cache, such as 2G or 512M. Default: a quarter of the machine's memory, or what 64 "
        "sequences need.",
        show_default=False,
    ),
]
CacheType = Annotated[
    CacheTypes,
    typer.Option(
        help="Keys and values in the KV cache: bfloat16, or int8, which takes about half the memory and changes "
        "answers slightly.",
    ),
]
Speculate = Annotated[
    Drafts,
    typer.Option(
        help="Draft what followed the same tokens earlier in prompt and answer, and compute several tokens at once "
        "where that is faster. Answers are the same either way.",
    ),
]
DraftModel = Annotated[
    Path | None,
    typer.Option(
        metavar="FOLDER",
        help="A smaller model with the same tokens, a folder or a .gguf file, that drafts where --speculate lookup "
        "finds nothing. Answers are the same.",
        show_default=False,
    ),
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help="The most tokens of an answer. Default: no limit.", show_default=False),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=2,
        help="0 takes the likeliest token. Default: the model's generation_config.json, else 0.8, with top_k 40 and "
        "min_p 0.05.",
        show_default=False,
    ),
]


def _check_top_p(value: float | None) -> float | None:
    if value is not None and not 0 < value <= 1:
        raise typer.BadParameter(f"{value:g} is not above 0 and at most 1")
    return value


TopP = Annotated[
    float | None,
    typer.Option(
        callback=_check_top_p,
        help="Keep the likeliest tokens whose probabilities add up to this. Default: the model's, else 0.95.",
        show_default=False,
    ),
]
Seed = Annotated[int | None, typer.Option(help="Equal seeds give equal answers.", show_default=False)]
ChatTemplate = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A Jinja file that replaces the model's chat template.", show_default=False),
]
REASONING = "reasoning"  # the kind of a piece in server/pieces.py, whose package this module must not import
_COMMAND = re.compile(r"/[A-Za-z]*(\s|$)")  # not a path such as /etc/hosts
_HELP = """\
/new    forget the conversation and begin again
/exit   end (also Ctrl-D)
/help   list the commands
Ctrl-C  stop an answer, which then is not part of the conversation
A space in front of / sends the line as a message."""
_UNITS = {"K": 10, "M": 20, "G": 30, "T": 40}


def serve(
    folder: Folder,
    host: Annotated[
        str,
        typer.Option(help="The address to listen on. There is no TLS: put a proxy in front of other than local use."),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port; 0: a free one.")] = 8000,
    threads: Threads = None,
    context: Context = None,
    cache_memory: CacheMemory = None,
    cache_type: CacheType = CacheTypes.BFLOAT16,
    share_weights: Annotated[
        bool,
        typer.Option(
            "--share-weights",
            help="Share the memory of the weights with other processes, instead of reading them into huge pages, "
            "where decoding is faster.",
        ),
    ] = False,
    name: Annotated[
        str | None, typer.Option(help="The model's name in answers. Default: the folder's.", show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            metavar="KEY",
            envvar="ORTOLAN_API_KEY",
            help="Requests must have this bearer token. Others can read it in the list of processes: better set "
            "ORTOLAN_API_KEY.",
            show_default=False,
        ),
    ] = None,
    encoder: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also serve this embedding model or reranker.", show_default=False),
    ] = None,
    tool_calls: Annotated[
        str | None,
        typer.Option(
            metavar="FORM",
            help="How the model writes tool calls: hermes, qwen3_coder, mistral or llama. Default: from the chat "
            "template.",
            show_default=False,
        ),
    ] = None,
    chat_template: ChatTemplate = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ORIGIN",
            help="Web pages of this origin, such as http://localhost:3000, may send requests; * allows all. Can be "
            "repeated.",
            show_default=False,
        ),
    ] = None,
    max_sequences: Annotated[int, typer.Option(min=1, help="The most answers that run at the same time.")] = 64,
    max_queue: Annotated[int, typer.Option(min=1, help="The most answers that wait; more get 429.")] = 1024,
    max_step_tokens: Annotated[
        int, typer.Option(min=1, help="The most tokens of a step. Fewer: shorter pauses; more: faster prompts.")
    ] = 512,
    speculate: Speculate = Drafts.LOOKUP,
    draft_model: DraftModel = None,
    max_seconds: Annotated[
        float, typer.Option(min=0.001, help="The longest time of a request, waiting included.")
    ] = 600,
    drain: Annotated[
        float, typer.Option(min=0, help="Seconds that requests may continue after SIGTERM or Ctrl-C.")
    ] = 30,
) -> None:
    """Serve a model with OpenAI's API: chats, completions, embeddings, reranking (needs the extra serve)."""
    from .server.run import ServeOptions, model_name
    from .server.run import serve as run
    from .server.settings import Limits

    options = ServeOptions(
        host=host,
        port=port,
        name=name or model_name(folder),
        threads=threads,
        context=context,
        cache_bytes=read_bytes(cache_memory),
        cache_type=cache_type.value,
        share_weights=share_weights,
        max_step_tokens=max_step_tokens,
        max_sequences=max_sequences,
        max_queue=max_queue,
        speculate=speculate.value,
        draft_model=draft_model,
        encoder=encoder,
        tool_calls=tool_calls,
        chat_template=chat_template,
        allow_origins=tuple(allow_origin or ()),
        api_key=api_key,
        drain_seconds=drain,
        limits=Limits(seconds=max_seconds),
    )
    with ExitStack() as stack:
        progress = stack.enter_context(progress_bar())

        run(folder, options, progress=progress, on_ready=lambda _: stack.close(), say=print_step)  # removes the bar


def chat(
    folder: Folder,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="The system message.", show_default=False)] = None,
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    threads: Threads = None,
    context: Context = None,
    cache_memory: CacheMemory = None,
    cache_type: CacheType = CacheTypes.BFLOAT16,
    speculate: Speculate = Drafts.LOOKUP,
    draft_model: DraftModel = None,
    chat_template: ChatTemplate = None,
) -> None:
    """Talk with a model in the terminal. /new begins again, /exit ends; Ctrl-C stops an answer."""
    from .conversation import Conversation

    options = _options(max_tokens, temperature, top_p, seed)
    how = threads, context, cache_memory, cache_type, speculate, draft_model, chat_template
    with _engine(folder, *how) as (engine, read):
        first = [] if system is None else [{"role": "system", "content": system}]
        talk = Conversation(engine, read, options, list(first))
        prompt = ""
        if sys.stdin.isatty():
            prompt = "> "
            _keep_history()
            print_step("/help lists the commands")
        while (said := _ask(prompt)) is not None:
            if _COMMAND.match(said):
                if not _obey(said.strip(), talk, first):
                    break
            elif said.strip():
                _print_answer(talk, said.strip())


def _obey(command: str, talk: Conversation, first: list[dict[str, Any]]) -> bool:
    """Carry out a command; return False at the end of the chat. first: the messages of a new conversation."""
    if command in ("/exit", "/quit"):
        return False
    if command == "/new":
        talk.messages[:] = first
        print_step("new conversation")
    elif command == "/help":
        print_step(_HELP)
    else:
        print_step(f"unknown command {command.split()[0]}; /help lists the commands")
    return True


def generate(
    folder: Folder,
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from stdin.", show_default=False)],
    max_tokens: MaxTokens = None,
    temperature: Temperature = None,
    top_p: TopP = None,
    seed: Seed = None,
    threads: Threads = None,
    context: Context = None,
    cache_memory: CacheMemory = None,
    cache_type: CacheType = CacheTypes.BFLOAT16,
    speculate: Speculate = Drafts.LOOKUP,
    draft_model: DraftModel = None,
    chat_template: ChatTemplate = None,
) -> None:
    """Write one answer to a prompt: as a chat if the model has a chat template, else its continuation."""
    from .conversation import complete
    from .errors import ArgumentError

    text = typer.get_text_stream("stdin").read() if prompt == "-" else prompt
    if not text.strip():
        raise ArgumentError("the prompt is empty, expected a text, or - and a text on stdin")
    options = _options(max_tokens, temperature, top_p, seed)
    how = threads, context, cache_memory, cache_type, speculate, draft_model, chat_template
    with _engine(folder, *how) as (engine, read):
        notes: list[str] = []
        for piece in complete(engine, read, text, options, notes.append):
            typer.echo(piece, nl=False)
        typer.echo()
        _print_notes(notes)


def _options(max_tokens: int | None, temperature: float | None, top_p: float | None, seed: int | None) -> AnswerOptions:
    from .conversation import AnswerOptions

    found = AnswerOptions(max_tokens, temperature, top_p, seed)
    found.sampling({})  # raises an error for a wrong value, before a conversion
    return found


@contextmanager
def _engine(
    folder: Path,
    threads: int | None,
    context: int | None,
    cache_memory: str | None,
    cache_type: CacheTypes,
    speculate: Drafts,
    draft_model: Path | None,
    chat_template: Path | None,
) -> Iterator[tuple[Engine, ModelFolder]]:
    from .server.run import ServeOptions, open_engine, prepare_decoder, prepare_draft_model
    from .server.start_checks import check_engine_options

    options = ServeOptions(
        threads=threads,
        context=context,
        cache_bytes=read_bytes(cache_memory),
        cache_type=cache_type.value,
        max_sequences=1,
        speculate=speculate.value,
        draft_model=draft_model,
        chat_template=chat_template,
    )
    check_engine_options(folder, options)
    with progress_bar() as progress:
        prepared = prepare_decoder(folder, progress, print_step)
        options = prepare_draft_model(options, progress, print_step)
    with open_engine(prepared, options, print_step) as opened:
        yield opened


def read_bytes(text: str | None) -> int | None:
    """Return a size such as 512M in bytes.

    Raises:
        typer.BadParameter: The text is not a size.
    """
    if text is None:
        return None
    number = text.strip().upper().removesuffix("B").removesuffix("I")
    unit = _UNITS.get(number[-1:], 0)
    number = number[:-1] if unit else number
    try:
        size = float(number) * 2**unit
    except ValueError:
        size = 0
    if not 1 <= size < 2**60:
        raise typer.BadParameter(f"{text!r} is not a size such as 2G or 512M", param_hint="--cache-memory")
    return int(size)


def _keep_history() -> None:
    """Let the terminal recall earlier messages with the arrow keys."""
    with suppress(ImportError):
        import readline  # noqa: F401  # input() uses it once it is imported


def _ask(prompt: str) -> str | None:
    """Return the next line; None at the end. prompt: empty if stdin is not a terminal."""
    try:
        return input(prompt)
    except (EOFError, KeyboardInterrupt):
        if prompt:
            typer.echo()
        return None


def _print_answer(talk: Conversation, said: str) -> None:
    """Print the answer to a message as it arrives, its thoughts dimmed. Ctrl-C stops it."""
    from .errors import OrtolanError

    shown = ""
    notes: list[str] = []
    try:
        with closing(talk.say(said, notes.append)) as pieces:
            for kind, text in pieces:
                typer.echo("\n\n" if shown not in ("", kind) else "", nl=False)
                typer.echo(typer.style(text, dim=True) if kind == REASONING else text, nl=False)
                shown = kind
    except KeyboardInterrupt:
        typer.echo("\n(stopped: not part of the conversation)", nl=False)
    except OrtolanError as error:
        print_error(str(error))
    typer.echo()
    _print_notes(notes)


def _print_notes(notes: list[str]) -> None:
    """Print why an answer was cut, below it."""
    for line in notes:
        print_step(line)
