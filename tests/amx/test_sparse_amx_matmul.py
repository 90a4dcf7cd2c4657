"""Test the machine code of SparseAMXMatMul's AMX kernel, in the emulator if the CPU lacks AMX."""

from __future__ import annotations

from .emulated import check

CHECK_SHAPES = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.single_node import assert_matmul_close, assert_same_bits, sparse_weight
assert _native.cpu_info()["isa"] == "amx"
rng = np.random.default_rng(5)
for k in (1, 31, 33, 100, 544, 1000):
    for n in (1, 16, 17, 40, 64):
        for sparsity in (0.0, 0.5, 1.0):
            w, bias = sparse_weight(rng, k, n, sparsity), rng.standard_normal(n, dtype=np.float32)
            packed, dense = _native.pack_bitmap(w), _native.pack_bitmap(w, dense=True)
            x = rng.standard_normal((33, k), dtype=np.float32)
            for m in (1, 2, 7, 16, 17, 32, 33):
                if k * n * m > 500_000:
                    continue  # a tile instruction takes 10 us under the emulator
                b = bias if m % 2 else None
                y = _testing.sparse_amx_matmul(x[:m], *packed, k, n, bias=b, kernel="amx")
                assert_matmul_close(y, x[:m], w, b)
                if sparsity == 0.5:
                    assert_same_bits(_testing.sparse_amx_matmul(x[:m], *dense, k, n, bias=b, kernel="amx"), y)
"""

# 2:4 storage must give the same results as a bitmap.
CHECK_TWO_FOUR = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.single_node import assert_matmul_close, assert_same_bits, to_bf16
from tests.ops.two_four import BF16
rng = np.random.default_rng(8)
for k, n in ((1, 1), (33, 17), (100, 40), (1000, 16)):
    w, bias = BF16.random(rng, k, n), rng.standard_normal(n, dtype=np.float32)
    packed, bitmap = _native.pack_two_four(w), _native.pack_bitmap(w)
    x = rng.standard_normal((17, k), dtype=np.float32)
    for m in (1, 17):
        y = _testing.sparse_amx_matmul(x[:m], *packed, k, n, bias=bias, kernel="amx")
        assert_same_bits(y, _testing.sparse_amx_matmul(x[:m], *bitmap, k, n, bias=bias, kernel="amx"))
    for m in (1, 3, 17):
        y = _testing.sparse_amx_matmul(x[:m], *packed, k, n, bias=bias, kernel="avx512bf16")
        assert_matmul_close(y, x[:m], w, bias)
    x[0, k // 2] = np.inf
    with np.errstate(invalid="ignore"):
        expected = to_bf16(x[:1]) @ to_bf16(w)
    y = _testing.sparse_amx_matmul(x[:1], *packed, k, n, kernel="avx512bf16")
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
"""

# Calls with few rows run on vectors and must add in the same order as the tiles.
CHECK_FEW_ROWS = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.single_node import assert_same_bits
from tests.ops.two_four import BF16
rng = np.random.default_rng(9)
for k, n in ((33, 17), (100, 70), (544, 16)):
    w, bias = BF16.random(rng, k, n), rng.standard_normal(n, dtype=np.float32)
    x = rng.standard_normal((17, k), dtype=np.float32) * np.exp2(rng.integers(-60, 40, (17, k))).astype(np.float32)
    for packed in (_native.pack_two_four(w), _native.pack_bitmap(w), _native.pack_bitmap(w, dense=True)):
        among_all = _testing.sparse_amx_matmul(x, *packed, k, n, bias=bias, kernel="amx")
        for m in (1, 2, 3):
            y = _testing.sparse_amx_matmul(x[:m], *packed, k, n, bias=bias, kernel="amx")
            assert_same_bits(y, among_all[:m])
"""

# Expected order: each tile has one chain of fused multiply-adds for even inputs and one for odd inputs, both from +0.
# The two are added, and their sum is added to the result.
CHECK_BITS = """
import ml_dtypes
import numpy as np
from ortolan import _native, _testing
from tests.amx import reference
from tests.ops.single_node import assert_same_bits, sparse_weight
rng = np.random.default_rng(6)
k, n, m = 96, 16, 16
w = sparse_weight(rng, k, n, 0.4)
x = rng.standard_normal((m, k), dtype=np.float32)
expected = np.zeros((m, n), np.float32)
for tile in range(0, k, 32):
    a = x[:, tile : tile + 32].astype(ml_dtypes.bfloat16)
    b = w[tile : tile + 32].astype(ml_dtypes.bfloat16)
    expected = reference.tdpbf16ps(expected, a, b)
for dense in (False, True):
    y = _testing.sparse_amx_matmul(x, *_native.pack_bitmap(w, dense), k, n, kernel="amx")
    assert_same_bits(y, expected)
