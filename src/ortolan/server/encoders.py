"""Embeddings like OpenAI's, and reranking like that of Cohere, Jina and text-embeddings-inference."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from ..engines import EncoderEngine, RequestError
from ..errors import OrtolanError
from ..text_encoder import BATCH_TOKENS
from ..token_batches import TokenBatches
from .errors import FAILED, ApiError, log_failure
from .fields import Fields, refuse
from .http import GONE, json_response, read_body, unless_gone

if TYPE_CHECKING:
    from ..tokens import Tokens
    from .metrics import EncoderMetrics
    from .settings import Limits

_INPUT = "a text, texts, tokens of a text, or tokens of texts"
_MOST_DIMENSIONS = 1 << 20


class Encoders:
    """An embedding model or a reranker, with batches over the texts of all waiting requests."""

    def __init__(
        self,
        engine: EncoderEngine,
        name: str,
        limits: Limits,
        metrics: EncoderMetrics,
        batch_tokens: int = BATCH_TOKENS,
    ) -> None:
        """Wrap a model.

        Args:
            engine: The model.
            name: Its name in answers.
            limits: The limits on requests.
            metrics: Counts texts and batches.
            batch_tokens: The largest number of tokens in a batch.
        """
        self._engine, self._name, self._limits, self._metrics = engine, name, limits, metrics
        self._batch_tokens = batch_tokens
        self._tokenizing = ThreadPoolExecutor(1, "ortolan-tokenize")
        self._running = ThreadPoolExecutor(1, "ortolan-encode")
        encoder = engine.encoder
        self._batches = TokenBatches(
            self._run_batch, batch_tokens, limits.waiting_tokens, encoder.pads, encoder.length, self._count
        )

    async def check(self) -> None:
        """Run one text or pair, and raise the error if it fails."""
        await asyncio.get_running_loop().run_in_executor(self._running, self._engine.check)

    def close(self) -> None:
        """End the threads."""
        for pool in (self._tokenizing, self._running):
            pool.shutdown(wait=False, cancel_futures=True)

    async def embed(self, request: Request) -> Response:
        """Answer POST /v1/embeddings."""
        body = await read_body(request, self._limits)
        form = body.choice("encoding_format", "float", ("float", "base64"))
        dimensions = body.integer("dimensions", None, 1, _MOST_DIMENSIONS)
        texts = self._inputs(body)
        encoder = self._engine.encoder
        tokenize: Any = encoder.tokenize if isinstance(texts[0], str) else encoder.tokenize_ids
        found = await unless_gone(request, self._answers("input", tokenize, texts))
        if found is None:
            return Response(status_code=GONE)
        vectors, tokens = found
        return json_response(embedding_list(first_dimensions(vectors, dimensions), form, self._name, tokens))

    async def rerank(self, request: Request) -> Response:
        """Answer POST /rerank."""
        body = await read_body(request, self._limits)
        query = self._text("query", body.require("query", "a string"))
        texts = self._ranked_texts(body)
        top_n = body.integer("top_n", None, 1, 1 << 31)
        shows = body.boolean("return_documents" if body.get("documents") is not None else "return_text")
        body.refuse_unless("raw_scores", False, why="scores are those of the model's activation")
        found = await unless_gone(
            request, self._answers("documents", self._engine.encoder.tokenize_pairs, query, texts)
        )
        if found is None:
            return Response(status_code=GONE)
        scores, tokens = found
        order = [int(index) for index in np.argsort(-scores, kind="stable")][:top_n]
        if body.get("documents") is None:
            return json_response(
                [
                    {"index": index, "score": float(scores[index]), **({"text": texts[index]} if shows else {})}
                    for index in order
                ]
            )
        results = [
            {
                "index": index,
                "relevance_score": float(scores[index]),
                **({"document": {"text": texts[index]}} if shows else {}),
            }
            for index in order
        ]
        return json_response({"model": self._name, "results": results, "usage": _usage(tokens)})

    def _inputs(self, body: Fields) -> list[Any]:
        """Return texts, or tokens of texts."""
        given = body.require("input", _INPUT)
        found = (
            [given] if isinstance(given, str) or (isinstance(given, list) and given and _is_token(given[0])) else given
        )
        if not isinstance(found, list) or not found:
            raise body.refuse("input", _INPUT)
        self._check_count(found)
        texts = isinstance(found[0], str)
        for number, one in enumerate(found):
            if texts:
                self._text(f"input[{number}]", one)
            elif not isinstance(one, list) or not one or not all(map(_is_token, one)):
                raise refuse(f"input[{number}]", one, "tokens, at least one")
        return found

    def _ranked_texts(self, body: Fields) -> list[str]:
        """Return the documents (Cohere, Jina) or texts (text-embeddings-inference)."""
        name = "documents" if body.get("documents") is not None else "texts"
        if name == "documents" and body.get("texts") is not None:
            raise body.refuse("texts", "no value, because there are documents")
        given = body.require(name, "an array of texts")
        if not isinstance(given, list) or not given:
            raise body.refuse(name, "an array of texts, at least one")
        self._check_count(given)
        documents = name == "documents"
        return [
            self._text(f"{name}[{number}]", one.get("text") if documents and isinstance(one, dict) else one)
            for number, one in enumerate(given)
        ]

    def _check_count(self, texts: Sequence[Any]) -> None:
        if len(texts) > self._limits.texts:
            raise ApiError(413, f"request has {len(texts)} texts, expected at most {self._limits.texts}")

    def _text(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise refuse(name, value, "a string")
        if len(value) > self._limits.text_characters:
            raise ApiError(
                413, f"{name} has {len(value)} characters, expected at most {self._limits.text_characters}", param=name
            )
        return value

    async def _answers(self, param: str, tokenize: Callable[..., list[Tokens]], *given: Any) -> tuple[np.ndarray, int]:
        """Return the texts' vectors or scores, and their number of tokens."""
        loop = asyncio.get_running_loop()
        try:
            self._batches.check()  # refuse before any work is done
            try:
                texts = await loop.run_in_executor(self._tokenizing, tokenize, *given)
            except OrtolanError as error:  # the model is of another kind, or a token is unknown
                raise ApiError(400, str(error), param=param) from None
            answers = await self._batches.answer(texts)
        except RequestError as error:
            if error.status == 429:
                self._metrics.refused.inc()
            raise
        for number, answer in enumerate(answers):
            if isinstance(answer, Exception):
                log_failure(f"text {number} could not be run", answer)
                raise ApiError(500, f"text {number} could not be run: {FAILED}")
        return np.stack(answers), sum(map(len, texts))

    async def _run_batch(self, texts: list[Tokens]) -> Sequence[Any]:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._running, self._engine.run_each, texts)

    def _count(self, texts: int, tokens: int) -> None:
        self._metrics.texts.inc(texts)
        self._metrics.tokens.inc(tokens)
        self._metrics.waiting.set(self._batches.waiting_tokens)
        self._metrics.fill.observe(max(tokens, 1) / self._batch_tokens)


def _is_token(value: Any) -> bool:
    return type(value) is int


def first_dimensions(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first dimensions of float32 [texts, width] as unit vectors.

    Raises:
        ApiError: 400 for more dimensions than the model has.
    """
    if dimensions is None:
        return vectors
    if dimensions > vectors.shape[1]:
        raise ApiError(
            400, f"dimensions is {dimensions}, expected at most the model's {vectors.shape[1]}", param="dimensions"
        )
    cut = vectors[:, :dimensions]
    return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.float32(1e-12)))


def embedding_list(vectors: np.ndarray, encoding_format: str, model: str, tokens: int) -> dict[str, Any]:
    """Return the answer of POST /v1/embeddings; base64 encodes little-endian float32."""
    encoded: list[Any] = list(vectors.astype("<f4", copy=False))
    if encoding_format == "base64":
        encoded = [base64.b64encode(vector.tobytes()).decode() for vector in encoded]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(encoded)],
        "model": model,
        "usage": _usage(tokens),
    }


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}
