"""serve: opens models and runs the server in this process."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

from ..cache_folder import default_cache_dir
from ..errors import ArgumentError, OrtolanError
from .settings import Limits, ServerSettings

if TYPE_CHECKING:
    from types import FrameType

    from ..engine import DraftModel, Engine
    from ..engine.model import CacheType, PagedModel
    from ..engine.recurrent import RecurrentModel
    from ..progress import Progress
    from .application import Application
    from .model_folder import ModelFolder

_PACKAGES = "starlette uvicorn orjson jinja2 prometheus-client tokenizers llguidance"
_CLOSING_SECONDS = 5  # for connections, after the last answer


@dataclass(frozen=True)
class ServeOptions:
    """Options of `serve`.

    Attributes:
        host: The address to listen on. The server has no TLS; put a proxy in front of it.
        port: The port; 0: a free one.
        name: The model's name in answers. Default: the folder's or the file's.
        threads: Threads of ONNX Runtime. Default: one for each core.
        context: The most tokens of a prompt and its answer. Default: the model's limit.
        cache_bytes: The size of the KV cache. Default: PagedModel's.
        cache_type: The type of keys and values in the KV cache, see PagedModel.
        share_weights: Share the memory of the weights with other processes, see PagedModel.
        max_step_tokens: The most tokens of a call of the model, see `Engine`.
        max_sequences: The most sequences that run at the same time.
        max_queue: The most sequences that wait; more get 429.
        speculate: "lookup": draft tokens from what followed the same tokens earlier, see `Engine`; "off": do not.
        draft_model: A smaller decoder of the same vocabulary, a GGUF file or a folder, that drafts tokens where
            "lookup" finds none.
        encoder: An embedding model or a reranker that is served too.
        tool_calls: The form of tool calls, if the chat template does not tell: hermes, qwen3_coder, mistral or llama.
        chat_template: A Jinja file that replaces the model's chat template.
        allow_origins: Origins of web pages that may send requests from browsers, such as "http://localhost:3000", or
            "*" for all.
        api_key: The key that requests must have. Default: the environment variable ORTOLAN_API_KEY, else no key.
        drain_seconds: How long requests may continue after SIGTERM or SIGINT.
        limits: The limits on requests.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    name: str | None = None
    threads: int | None = None
    context: int | None = None
    cache_bytes: int | None = None
    cache_type: CacheType = "bfloat16"
    share_weights: bool = False
    max_step_tokens: int = 512
    max_sequences: int = 64
    max_queue: int = 1024
    speculate: Literal["lookup", "off"] = "lookup"
    draft_model: Path | None = None
    encoder: Path | None = None
    tool_calls: str | None = None
    chat_template: Path | None = None
    allow_origins: tuple[str, ...] = ()
    api_key: str | None = None
    drain_seconds: float = 30
    limits: Limits = field(default_factory=Limits)


