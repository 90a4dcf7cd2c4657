from __future__ import annotations

from array import array

import pytest

from ortolan.engine.blocks import BlockHasher, BlockPool


def test_blocks_are_free_then_used_then_cached() -> None:
    pool = BlockPool(4)
    first, second = pool.allocate(), pool.allocate()
    assert (pool.free, pool.used, pool.cached) == (2, 2, 0)
    assert pool.register(first, b"a") == first and pool.find(b"a") == first
    pool.release(first)
    pool.release(second)
    assert (pool.free, pool.used, pool.cached, pool.available) == (3, 0, 1, 4)
    pool.acquire(first)
    assert (pool.used, pool.cached, pool.references(first)) == (1, 0, 1)


def test_free_blocks_go_first_then_cached_ones_by_their_release() -> None:
    pool = BlockPool(3)
    blocks = [pool.allocate() for _ in range(3)]
    for block in (0, 1):
        pool.register(blocks[block], bytes([block]))
    for block in (1, 2, 0):
        pool.release(blocks[block])
    assert [pool.allocate() for _ in range(3)] == [blocks[2], blocks[1], blocks[0]]
    assert pool.find(b"\0") is None and pool.find(b"\1") is None and pool.available == 0


def test_use_makes_a_block_young() -> None:
    pool = BlockPool(2)
    blocks = [pool.allocate(), pool.allocate()]
    for index, block in enumerate(blocks):
        pool.register(block, bytes([index]))
        pool.release(block)
    pool.acquire(blocks[0])
    pool.release(blocks[0])
    assert pool.allocate() == blocks[1]


def test_equal_blocks_become_one() -> None:
    pool = BlockPool(3)
    first, second = pool.allocate(), pool.allocate()
    pool.register(first, b"a")
    assert pool.register(second, b"a") == first
    assert pool.references(first) == 2 and pool.references(second) == 0 and pool.free == 2
    assert pool.register(first, b"a") == first and pool.references(first) == 2


def test_a_block_is_not_released_twice() -> None:
    pool = BlockPool(1)
    block = pool.allocate()
    pool.release(block)
    with pytest.raises(AssertionError, match="more often"):
        pool.release(block)


def test_hashes_depend_on_all_tokens_before() -> None:
    hasher = BlockHasher()

    def hashes(tokens: list[int], blocks: int) -> list[bytes]:
        found: list[bytes] = []
        hasher.extend(found, array("q", tokens), blocks, b"")
        return found

    tokens = list(range(64))
    whole = hashes(tokens, 4)
    assert len(set(whole)) == 4 and all(len(one) == 16 for one in whole)
    assert hashes(tokens[:40], 2) == whole[:2]
    in_steps: list[bytes] = []
    for blocks in (1, 1, 3, 4, 2):
        hasher.extend(in_steps, array("q", tokens), blocks, b"")
    assert in_steps == whole
    changed = hashes([99, *tokens[1:]], 4)
    assert not set(changed) & set(whole)
    assert hashes([*tokens[:48], *tokens[:16]], 4)[3] != whole[0]
    other: list[bytes] = []
    BlockHasher().extend(other, array("q", tokens), 4, b"")
    assert not set(other) & set(whole)  # the key is secret
    salted: list[bytes] = []
    hasher.extend(salted, array("q", tokens), 4, b"salt")
    assert not set(salted) & set(whole)
