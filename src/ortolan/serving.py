"""Serving with Ray Serve: embeddings, reranking and generation over HTTP, on one machine or many.

    serve run ortolan.serving:embeddings model=fast.onnx replicas=2
    serve run ortolan.serving:generation model=decoder.onnx tokenizer=tokenizer.json

Ray Serve starts, restarts and scales the replicas and distributes the requests. This module defines the replicas.
"""

import asyncio
import json
import logging
import os
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from .engines import EncoderEngine, Generated, GenerationEngine, RequestError
from .errors import OrtolanError
from .session import package_versions
from .text_encoder import BATCH_TOKENS, Tokens
from .token_batches import TokenBatches

try:
    import orjson
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse, Response, StreamingResponse
    from pydantic import BaseModel, ConfigDict, Field, PositiveInt
    from ray import serve
    from ray.serve import Application
    from ray.serve.metrics import Counter, Gauge, Histogram
    from starlette.exceptions import HTTPException
    from starlette.types import Receive, Scope, Send

    from .serving_requests import (
        EmbeddingRequest,
        GenerationRequest,
        OpenAIEmbeddingRequest,
        RerankRequest,
        check_characters,
        first_dimensions,
        openai_embeddings,
        openai_error,
        openai_model,
        ranked,
        read_request,
    )
except ImportError as error:
    packages = "'ray[serve]>=2.60' orjson onnxruntime-extensions tokenizers"
    raise OrtolanError(f"serving needs Ray Serve ({error}); install it with: pip install {packages}") from error

_log = logging.getLogger("ray.serve")
_FAILED = "the server failed; its log has the reason, under this answer's x-request-id"
_SHUTDOWN_SECONDS = 20.0


