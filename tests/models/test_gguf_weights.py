"""Weights of GGUF files in the operators' formats, compared with the dequantization of the package gguf."""

import tracemalloc

import numpy as np
import pytest

from ortolan.graph_passes.files.spill import TensorSpill
from ortolan.graph_passes.weights.quantizers.grid import Quantization
from ortolan.graph_passes.weights.quantizers.k_quants import Q6_K
from ortolan.models.gguf.file import StoredWeight
from ortolan.models.gguf.weights import in_turns, join_quantized, keep_gguf_weight
from ortolan.models.graph_builder import ModelBuildError

from .gguf_file import quantized

RNG = np.random.default_rng(0)
WEIGHT = (RNG.standard_normal((48, 512)) * RNG.uniform(0.01, 0.1, (48, 1))).astype(np.float32)


def stored(kind, weight=WEIGHT):
    return StoredWeight("layer", kind, weight.shape, quantized(weight, kind))


def take(weight, folder, **options):
    with TensorSpill(folder) as spill:
        return keep_gguf_weight(weight, spill, **options)


@pytest.mark.parametrize(
    ("kind", "bits", "group", "subgroup", "minimum"),
    [
        ("Q4_0", 4, 32, None, False),
        ("Q4_1", 4, 32, None, True),
        ("Q8_0", 8, 32, None, False),
        ("Q5_0", 5, 32, 32, False),
        ("MXFP4", 5, 32, 32, False),
        ("Q5_1", 5, 32, 32, True),
        ("Q2_K", 4, 256, 16, True),
        ("Q3_K", 4, 256, 16, False),
        ("Q4_K", 4, 256, 32, True),
        ("Q5_K", 5, 256, 32, True),
        ("Q6_K", 6, 256, 16, False),
    ],
)
def test_weights_are_kept_exactly(tmp_path, kind, bits, group, subgroup, minimum):
    weight = stored(kind)
    taken = take(weight, tmp_path)
    quantized = taken.quantized
    assert (quantized.bits, quantized.group_size, quantized.subgroup_size) == (bits, group, subgroup)
    assert quantized.minimum == minimum and taken.error == 0
    np.testing.assert_array_equal(quantized.matrix().T, weight.floats())
    order = np.random.default_rng(2).permutation(48)
    np.testing.assert_array_equal(
        take(weight.reordered(order).rows(3, 20), tmp_path).quantized.matrix().T, weight.floats()[order[3:20]]
    )


def test_mxfp4_with_scales_that_float16_lacks(tmp_path):
    for exponent in (1, 250):
        weight = stored("MXFP4")
        weight.data[5, 17] = exponent
        quantized = take(weight, tmp_path).quantized
        assert quantized.scales.dtype.name == "FLOAT"
        np.testing.assert_array_equal(quantized.matrix().T, weight.floats())


def test_columns_in_turns(tmp_path):
    for kind in ("Q4_K", "Q6_K", "MXFP4"):
        first, second = stored(kind), stored(kind)
        if kind == "MXFP4":
            second.data[5, 17] = 1
        one, other = (take(weight, tmp_path).quantized for weight in (first, second))
        found = in_turns(one, other).matrix()
        np.testing.assert_array_equal(found[:, ::2], one.matrix())
        np.testing.assert_array_equal(found[:, 1::2], other.matrix())


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_eight_bits(tmp_path, kind):
    weight = stored(kind)
    taken = take(weight, tmp_path)
    assert (taken.quantized.bits, taken.quantized.symmetric, taken.quantized.scales.dtype.name) == (8, True, "FLOAT16")
    exact, found = weight.floats(), taken.quantized.matrix().T
    assert taken.error == pytest.approx(np.linalg.norm(found - exact) / np.linalg.norm(exact), rel=1e-3)
    # The error is at most that of rounding to nearest with the scale of the largest weight.
    blocks = exact.reshape(-1, 32)
    scale = np.maximum(np.abs(blocks).max(axis=1, keepdims=True) / 127, 2**-24).astype(np.float16).astype(np.float32)
    plain = np.clip(np.rint(blocks / scale), -127, 127) * scale - blocks
    assert (np.square(found - exact).reshape(-1, 32).sum(1) <= np.square(plain).sum(1) * 1.001 + 1e-12).all()
    assert 0 < taken.error < 0.006


