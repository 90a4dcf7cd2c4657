"""W8A8MatMul's AMX kernel: its machine code, under the emulator where the CPU has no AMX."""

from __future__ import annotations

from .emulated import check

CHECK_SHAPES = """
import numpy as np
from ortolan import _native
from tests.ops.groups import GroupLayer
assert _native.cpu_info()["isa"] == "amx"
rng = np.random.default_rng(5)
for group in (32, 64, 128):
    for k in (1, 31, 33, 100, 160, 1100):
        for n in (1, 16, 17, 40, 64):
            layer = GroupLayer.random(rng, k, n, group, half=bool(k % 2), bits=8)
            bias, x = rng.standard_normal(n, dtype=np.float32), rng.standard_normal((33, k), dtype=np.float32)
            for m in (1, 7, 16, 17, 32, 33):
                if k * n * m > 500_000:
                    continue  # a tile instruction takes 10 us under the emulator
                b = bias if m % 2 else None
                layer.check(layer.multiply(x[:m], b, "amx"), x[:m], b)
    x = rng.standard_normal((290, 70), dtype=np.float32)  # more rows than the kernel keeps sums of
    x[3], x[270, 5], x[280, 69] = 0, np.nan, np.inf
    layer = GroupLayer.random(rng, 70, 20, group, bits=8)
    layer.check(layer.multiply(x, None, "amx"), x)
"""

# The same bits as the portable kernel: integer sums are exact, and with scales of powers of two and so few groups that
# no float sum rounds, so are the float ones.
CHECK_BITS = """
import numpy as np
from tests.ops.single_node import assert_same_bits
from tests.ops.groups import GroupLayer
rng = np.random.default_rng(6)
for group in (32, 64, 128):
    k, n, m = 8 * group - 5, 40, 20
    layer = GroupLayer.random(rng, k, n, group, bits=8)
    layer.q[::3, ::2] = -128
    powers = np.ldexp(np.float32(1), rng.integers(-1, 1, layer.scales.shape)).astype(np.float32)
    layer = GroupLayer(layer.q, powers, None, group)
    x = rng.integers(-127, 128, (m, k)).astype(np.float32)
    x[:, ::group] = -127  # each group's scale is one
    y = layer.multiply(x, None, "amx")
    assert_same_bits(y, layer.multiply(x, None, "scalar"))
    assert_same_bits(y, (x.astype(np.float64) @ layer.matrix()).astype(np.float32))
"""

# Tiles of weights are loaded from where they are stored: nothing is expanded.
CHECK_COUNTS = """
import numpy as np
from tests.ops.groups import GroupLayer
rng = np.random.default_rng(7)
m, k, n = 40, 1216, 48
row_tiles, panels = 3, 3
x = rng.standard_normal((m, k), dtype=np.float32)
for group in (32, 64, 128):
    layer = GroupLayer.random(rng, k, n, group, bits=8)
    if emulator is None:
        break
    emulator.reset_counts()
    layer.multiply(x, None, "amx")
    steps = k // min(group, 64)
    groups = -(-k // group)
    assert emulator.count("tdpbssd") == steps * row_tiles * panels, emulator.counts()
    assert emulator.count("tileloadd") == steps * row_tiles * 2 + steps * panels * 2, emulator.counts()
    assert emulator.count("tilestored") == emulator.count("tilezero") == groups * row_tiles * panels
    assert emulator.count("ldtilecfg") == emulator.count("tilerelease") == 1
    assert emulator.live_threads_with_config() == 0
"""


def test_shapes() -> None:
    check(CHECK_SHAPES)


def test_bits_are_those_of_the_portable_kernel() -> None:
    check(CHECK_BITS)


def test_counts_of_tile_instructions_and_release() -> None:
    check(CHECK_COUNTS)
