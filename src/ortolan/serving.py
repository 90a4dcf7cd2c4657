"""Serving with Ray Serve: embeddings and generation over HTTP, on one machine or many.

    serve run ortolan.serving:embeddings model=fast.onnx replicas=2
    serve run ortolan.serving:generation model=decoder.onnx tokenizer=tokenizer.json

Ray Serve starts, restarts and scales the replicas and spreads the requests; here stands what a replica does with one.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from typing import Any, TypeVar

from .engines import EmbeddingEngine, Generated, GenerationEngine, RequestError
from .errors import OrtolanError
from .session import package_versions

try:
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError
    from ray import serve
    from ray.serve import Application
    from ray.serve.metrics import Counter
    from starlette.exceptions import HTTPException
    from starlette.types import Receive, Scope, Send
except ImportError as error:
    raise OrtolanError(f"serving needs Ray Serve ({error}); install it with: pip install 'ortolan[serve]'") from error

_log = logging.getLogger("ray.serve")
_FAILED = "the server failed; its log says why, under this answer's x-request-id"
_SHUTDOWN_SECONDS = 20.0
Payload = TypeVar("Payload", bound=BaseModel)


class ServingConfig(BaseModel):
    """What both kinds of servers are told. Values may be given as text, as `serve run` does.

    model, tokenizer: paths, on every machine that runs a replica. replicas: how many; or min_replicas and max_replicas,
    between which Ray Serve scales to target_ongoing_requests of each. threads: of ONNX Runtime for each replica, and
    the CPUs that Ray counts for it. spin: idle threads wait in a loop. max_queued_requests: more get 503 (-1: no
    limit). max_body_bytes: of a request; larger ones get 413.
    """

    model_config = ConfigDict(extra="forbid")

    model: str
    tokenizer: str | None = None
    replicas: PositiveInt = 1
    min_replicas: PositiveInt | None = None
    max_replicas: PositiveInt | None = None
    target_ongoing_requests: PositiveInt = 4
    threads: PositiveInt = 1
    spin: bool = False
    max_ongoing_requests: PositiveInt = 64
    max_queued_requests: int = 1000
    max_body_bytes: PositiveInt = 1 << 20


class EmbeddingConfig(ServingConfig):
    """max_texts: of a request, more get 413. max_characters: of a text, likewise. max_tokens: what texts are cut to, if
    the model takes tokens (one that takes texts knows by itself). batch_size: texts of all requests that run as one
    batch; batch_wait: seconds to wait for them."""

    max_texts: PositiveInt = 128
    max_characters: PositiveInt = 20_000
    max_tokens: PositiveInt = 256
    batch_size: PositiveInt = 16
    batch_wait: float = Field(default=0.002, ge=0, le=1)


class GenerationConfig(ServingConfig):
    """max_characters, max_prompt_tokens: of a prompt, more get 413. max_new_tokens, max_seconds: that a request may ask
    for, more get 422; max_seconds, waiting included, is also what a request has that asks for none. max_context: tokens
    of a prompt and its continuation, of a model whose file does not say. concurrent: requests that one replica runs at
    a time; others wait."""

    tokenizer: str
    max_characters: PositiveInt = 100_000
    max_prompt_tokens: PositiveInt = 1024
    max_new_tokens: PositiveInt = 512
    max_context: int | None = Field(default=None, ge=2)
    max_seconds: float = Field(default=120, gt=0, allow_inf_nan=False)
    concurrent: PositiveInt = 1


class EmbeddingRequest(BaseModel):
    """The body of POST /embed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: list[str] = Field(min_length=1)


