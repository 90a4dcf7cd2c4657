"""Sequences as the scheduler sees them."""

from __future__ import annotations

from array import array
from enum import Enum
from typing import Any

from .step import BLOCK_TOKENS


class State(Enum):
    """Place of a sequence: in the queue, in the pools, or neither."""

    WAITING = 0
    RUNNING = 1
    ENDED = 2


class Sequence:
    """The tokens of one choice of a request, and how many of them the pools hold.

    Attributes:
        tokens: Prompt and answer. An array, because the garbage collector would visit each element of a list. Until a
            sequence runs, the choices of a request share one.
        priority: The priority of the request.
        client: The client of the request.
        user: The client's user.
        salt: Sequences with different salts share no blocks.
        computed: The number of tokens whose keys and values are stored.
        blocks: The number of blocks in the sequence's row of the block table.
        slot: The sequence's row of the block table; -1: none.
        ticket: The place in the order in which sequences first ran; -1: it has never run.
        hashes: Hashes of the first full blocks, chained.
        cached: Tokens that came from the prefix cache when the sequence first ran.
        preemptions: How often the sequence lost its blocks.
        limit: The most tokens of prompt and answer.
        drafting: What a drafter keeps about the sequence.
    """

    __slots__ = (
        "blocks",
        "cached",
        "client",
        "computed",
        "drafting",
        "hashes",
        "limit",
        "preemptions",
        "priority",
        "salt",
        "slot",
        "state",
        "ticket",
        "tokens",
        "user",
    )

    def __init__(
        self,
        prompt: tuple[int, ...] | array[int],
        limit: int,
        priority: int = 0,
        client: str = "",
        user: str = "",
        salt: bytes = b"",
    ) -> None:
        self.tokens = prompt if isinstance(prompt, array) else array("q", prompt)
        self.priority = priority
        self.client, self.user, self.salt = client, user, salt
        self.state = State.WAITING
        self.computed = 0
        self.blocks = 0
        self.slot = -1
        self.ticket = -1
        self.hashes: list[bytes] = []
        self.cached = 0
        self.preemptions = 0
        self.limit = limit
        self.drafting: Any = None

    @property
    def rank(self) -> tuple[int, int]:
        """The order of running sequences: those of higher rank give up their blocks first."""
        return self.priority, self.ticket

    @property
    def sharable_blocks(self) -> int:
        """The number of blocks that may come from the prefix cache: full, and without the last token."""
        return (len(self.tokens) - 1) // BLOCK_TOKENS


def blocks_of(tokens: int) -> int:
    """Return the number of blocks that hold a number of tokens."""
    return -(-tokens // BLOCK_TOKENS)
