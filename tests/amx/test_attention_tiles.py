"""Test attention in AMX tiles: the kernel, its loop on AVX2 vectors, and the choice of nodes that run it.

Tile instructions are emulated if the CPU lacks AMX. Only the kernel needs AVX-512.
"""

from __future__ import annotations

import numpy as np
import pytest

from . import attention_in_tiles as tiles
from .emulated import check
from .emulator import Emulator

all_checks = pytest.mark.parametrize("name", tiles.CHECKS)

COUNTS = """
import numpy as np
from ortolan import _native
from tests.amx import attention_in_tiles as tiles
assert _native.cpu_info()["isa"] == "amx"
q, k, v = tiles.random(np.random.default_rng(7), 1, 64, 160, 64)
if emulator is not None:
    emulator.reset_counts()
    tiles.kernel(q, k, v, 0.125)
    assert emulator.counts() == tiles.COUNTS, emulator.counts()
    assert emulator.live_threads_with_config() == 0
"""

# The bits of each query head are those of the AMX kernel, or those of scalar/16 if the node is reproducible.
NODES = """
import numpy as np
from ortolan import _native, _testing
from tests.amx import attention_in_tiles as tiles
from tests.ops.attention_node import node_model
from tests.ops.single_node import assert_same_bits, session
assert _native.cpu_info()["isa"] == "amx"
heads, kv_heads, rows, width = 6, 2, 33, 36
rng = np.random.default_rng(8)
shapes = {"query": (2, rows, heads * width), "key": (2, rows, kv_heads * width), "value": (2, rows, kv_heads * width)}
feeds = {name: rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}
feeds["mask"] = np.where(rng.random((2, 1, 1, rows)) < 0.2, np.float32(-10000), np.float32(0))
feeds["mask"][..., 0] = 0
for where, causal in (({}, 0), ({}, 1), ({"reproducible": "everywhere"}, 0)):
    model = node_model(heads, kv_heads, causal=causal, precision=16, **where)
    run = session(model, threads=2)
    if emulator is not None:
        emulator.reset_counts()
    y = run.run(None, feeds)[0].reshape(2, rows, heads, width)
    if emulator is not None:
        assert (emulator.count("tdpbf16ps") > 0) == (not where), emulator.counts()
        assert emulator.live_threads_with_config() == 0
    apart = {name: array.reshape(2, rows, -1, width) for name, array in feeds.items() if name != "mask"}
    for b in range(2):
        for head in range(heads):
            q, k, v = (apart[name][b, :, head if name == "query" else head // 3] for name in ("query", "key", "value"))
            given = (q[None], k, v, width**-0.5, feeds["mask"][b], bool(causal))
            found = [_testing.nomad_attention(*given, kernel=name)[0] for name in (tiles.KERNEL, "scalar/16")]
            assert (found[0] != found[1]).any()
            assert_same_bits(y[b, :, head], found[1 if where else 0])
"""

# Calls of many queries run in tiles; a call of one token runs in float32 vectors.
CACHED_NODES = """
import numpy as np
from ortolan import _native, _testing
from tests.amx import attention_in_tiles as tiles
from tests.ops.cached_attention import Decoder, Setup, node_model
from tests.ops.single_node import assert_same_bits, session
assert _native.cpu_info()["isa"] == "amx"
setup = Setup(6, 2, 36, precision=16)
run, decoder = session(node_model(setup), threads=2), Decoder(setup, 2)
for queries, in_tiles in ((40, True), (1, False), (9, True)):
    call = decoder.call(queries)
    if emulator is not None:
        emulator.reset_counts()
    outputs = run.run(None, call.feeds)
    if emulator is not None:
        assert (emulator.count("tdpbf16ps") > 0) == in_tiles, emulator.counts()
        assert emulator.live_threads_with_config() == 0
    call.check(outputs)
    y = outputs[0].reshape(2, queries, 6, 36)
    for b in range(2) if in_tiles else ():
        for head in range(6):
            k, v = call.k[b][head // 3], call.v[b][head // 3]
            alone = tiles.kernel(call.q[b, head : head + 1], k, v, 36**-0.5, causal=True)
            assert_same_bits(y[b, :, head], alone[0])
"""


@all_checks
def test_the_kernel(name: str) -> None:
    code = "from tests.amx import attention_in_tiles as tiles\n"
    check(code + f"tiles.CHECKS[{name!r}](tiles.kernel)")


@all_checks
def test_its_loop_on_avx2(name: str, amx: Emulator | None) -> None:
    tiles.CHECKS[name](tiles.on_avx2())


def test_counts_of_its_loop_on_avx2(emulated: Emulator) -> None:
    q, k, v = tiles.random(np.random.default_rng(7), 1, 64, 160, 64)
    attend = tiles.on_avx2()
    emulated.reset_counts()
    attend(q, k, v, 0.125)
    assert emulated.counts() == tiles.COUNTS
    assert emulated.live_threads_with_config() == 0


def test_counts_of_the_kernel() -> None:
    check(COUNTS)


def test_nodes_take_it_unless_they_are_reproducible() -> None:
    check(NODES)


def test_prompts_of_nodes_with_a_cache_take_it() -> None:
    check(CACHED_NODES)
