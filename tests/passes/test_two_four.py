"""2:4 storage of SparseAMXMatMul: the layers that get it, their weights, and refusals."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import NothingToReplaceError, OptimizationReport, Recipe, RecipeError, _native
from ortolan.graph_passes.find.quantized_weight import QuantizedWeight
from ortolan.graph_passes.operators import sparse_amx_matmul_storage as storage
from ortolan.graph_passes.operators.replacement import LayerWeight, Stored
from ortolan.graph_passes.operators.sparse_amx_matmul import SparseAMXMatMul
from ortolan.graph_passes.weights.quantizers.grid import Quantization, round_to_nearest
from ortolan.graph_passes.weights.quantizers.mse import round_mse
from ortolan.models import tiny

from ..ops.two_four import two_of_four
from ..recipes.forms import NAMED
from .int8_layers import Int8Layer
from .small_models import make_model, matmul_model, op_types, optimize, random_weight, relative_error, run
from .stored_layers import NBitsLayer

KINDS = ("bf16", "int8", "int4")
BITS = {"bf16": 16, "int8": 8, "int4": 4}
# Packed bytes per weight: masks and values.
BYTES = {"bf16": 1.125, "int8": 0.625, "int4": 0.375}


def half(k: int, n: int, seed: int = 0) -> np.ndarray:
    """Return a weight with exactly two nonzero values in each group of four inputs."""
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.tile(np.arange(4), (-(-k // 4), n, 1)), axis=2)
    kept = (order < 2).transpose(0, 2, 1).reshape(-1, n)[:k]
    return np.where(kept, random_weight(k, n, seed=seed), np.float32(0))


def two_layers(first: np.ndarray, second: np.ndarray) -> onnx.ModelProto:
    """Return the model y = relu(x W) V."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "W"], ["p"], name="first"),
            helper.make_node("Relu", ["p"], ["h"], name="relu"),
            helper.make_node("MatMul", ["h", "V"], ["y"], name="second"),
        ],
        {"x": (TensorProto.FLOAT, ["batch", len(first)])},
        {"y": (TensorProto.FLOAT, ["batch", second.shape[1]])},
        {"W": first, "V": second},
    )


def packed(model: onnx.ModelProto, name: str) -> tuple[np.ndarray, str]:
    """Return the weights of the packed layer of this name, and its storage."""
    (node,) = [node for node in model.graph.node if node.op_type == "SparseAMXMatMul" and node.name == name]
    tensors = {tensor.name: tensor for tensor in model.graph.initializer}
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    masks, values, offsets = (numpy_helper.to_array(tensors[name]) for name in node.input[1:4])
    unpack: Any = {16: _native.unpack_bitmap, 8: _native.unpack_bitmap_int8, 4: _native.unpack_bitmap_int4}
    bits = sizes["weight_bits"]
    array = values.view(np.uint16) if bits == 16 else values
    return unpack[bits](masks, array, offsets, sizes["k"], sizes["n"]), storage.storage_of(masks.size, offsets.size)


def expected_numbers(kind: str, weight: np.ndarray) -> np.ndarray:
    if kind == "bf16":
        return weight.astype(ml_dtypes.bfloat16).astype(np.float32)
    if kind == "int4":
        return round_mse(weight, Quantization(4, 128, bf16_scales=True)).q
    return round_to_nearest(weight, Quantization(8, None)).q


@pytest.fixture(params=[True, False], ids=["fast bitmaps", "slow bitmaps"])
def fast(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    on_cpu(monkeypatch, request.param)
    return bool(request.param)


def on_cpu(monkeypatch: pytest.MonkeyPatch, fast_bitmaps: bool) -> None:
    monkeypatch.setattr(_native, "bitmaps_are_fast", lambda bits: bits == 16 or fast_bitmaps)


# --- choice of the storage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "is_two_four", "wanted", "with_bitmaps", "without"),
    [
        (1.0, False, None, "dense", "dense"),
        (0.5, False, None, "bitmap", "dense"),
        (0.5, False, "small", "bitmap", "bitmap"),
        (0.5, False, "2:4", "bitmap", "dense"),  # pass replace refuses this layer
        (0.5, True, None, "2:4", "2:4"),
        (0.5, True, "small", "2:4", "2:4"),
        (0.1, True, None, "bitmap", "2:4"),
        (0.1, True, "small", "bitmap", "bitmap"),
        (0.1, True, "2:4", "2:4", "2:4"),
    ],
)
def test_choice(
    monkeypatch: pytest.MonkeyPatch, count: float, is_two_four: bool, wanted: str, with_bitmaps: str, without: str
) -> None:
    stored = Stored(round(count * 256 * 512), "" if is_two_four else "not 2:4")
    for fast_bitmaps, expected in ((True, with_bitmaps), (False, without)):
        on_cpu(monkeypatch, fast_bitmaps)
        for bits in (8, 4):
            assert storage.choose_storage(256, 512, stored, bits, wanted) == expected
        # Bitmaps of bf16 weights are fast on every CPU.
        assert storage.choose_storage(256, 512, stored, 16, wanted) == with_bitmaps


