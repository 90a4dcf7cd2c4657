"""Test the machine code of the AMX kernels of W4A8MatMul and W8A8MatMul, in the emulator if the CPU lacks AMX."""

from __future__ import annotations

from .emulated import check

CHECK_SHAPES = """
import numpy as np
from ortolan import _native
from tests.ops.groups import GroupLayer
assert _native.cpu_info()["isa"] == "amx"
rng = np.random.default_rng(5)
for group in (64, 128):
    for k in (1, 31, 33, 100, 160, 1100):
        for n in (1, 16, 17, 40, 64):
            for kind in ({"zero_points": False}, {}, {"fractions": True}, {"minimums": True}, {"bits": 8}):
                layer = GroupLayer.random(rng, k, n, group, half=bool(k % 2), **kind)
                bias, x = rng.standard_normal(n, dtype=np.float32), rng.standard_normal((33, k), dtype=np.float32)
                for m in (1, 7, 16, 17, 32, 33):
                    if k * n * m > 500_000:
                        continue  # a tile instruction takes 10 us under the emulator
                    b = bias if m % 2 else None
                    layer.check(layer.multiply(x[:m], b, "amx"), x[:m], b)
    x = rng.standard_normal((290, 70), dtype=np.float32)  # more rows than the kernel keeps sums of
    x[3], x[270, 5], x[280, 69] = 0, np.nan, np.inf
    for kind in ({}, {"minimums": True}, {"bits": 8}):
        layer = GroupLayer.random(rng, 70, 20, group, **kind)
        layer.check(layer.multiply(x, None, "amx"), x)
"""

# The portable kernel must give the same bits. Integer sums are exact; with power-of-two scales and few groups, the
# float sums are exact too.
CHECK_BITS = """
import numpy as np
from tests.ops.single_node import assert_same_bits
from tests.ops.groups import GroupLayer
rng = np.random.default_rng(6)
for group in (64, 128):
    for offset in ("", "zero_points", "minimums", "8 bits"):
        k, n, m, bits = 8 * group - 5, 40, 20, 8 if offset == "8 bits" else 4
        layer = GroupLayer.random(rng, k, n, group, zero_points=offset == "zero_points", bits=bits)
        if bits == 8:
            layer.q[::3, ::2] = -128
        lowest, highest = (-1, 1) if bits == 8 else (-2, 2)
        powers = np.ldexp(np.float32(1), rng.integers(lowest, highest, layer.scales.shape)).astype(np.float32)
        layer = GroupLayer(layer.q, powers, layer.zero_points, group, -4 * powers if offset == "minimums" else None)
        x = rng.integers(-127, 128, (m, k)).astype(np.float32)
        x[:, ::group] = -127  # each group's scale is one
        y = layer.multiply(x, None, "amx")
        assert_same_bits(y, layer.multiply(x, None, "scalar"))
        assert_same_bits(y, (x.astype(np.float64) @ layer.matrix()).astype(np.float32))
"""

CHECK_ODD_ADDRESSES = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.single_node import assert_same_bits, at_odd_address
from tests.ops.groups import GroupLayer
rng = np.random.default_rng(8)
for half in (False, True):
    layer = GroupLayer.random(rng, 200, 40, 64, half=half)
    x = rng.standard_normal((20, 200), dtype=np.float32)
    odd = _testing.w4a8_matmul(
        x,
        at_odd_address(_native.pack_int4_group(layer.q)),
        at_odd_address(layer.packed_scales),
        64,
        200,
        40,
        zero_points=at_odd_address(layer.packed_zero_points),
        kernel="amx",
    )
    assert_same_bits(odd, layer.multiply(x, None, "amx"))
