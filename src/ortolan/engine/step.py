"""The arrays of one call of a model, and what the engine expects of a model."""

from __future__ import annotations

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

BLOCK_TOKENS = 16  # kBlockTokens of the operator PagedNoMADAttention
COLUMNS = 8  # block tables have a multiple of this many columns, so that few shapes occur


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """Tokens of several sequences for one call, the sequences one after the other.

    Attributes:
        input_ids: int64 [tokens].
        position_ids: int64 [tokens], the index of each token in its sequence.
        sequence_starts: int64 [sequences + 1], the first row of each sequence, then the number of tokens.
        past_lengths: int64 [sequences], the number of tokens that the pools hold of each sequence.
        block_table: int64 [sequences, columns], the blocks of each sequence, padded by 0; columns is a multiple of 8.
        logit_rows: int64 [rows], the rows whose logits are wanted, in ascending order; may be empty.
    """

    input_ids: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    sequence_starts: NDArray[np.int64]
    past_lengths: NDArray[np.int64]
    block_table: NDArray[np.int64]
    logit_rows: NDArray[np.int64]


def pack_step(
    ids: Items[int], lengths: Items[int], past: Items[int], table: NDArray[np.int64], rows: Items[int]
) -> Step:
    """Return a step.

    Args:
        ids: The tokens of all sequences, one sequence after the other.
        lengths: The number of tokens of each sequence.
        past: As `Step.past_lengths`.
        table: As `Step.block_table`.
        rows: As `Step.logit_rows`.
    """
    counts, stored = np.array(lengths, np.int64), np.array(past, np.int64)
    starts = np.zeros(len(counts) + 1, np.int64)
    np.cumsum(counts, out=starts[1:])
    positions = np.arange(len(ids), dtype=np.int64)
    positions += np.repeat(stored - starts[:-1], counts)
    return Step(np.array(ids, np.int64), positions, starts, stored, table, np.array(rows, np.int64))


class Model(Protocol):
    """A decoder whose KV cache is a pool of blocks.

    A sequence's logits and stored keys and values must not depend on how the sequence is divided into calls, nor on the
    other sequences of a call: blocks are shared and recomputed on that promise.

    Attributes:
        vocabulary: The number of token ids.
        context: The largest number of tokens of a sequence.
        blocks: The number of blocks of the pools.
    """

    @property
    def vocabulary(self) -> int: ...  # noqa: D102
    @property
    def context(self) -> int: ...  # noqa: D102
    @property
    def blocks(self) -> int: ...  # noqa: D102

    def run(self, step: Step) -> NDArray[np.float32]:
        """Store keys and values of all tokens of a step and return logits, float32 [rows, vocabulary]."""
        ...