class GenerationRequest(BaseModel):
    """The body of POST /generate. temperature 0 takes the likeliest token; see ortolan.generate.sample. stream:
    the answer is a stream of server-sent events, {"piece": "…"} each, and at last what it is without stream."""

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(default=64, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    stream: bool = False


def embeddings(config: EmbeddingConfig) -> Application:
    """An application of Ray Serve: POST /embed {"texts": […]} -> {"embeddings": [[…], …]}; GET /health."""
    return _deploy(Embeddings, config, _SHUTDOWN_SECONDS)


def generation(config: GenerationConfig) -> Application:
    """An application of Ray Serve: POST /generate {"prompt": "…"} -> {"text": "…", "tokens": n, "finish_reason": "…"};
    GET /health."""
    return _deploy(Generation, config, config.max_seconds + _SHUTDOWN_SECONDS)


def _deploy(deployment: Any, config: ServingConfig, shutdown_seconds: float) -> Application:
    """shutdown_seconds: that a replica has to end its requests when it is taken away."""
    scale: dict[str, Any] = {"num_replicas": config.replicas}
    if config.min_replicas is not None or config.max_replicas is not None:
        least = config.min_replicas or 1
        scale = {
            "autoscaling_config": {
                "min_replicas": least,
                "max_replicas": config.max_replicas or max(least, config.replicas),
                "target_ongoing_requests": config.target_ongoing_requests,
            }
        }
    application: Application = deployment.options(
        **scale,
        max_ongoing_requests=config.max_ongoing_requests,
        max_queued_requests=config.max_queued_requests,
        graceful_shutdown_timeout_s=shutdown_seconds,
        ray_actor_options={"num_cpus": config.threads},
    ).bind(config.model_dump())
    return application


async def read_request(request: Request, payload: type[Payload], max_bytes: int) -> Payload:
    """Reads a request's body. Raises RequestError: 413 for more bytes, 400 for what is no JSON in UTF-8, 422 for JSON
    of another form."""
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_bytes:
            raise RequestError(413, f"the body has more than {max_bytes} bytes; send less at a time")
    return parse_request(bytes(content), payload)


def parse_request(content: bytes, payload: type[Payload]) -> Payload:
    """See read_request."""
    try:
        said = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from None
    try:
        # Escapes of JSON can write half a character, which is no text.
        json.dumps(said, ensure_ascii=False).encode("utf-8")
        return payload.model_validate(said)
    except UnicodeEncodeError:
        raise RequestError(422, "a text holds half of a surrogate pair; send whole characters") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "the body"
        raise RequestError(422, f"{where}: {first['msg']}") from None


def check_characters(texts: list[str], most: int) -> None:
    """Raises RequestError 413."""
    for number, text in enumerate(texts):
        if len(text) > most:
            raise RequestError(413, f"text {number} has {len(text)} characters, expected at most {most}")


def _application() -> FastAPI:
    """Routes are added by each class; errors become JSON here: {"error": "…"}."""
    application = FastAPI(title="Ortolan", docs_url=None, redoc_url=None, openapi_url=None)

    async def refuse(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestError)
        return JSONResponse({"error": str(error)}, error.status)

    async def refuse_route(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return JSONResponse({"error": error.detail}, error.status_code, error.headers)

    async def fail(_: Request, error: Exception) -> JSONResponse:
        # Ray Serve gets the exception after this answer, counts it and logs its traceback.
        return JSONResponse({"error": _FAILED}, 500)

    application.add_exception_handler(RequestError, refuse)
    application.add_exception_handler(HTTPException, refuse_route)
    application.add_exception_handler(Exception, fail)
    return application


def _health(config: ServingConfig) -> dict[str, Any]:
    versions = package_versions()
    return {"status": "ok", "model": os.path.basename(config.model), "versions": versions}


class _Runner:
    """Runs what computes on threads of its own, so that the replica can go on to read requests."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._free = asyncio.Semaphore(threads)

    async def __call__(self, call: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """call(*arguments). seconds: to wait for a free thread. Raises RequestError 504 where there was none."""
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise RequestError(
                504, f"other requests took all of {seconds} s; ask for more (max_seconds), or try again later"
            ) from None
        loop = asyncio.get_running_loop()
        try:
            job = self._pool.submit(call, *arguments)
        except BaseException:
            self._free.release()
            raise
        # When the thread has ended: one whose caller was cancelled works on, and is not free for the next.
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
        return await asyncio.wrap_future(job)


def _event(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said)}\n\n"


async def _events(pieces: "asyncio.Queue[str | None]", work: "asyncio.Task[Generated]") -> AsyncGenerator[str]:
    """The pieces up to None, then the result. Ends the work where it is ended itself, as its client went away."""
    try:
        while (piece := await pieces.get()) is not None:
            yield _event({"piece": piece})
        yield _event(asdict(work.result()))
    finally:
        work.cancel()


async def _stream(first: str, events: AsyncGenerator[str]) -> AsyncGenerator[str]:
    yield first
    try:
        async for event in events:
            yield event
    except Exception:  # too late for a status
        _log.exception("A generation failed.")
        yield _event({"error": _FAILED})


class _EventResponse(StreamingResponse):
    """The first event, sent after it is at hand, and the others."""

    def __init__(self, first: str, events: AsyncGenerator[str]) -> None:
        self._events, self._said = events, _stream(first, events)
        super().__init__(self._said, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # A client that goes away ends this at any event, or before the first: then too, its generation ends now, and
        # not when the generators are collected.
        async with aclosing(self._events), aclosing(self._said):
            await super().__call__(scope, receive, send)


def _ended(work: "asyncio.Task[Generated]") -> None:
    """Reads the exception, if any: asyncio logs those that are not read, as when the client is gone."""
    if not work.cancelled():
        work.exception()


# Ray Serve sends the classes below to its processes with what is defined by then.
_embedding_routes, _generation_routes = _application(), _application()


@serve.deployment
@serve.ingress(_embedding_routes)
class Embeddings:
    """A replica: one session, and batches of texts out of all requests at hand."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = EmbeddingConfig(**config)
        self._engine = EmbeddingEngine(
            self._config.model,
            self._config.tokenizer,
            max_tokens=self._config.max_tokens,
            threads=self._config.threads,
            spin=self._config.spin,
        )
        self._run = _Runner(1)
        self._texts = Counter("ortolan_texts", description="Texts that went into batches.")
        batch: Any = self._embed_text
        batch.set_max_batch_size(self._config.batch_size)
        batch.set_batch_wait_timeout_s(self._config.batch_wait)

    @_embedding_routes.post("/embed")
    async def embed(self, request: Request) -> JSONResponse:
        """One vector a text."""
        given = await read_request(request, EmbeddingRequest, self._config.max_body_bytes)
        if len(given.texts) > self._config.max_texts:
            raise RequestError(413, f"there are {len(given.texts)} texts, expected at most {self._config.max_texts}")
        check_characters(given.texts, self._config.max_characters)
        embed_text: Any = self._embed_text
        vectors = await asyncio.gather(*map(embed_text, given.texts))
        for number, vector in enumerate(vectors):
            if isinstance(vector, Exception):
                _log.error("Text %d could not be embedded.", number, exc_info=vector)
                raise RequestError(500, f"text {number} could not be embedded: {_FAILED}")
        return JSONResponse({"embeddings": [vector.tolist() for vector in vectors]})

    @serve.batch
    async def _embed_text(self, texts: list[str]) -> list[Any]:
        """A vector or an exception of each: raised, it would reach the requests of all."""
        self._texts.inc(len(texts))
        vectors: list[Any] = await self._run(self._engine.embed_each, texts)
        return vectors

    @_embedding_routes.get("/health")
    async def health(self) -> dict[str, Any]:
        """Whether a replica answers."""
        return _health(self._config)

    async def check_health(self) -> None:
        """Asked by Ray Serve now and then; a replica that fails is replaced."""
        await self._run(self._engine.embed, ["health"])


@serve.deployment
@serve.ingress(_generation_routes)
class Generation:
    """A replica: one session, one cache a request."""

    def __init__(self, config: dict[str, Any]) -> None:
        self._config = GenerationConfig(**config)
        self._engine = GenerationEngine(
            self._config.model,
            self._config.tokenizer,
            max_prompt_tokens=self._config.max_prompt_tokens,
            max_context=self._config.max_context,
            threads=self._config.threads,
            spin=self._config.spin,
        )
        self._run = _Runner(self._config.concurrent)
        self._run_check = _Runner(1)  # behind requests that take minutes, a check would fail
        self._tokens = Counter("ortolan_generated_tokens", description="Tokens that were generated.")
        self._ended = Counter("ortolan_generations", description="Generations that ended.", tag_keys=("finish_reason",))

    @_generation_routes.post("/generate")
    async def generate(self, request: Request) -> Response:
        """The prompt, continued."""
        given = await read_request(request, GenerationRequest, self._config.max_body_bytes)
        check_characters([given.prompt], self._config.max_characters)
        if given.max_new_tokens > self._config.max_new_tokens:
            raise RequestError(
                422, f"max_new_tokens: {given.max_new_tokens}, expected at most {self._config.max_new_tokens}"
            )
        if given.max_seconds is not None and given.max_seconds > self._config.max_seconds:
            raise RequestError(422, f"max_seconds: {given.max_seconds}, expected at most {self._config.max_seconds}")
        if not given.stream:
            return JSONResponse(asdict(await self._continue(given)))
        pieces: asyncio.Queue[str | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def tell(piece: str) -> None:
            loop.call_soon_threadsafe(pieces.put_nowait, piece)

        work = loop.create_task(self._continue(given, tell))
        work.add_done_callback(lambda _: pieces.put_nowait(None))
        work.add_done_callback(_ended)
        events = _events(pieces, work)
        # Only now, when there is a first event, is it known whether the request is refused.
        first = await anext(events)
        return _EventResponse(first, events)

    async def _continue(self, given: GenerationRequest, on_text: Callable[[str], None] | None = None) -> Generated:
        """Waits for a turn, and generates."""
        seconds = given.max_seconds or self._config.max_seconds
        deadline = time.monotonic() + seconds
        cancelled = threading.Event()
        try:
            made: Generated = await self._run(self._generate, given, deadline, cancelled, on_text, seconds=seconds)
            return made
        finally:
            cancelled.set()  # the client may be gone, and the thread still at work

    def _generate(
        self,
        given: GenerationRequest,
        deadline: float,
        cancelled: threading.Event,
        on_text: Callable[[str], None] | None,
    ) -> Generated:
        made = self._engine.generate(
            given.prompt,
            given.max_new_tokens,
            temperature=given.temperature,
            top_k=given.top_k,
            top_p=given.top_p,
            seed=given.seed,
            deadline=deadline,
            cancelled=cancelled,
            on_text=on_text,
        )
        self._tokens.inc(made.tokens)
        self._ended.inc(tags={"finish_reason": made.finish_reason})
        return made

    @_generation_routes.get("/health")
    async def health(self) -> dict[str, Any]:
        """Whether a replica answers."""
        return _health(self._config)

    async def check_health(self) -> None:
        """See Embeddings.check_health."""
        await self._run_check(self._engine.generate, "", 1)
