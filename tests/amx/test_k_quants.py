"""Test the machine code of the AMX kernel for K-quants, in the emulator if the CPU lacks AMX."""

from __future__ import annotations

from .emulated import check

# From 64 rows on, two panels are multiplied at once. 70 rows make two pairs of row tiles and a partial tile, 90 rows a
# third pair whose second tile is partial. 600 inputs make three groups, the last one partial.
CHECK_SHAPES = """
import numpy as np
from ortolan import _native
from tests.ops.k_quants import KINDS, KQuantLayer
from tests.ops.single_node import assert_same_bits
assert _native.cpu_info()["isa"] == "amx"
rng = np.random.default_rng(5)
for kind in KINDS:
    for k, n, rows in ((1, 1, (1, 17)), (64, 17, (33, 70)), (257, 16, (16, 33)), (600, 40, (70, 90))):
        layer = KQuantLayer.of_kind(rng, k, n, KINDS[kind], half=bool(k % 2))
        bias, x = rng.standard_normal(n, dtype=np.float32), rng.standard_normal((90, k), dtype=np.float32)
        for m in rows:
            b = bias if m % 2 else None
            y = layer.multiply(x[:m], b, "amx")
            layer.check(y, x[:m], b)
            assert_same_bits(y, layer.multiply(x[:m], b, "scalar"))
    x = rng.standard_normal((290, 70), dtype=np.float32)  # more rows than the kernel keeps totals of
    x[3], x[270, 5], x[280, 69] = 0, np.nan, np.inf
    layer = KQuantLayer.of_kind(rng, 70, 40, KINDS[kind])
    y = layer.multiply(x, None, "amx")
    layer.check(y, x)
    assert_same_bits(y, layer.multiply(x, None, "scalar"))
"""

CHECK_COUNTS = """
import numpy as np
from tests.ops.k_quants import KINDS, KQuantLayer
rng = np.random.default_rng(7)
k, n = 600, 48
tiles, panels, groups = -(-k // 64), 3, -(-k // 256)
layer = KQuantLayer.of_kind(rng, k, n, KINDS["Q4_K"])
for m in (16, 70):
    if emulator is None:
        break
    row_tiles = -(-m // 16)
    x = rng.standard_normal((m, k), dtype=np.float32)
    emulator.reset_counts()
    layer.multiply(x, None, "amx")
    # Each weight has two bytes, one of them unsigned.
    assert emulator.count("tdpbssd") == emulator.count("tdpbsud") == tiles * row_tiles * panels, emulator.counts()
    assert emulator.count("tilestored") == emulator.count("tilezero") == 2 * groups * row_tiles * panels
    assert emulator.count("ldtilecfg") == emulator.count("tilerelease") == 1
    assert emulator.live_threads_with_config() == 0
"""

# Groups of 32 do not fill tiles, so vectors multiply them.
CHECK_SHORT_GROUPS = """
import numpy as np
from tests.ops.k_quants import KINDS, KQuantLayer
layer = KQuantLayer.of_kind(np.random.default_rng(9), 64, 16, KINDS["Q5_0"])
if emulator is not None:
    emulator.reset_counts()
    layer.multiply(np.ones((64, 64), np.float32), None, "amx")
    assert emulator.count("tdpbssd") == 0
"""


def test_every_shape_and_kind() -> None:
    check(CHECK_SHAPES)


def test_instructions_are_counted() -> None:
    check(CHECK_COUNTS)


def test_short_groups_use_vectors() -> None:
    check(CHECK_SHORT_GROUPS)