"""

# 40 rows make two row tiles and a partial one; 48 columns make a pair of panels and a single one; 1216 inputs make five
# blocks of 4 tiles.
CHECK_COUNTS = """
import numpy as np
from tests.ops.groups import GroupLayer
rng = np.random.default_rng(7)
m, k, n = 40, 1216, 48
row_tiles, panels = 3, 3
x = rng.standard_normal((m, k), dtype=np.float32)
# 8-bit tiles are loaded directly from the weight, 4-bit tiles from the buffer with expanded weights.
for group, bits in ((group, bits) for group in (64, 128) for bits in (4, 8)):
    layer = GroupLayer.random(rng, k, n, group, bits=bits)
    if emulator is None:
        break
    emulator.reset_counts()
    layer.multiply(x, None, "amx")
    steps = k // 64
    groups = -(-k // group)
    assert emulator.count("tdpbssd") == steps * row_tiles * panels, emulator.counts()
    # x is loaded once per group of panels, and the weight once per group of row tiles.
    assert emulator.count("tileloadd") == steps * row_tiles * 2 + steps * panels * 2, emulator.counts()
    assert emulator.count("tilestored") == emulator.count("tilezero") == groups * row_tiles * panels
    assert emulator.count("ldtilecfg") == emulator.count("tilerelease") == 1
    assert emulator.live_threads_with_config() == 0
"""

CHECK_DISPATCH = """
import numpy as np
from tests.ops.groups import GroupLayer
for group, bits, m, uses_tiles in (
    *((group, 4, m, m == 6) for group in (64, 128) for m in (1, 5, 6)),
    *((group, 8, m, m == 8) for group in (64, 128) for m in (1, 7, 8)),
    *((32, bits, 64, False) for bits in (4, 8)),  # does not fill a tile
):
    if emulator is None:
        break
    emulator.reset_counts()
    GroupLayer.random(np.random.default_rng(9), 128, 16, group, bits=bits).multiply(np.ones((m, 128), np.float32))
    assert (emulator.count("tdpbssd") > 0) == uses_tiles, (group, bits, m)
"""

CHECK_SUBGROUPS = """
import numpy as np
from tests.ops.single_node import assert_same_bits
from tests.ops.subgroups import SubgroupLayer
rng = np.random.default_rng(10)
for bits in (4, 5, 6):
    for group, subgroup in ((64, 16), (128, 32), (256, 16)):
        for k, n in ((1, 1), (100, 17), (300, 40), (1100, 33)):
            layer = SubgroupLayer.in_subgroups(rng, k, n, group, subgroup=subgroup, bits=bits)
            x = rng.standard_normal((33, k), dtype=np.float32)
            for m in (1, 8, 17, 33):
                if k * n * m > 500_000:
                    continue
                y = layer.multiply(x[:m], None, "amx")
                layer.check(y, x[:m])
                assert_same_bits(y, layer.multiply(x[:m], None, "scalar"))
"""

# With tiles, the epilogue runs after each few panels.
CHECK_EPILOGUE = """
import numpy as np
from ortolan.graph_passes.find.epilogue import Activation
from tests.ops.linear_kinds import apply
from tests.ops.group_node import node_model
from tests.ops.groups import GroupLayer
from tests.ops.single_node import session
rng = np.random.default_rng(11)
for bits in (4, 8):
    layer = GroupLayer.random(rng, 64, 100, 64, scale=0.16 / 2**bits, bits=bits)
    for m in (17, 300):
        x, residual = rng.standard_normal((m, 64), dtype=np.float32), rng.standard_normal((m, 100), dtype=np.float32)
        product = session(node_model(layer), library=True).run(None, {"x": x})[0]
        model = node_model(layer, residual=residual.shape, activation=Activation.GELU)
        y = session(model, library=True).run(None, {"x": x, "residual": residual})[0]
        expected = apply(Activation.GELU, product) + residual.astype(np.float64)
        assert np.all(np.abs(y - expected) <= 2.0**-20 * (np.abs(product) + np.abs(residual)))
"""


def test_shapes() -> None:
    check(CHECK_SHAPES)


def test_subgroups() -> None:
    check(CHECK_SUBGROUPS)


def test_bits_are_those_of_the_portable_kernel() -> None:
    check(CHECK_BITS)


def test_unaligned_weights() -> None:
    check(CHECK_ODD_ADDRESSES)


def test_counts_of_tile_instructions_and_release() -> None:
    check(CHECK_COUNTS)


def test_few_rows_and_small_groups_go_elsewhere() -> None:
    check(CHECK_DISPATCH)


def test_epilogue() -> None:
    check(CHECK_EPILOGUE)
