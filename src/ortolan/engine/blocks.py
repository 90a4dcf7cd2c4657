"""The blocks of a KV cache: who uses them, and which hold a prefix that can be used again."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict
from hashlib import blake2b

from .step import BLOCK_TOKENS


class BlockPool:
    """Blocks with reference counts, and a prefix cache over them.

    A block is free, used (by one sequence or more), or cached: unused, but full of tokens whose hash is known. Cached
    blocks are given out when no block is free, the one that was released first before the others.

    Attributes:
        blocks: The number of all blocks.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._references = [0] * blocks
        self._free = list(range(blocks - 1, -1, -1))
        self._unused: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently released first
        self._hashes: dict[int, bytes] = {}
        self._by_hash: dict[bytes, int] = {}

    @property
    def free(self) -> int:
        """The number of blocks that hold nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """The number of unused blocks that hold a prefix."""
        return len(self._unused)

    @property
    def available(self) -> int:
        """The number of blocks that can be allocated."""
        return len(self._free) + len(self._unused)

    @property
    def used(self) -> int:
        """The number of blocks that sequences use."""
        return self.blocks - self.available

    def references(self, block: int) -> int:
        """Return the number of sequences that use a block."""
        return self._references[block]

    def is_registered(self, block: int) -> bool:
        """Return whether other sequences can find a block."""
        return block in self._hashes

    def allocate(self) -> int:
        """Return a block for one sequence, whose content is arbitrary. `available` must be above 0."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unused.popitem(last=False)
            del self._by_hash[self._hashes.pop(block)]
        self._references[block] = 1
        return block

    def find(self, block_hash: bytes) -> int | None:
        """Return the block with a hash, or None."""
        return self._by_hash.get(block_hash)

    def acquire(self, block: int) -> None:
        """Use a block that `find` returned."""
        if self._references[block] == 0:
            del self._unused[block]
        self._references[block] += 1

    def release(self, block: int) -> None:
        """End one use of a block. The last one makes the block cached, or free if it has no hash."""
        count = self._references[block] - 1
        if count < 0:
            raise AssertionError(f"block {block} was released more often than it was acquired")
        self._references[block] = count
        if count == 0:
            if block in self._hashes:
                self._unused[block] = None
            else:
                self._free.append(block)

    def register(self, block: int, block_hash: bytes) -> int:
        """Make a full block known by its hash.

        If another block has the hash already, `block` is released and the other one is acquired: both hold the same
        bits, since what a model stores depends on the tokens alone.

        Returns:
            The block to use from now on.
        """
        known = self._by_hash.get(block_hash)
        if known is None:
            self._by_hash[block_hash] = block
            self._hashes[block] = block_hash
            return block
        if known != block:
            self.acquire(known)
            self.release(block)
        return known


class BlockHasher:
    """Hashes of blocks, chained: a block's hash follows from its tokens and from the hash of the block before it.

    128 bits under a secret key of this process, so that no client can make up a prompt that finds another's blocks. The
    chain begins with a salt: sequences with different salts share no blocks.
    """

    def __init__(self) -> None:
        self._key = os.urandom(32)

    def extend(self, hashes: list[bytes], tokens: array[int], blocks: int, salt: bytes) -> None:
        """Append hashes until there are those of the first `blocks` blocks of tokens."""
        parent = hashes[-1] if hashes else salt
        key = self._key
        done = len(hashes)
        if done >= blocks:
            return
        data = tokens[done * BLOCK_TOKENS : blocks * BLOCK_TOKENS].tobytes()
        size = BLOCK_TOKENS * tokens.itemsize
        for start in range(0, len(data), size):
            parent = blake2b(parent + data[start : start + size], digest_size=16, key=key).digest()
            hashes.append(parent)
