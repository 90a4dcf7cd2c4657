"""Test PagedNoMADAttention on a CPU with AMX: int8 scores in tiles, with the bits of every other instruction set."""

from __future__ import annotations

import pytest

from ..ops import test_paged_op
from ..ops.isa_process import run_with_isa
from .emulated import check
from .emulator import run_python

# 32 query heads of one sequence fill two tiles of rows; a width of 80 needs a tile of 64 dimensions and one of 16.
NODE = """
from ortolan import _native
from tests.ops.paged_attention import Node, sequence
assert _native.cpu_info()["isa"] == "amx"
calls = (99, 4, True, True), (1, 32, True, True), (1, 4, True, False), (99, 4, False, False)
for tokens, heads, int8, in_tiles in calls:
    node = Node(heads=heads, kv_heads=1, dim=80, int8=int8)
    if emulator is not None:
        emulator.reset_counts()
    node.run([sequence(node, tokens)], [0], [[3, 5, 9, 2, 0, 1, 8]])
    if emulator is not None:
        assert (emulator.count("tdpbssd") > 0) == in_tiles, emulator.counts()
        assert emulator.live_threads_with_config() == 0
"""


def test_calls_of_many_rows_use_tiles() -> None:
    check(NODE)


@pytest.mark.parametrize("isa", ["scalar"])
def test_it_has_the_bits_of_other_instruction_sets(isa: str) -> None:
    ours, other = run_python(test_paged_op.DIGEST), run_with_isa(isa, test_paged_op.DIGEST)
    assert ours.returncode == 0 and other.returncode == 0, ours.stderr + other.stderr
    assert ours.stdout.split()[-1] == other.stdout.split()[-1]