def serve(
    model: str | os.PathLike[str],
    options: ServeOptions | None = None,
    *,
    progress: Progress | None = None,
    on_ready: Callable[[str], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> None:
    """Serve a model until the process gets SIGINT or SIGTERM.

    Args:
        model: A GGUF file, or a folder with a decoder, an embedding model or a reranker. A decoder that has not the
            form for serving is converted once, into the cache folder.
        options: Options.
        progress: Of the conversion, as for `optimize_onnx`.
        on_ready: Called with the server's address when it accepts requests.
        say: Called with lines for the person who started the server.

    Raises:
        OrtolanError: A model cannot be opened, a package is missing, or the port is in use.
    """
    chosen = options or ServeOptions()
    _require_packages()
    from .start_checks import check_engine_options, check_server_options

    check_server_options(chosen)
    check_engine_options(Path(model), chosen)
    with ExitStack() as stack:
        listening = stack.enter_context(_listen(chosen.host, chosen.port))
        named = replace(chosen, name=chosen.name or model_name(Path(model)))
        prepared = prepare_model(Path(model), progress, say)
        named = prepare_draft_model(named, progress, say)
        application = stack.enter_context(open_application(prepared, named, say))

        def ready() -> None:
            url = _url(listening)
            if on_ready is not None:
                on_ready(url)
            if say is not None:
                sizes = f" ({application.sizes})" if application.sizes else ""
                drafts = f", draft model {model_name(chosen.draft_model)}" if chosen.draft_model else ""
                say(f"serving {named.name} on {url}{sizes}{drafts}")

        server = make_server(application, chosen.drain_seconds, ready, say)
        _allow_old_connections(listening, True)
        server.run(sockets=[listening])


def _url(listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _require_packages() -> None:
    try:
        import jinja2  # noqa: F401
        import orjson  # noqa: F401
        import prometheus_client  # noqa: F401
        import starlette  # noqa: F401
        import tokenizers  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise OrtolanError(
            f"the server needs more packages ({error}); install them with: pip install {_PACKAGES}"
        ) from error


def _allow_old_connections(listening: socket.socket, allow: bool) -> None:
    """Set whether connections of an earlier server may still use the port, which would otherwise count as in use."""
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, int(allow))


@contextmanager
def _listen(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that is bound, and listens once the model is open: before, clients are refused."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as listening:
        _allow_old_connections(listening, True)
        try:
            listening.bind((host, port))
        except (OSError, OverflowError) as error:
            of_port = isinstance(error, OverflowError) or error.errno in (errno.EADDRINUSE, errno.EACCES)
            option = "--port" if of_port else "--host"
            raise OrtolanError(f"cannot listen on {host} port {port}: {error}; choose another with {option}") from None
        # Otherwise another server could bind the port as well while this one loads its model.
        _allow_old_connections(listening, False)
        yield listening


def prepare_model(model: Path, progress: Progress | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a model that can be served: an encoder unchanged, a decoder converted if necessary.

    Args:
        model: The model.
        progress: As for `serve`.
        say: Called with a line if a conversion begins.

    Raises:
        OrtolanError: The model cannot be read or converted.
    """
    from .conversion import model_kind, serving_folder

    if model.suffix != ".gguf" and model.exists() and model_kind(model) == "encoder":
        return model
    return serving_folder(model, default_cache_dir(), progress, say)


def prepare_decoder(model: Path, progress: Progress | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Return the folder of a decoder in the form for serving, converted if necessary. Arguments as `prepare_model`.

    Raises:
        OrtolanError: The model is an encoder, or cannot be read or converted.
    """
    from .conversion import model_kind

    prepared = prepare_model(model, progress, say)
    if model_kind(prepared) == "encoder":
        raise OrtolanError(
            f"{str(model)!r} is an embedding model or a reranker, expected a decoder; use ortolan embed, rerank or "
            "serve"
        )
    return prepared


def prepare_draft_model(
    options: ServeOptions, progress: Progress | None = None, say: Callable[[str], None] | None = None
) -> ServeOptions:
    """Return options whose draft model has the form for serving. Arguments and errors as `prepare_decoder`."""
    if options.draft_model is None:
        return options
    return replace(options, draft_model=prepare_decoder(options.draft_model, progress, say))


@contextmanager
def open_application(
    model: Path, options: ServeOptions, say: Callable[[str], None] | None = None
) -> Iterator[Application]:
    """Open the models that `prepare_model` returned, and close the engine at the end. say: as for `open_engine`."""
    from ortolan.graph_passes.report.figures import human_bytes

    from ..engines import EncoderEngine
    from .application import Application
    from .conversion import model_kind

    settings = ServerSettings(
        options.name or model_name(model),
        options.api_key or os.environ.get("ORTOLAN_API_KEY") or None,
        options.limits,
        options.allow_origins,
    )
    threads = options.threads or os.cpu_count() or 1
    if model_kind(model) == "encoder":
        if options.encoder is not None:
            raise OrtolanError(f"{str(model)!r} is an encoder, so that there is no second one: remove --encoder")
        if options.chat_template is not None:
            raise OrtolanError(f"{str(model)!r} is an encoder, which has no chats: remove --chat-template")
        yield Application(settings, encoder=EncoderEngine(model, threads=threads))
        return
    encoder = None if options.encoder is None else EncoderEngine(options.encoder, threads=threads)
    encoder_name = None if options.encoder is None else model_name(options.encoder)
    with open_engine(model, options, say) as (engine, folder):
        application = Application(settings, make_generator(engine, folder), encoder, encoder_name)
        model_of_engine = cast("PagedModel | RecurrentModel", engine.model)
        kind = "" if model_of_engine.cache_type == "bfloat16" else f"{model_of_engine.cache_type} "
        cache = human_bytes(model_of_engine.blocks * model_of_engine.block_bytes)
        application.sizes = f"context {engine.context} tokens, {kind}cache {cache}"
        yield application


@contextmanager
def open_engine(
    folder: Path, options: ServeOptions, say: Callable[[str], None] | None = None
) -> Iterator[tuple[Engine, ModelFolder]]:
    """Open a decoder that `prepare_decoder` returned, with its engine, tokenizer and chat template.

    Args:
        folder: The folder.
        options: Options.
        say: Called with a line if the cache is too small for the model's context.
    """
    from ..engine import Engine
    from .conversion import model_kind
    from .model_folder import read_model_folder

    model: PagedModel | RecurrentModel
    source: Literal["lookup"] | DraftModel | None

    read = read_model_folder(folder, options.tool_calls, options.chat_template)
    if model_kind(folder) == "recurrent":
        model, source = _open_recurrent(folder, options), None
    else:
        model, source = _open_paged(folder, options, say)
    with Engine(
        model,
        tokenizer=read.tokenizer,
        max_step_tokens=options.max_step_tokens,
        max_sequences=options.max_sequences,
        max_queue=options.max_queue,
        speculation=source,
    ) as engine:
        yield engine, read


def _open_recurrent(folder: Path, options: ServeOptions) -> RecurrentModel:
    """Open a decoder with recurrent states. They cannot be rewound, so that it verifies no drafts."""
    from ..engine.recurrent import RecurrentModel

    given = {"--draft-model": options.draft_model, "--cache-memory": options.cache_bytes}
    given["--cache-type int8"] = options.cache_type == "int8" or None
    if refused := [name for name, value in given.items() if value is not None]:
        raise ArgumentError(f"{str(folder)!r} has recurrent states, which cannot be used with {refused[0]}; remove it")
    return RecurrentModel.open(
        folder, threads=options.threads, context=options.context, sequences=options.max_sequences
    )


def _open_paged(
    folder: Path, options: ServeOptions, say: Callable[[str], None] | None
) -> tuple[PagedModel, Literal["lookup"] | DraftModel | None]:
    """Open a decoder in the form for serving; return it and the source of drafts. say: as for `open_engine`."""
    from ..engine import DraftModel
    from ..engine.model import PagedModel

    paged = PagedModel.open(
        folder,
        threads=options.threads,
        context=options.context,
        cache_bytes=options.cache_bytes,
        cache_type=options.cache_type,
        share_weights=options.share_weights,
    )
    if say is not None and options.context is None and paged.limit is not None and paged.context < paged.limit:
        why = "--cache-memory" if options.cache_bytes is not None else "the machine's memory; see --cache-memory"
        say(f"context is {paged.context} of the model's {paged.limit} tokens, because of {why}")
    source: Literal["lookup"] | DraftModel | None = None if options.speculate == "off" else "lookup"
    if options.draft_model is not None:  # its cache holds as many tokens
        smaller = PagedModel.open(
            options.draft_model,
            threads=options.threads,
            cache_type=options.cache_type,
            blocks=paged.blocks,
            share_weights=options.share_weights,
        )
        source = DraftModel(smaller)
    return paged, source


def make_generator(engine: Engine, folder: ModelFolder) -> Any:
    """Return the bridge to an engine, which compiles grammars for the model's tokens."""
    from functools import cache

    from ..engine.grammar import GrammarTokenizer, TokenGrammar
    from .generation import Generator

    @cache
    def tokenizer() -> GrammarTokenizer:
        vocabulary = engine.model.vocabulary
        return GrammarTokenizer(folder.tokenizer, vocabulary=vocabulary, end_tokens=folder.end_tokens)

    return Generator(engine, folder, lambda grammar: TokenGrammar.from_lark(grammar, tokenizer()))


def model_name(model: Path) -> str:
    """Return the name of a model's folder or file."""
    path = Path(os.path.abspath(model))  # the name that the user typed, not that of a link's target
    return (path.name if path.is_dir() else path.stem) or "model"


def make_server(
    application: Application,
    drain_seconds: float,
    on_ready: Callable[[], None] | None = None,
    say: Callable[[str], None] | None = None,
) -> Any:
    """Return a uvicorn server whose end is gentle.

    It runs until SIGINT or SIGTERM. After the first signal it answers new requests with 503, and /health too, so that a
    load balancer sends them elsewhere. When the active requests have ended, or after drain_seconds, it cancels the rest
    and closes. A second signal cancels them at once. A third one does not even wait for the end of their responses.

    Args:
        application: The application.
        drain_seconds: How long requests may continue after the first signal.
        on_ready: Called when the server accepts requests.
        say: Called with a line when the drain begins.
    """
    import uvicorn

    class Server(uvicorn.Server):
        """A server that drains."""

        drained: asyncio.Task[None] | None = None
        hurried = False

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            if not application.drain.begun:
                self.begin_drain()
            elif not self.hurried:
                self.hurried = True
            else:
                self.force_exit = self.should_exit = True

        def begin_drain(self) -> None:
            """Take no more requests, and end the server when the active ones have ended."""
            application.drain.begun = True
            self.loop.call_soon_threadsafe(self._start_drain)

        def _start_drain(self) -> None:
            # Not in the signal's handler, which may have interrupted another print.
            if say is not None:
                say(_farewell(application.drain.active, drain_seconds))
            self.drained = asyncio.ensure_future(self._drain())

        async def _drain(self) -> None:
            if not await application.drain.wait(drain_seconds, lambda: self.hurried):
                application.cancel_all()
                await application.drain.wait(_CLOSING_SECONDS)
            self.should_exit = True

        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            self.loop = asyncio.get_running_loop()
            await super().startup(sockets)
            if self.started and on_ready is not None:
                on_ready()

    return Server(
        uvicorn.Config(
            application.asgi,
            log_level="warning",
            access_log=False,
            timeout_graceful_shutdown=_CLOSING_SECONDS,
            server_header=False,
        )
    )


def _farewell(active: int, drain_seconds: float) -> str:
    if not active:
        return "shutting down"
    answers = "1 answer" if active == 1 else f"{active} answers"
    return f"shutting down: {answers} may take up to {drain_seconds:g} s; Ctrl-C again stops at once"