class ServingConfig(BaseModel):
    """Settings of all servers. Values may be strings, as `serve run` passes them.

    Attributes:
        model: Path of the model, on every machine that runs a replica.
        tokenizer: Path of the tokenizer, on every machine that runs a replica.
        min_replicas: The smallest number of replicas, if Ray Serve scales them.
        max_replicas: The largest number of replicas, if Ray Serve scales them.
        target_ongoing_requests: Ray Serve scales so that each replica has about this number of requests.
        threads: ONNX Runtime's threads of each replica, and the CPUs that Ray counts for it.
        spin: Idle threads wait in a loop.
        max_ongoing_requests: Requests that a replica accepts at a time.
        max_queued_requests: More waiting requests get 503; -1: no limit.
        max_body_bytes: The largest body of a request; larger ones get 413.
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
    """Settings of a server for embeddings or reranking.

    Attributes:
        max_ongoing_requests: Should exceed the number of requests that `max_waiting_tokens` allows.
        max_texts: The largest number of texts in a request; more get 413.
        max_characters: The longest text; longer ones get 413.
        max_tokens: The length to which texts are cut, if the model takes tokens. Default: from the model's folder.
        batch_tokens: Largest number of tokens in a batch. A batch mixes texts of all waiting requests.
        max_waiting_tokens: Limit for the tokens of waiting texts; requests that exceed it get 429.
    """

    max_ongoing_requests: PositiveInt = 2048
    max_texts: PositiveInt = 2048
    max_characters: PositiveInt = 20_000
    max_tokens: PositiveInt | None = None
    batch_tokens: PositiveInt = BATCH_TOKENS
    max_waiting_tokens: PositiveInt = 32 * BATCH_TOKENS


class GenerationConfig(ServingConfig):
    """Settings of a server for generation.

    Attributes:
        tokenizer: Path of tokenizer.json, or of tokenizer.bin of llama2.c.
        max_characters: The longest prompt in characters; longer ones get 413.
        max_prompt_tokens: The longest prompt in tokens; longer ones get 413.
        max_new_tokens: The most new tokens that a request may ask for; more get 422.
        max_context: Tokens of a prompt and its continuation, for models without this limit in their file.
        max_seconds: The default and largest `max_seconds` of a request, queueing included; larger values get 422.
        concurrent: Number of requests that a replica runs at a time; further requests wait.
    """

    tokenizer: str
    max_characters: PositiveInt = 100_000
    max_prompt_tokens: PositiveInt = 1024
    max_new_tokens: PositiveInt = 512
    max_context: int | None = Field(default=None, ge=2)
    max_seconds: float = Field(default=120, gt=0, allow_inf_nan=False)
    concurrent: PositiveInt = 1


def embeddings(config: EmbeddingConfig) -> Application:
    """Return an application of Ray Serve for an embedding model or a reranker.

    Routes of an embedding model: POST /v1/embeddings like OpenAI, and POST /embed {"texts": […]} -> {"embeddings":
    [[…], …]}. Routes of a reranker: POST /rerank like Cohere, Jina and text-embeddings-inference. Both have GET
    /v1/models and GET /health.
    """
    return _deploy(Embeddings, config, _SHUTDOWN_SECONDS)


def generation(config: GenerationConfig) -> Application:
    """Return an application of Ray Serve for a decoder.

    Routes: POST /generate {"prompt": "…"} -> {"text": "…", "tokens": n, "finish_reason": "…"}, and GET /health.
    """
    return _deploy(Generation, config, config.max_seconds + _SHUTDOWN_SECONDS)


def _deploy(deployment: Any, config: ServingConfig, shutdown_seconds: float) -> Application:
    """Return the application. shutdown_seconds: time that a removed replica has to finish its requests."""
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


def _application() -> FastAPI:
    """Return an application without routes, in which errors become JSON: {"error": "…"}, or OpenAI's format."""
    application = FastAPI(title="Ortolan", docs_url=None, redoc_url=None, openapi_url=None)

    def error(request: Request, status: int, message: str, headers: Any = None) -> JSONResponse:
        of_openai = "/v1/" in request.url.path
        return JSONResponse(openai_error(status, message) if of_openai else {"error": message}, status, headers)

    async def refuse(request: Request, found: Exception) -> JSONResponse:
        assert isinstance(found, RequestError)
        wait = {} if found.retry_after is None else {"Retry-After": str(found.retry_after)}
        return error(request, found.status, str(found), wait)

    async def refuse_route(request: Request, found: Exception) -> JSONResponse:
        assert isinstance(found, HTTPException)
        return error(request, found.status_code, str(found.detail), found.headers)

    async def fail(request: Request, _: Exception) -> JSONResponse:
        # Ray Serve gets the exception after this answer, counts it and logs its traceback.
        return error(request, 500, _FAILED)

    application.add_exception_handler(RequestError, refuse)
    application.add_exception_handler(HTTPException, refuse_route)
    application.add_exception_handler(Exception, fail)
    return application


def model_name(model: str) -> str:
    """Return the name of a model file, or of the folder with model.onnx."""
    path = Path(model)
    return path.parent.name if path.name == "model.onnx" and path.parent.name else path.stem


def _json(said: Any) -> Response:
    """Return a JSON response; NumPy arrays become lists, float32 with the shortest digits that identify them."""
    return Response(orjson.dumps(said, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


def _health(config: ServingConfig) -> dict[str, Any]:
    versions = package_versions()
    return {"status": "ok", "model": os.path.basename(config.model), "versions": versions}


class _Runner:
    """Runs computations on its own threads, so that the replica can read requests meanwhile."""

    def __init__(self, threads: int) -> None:
        self._pool = ThreadPoolExecutor(threads)
        self._free = asyncio.Semaphore(threads)

    async def __call__(self, call: Callable[..., Any], *arguments: Any, seconds: float | None = None) -> Any:
        """Run call(*arguments) on a free thread.

        Raises:
            RequestError: 504 if no thread is free within `seconds`.
        """
        try:
            async with asyncio.timeout(seconds):
                await self._free.acquire()
        except TimeoutError:
            raise RequestError(
                504, f"no free thread within {seconds} s; request more (max_seconds), or try again later"
            ) from None
        loop = asyncio.get_running_loop()
        try:
            job = self._pool.submit(call, *arguments)
        except BaseException:
            self._free.release()
            raise
        # The thread is free when the call has ended, even if the caller was cancelled before.
        job.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free.release))
        return await asyncio.wrap_future(job)