@pytest.mark.parametrize("rows", [4, 8, 12, 2000])
def test_first_place_that_is_beyond(rows: int) -> None:
    weight = np.zeros((rows, 7), np.float32)
    weight[0::4], weight[3::4] = 1, -2
    assert storage.beyond_two_four(weight) == ""
    weight[-2, 5] = 3
    place = f"3 of its weights from inputs {rows - 4} to {rows - 1} to output 5 are not zero"
    assert storage.beyond_two_four(weight) == place
    assert storage.beyond_two_four(weight[:-2]) == ""


@pytest.mark.parametrize("size", [(1, 1), (2, 50), (31, 17), (64, 16), (65, 16), (100, 50)])
@pytest.mark.parametrize("wanted", [None, "2:4", "small"])
@pytest.mark.parametrize("kind", KINDS)
def test_size_is_predicted_exactly(kind: str, wanted: str | None, size: tuple[int, int]) -> None:
    weight, operator, quantized = half(*size), SparseAMXMatMul(), None
    operator.storage = wanted
    if kind != "bf16":
        group = None if kind == "int8" else 32
        rounded = round_to_nearest(weight, Quantization(BITS[kind], group))
        quantized = QuantizedWeight(BITS[kind], group, ir.Tensor(rounded.q), ir.Tensor(rounded.scales))
    made = operator.pack(LayerWeight(weight, quantized))
    numbers = weight if quantized is None else quantized.q.numpy()
    stored = operator.stored_weights(numbers)
    found = storage.storage_of(made["masks"].array.size, made["offsets"].array.size)
    assert found == operator.foreseen_storage(*size, stored, quantized)
    assert wanted != "2:4" or found == "2:4"
    if found == "2:4" or kind != "int4":  # for int4 bitmaps, packed_bytes is an upper bound
        assert operator.packed_bytes(*size, stored, quantized) == sum(part.array.nbytes for part in made.values())


# --- formats
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dry_run", [False, True])
@pytest.mark.parametrize("method", [None, "sparsegpt"])
@pytest.mark.parametrize("kind", KINDS)
def test_pruned_to_the_pattern(kind: str, method: str | None, dry_run: bool, fast: bool) -> None:
    model = two_layers(random_weight(96, 64), random_weight(64, 48, seed=1))
    x = {"x": np.random.default_rng(2).standard_normal((200, 96), dtype=np.float32)}
    recipe = Recipe.of(weights=kind, sparsity=0.5, pattern="2:4", method=method)
    report = optimize(model, recipe=recipe, calibration=x, dry_run=dry_run)
    assert [(layer.storage, layer.reason) for layer in report.layers] == [("2:4", None)] * 2
    assert ("2:4 " + kind) in str(report)
    if dry_run:
        return
    assert all(layer.sparsity >= 0.5 for layer in report.layers)
    for layer in ortolan.inspect_onnx(report.model).linears:
        assert layer.weight_format.startswith(f"2:4 {kind}") and layer.sparsity >= 0.5
    # Outputs with the library and without it equal those of the unpacked weights.
    assert packed(report.model, "first")[1] == packed(report.model, "second")[1] == "2:4"
    kernel, body = (run(report.model, x, library=library)[0] for library in (True, False))
    assert relative_error(kernel, body) < 1e-5


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_large_layer(kind: str) -> None:
    model = matmul_model(512, 256)
    report = optimize(model, recipe=Recipe.of(weights=kind, sparsity=0.5, pattern="2:4"))
    (layer,) = report.layers
    scales = {"bf16": 0, "int8": 4 * 256, "int4": 2 * 256 * 4}[kind]
    assert layer.bytes_after == BYTES[kind] * 512 * 256 + scales


