"""Requests and answers of the servers: Ortolan's own, and those of OpenAI, Cohere, Jina, text-embeddings-inference."""

import base64
import json
import time
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import numpy as np
from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .engines import RequestError

Payload = TypeVar("Payload", bound=BaseModel)


class EmbeddingRequest(BaseModel):
    """The body of POST /embed."""

    model_config = ConfigDict(extra="forbid", strict=True)

    texts: list[str] = Field(min_length=1)


class OpenAIEmbeddingRequest(BaseModel):
    """The body of POST /v1/embeddings.

    Attributes:
        input: A text, texts, tokens of a text, or tokens of texts.
        model: Ignored: a server has one model.
        dimensions: Return only the first dimensions, scaled to length 1.
    """

    model_config = ConfigDict(extra="ignore", strict=True)

    input: str | list[str] | list[int] | list[list[int]]
    model: str = ""
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(default=None, ge=1)

    def inputs(self) -> list[str] | list[list[int]]:
        """Return the texts, or their tokens. Raises RequestError (422) if there is no text, or one without tokens."""
        given: Any = self.input
        found: Any = [given] if isinstance(given, str) or (given and isinstance(given[0], int)) else given
        if not found:
            raise RequestError(422, "input has no text; send at least one")
        if [] in found:
            raise RequestError(422, "input has a text without tokens; send at least one token for each text")
        return list(found)


class Document(BaseModel):
    """A document of Cohere and Jina; other fields are ignored."""

    model_config = ConfigDict(extra="ignore", strict=True)

    text: str


class RerankRequest(BaseModel):
    """The body of POST /rerank: documents (Cohere, Jina), or texts (text-embeddings-inference)."""

    model_config = ConfigDict(extra="ignore", strict=True)

    query: str
    documents: list[str | Document] | None = None
    top_n: int | None = Field(default=None, ge=1)
    return_documents: bool = False
    texts: list[str] | None = None
    return_text: bool = False
    raw_scores: Literal[False] = False

    def given(self) -> list[str]:
        """Return the texts. Raises RequestError (422) if there are no texts, or both fields are set."""
        if (self.documents is None) == (self.texts is None):
            raise RequestError(422, "body needs either documents or texts; send one of them")
        found = self.texts if self.documents is None else self.documents
        if not found:
            raise RequestError(422, "body has no text to rank; send at least one")
        return [one if isinstance(one, str) else one.text for one in found]


class GenerationRequest(BaseModel):
    """The body of POST /generate.

    Attributes:
        max_seconds: The longest time, queueing included.
        temperature: As for ortolan.generate.sample; 0: the most likely token.
        top_k: As for ortolan.generate.sample.
        top_p: As for ortolan.generate.sample.
        stream: Return server-sent events: {"piece": "…"} each, and last the answer without stream.
    """

    model_config = ConfigDict(extra="forbid", strict=True)

    prompt: str = Field(min_length=1)
    max_new_tokens: int = Field(default=64, ge=1)
    max_seconds: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    temperature: float = Field(default=0.0, ge=0, le=10, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int = Field(default=0, ge=0)
    stream: bool = False


async def read_request(request: Request, payload: type[Payload], max_bytes: int) -> Payload:
    """Read a request's body.

    Raises:
        RequestError: 413 for too many bytes, 400 if the body is not JSON in UTF-8, 422 for other fields or types.
    """
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > max_bytes:
            raise RequestError(413, f"body has more than {max_bytes} bytes; send less at a time")
    return parse_request(bytes(content), payload)


def parse_request(content: bytes, payload: type[Payload]) -> Payload:
    """Parse a body, as for `read_request`."""
    try:
        said = json.loads(content.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise RequestError(400, f"body is not UTF-8: {error}") from None
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"body is not JSON: {error}") from None
    try:
        # JSON escapes can encode half of a surrogate pair, which is not a character.
        json.dumps(said, ensure_ascii=False).encode("utf-8")
        return payload.model_validate(said)
    except UnicodeEncodeError:
        raise RequestError(422, "a text has half of a surrogate pair; send whole characters") from None
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise RequestError(422, f"{where}: {first['msg']}") from None


def check_characters(texts: Sequence[str], most: int) -> None:
    """Check the lengths of texts. Raises RequestError (413) for a text with too many characters."""
    for number, text in enumerate(texts):
        if len(text) > most:
            raise RequestError(413, f"text {number} has {len(text)} characters, expected at most {most}")


def first_dimensions(vectors: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first dimensions of float32 [texts, width] as unit vectors. Raises RequestError (422) for too few."""
    if dimensions is None:
        return vectors
    if dimensions > vectors.shape[1]:
        raise RequestError(422, f"dimensions is {dimensions}, expected at most the model's {vectors.shape[1]}")
    cut = vectors[:, :dimensions]
    return np.asarray(cut / np.maximum(np.linalg.norm(cut, axis=1, keepdims=True), np.float32(1e-12)))


def openai_embeddings(vectors: np.ndarray, encoding_format: str, model: str, tokens: int) -> dict[str, Any]:
    """Return the answer of POST /v1/embeddings; base64 encodes little-endian float32."""
    encoded: list[Any] = list(vectors.astype("<f4", copy=False))
    if encoding_format == "base64":
        encoded = [base64.b64encode(vector.tobytes()).decode() for vector in encoded]
    return {
        "object": "list",
        "data": [{"object": "embedding", "index": index, "embedding": one} for index, one in enumerate(encoded)],
        "model": model,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def openai_model(model: str) -> dict[str, Any]:
    """Return a model of GET /v1/models."""
    return {"id": model, "object": "model", "created": int(time.time()), "owned_by": "ortolan"}


def openai_error(status: int, message: str) -> dict[str, Any]:
    """Return an error in OpenAI's format."""
    kind = "server_error" if status >= 500 else "rate_limit_error" if status == 429 else "invalid_request_error"
    return {"error": {"message": message, "type": kind, "param": None, "code": None}}


def ranked(asked: RerankRequest, texts: list[str], scores: np.ndarray, model: str, tokens: int) -> Any:
    """Return the answer of POST /rerank in the request's format, the best first; equal scores stay in order."""
    order = [int(index) for index in np.argsort(-scores, kind="stable")][: asked.top_n]
    if asked.documents is None:
        shown: list[dict[str, Any]] = [{"text": texts[index]} if asked.return_text else {} for index in order]
        return [{"index": index, "score": float(scores[index]), **one} for index, one in zip(order, shown, strict=True)]
    shown = [{"document": {"text": texts[index]}} if asked.return_documents else {} for index in order]
    return {
        "model": model,
        "results": [
            {"index": index, "relevance_score": float(scores[index]), **one}
            for index, one in zip(order, shown, strict=True)
        ],
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