"""

CHECK_ODD_ADDRESSES = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.single_node import assert_same_bits, at_odd_address, sparse_weight
rng = np.random.default_rng(9)
k, n, m = 600, 40, 20
w = sparse_weight(rng, k, n, 0.5)
x = rng.standard_normal((m, k), dtype=np.float32)
for dense in (False, True):
    masks, values, offsets = _native.pack_bitmap(w, dense)
    y = _testing.sparse_amx_matmul(x, at_odd_address(masks), at_odd_address(values), offsets, k, n, kernel="amx")
    assert_same_bits(y, _testing.sparse_amx_matmul(x, masks, values, offsets, k, n, kernel="amx"))
"""

# 40 rows make two row tiles and a partial one; 48 columns make a pair of panels and a single one. 600 inputs make 19
# tiles: five blocks of 4 if they are expanded, two blocks of 16 if they are read directly.
CHECK_COUNTS = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.single_node import sparse_weight
rng = np.random.default_rng(7)
m, k, n = 40, 600, 48
w = sparse_weight(rng, k, n, 0.5)
x = rng.standard_normal((m, k), dtype=np.float32)
for dense in (False, True):
    packed = _native.pack_bitmap(w, dense)
    if emulator is not None:
        emulator.reset_counts()
    _testing.sparse_amx_matmul(x, *packed, k, n, kernel="amx")
    if emulator is not None:
        k_tiles, row_tiles, panels, blocks = 19, 3, 3, 2 if dense else 5
        assert emulator.count("tdpbf16ps") == k_tiles * row_tiles * panels, emulator.counts()
        # x is loaded once per group of panels, the weight once per group of row tiles, the sums once per block.
        loads = k_tiles * row_tiles * 2 + k_tiles * panels * 2 + row_tiles * panels * blocks
        assert emulator.count("tileloadd") == loads, emulator.counts()
        assert emulator.count("tilestored") == row_tiles * panels * blocks
        assert emulator.count("ldtilecfg") == emulator.count("tilerelease") == 1
        assert emulator.live_threads_with_config() == 0
"""

# 32 rows and 32 columns make 2 x 2 tiles of sums; 128 inputs make one block. The tile multiplications equal the loads
# of operands in number (SparAMX, section 4.1). The other loads, and the stores, are the four tiles of sums.
CHECK_COUNTS_OF_2X2 = """
import numpy as np
from ortolan import _native, _testing
from tests.ops.quantized import Layer
from tests.ops.single_node import sparse_weight
rng = np.random.default_rng(7)
m, k, n = 32, 128, 32
x = rng.standard_normal((m, k), dtype=np.float32)
w = sparse_weight(rng, k, n, 0.5)
layer = Layer.random(rng, k, n, 0.5, None)

def counts_of(multiply):
    emulator.reset_counts()
    multiply()
    return emulator.counts()

if emulator is not None:
    for packed in (_native.pack_bitmap(w), _native.pack_bitmap(w, dense=True)):
        counts = counts_of(lambda: _testing.sparse_amx_matmul(x, *packed, k, n, kernel="amx"))
        assert counts == {
            "ldtilecfg": 1, "tdpbf16ps": 16, "tileloadd": 16 + 4, "tilestored": 4, "tilerelease": 1
        }, counts
        assert emulator.live_threads_with_config() == 0
    for stored in (layer, layer.stored_dense()):
        counts = counts_of(lambda: stored.multiply(x, None, "amx"))
        assert counts == {
            "ldtilecfg": 1, "tdpbssd": 8, "tileloadd": 8, "tilezero": 4, "tilestored": 4, "tilerelease": 1
        }, counts
        assert emulator.live_threads_with_config() == 0
"""

CHECK_ORT = """
import numpy as np
from ortolan import _native
from tests.ops.single_node import assert_matmul_close, session, sparse_amx_matmul_model, sparse_weight
rng = np.random.default_rng(8)
k, n = 100, 200
w, bias = sparse_weight(rng, k, n, 0.5), rng.standard_normal(n, dtype=np.float32)
run = session(sparse_amx_matmul_model(_native.pack_bitmap(w), k, n, bias), threads=2)
for m in (1, 3, 4, 20, 300):
    x = rng.standard_normal((m, k), dtype=np.float32)
    if emulator is not None:
        emulator.reset_counts()
    assert_matmul_close(run.run(None, {"x": x})[0], x, w, bias)
    if emulator is not None:
        # Few rows are left to the AVX-512 kernel.
        assert (emulator.count("tdpbf16ps") > 0) == (m >= 4)
        assert emulator.live_threads_with_config() == 0
"""


def test_two_four() -> None:
    check(CHECK_TWO_FOUR)


def test_few_rows_have_the_bits_of_many() -> None:
    check(CHECK_FEW_ROWS)


def test_shapes() -> None:
    check(CHECK_SHAPES)


def test_bits_are_those_of_the_documented_order() -> None:
    check(CHECK_BITS)


def test_counts_of_tile_instructions_and_release() -> None:
    check(CHECK_COUNTS)


def test_counts_of_a_block_of_2_x_2_tiles() -> None:
    check(CHECK_COUNTS_OF_2X2)


def test_masks_and_values_at_odd_addresses() -> None:
    check(CHECK_ODD_ADDRESSES)


def test_in_onnx_runtime_on_its_threads() -> None:
    check(CHECK_ORT)
