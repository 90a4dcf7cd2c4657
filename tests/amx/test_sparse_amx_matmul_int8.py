"""Test the machine code of SparseAMXMatMul's int8 and int4 AMX kernels, in the emulator if the CPU lacks AMX."""

from __future__ import annotations

from .emulated import check

CHECK_SHAPES = """
import numpy as np
from ortolan import _native
from tests.ops.quantized import Layer
from tests.ops.single_node import assert_same_bits, at_odd_address
assert _native.cpu_info()["isa"] == "amx"
rng = np.random.default_rng(5)
for group in (None, 32, 64, 128):
    for k in (1, 31, 33, 100, 160, 1100):
        for n in (1, 16, 17, 40, 64):
            for sparsity in (0.0, 0.5, 1.0):
                layer, bias = Layer.random(rng, k, n, sparsity, group), rng.standard_normal(n, dtype=np.float32)
                x = rng.standard_normal((33, k), dtype=np.float32)
                for m in (1, 2, 7, 16, 17, 32, 33):
                    if k * n * m > 500_000:
                        continue  # a tile instruction takes 10 us under the emulator
                    b = bias if m % 2 else None
                    y = layer.multiply(x[:m], b, "amx")
                    layer.check(y, x[:m], b)
                    if sparsity == 0.5:
                        assert_same_bits(layer.stored_dense().multiply(x[:m], b, "amx"), y)
    for zeros in Layer.random(rng, 160, 40, 0.5, group).kinds()[1:]:
        x = rng.standard_normal((33, 160), dtype=np.float32) + 1
        y = zeros.multiply(x, None, "amx")
        zeros.check(y, x)
        assert_same_bits(zeros.stored_dense().multiply(x, None, "amx"), y)
    layer = Layer.random(rng, 70, 20, 0.5, group)
    x = rng.standard_normal((290, 70), dtype=np.float32)  # more rows than the kernel keeps sums of
    x[3], x[270, 5], x[280, 69] = 0, np.nan, np.inf
    y = layer.multiply(x, None, "amx")
    layer.check(y, x)
    assert_same_bits(layer.stored_dense().multiply(x, None, "amx"), y)
    for stored in (layer, layer.stored_dense()):
        masks, values, offsets = stored.packed
        packed = (at_odd_address(masks), at_odd_address(values), offsets)
        odd = layer.multiply_packed(x, packed, at_odd_address(layer.packed_scales()), None, "amx")
        assert_same_bits(odd, y)
"""

# 2:4 storage is expanded to tiles and must give the same results as dense storage.
CHECK_TWO_FOUR = """
import numpy as np
from tests.ops.quantized import Layer
from tests.ops.single_node import assert_same_bits, at_odd_address
from tests.ops.two_four import two_of_four
rng = np.random.default_rng(8)
for group in (None, 32, 64, 128):
    for k, n in ((1, 1), (33, 17), (160, 40), (1100, 16)):
        random = Layer.random(rng, k, n, 0.1, group)
        layer = Layer.two_four(two_of_four(rng, random.weights), random.scales, group)
        bias, x = rng.standard_normal(n, dtype=np.float32), rng.standard_normal((17, k), dtype=np.float32)
        for m in (1, 17):
            y = layer.multiply(x[:m], bias, "amx")
            layer.check(y, x[:m], bias)
            assert_same_bits(layer.stored_dense().multiply(x[:m], bias, "amx"), y)
        masks, values, offsets = layer.packed
        packed = (at_odd_address(masks), at_odd_address(values), offsets)
        assert_same_bits(layer.multiply_packed(x, packed, at_odd_address(layer.packed_scales()), bias, "amx"), y)
"""

# The portable kernel must give the same bits. Integer sums are exact; with scales of one, the float sums are exact too.
CHECK_BITS = """
import numpy as np
from ortolan import _native
from tests.ops.quantized import Layer
from tests.ops.single_node import assert_same_bits
rng = np.random.default_rng(6)
for group in (None, 32, 64, 128):
    layer = Layer.random(rng, 1500, 40, 0.4, group)
    x = rng.standard_normal((20, 1500), dtype=np.float32)
    layer = Layer(layer.weights, np.ones_like(layer.scales), group, layer.packed)
    expected = layer.multiply(x, None, "scalar")
    assert_same_bits(layer.multiply(x, None, "amx"), expected)
    assert_same_bits(layer.stored_dense().multiply(x, None, "amx"), expected)
"""

# 40 rows make two row tiles and a partial one; 48 columns make a pair of panels and a single one. 1216 inputs make 19
# tiles: five blocks of 4 if they are expanded, two blocks of 16 if they are read directly.
CHECK_COUNTS = """
import numpy as np
from ortolan import _native
from tests.ops.quantized import Layer
rng = np.random.default_rng(7)
m, k, n = 40, 1216, 48
row_tiles, panels = 3, 3
x = rng.standard_normal((m, k), dtype=np.float32)
for group in (None, 32, 64, 128):
    bitmap = Layer.random(rng, k, n, 0.5, group)
    for layer, blocks in ((bitmap, 5), (bitmap.stored_dense(), 2)):
        if emulator is None:
            break
        emulator.reset_counts()
        layer.multiply(x, None, "amx")
        steps = k // min(group or 64, 64)
        ends = blocks if group is None else -(-k // group)  # sums leave the tiles after a block, or after a group
        assert emulator.count("tdpbssd") == steps * row_tiles * panels, emulator.counts()
        # Rows of x once for each group of panels, weights once for each group of row tiles, sums once a block
        # but the first.
        loads = steps * row_tiles * 2 + steps * panels * 2 + (ends - 1 if group is None else 0) * row_tiles * panels
        assert emulator.count("tileloadd") == loads, emulator.counts()
        assert emulator.count("tilestored") == ends * row_tiles * panels
        assert emulator.count("tilezero") == (1 if group is None else ends) * row_tiles * panels
        assert emulator.count("ldtilecfg") == emulator.count("tilerelease") == 1
        assert emulator.live_threads_with_config() == 0
"""


def test_shapes() -> None:
    check(CHECK_SHAPES)


def test_two_four() -> None:
    check(CHECK_TWO_FOUR)


def test_bits_are_those_of_the_portable_kernel() -> None:
    check(CHECK_BITS)


def test_counts_of_tile_instructions_and_release() -> None:
    check(CHECK_COUNTS)
