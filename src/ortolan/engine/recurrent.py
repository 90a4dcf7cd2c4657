"""A hybrid decoder, whose layers have recurrent states, as the engine's model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from ortolan.graph_passes.files.model_file import model_in

from ..errors import ArgumentError
from ..generate import Decoder, read_context, read_head_size, shares_cache
from ..session import create_session, new_options
from .step import BLOCK_TOKENS, Step

if TYPE_CHECKING:
    import onnxruntime

_CONTEXT = 8192  # tokens, for a model without a limit


class RecurrentModel:
    """Decoders with a state each, as a model whose cache is a pool of blocks.

    A recurrent state cannot be cut into blocks. So the pool holds the ids of the tokens, and a step continues the
    decoder that holds exactly the past tokens of a sequence. After a prefix hit or a preemption there is no such
    decoder, and the least recently used one computes them again. Sequences are computed one after the other.

    Attributes:
        vocabulary: The number of token ids.
        context: The most tokens of a sequence.
        limit: The model's own limit of the context; None: it has none.
        blocks: The number of blocks.
        block_bytes: The bytes of keys and values of a block of tokens.
        cache_type: The type of keys and values: that of the file.
    """

    cache_type = "original"

    def __init__(
        self,
        session: onnxruntime.InferenceSession,
        context: int,
        *,
        sequences: int = 1,
        limit: int | None = None,
        shared: bool = False,
        head_size: int | None = None,
    ) -> None:
        """Create the model.

        Args:
            session: A session of a decoder, as for `Decoder`.
            context: The most tokens of a sequence.
            sequences: The most decoders.
            limit: The model's own limit of the context.
            shared: Past and present of keys and values may be one buffer (`shares_cache`).
            head_size: As for `Decoder`.

        Raises:
            OrtolanError: The session is not a decoder.
        """
        self._new: Callable[[], Decoder] = lambda: Decoder(session, context if shared else None, head_size)
        first = self._new()
        self.vocabulary: int = first.vocabulary
        self.context, self.limit = context, limit
        self.blocks = sequences * -(-context // BLOCK_TOKENS)
        self.block_bytes = first.token_bytes * BLOCK_TOKENS
        self._most = sequences
        self._tokens = np.zeros(self.blocks * BLOCK_TOKENS, np.int64)
        # Decoders and their tokens, the least recently used first.
        self._decoders: list[tuple[Decoder, NDArray[np.int64]]] = [(first, self._tokens[:0])]

    @classmethod
    def open(
        cls, folder: Path, *, threads: int | None = None, context: int | None = None, sequences: int = 1
    ) -> RecurrentModel:
        """Open the model of a folder. Arguments as for the constructor.

        Raises:
            SessionError: The model cannot be opened.
            ArgumentError: `context` exceeds the model's limit.
            OrtolanError: It is not a decoder.
        """
        file = model_in(folder)
        options = new_options()
        if threads is not None:
            options.intra_op_num_threads = threads
        limit = read_context(file)
        if context is not None and limit is not None and not 1 <= context <= limit:
            raise ArgumentError(f"context is {context}, expected 1 to the model's {limit} tokens")
        return cls(
            create_session(file, options),
            context or limit or _CONTEXT,
            sequences=sequences,
            limit=limit,
            shared=shares_cache(file),
            head_size=read_head_size(file),
        )

    def run(self, step: Step) -> NDArray[np.float32]:
        """Append the tokens of a step, and return the logits float32 [rows, vocabulary]."""
        logits: NDArray[np.float32] = np.empty((len(step.logit_rows), self.vocabulary), np.float32)
        for row, past in enumerate(step.past_lengths.tolist()):
            start, end = step.sequence_starts[row : row + 2].tolist()
            offsets = np.arange(past + end - start)
            places = step.block_table[row][offsets // BLOCK_TOKENS] * BLOCK_TOKENS + offsets % BLOCK_TOKENS
            self._tokens[places[past:]] = step.input_ids[start:end]
            found = self._append(self._tokens[places], past)
            wanted = (step.logit_rows >= start) & (step.logit_rows < end)
            # Rows are counted from the end, because recomputed tokens have rows too.
            logits[wanted] = found[step.logit_rows[wanted] - end]
        return logits

    def _append(self, tokens: NDArray[np.int64], past: int) -> NDArray[np.float32]:
        """Return the logits of the last tokens, or of all. A decoder may hold the first `past` tokens."""
        index = next(
            (index for index, (_, held) in enumerate(self._decoders) if np.array_equal(held, tokens[:past])), None
        )
        if index is not None:
            decoder, _ = self._decoders.pop(index)
        elif len(self._decoders) < self._most:
            decoder, past = self._new(), 0
        else:
            (decoder, _), past = self._decoders.pop(0), 0
            decoder.reset()
        found: NDArray[np.float32] = decoder.step(tokens[past:]).astype(np.float32, copy=False)
        self._decoders.append((decoder, tokens))
        return found