@pytest.mark.parametrize("kind", KINDS)
def test_the_pattern_alone_takes_what_has_it(kind: str, fast: bool) -> None:
    """pattern="2:4" without pruning: one layer has a group of three nonzero weights and is kept exactly."""
    weight, other = half(96, 64), half(64, 48, seed=1)
    other[8:11, 5] = 1
    report = optimize(two_layers(weight, other), recipe=Recipe.of(weights=kind, pattern="2:4"))
    found, how = packed(report.model, "first")
    assert how == "2:4"
    np.testing.assert_array_equal(found, expected_numbers(kind, weight))
    first, second = report.layers
    assert (first.status, first.storage, second.status, second.storage) == ("replaced", "2:4", "kept", None)
    assert "of its weights from inputs 8 to 11 to output 5 are not zero, expected at most 2 of 4;" in second.reason
    (kept,) = [tensor for tensor in report.model.graph.initializer if tensor.name == "V"]
    np.testing.assert_array_equal(numpy_helper.to_array(kept), other)


def test_layers_that_are_ignored_need_no_pattern() -> None:
    model = two_layers(half(96, 64), random_weight(64, 48, seed=1))
    report = optimize(model, recipe=Recipe.of(weights="int8", pattern="2:4", ignore=["second"]))
    assert [(layer.storage, layer.weight_bits) for layer in report.layers] == [("2:4", 8), ("dense", None)]


def test_a_model_without_the_pattern_is_refused_by_name() -> None:
    reason = r"linear: [34] of its weights from inputs 0 to 3 to output 0 are not zero"
    with pytest.raises(NothingToReplaceError, match=reason):
        optimize(matmul_model(), recipe=Recipe.of(pattern="2:4"))


@pytest.mark.parametrize("kind", ["bf16", "int8"])
def test_forms_that_do_not_name_the_pattern_use_it(kind: str, fast: bool) -> None:
    weight = half(96, 64)
    report = optimize(matmul_model(96, 64, weight=weight), recipe=Recipe.of(weights=kind))
    found, how = packed(report.model, "linear")
    assert how == "2:4"
    np.testing.assert_array_equal(found, expected_numbers(kind, weight))


def test_unstructured_zeros_where_bitmaps_are_slow(fast: bool) -> None:
    """If bitmaps are slow, formats that prune still use them and note it; other formats use dense storage."""
    weight = random_weight(512, 256)
    weight[np.random.default_rng(0).random(weight.shape) < 0.5] = 0
    model = matmul_model(512, 256, weight=weight)
    note = "no faster than dense weights on this CPU"
    pruned = optimize(model, recipe=Recipe.of(weights="int8", sparsity=0.5))
    assert packed(pruned.model, "linear")[1] == "bitmap" and any(note in one for one in pruned.notes) != fast
    plain = optimize(model, recipe=Recipe.of(weights="int8"))
    assert packed(plain.model, "linear")[1] == ("bitmap" if fast else "dense")
    assert not any(note in one for one in plain.notes)


def test_gate_and_up_in_one_node() -> None:
    report = optimize(ir.to_proto(tiny.tiny_llama()), recipe=Recipe.of(weights="int8", sparsity=0.5, pattern="2:4"))
    gates = [layer for layer in report.layers if "gated" in str(layer.fused)]
    assert gates and all(layer.storage == "2:4" for layer in gates)
    layers = [layer for layer in report.replaced if layer.new_op != "NoMADAttention"]
    assert all("lm_head" in layer.name for layer in layers if layer.storage != "2:4")


@pytest.mark.parametrize("name", ["storage", "quantized_only"])
def test_options_of_another_operator(name: str) -> None:
    value: Any = "2:4" if name == "storage" else True
    with pytest.raises(RecipeError, match=f"{name} is .*, which needs op = 'SparseAMXMatMul'"):
        Recipe.from_dict({"name": "r", "pass": [{"name": "replace", "op": "W4A8MatMul", name: value}]})


def test_inspect_knows_the_pattern() -> None:
    model = two_layers(half(96, 64), random_weight(64, 48, seed=1))
    assert [layer.weight_format for layer in ortolan.inspect_onnx(model).linears] == ["FLOAT, 2:4", "FLOAT"]
    ((tiny_one,), (zero,)) = (
        ortolan.inspect_onnx(matmul_model(2, 3, weight=weight)).linears
        for weight in (random_weight(2, 3), np.zeros((2, 3), np.float32))
    )
    assert (tiny_one.weight_format, zero.weight_format) == ("FLOAT", "FLOAT, 2:4")