def test_rows_that_end_in_half_a_group(tmp_path):
    weight = stored("F32", WEIGHT[:, :100])
    taken = take(weight, tmp_path)
    assert taken.quantized.scales.shape.numpy() == (4, 48)
    assert taken.error < 0.006


def subgroups(bits):
    return Quantization(bits, 256, symmetric=False, subgroup_size=16)


@pytest.mark.parametrize(
    ("wanted", "most"), [(subgroups(4), 0.08), (subgroups(5), 0.04), (subgroups(6), 0.025), (Q6_K, 0.022)]
)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_rounding_on_request(tmp_path, kind, wanted, most):
    weight = stored(kind, WEIGHT[:, :352])  # the last group and its last subgroups are incomplete
    taken = take(weight, tmp_path, wanted=wanted)
    found = taken.quantized
    assert (found.bits, found.group_size, found.subgroup_size) == (wanted.bits, 256, 16)
    assert found.k_quant_zero == wanted.k_quant_zero
    exact = weight.floats()
    error = np.linalg.norm(found.matrix().T - exact) / np.linalg.norm(exact)
    assert taken.error == pytest.approx(error, rel=1e-3) and most / 2 < error < most


@pytest.mark.parametrize(("kind", "bits"), [("Q4_0", 4), ("Q3_K", 4), ("Q5_1", 5), ("Q5_K", 5), ("Q6_K", 6)])
def test_weights_of_fewer_bits_than_wanted_stay(tmp_path, kind, bits):
    assert take(stored(kind), tmp_path, wanted=subgroups(bits)).error > 0
    for wanted in (Q6_K, *map(subgroups, range(bits + 1, 7))):
        assert take(stored(kind), tmp_path, wanted=wanted).error == 0


def test_small_and_zero_weights(tmp_path):
    weight = np.zeros((2, 64), np.float32)
    weight[0, :32] = np.linspace(-1e-7, 1e-7, 32)
    for wanted in (None, Q6_K, subgroups(4)):
        found = take(stored("F32", weight), tmp_path, wanted=wanted).quantized.matrix().T
        np.testing.assert_allclose(found, weight, atol=3.1e-8)
        assert not found[1].any()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q8_0"])
def test_scales_that_are_not_finite(tmp_path, kind):
    weight = stored(kind)
    weight.data[7, :2] = np.array([np.inf], np.float16).view(np.uint8)
    with pytest.raises(ModelBuildError, match=f"tensor 'layer' \\({kind}\\) has scales that are NaN, infinite"):
        take(weight, tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e9])
def test_floats_that_are_not_finite(tmp_path, bad):
    weight = WEIGHT.copy()
    weight[3, 5] = bad
    with pytest.raises(ModelBuildError, match="tensor 'layer' holds NaN, infinity or weights that are too large"):
        take(stored("F32", weight), tmp_path)
    if not np.isfinite(bad):
        with pytest.raises(ModelBuildError, match="tensor 'layer' \\(F32\\) holds NaN or infinity"):
            take(stored("F32", weight), tmp_path, wanted=Q6_K)


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "Q5_1", "Q6_K"])
def test_weights_side_by_side(tmp_path, kind):
    parts = [take(stored(kind).rows(*rows), tmp_path).quantized for rows in ((0, 32), (8, 16))]
    joined = join_quantized(parts)
    np.testing.assert_array_equal(joined.matrix(), np.concatenate([part.matrix() for part in parts], axis=1))
    for other in ("Q4_0", "Q5_0", "Q5_K"):
        assert join_quantized([parts[0], take(stored(other), tmp_path).quantized]) is None


@pytest.mark.parametrize("shape", [(8192, 1024), (8, 1024, 1024)])
def test_dequantizing_takes_little_memory_beside_the_result(shape):
    weight = StoredWeight("layer", "Q8_0", shape, np.tile(quantized(WEIGHT[:1, :32], "Q8_0"), (*shape[:-1], 32)))
    tracemalloc.start()
    floats = weight.floats()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert floats.shape == shape
    assert peak < 1.5 * floats.nbytes


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_vectors(kind):
    vector = WEIGHT[0]
    data = quantized(vector, kind)
    weight = StoredWeight("norm", kind, vector.shape, data)
    np.testing.assert_allclose(weight.floats(), vector, rtol=2**-8)
    np.testing.assert_array_equal(weight.floats(3, 100), weight.floats()[3:100])
    order = RNG.permutation(len(vector))
    np.testing.assert_array_equal(weight.reordered(order).floats(), weight.floats()[order])
