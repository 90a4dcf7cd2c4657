"""The parts of a server below HTTP: engines from texts to vectors and from prompts to texts, and refused requests."""

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
    """Return session options for a replica that shares a machine with other replicas.

    Args:
        threads: Threads of ONNX Runtime's pool.
        spin: Idle threads wait in a loop, which lowers latency and keeps cores busy.
    """
    options = new_options()
    options.intra_op_num_threads = threads
    options.add_session_config_entry(_SPINNING, "1" if spin else "0")
    return options


class RequestError(OrtolanError):
    """A request that is refused.

    Attributes:
        status: The HTTP status: 4xx, or 5xx if the server is at fault.
        retry_after: Seconds after which the same request may succeed; None: unknown.
    """

    def __init__(self, status: int, message: str, retry_after: int | None = None) -> None:
        """Create the error."""
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class EncoderEngine:
    """Computes vectors of texts, or scores of pairs of texts."""

    def __init__(
        self,
        model: str | os.PathLike[str],
        tokenizer: str | os.PathLike[str] | None = None,
        *,
        max_tokens: int | None = None,
        threads: int = 1,
        spin: bool = False,
    ) -> None:
        """Open a model.

        Args:
            model: A model that takes texts (`optimize_onnx(texts_in=True)`), or an encoder that takes tokens, whose
                folder has the settings, as for `TextEncoder`.
            tokenizer: The tokenizer.json of a model that takes tokens. Default: the one beside the model.
            max_tokens: The length to which texts are cut. Default: from the model's folder.
            threads: As for `serving_options`.
            spin: As for `serving_options`.

        Raises:
            SessionError: The model cannot be opened.
            ModelError: The model returns neither vectors nor scores.
        """
        options = serving_options(threads, spin)
        self.encoder = TextEncoder(model, tokenizer, TextInput(max_tokens=max_tokens), options)

    def check(self) -> None:
        """Run one text or pair, and raise the error if it fails."""
        if self.encoder.kind == "reranker":
            self.encoder.score("health", ["health"])
        else:
            self.encoder.encode(["health"])

    def run_each(self, batch: Sequence[Tokens]) -> list[np.ndarray | Exception]:
        """Return the vector, float32 [width], the score, float32 [], or the error of each text.

        If a batch fails, its texts run one by one, so that only the bad text fails.
        """
        try:
            found = self.encoder.run(batch)
        except Exception as error:
            failure = error
        else:
            unfit = OrtolanError("the model returned NaN or infinity")
            return [one if np.isfinite(one).all() else unfit for one in found]
        return [failure] if len(batch) == 1 else [self.run_each([text])[0] for text in batch]


@dataclass(frozen=True)
class Generated:
    """A generated text.

    Attributes:
        finish_reason: What ended it: the model ("stop"), the number of tokens ("length"), the time ("deadline") or the
            caller ("cancelled").
    """

    text: str
    tokens: int
    finish_reason: str


class GenerationEngine:
    """Continues prompts. Several threads may call it, because each call has its own cache.

    Attributes:
        context: The largest number of tokens of a prompt and its continuation; None: unknown.
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
        """Open a decoder.

        Args:
            model: A decoder with a KV cache, as for `ortolan.generate.Decoder`.
            tokenizer: Its tokenizer.json, or tokenizer.bin of llama2.c.
            max_prompt_tokens: The largest number of tokens of a prompt.
            max_context: Limits `context` below the model's position tables, or sets it if the model has no tables.
            threads: As for `serving_options`.
            spin: As for `serving_options`.

        Raises:
            SessionError: The model cannot be opened.
            OrtolanError: The model is not a decoder with a cache.
        """
        import onnx_ir as ir

        from ortolan.generate import Decoder, read_context, read_head_size
        from ortolan.models.tokenizer import load_tokenizer

        self._session = create_session(model, serving_options(threads, spin))
        graph = ir.load(model_in(Path(model)) if os.path.isdir(model) else model)
        self._head_size = read_head_size(graph)
        self._tokenizer = load_tokenizer(tokenizer)
        # Raises now, rather than at the first request, if the model is not a decoder.
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
        """Continue a prompt.

        temperature, top_k, top_p: As for `ortolan.generate.sample`. deadline: A time of time.monotonic() after which no
        token is started. cancelled: When it is set, no further token is started. on_text: Called with each new piece of
        the text.

        Raises:
            RequestError: 413 for a prompt with too many tokens, 422 if the new tokens do not fit after it, 504 if the
                deadline passed before the first token.
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
            # A character of several tokens decodes to the replacement character until its last token. All tokens are
            # decoded each time (20 ms in total for 512 tokens), because decoding only the last ones can differ, for
            # example at spaces, and the pieces must join to the text.
            if on_text is not None and not (text := self._tokenizer.decode(made)).endswith("\ufffd"):
                on_text(text[told:])
                told = len(text)
        if deadline is not None and reason == "deadline" and not made:
            left = deadline - begun
            spent = f"tokenizing the prompt ({len(ids)} tokens) took the remaining {left:.3g} s"
            raise RequestError(
                504,
                f"no time for a first token: {spent if left > 0 else 'the deadline passed in the queue'}; "
                "request more (max_seconds), or try again later",
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
        ids = ids or [self._tokenizer.start]  # the prompt is empty, and the tokenizer adds no start token
        if len(ids) > self._max_prompt_tokens:
            raise RequestError(
                413, f"prompt has {len(ids)} tokens, expected at most {self._max_prompt_tokens}; shorten it"
            )
        if self.context is not None and len(ids) + max_new_tokens > self.context:
            raise RequestError(
                422,
                f"max_new_tokens is {max_new_tokens}, expected at most {self.context - len(ids)} after a prompt of "
                f"{len(ids)} tokens in a context of {self.context}; request fewer, or shorten the prompt",
            )
        return ids
