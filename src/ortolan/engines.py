"""The parts of a server for encoders below HTTP: an engine from texts to vectors or scores, and refused requests."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from ortolan.graph_passes.text.text_plan import TextInput

from .errors import ModelError, OrtolanError
from .session import new_options
from .text_encoder import TextEncoder
from .tokens import Tokens

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
        if self.encoder.kind not in ("embedding", "reranker"):
            raise ModelError(
                f"model is of kind {self.encoder.kind!r}, expected an embedding model or a reranker: call "
                "embed_tokens, embed_sparse or rerank"
            )

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
