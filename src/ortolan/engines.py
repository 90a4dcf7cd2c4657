"""What a server does with requests, without the server: texts to vectors, prompts to texts, and what is refused."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ortolan.graph_passes.files.model_file import model_in
from ortolan.graph_passes.text.text_plan import TextInput

from .errors import OrtolanError
from .session import create_session, new_options
from .text_encoder import TextEncoder, Tokens

if TYPE_CHECKING:
    import onnxruntime

_SPINNING = "session.intra_op.allow_spinning"


def serving_options(threads: int, spin: bool = False) -> onnxruntime.SessionOptions:
    """Session options of one replica of several on a machine.

    threads: of ONNX Runtime's pool. spin: idle threads wait in a loop, which answers sooner and keeps cores busy.
    """
    options = new_options()
    options.intra_op_num_threads = threads
    options.add_session_config_entry(_SPINNING, "1" if spin else "0")
    return options


class RequestError(OrtolanError):
    """A request that is not served. status: of HTTP; 4xx, or 5xx where the request is not to blame. retry_after:
    seconds until the same request may be served."""

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class EncoderEngine:
    """Texts to vectors, or pairs of texts to scores."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        max_tokens: int | None = None,
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        """model: one that takes texts (optimize_onnx(texts_in=True)); or an encoder that takes tokens: its folder says
            how vectors are made of them (see TextEncoder), tokenizer is its tokenizer.json where none lies beside it,
            and longer texts are cut to max_tokens (None: as the folder says).

        Raises SessionError, or ModelError for a model that gives neither vectors nor scores.
        """
        options = serving_options(threads, spin)
        self.encoder = TextEncoder(model, tokenizer, TextInput(max_tokens=max_tokens), options)

    def check(self) -> None:
        """Raises what a text or pair raises."""
        if self.encoder.kind == "reranker":
            self.encoder.score("health", ["health"])
        else:
            self.encoder.encode(["health"])

    def run_each(self, batch: Sequence[Tokens]) -> list[np.ndarray | Exception]:
        """The vector, float32 [width], or score, float32 [], of each, or why there is none: where a batch fails, its
        texts run one by one, so that one bad text fails alone."""
        try:
            found = self.encoder.run(batch)
        except Exception as error:
            failure = error
        else:
            unfit = OrtolanError("the model's answer has numbers that are not finite")
            return [one if np.isfinite(one).all() else unfit for one in found]
        return [failure] if len(batch) == 1 else [self.run_each([text])[0] for text in batch]


@dataclass(frozen=True)
class Generated:
    """The new text; its number of tokens; what ended it: the model ("stop"), the number of tokens ("length"), the time
    ("deadline"), or the caller ("cancelled")."""

    text: str
    tokens: int
    finish_reason: str


class GenerationEngine:
    """Prompts to texts. Calls may come from several threads; each has a cache of its own.

    context: how many tokens a prompt and its continuation may have together; None: no limit is known.
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str],
        *,
        max_prompt_tokens: int = 1024,
        max_context: int | None = None,
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        """model: a decoder with a cache, as ortolan.generate.Decoder takes it. tokenizer: its tokenizer.json, or
            tokenizer.bin of llama2.c. max_context: makes context smaller than the model's tables of positions do, or
            sets it where the model has none.

        Raises SessionError, or OrtolanError for a model that is no decoder.
        """
        import onnx_ir as ir

        from ortolan.generate import Decoder, read_context, read_head_size
        from ortolan.models.tokenizer import load_tokenizer

        self._session = create_session(model, serving_options(threads, spin))
        graph = ir.load(model_in(Path(model)) if os.path.isdir(model) else model)
        self._head_size = read_head_size(graph)
        self._tokenizer = load_tokenizer(tokenizer)
        # Refuses other models now, not at the first request.
        decoder = Decoder(self._session, head_size=self._head_size)
        positions = read_context(graph)
        known = [limit for limit in (positions and positions - decoder.prompt_tokens, max_context) if limit is not None]
        self.context = min(known, default=None)
        self._max_prompt_tokens = min([max_prompt_tokens, *(limit - 1 for limit in known)])

    def generate(
        self,
        prompt: str,
        max_new_tokens: int,
        *,
        temperature: float = 0.0,
        top_k: int = 0,
        top_p: float = 1.0,
        seed: int = 0,
        deadline: float | None = None,
        cancelled: threading.Event | None = None,
        on_text: Callable[[str], None] | None = None,
    ) -> Generated:
        """Continues a prompt.

        deadline: of time.monotonic(); no token is begun after it. cancelled: once it is set, likewise. on_text: is
        called with each new piece of the text.

        Raises RequestError: 413 for a prompt of too many tokens, 422 for more new ones than fit behind it, 504 where
        the deadline passed before the first.
        """
        from ortolan.generate import Decoder, generate_tokens

        begun = time.monotonic()
        ids = self._encode(prompt, max_new_tokens)
        tokens = generate_tokens(
            Decoder(self._session, head_size=self._head_size),
            ids,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop=self._tokenizer.stop,
        )
        made: list[int] = []
        told, reason = 0, "length"
        while len(made) < max_new_tokens:
            if cancelled is not None and cancelled.is_set():
                reason = "cancelled"
                break
            if deadline is not None and time.monotonic() >= deadline:
                reason = "deadline"
                break
            token = next(tokens, None)
            if token is None:
                reason = "stop"
                break
            made.append(token)
            # Of a character of several tokens, all but the last decode to the replacement character. All tokens are
            # decoded, 20 ms for 512 of them one after the other: what decoders make of the last ones alone, as at a
            # space or in bytes, differs, and the pieces must join to the text.
            if on_text is not None and not (text := self._tokenizer.decode(made)).endswith("\ufffd"):
                on_text(text[told:])
                told = len(text)
        if deadline is not None and reason == "deadline" and not made:
            left = deadline - begun
            spent = f"splitting the prompt into {len(ids)} tokens took the {left:.3g} s that were left"
            raise RequestError(
                504,
                f"no time for a first token: {spent if left > 0 else 'it was over when this request had its turn'}; "
                "ask for more (max_seconds), or try again later",
            )
        text = self._tokenizer.decode(made)
        if on_text is not None and text[told:]:
            on_text(text[told:])
        return Generated(text, len(made), reason)

    def _encode(self, prompt: str, max_new_tokens: int) -> list[int]:
        ids = self._tokenizer.encode(prompt)
        prefix = list(self._tokenizer.prefix)
        if ids[: len(prefix)] != prefix:
            ids = prefix + ids
        ids = ids or [self._tokenizer.start]  # an empty prompt, and a model without a start token
        if len(ids) > self._max_prompt_tokens:
            raise RequestError(
                413, f"the prompt has {len(ids)} tokens, expected at most {self._max_prompt_tokens}; shorten it"
            )
        if self.context is not None and len(ids) + max_new_tokens > self.context:
            raise RequestError(
                422,
                f"the prompt's {len(ids)} tokens and max_new_tokens {max_new_tokens} are more than the model's context "
                f"of {self.context}; ask for at most {self.context - len(ids)}, or shorten the prompt",
            )
        return ids