def _event(said: dict[str, Any]) -> str:
    return f"data: {json.dumps(said)}\n\n"


async def _events(pieces: "asyncio.Queue[str | None]", work: "asyncio.Task[Generated]") -> AsyncGenerator[str]:
    """Yield the pieces until None, then the result. If the client disconnects, the work is cancelled."""
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
    except Exception:  # the response has begun, so the HTTP status cannot change
        _log.exception("A generation failed.")
        yield _event({"error": _FAILED})


class _EventResponse(StreamingResponse):
    """A stream of events that starts when the first event exists."""

    def __init__(self, first: str, events: AsyncGenerator[str]) -> None:
        self._events, self._said = events, _stream(first, events)
        super().__init__(self._said, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # If the client disconnects, the generators are closed at once, not when they are garbage-collected.
        async with aclosing(self._events), aclosing(self._said):
            await super().__call__(scope, receive, send)


def _ended(work: "asyncio.Task[Generated]") -> None:
    """Read the exception, if any: asyncio logs exceptions that nobody reads, for example of disconnected clients."""
    if not work.cancelled():
        work.exception()


# Ray Serve pickles the classes below with everything that is defined before them.
_embedding_routes, _generation_routes = _application(), _application()


@serve.deployment
@serve.ingress(_embedding_routes)
class Embeddings:
    """A replica with one session and batches of texts from all waiting requests."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Open the model."""
        self._config = EmbeddingConfig(**config)
        self._engine = EncoderEngine(
            self._config.model,
            self._config.tokenizer,
            max_tokens=self._config.max_tokens,
            threads=self._config.threads,
            spin=self._config.spin,
        )
        self._name = model_name(self._config.model)
        self._tokenize, self._run = _Runner(1), _Runner(1)
        self._batches = TokenBatches(
            self._run_batch,
            self._config.batch_tokens,
            self._config.max_waiting_tokens,
            self._engine.encoder.pads,
            self._engine.encoder.length,
            self._count,
        )
        self._texts = Counter("ortolan_texts", description="Texts in batches.")
        self._tokens = Counter("ortolan_tokens", description="Tokens in batches.")
        self._refused = Counter(
            "ortolan_refused", description="Requests refused with 429 because too many tokens waited."
        )
        self._waiting = Gauge("ortolan_waiting_tokens", description="Tokens that wait when a batch starts.")
        self._fill = Histogram(
            "ortolan_batch_fill",
            description="Tokens of a batch as a fraction of batch_tokens.",
            boundaries=[0.1, 0.25, 0.5, 0.75, 0.9, 1],
        )

    @_embedding_routes.post("/embed")
    async def embed(self, request: Request) -> Response:
        """Return one vector for each text."""
        given = await read_request(request, EmbeddingRequest, self._config.max_body_bytes)
        self._check(given.texts)
        vectors, _ = await self._answers(self._engine.encoder.tokenize, given.texts)
        return _json({"embeddings": vectors})

    @_embedding_routes.post("/v1/embeddings")
    async def openai_embeddings(self, request: Request) -> Response:
        """Return embeddings like https://platform.openai.com/docs/api-reference/embeddings."""
        given = await read_request(request, OpenAIEmbeddingRequest, self._config.max_body_bytes)
        inputs: Any = given.inputs()
        if isinstance(inputs[0], str):
            self._check(inputs)
            vectors, tokens = await self._answers(self._engine.encoder.tokenize, inputs)
        else:
            self._check_count(inputs)
            vectors, tokens = await self._answers(self._engine.encoder.tokenize_ids, inputs)
        vectors = first_dimensions(vectors, given.dimensions)
        return _json(openai_embeddings(vectors, given.encoding_format, self._name, tokens))

    @_embedding_routes.post("/rerank")
    @_embedding_routes.post("/v1/rerank")
    async def rerank(self, request: Request) -> Response:
        """Return the scores of texts, the best first."""
        given = await read_request(request, RerankRequest, self._config.max_body_bytes)
        texts = given.given()
        self._check([given.query, *texts])
        scores, tokens = await self._answers(self._engine.encoder.tokenize_pairs, given.query, texts)
        return _json(ranked(given, texts, scores, self._name, tokens))

    def _check_count(self, texts: Sequence[Any]) -> None:
        if len(texts) > self._config.max_texts:
            raise RequestError(413, f"request has {len(texts)} texts, expected at most {self._config.max_texts}")

    def _check(self, texts: Sequence[str]) -> None:
        self._check_count(texts)
        check_characters(texts, self._config.max_characters)

    async def _answers(self, tokenize: Callable[..., list[Tokens]], *given: Any) -> tuple[np.ndarray, int]:
        """Return the texts' vectors or scores, and their number of tokens."""
        try:
            self._batches.check()  # refuse before any work is done
            try:
                texts: list[Tokens] = await self._tokenize(tokenize, *given)
            except OrtolanError as error:  # the model is of another kind, or a token is unknown
                raise RequestError(422, str(error)) from None
            answers = await self._batches.answer(texts)
        except RequestError as error:
            if error.status == 429:
                self._refused.inc()
            raise
        for number, answer in enumerate(answers):
            if isinstance(answer, Exception):
                _log.error("Text %d could not be run.", number, exc_info=answer)
                raise RequestError(500, f"text {number} could not be run: {_FAILED}")
        return np.stack(answers), sum(map(len, texts))

    def _count(self, texts: int, tokens: int) -> None:
        self._texts.inc(texts)
        if tokens:
            self._tokens.inc(tokens)
        self._waiting.set(self._batches.waiting_tokens)
        self._fill.observe(max(tokens, 1) / self._config.batch_tokens)

    async def _run_batch(self, texts: list[Tokens]) -> Sequence[Any]:
        answers: Sequence[Any] = await self._run(self._engine.run_each, texts)
        return answers

    @_embedding_routes.get("/v1/models")
    async def openai_models(self) -> dict[str, Any]:
        """List the model."""
        return {"object": "list", "data": [openai_model(self._name)]}

    @_embedding_routes.get("/health")
    async def health(self) -> dict[str, Any]:
        """Return a fixed answer, which shows that the replica responds."""
        return _health(self._config)

    async def check_health(self) -> None:
        """Run one text. Ray Serve calls this regularly and replaces a replica that fails."""
        await self._run(self._engine.check)


@serve.deployment
@serve.ingress(_generation_routes)
class Generation:
    """A replica with one session, and a cache for each request."""

    def __init__(self, config: dict[str, Any]) -> None:
        """Open the model."""
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
        self._run_check = _Runner(1)  # a separate thread: checks must not wait for requests that take minutes
        self._tokens = Counter("ortolan_generated_tokens", description="Tokens that were generated.")
        self._ended = Counter("ortolan_generations", description="Generations that ended.", tag_keys=("finish_reason",))

    @_generation_routes.post("/generate")
    async def generate(self, request: Request) -> Response:
        """Continue a prompt."""
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
        # Wait for the first event: if the request is refused, it raises.
        first = await anext(events)
        return _EventResponse(first, events)

    async def _continue(self, given: GenerationRequest, on_text: Callable[[str], None] | None = None) -> Generated:
        """Wait for a free thread, and generate."""
        seconds = given.max_seconds or self._config.max_seconds
        deadline = time.monotonic() + seconds
        cancelled = threading.Event()
        try:
            made: Generated = await self._run(self._generate, given, deadline, cancelled, on_text, seconds=seconds)
            return made
        finally:
            cancelled.set()  # stop the thread if the client has disconnected

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
        """Return a fixed answer, which shows that the replica responds."""
        return _health(self._config)

    async def check_health(self) -> None:
        """Generate one token, as in `Embeddings.check_health`."""
        await self._run_check(self._engine.generate, "", 1)
