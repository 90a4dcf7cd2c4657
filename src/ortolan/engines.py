"""What a server does with requests, without the server: texts to vectors, prompts to texts, and what is refused."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ortolan.graph_passes.text_input import EMBEDDING, TEXT_INPUT

from .errors import OrtolanError, SessionError, listing
from .session import create_session

if TYPE_CHECKING:
    import onnxruntime

_SPINNING = "session.intra_op.allow_spinning"


def serving_options(threads: int, spin: bool = False) -> onnxruntime.SessionOptions:
    """Session options of one replica of several on a machine.

    threads: of ONNX Runtime's pool. spin: idle threads wait in a loop, which answers sooner and keeps cores busy.
    """
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.add_session_config_entry(_SPINNING, "1" if spin else "0")
    return options


class RequestError(OrtolanError):
    """A request that is not served. status: of HTTP, 4xx."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class EmbeddingEngine:
    """Texts to vectors."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        max_tokens: int = 256,
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        """model: one that takes texts (optimize_onnx(with_tokenizer=…)); or an encoder that takes tokens, and then
            tokenizer is its tokenizer.json, vectors are means of the tokens' vectors, of length 1, and longer texts are
            cut to max_tokens.

        Raises SessionError, or OrtolanError for a model that gives no vectors.
        """
        self._session = create_session(model, serving_options(threads, spin))
        inputs = [value.name for value in self._session.get_inputs()]
        self._encoder = None
        if inputs == [TEXT_INPUT]:
            return
        if tokenizer is None:
            raise SessionError(
                f"model {os.fspath(model)!r} takes {listing(inputs)}, not texts: give its tokenizer.json, or "
                "optimize it with_tokenizer (--with-tokenizer)"
            )
        from ortolan.models.embed import SentenceEncoder

        self._encoder = SentenceEncoder(self._session, tokenizer, max_tokens)

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        """float32 [len(texts), hidden]."""
        if self._encoder is not None:
            return self._encoder.encode(texts)
        # The tokenizer in the graph takes NUL for the end of a text; it drops both characters.
        given = np.array([text.replace("\0", "\1") for text in texts], object)
        return np.asarray(self._session.run([EMBEDDING], {TEXT_INPUT: given})[0])


@dataclass(frozen=True)
class Generated:
    """The new text; its number of tokens; whether the model ended it ("stop") or the limit did ("length")."""

    text: str
    tokens: int
    finish_reason: str


class GenerationEngine:
    """Prompts to texts. Calls may come from several threads; each has a cache of its own."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str],
        *,
        max_prompt_tokens: int = 1024,
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        """model: a decoder with a cache, as ortolan.models.generate.Decoder takes it. tokenizer: its tokenizer.json, or
            tokenizer.bin of llama2.c.

        Raises SessionError, or OrtolanError for a model that is no decoder.
        """
        from ortolan.models.generate import Decoder, read_head_size
        from ortolan.models.tokenizer import load_tokenizer

        self._session = create_session(model, serving_options(threads, spin))
        self._head_size = read_head_size(model) if os.path.isfile(model) else None
        self._tokenizer = load_tokenizer(tokenizer)
        self._max_prompt_tokens = max_prompt_tokens
        Decoder(self._session, head_size=self._head_size)  # refuses other models now, not at the first request

    def generate(
        self,
        prompt: str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
    ) -> Generated:
        """Continues a prompt. Raises RequestError for one of too many tokens."""
        from ortolan.models.generate import Decoder, generate

        ids = [self._tokenizer.start, *self._tokenizer.encode(prompt)]
        if len(ids) > self._max_prompt_tokens:
            raise RequestError(
                413, f"the prompt has {len(ids)} tokens, expected at most {self._max_prompt_tokens}; shorten it"
            )
        made = generate(
            Decoder(self._session, head_size=self._head_size),
            ids,
            max_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=self._tokenizer.stop,
        )
        reason = "length" if len(made) == max_new_tokens else "stop"
        return Generated(self._tokenizer.decode(made), len(made), reason)
