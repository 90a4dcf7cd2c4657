"""Kernels compared with the peak throughput of products in registers: the measurement and its table."""

import pytest

from ortolan import _testing
from ortolan.benchmarks.peak import kernels, measure, products_of

TARGETS = [target for target in _testing.simd_lanes() if target != "scalar"]


@pytest.mark.parametrize("target", TARGETS)
def test_products_in_registers_are_counted(target):
    lanes = _testing.simd_lanes()[target]
    products = set(products_of(target).values())
    assert products
    for product in products:
        one, ten = (_testing.peak(target, product, rounds) for rounds in (1, 10))
        assert ten == 10 * one
        assert one % (lanes * (1 if product == "MultiplyAdd" else 4)) == 0 and one > 0


@pytest.mark.skipif("amx" not in TARGETS, reason="no AMX")
def test_tiles_have_16_rows_16_columns_and_64_bytes_of_inputs():
    assert _testing.peak("amx", "TileDpBssd", 1) == 4 * 16 * 16 * 64
    assert _testing.peak("amx", "TileDpBf16", 1) == 4 * 16 * 16 * 32


def test_unknown_products_and_columns_are_refused():
    with pytest.raises(ValueError, match="product is Add, which"):
        _testing.peak("scalar", "Add", 1)
    with pytest.raises(ValueError, match="target is sse, which"):
        _testing.peak("sse", "MultiplyAdd", 1)


@pytest.mark.skipif(not TARGETS, reason="this CPU has scalar kernels alone")
def test_a_row_for_each_kind_of_weight():
    rows = measure(3, 64, 32, 1, TARGETS[-1])
    assert [kind for kind, _, _ in rows] == list(kernels(3, 64, 32, TARGETS[-1]))
    assert all(peak > 0 and rate > 0 for _, peak, rate in rows)