# --- stored weights
# -----------------------------------------------------------------------------------------------------


def default(model: onnx.ModelProto) -> OptimizationReport:
    return ortolan.optimize_onnx(model, options={"verify.seconds": 0.0})


def numbers(k: int, n: int, most: int) -> np.ndarray:
    rng = np.random.default_rng(3)
    q = rng.integers(1, most + 1, (k, n)) * rng.choice([-1, 1], (k, n))
    return np.where(half(k, n) != 0, q, 0).astype(np.int8)


@pytest.mark.parametrize("form", ["dynamic", "chain", "to_float", "sparse_ml", "qdq", "qdq_gemm_trans_b"])
@pytest.mark.parametrize("recipe", [NAMED["adopt"], Recipe.of(weights="int8", pattern="2:4")], ids=["adopt", "form"])
def test_stored_int8_keeps_its_numbers(form: str, recipe: Recipe) -> None:
    layer = Int8Layer(form, q=numbers(64, 48, 127), bias=True)
    report = optimize(layer.model(), recipe=recipe)
    found, how = packed(report.model, "linear")
    assert how == "2:4"
    np.testing.assert_array_equal(found, layer.q)
    assert any("keeps the model's stored 8-bit weights exactly" in note for note in report.notes)
    x = {"x": layer.inputs()}
    expected = layer.expected(x["x"])
    for library in (True, False):
        assert relative_error(expected, run(report.model, x, library=library)[0]) < 0.02


def bf16_scaled(zero_points: str = "") -> NBitsLayer:
    layer = NBitsLayer(128, 48, 32, zero_points)
    layer.scales = layer.scales.astype(ml_dtypes.bfloat16).astype(np.float32)
    layer.q[:, :128] = numbers(128, 48, 7).T + 8
    layer.zeros[:] = 8
    return layer


def test_stored_int4_keeps_its_numbers() -> None:
    layer = bf16_scaled()
    report = default(layer.model())
    found, how = packed(report.model, "linear")
    assert how == "2:4"
    np.testing.assert_array_equal(found, numbers(128, 48, 7))
    x = {"x": layer.inputs()}
    expected = x["x"] @ layer.matrix
    for library in (True, False):
        assert relative_error(expected, run(report.model, x, library=library)[0]) < 0.02


def test_stored_int4_that_would_be_rounded() -> None:
    """Zero points, and scales that bfloat16 cannot represent, are kept by W4A8MatMul."""
    other = bf16_scaled()
    other.scales[3, 1] *= np.float32(1 + 2**-10)
    for layer in (bf16_scaled("packed"), other):
        report = default(layer.model())
        assert op_types(report.model) == ["W4A8MatMul"] and report.layers[0].reason is None
    with pytest.raises(NothingToReplaceError, match="has scales that are not exact in bfloat16"):
        optimize(other.model(), recipe=Recipe.of(weights="int4", pattern="2:4"))


def test_the_default_takes_no_float_layers() -> None:
    """The default call leaves a float layer unchanged if the model has another layer stored in int8."""
    stored = Int8Layer("dynamic", q=numbers(64, 48, 127))
    nodes = [*stored.nodes("r"), helper.make_node("MatMul", ["r", "V"], ["y"], name="float")]
    kind = TensorProto.FLOAT
    model = make_model(
        nodes,
        {"x": (kind, ["batch", 64])},
        {"y": (kind, ["batch", 48])},
        stored.tensors | {"V": half(48, 48)},
        domains={"com.microsoft": 1},
    )
    report = default(model)
    assert [(layer.name, layer.status) for layer in report.layers] == [("linear", "replaced"), ("float", "kept")]


def test_dense_int8_is_stored_dense() -> None:
    layer = Int8Layer("dynamic", q=np.full((64, 48), 3, np.int8))
    report = default(layer.model())
    assert [(one.new_op, one.storage) for one in report.layers] == [("SparseAMXMatMul", "dense")]


def test_pruned_weights_may_have_fewer() -> None:
    rng = np.random.default_rng(1)
    weight = two_of_four(rng, two_of_four(rng, random_weight(96, 64)))
    report = optimize(matmul_model(96, 64, weight=weight), recipe=Recipe.of(weights="bf16", pattern="2:4"))
    found, how = packed(report.model, "linear")
    assert how == "2:4"
    np.testing.assert_array_equal(found, expected_numbers("bf16", weight))
