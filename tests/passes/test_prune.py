"""Pruning zeroes exactly the requested number of weights, those with the smallest magnitudes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import ModelError, Recipe, RecipeError
from ortolan.graph_passes.passes.magnitude import Threshold, find_threshold, pruned_tensor, tally_weight
from ortolan.models import tiny

from .small_models import make_model, matmul_model, random_weight

FLOAT = TensorProto.FLOAT


def prune(model: onnx.ModelProto, **options) -> dict[str, np.ndarray]:
    """Run a recipe that only prunes, and return the weights."""
    recipe = Recipe.from_dict({"name": "prune", "pass": [{"name": "normalize"}, {"name": "prune", **options}]})
    pruned = ortolan.optimize_onnx(model, recipe=recipe).model
    return {tensor.name: numpy_helper.to_array(tensor) for tensor in pruned.graph.initializer}


FLOATS = st_numpy.arrays(
    st.sampled_from([np.float32, np.float16]),
    st_numpy.array_shapes(min_dims=2, max_dims=2, max_side=12),
    # Few distinct values to get ties, the largest and smallest values of float16, and zeros of both signs.
    elements=st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, -0.5, 6e4, -6e4, 6e-8]) | st.floats(-2, 2, width=16),
)


@given(st.lists(FLOATS, min_size=1, max_size=3), st.floats(0, 0.999))
def test_smallest_go_and_of_equals_the_first(weights, sparsity):
    tensors = [ir.Tensor(weight) for weight in weights]
    magnitudes = np.concatenate([np.abs(weight.astype(np.float32)).ravel() for weight in weights])
    count = round(sparsity * magnitudes.size)
    threshold = find_threshold(tensors, ["w"] * len(tensors), count)
    gone = np.zeros(magnitudes.size, bool)
    gone[np.argsort(magnitudes, kind="stable")[:count]] = True
    found, ties = [], threshold.ties
    for tensor in tensors:
        own = min(ties, tally_weight(tensor, threshold.key).equal)
        ties -= own
        found.append(pruned_tensor(tensor, Threshold(threshold.key, own)).numpy())
    expected = np.where(gone, 0, np.concatenate([weight.ravel().astype(np.float32) for weight in weights]))
    np.testing.assert_array_equal(np.concatenate([array.ravel().astype(np.float32) for array in found]), expected)
    assert all(array.dtype == weight.dtype for array, weight in zip(found, weights, strict=True))


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.5, 0.999])
def test_sparsity_of_a_layer_is_exact(sparsity):
    weight = random_weight(37, 41)
    pruned = prune(matmul_model(37, 41, weight=weight), sparsity=sparsity)["W"]
    assert np.count_nonzero(pruned == 0) == round(sparsity * weight.size)
    kept = pruned != 0
    np.testing.assert_array_equal(pruned[kept], weight[kept])
    assert np.abs(weight[kept]).min() >= np.abs(weight[~kept]).max(initial=0)


def test_weights_that_are_zero_already_count():
    weight = random_weight(20, 24) * (np.random.default_rng(0).random((20, 24)) < 0.2).astype(np.float32)
    np.testing.assert_array_equal(prune(matmul_model(weight=weight), sparsity=0.5)["W"], weight)


def two_layers() -> onnx.ModelProto:
    """Return a model of two layers; the weights of the second are 100 times smaller."""
    return make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("MatMul", ["h", "B"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", 20])},
        {"y": (FLOAT, ["batch", 30])},
        {"A": random_weight(20, 30), "B": random_weight(30, 30, seed=1) / 100},
    )


def zeros(array: np.ndarray) -> int:
    return int(np.count_nonzero(array == 0))


def test_global_threshold_takes_from_where_weights_are_small():
    weights = prune(two_layers(), scope="global", sparsity=0.5)
    assert zeros(weights["A"]) + zeros(weights["B"]) == round(0.5 * (600 + 900))
    assert zeros(weights["B"]) > 0.8 * 900 and zeros(weights["A"]) < 0.1 * 600


def test_layers_option_overrides_sparsity_by_name_of_node_or_weight():
    weights = prune(two_layers(), sparsity=0.5, layers={"/a": 0.9, "B": 0.1})
    assert (zeros(weights["A"]), zeros(weights["B"])) == (540, 90)


def test_layers_with_their_own_sparsity_do_not_count_in_the_global_threshold():
    weights = prune(two_layers(), scope="global", sparsity=0.5, layers={"/b": 0.0})
    assert (zeros(weights["A"]), zeros(weights["B"])) == (300, 0)


def test_select_and_exclude():
    assert [zeros(weight) for weight in prune(two_layers(), select=["/a"]).values()] == [300, 0]
    assert [zeros(weight) for weight in prune(two_layers(), exclude=["A"]).values()] == [0, 450]


@pytest.mark.parametrize("options", [{"select": ["/c"]}, {"layers": {"/c": 0.3}}])
def test_a_pattern_that_matches_nothing_is_an_error(options):
    with pytest.raises(RecipeError, match=r"'/c' .* matches no linear layer; layers have names like '/a'"):
        prune(two_layers(), **options)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_weights_that_are_not_finite_are_refused_by_name(bad):
    weight = random_weight(20, 24)
    weight[3, 4] = bad
    with pytest.raises(ModelError, match="'W' holds NaN or infinity"):
        prune(matmul_model(weight=weight))


def tied_to_embedding() -> onnx.ModelProto:
    return make_model(
        [
            helper.make_node("Gather", ["table", "ids"], ["h"], name="/embed"),
            helper.make_node("MatMul", ["h", "table"], ["y"], name="/linear"),
        ],
        {"ids": (TensorProto.INT64, ["batch"])},
        {"y": (FLOAT, ["batch", 16])},
        {"table": random_weight(16, 16)},
    )


def test_a_weight_that_others_use_is_copied_first():
    weights = prune(tied_to_embedding(), sparsity=0.5)
    assert zeros(weights["table"]) == 0 and zeros(weights["table_pruned"]) == 128


def test_layers_that_share_a_weight_are_pruned_together():
    model = make_model(
        [
            helper.make_node("MatMul", ["x", "A"], ["h"], name="/a"),
            helper.make_node("MatMul", ["h", "A"], ["y"], name="/b"),
        ],
        {"x": (FLOAT, ["batch", 20])},
        {"y": (FLOAT, ["batch", 20])},
        {"A": random_weight(20, 20)},
    )
    assert {name: zeros(weight) for name, weight in prune(model, sparsity=0.5).items()} == {"A": 200}
    with pytest.raises(RecipeError, match="share the weight 'A'"):
        prune(model, layers={"/a": 0.9})
    # If only /a is selected, /b keeps the original weight and /a gets a copy.
    weights = prune(model, exclude=["/b"])
    assert (zeros(weights["A"]), zeros(weights["A_pruned"])) == (0, 200)


@pytest.mark.parametrize("form", ["transpose", "cast", "dequantize", "gemm_trans_b"])
def test_weights_behind_other_operators(form):
    model = ir.to_proto(tiny.mlp((24, 40), form))
    shapes = {
        name: (zeros(weight), weight.size) for name, weight in prune(model, sparsity=0.5).items() if weight.ndim == 2
    }
    ((count, size),) = shapes.values()
    # Weights that int8 quantization rounded to zero count as pruned.
    assert size == 960 and count == 480


def test_the_model_passed_in_is_not_changed():
    model = tied_to_embedding()
    before = model.SerializeToString(deterministic=True)
    prune(model)
    assert model.SerializeToString(deterministic=True) == before


def test_a_weight_that_is_an_output_of_the_model_is_copied_first():
    model = matmul_model()
    model.graph.output.append(helper.make_tensor_value_info("W", FLOAT, [20, 24]))
    weights = prune(model, sparsity=0.5)
    assert (zeros(weights["W"]), zeros(weights["W_pruned"])) == (0, 240)


def blocks(weight: np.ndarray) -> np.ndarray:
    """Reshape [k, n] to [k, blocks, 4], with zeros in the last block if n is no multiple of 4."""
    padded = np.pad(weight, ((0, 0), (0, -weight.shape[1] % 4)))
    return padded.reshape(len(weight), -1, 4)


@pytest.mark.parametrize("form", ["gemm", "gemm_trans_b"])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8])
def test_blocks_of_one_input_and_four_outputs_go_together(form, sparsity):
    """The blocks with the smallest sums of magnitudes become zero; all other blocks are unchanged."""
    model = ir.to_proto(tiny.mlp(widths=(24, 42), forms=form))
    before = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    after = prune(model, pattern="4x1", sparsity=sparsity)
    (name,) = [name for name, array in before.items() if array.ndim == 2]
    old, new = (array if form == "gemm" else array.T for array in (before[name], after[name]))
    old, new = blocks(old), blocks(new)
    gone = ~new.any(axis=2)
    assert np.count_nonzero(gone) == round(sparsity * gone.size)
    np.testing.assert_array_equal(new[~gone], old[~gone])
    sums = np.abs(old).sum(axis=2)
    assert sums[gone].max(initial=0) <= sums[~gone].min() * (1 + 1e-6)


def test_layers_that_are_sparse_already_stay_as_they_are():
    weight = random_weight(32, 24)
    weight[np.random.default_rng(0).random((32, 6)).repeat(4, axis=1) < 0.6] = 0
    share = np.mean(weight == 0)
    for keep_sparse, pruned in ((None, True), (0.5, False), (0.9, True)):
        found = prune(matmul_model(32, 24, weight=weight), pattern="4x1", sparsity=0.8, keep_sparse=keep_sparse)["W"]
        assert (np.mean(found == 0) > share) == pruned
    recipe = Recipe.from_dict(
        {"name": "prune", "pass": [{"name": "normalize"}, {"name": "prune", "pattern": "4x1", "keep_sparse": 0.5}]}
    )
    report = ortolan.optimize_onnx(matmul_model(32, 24, weight=weight), recipe=recipe)
    assert any("already sparse" in note for note in report.notes)
    assert report.layers[0].sparsity == pytest.approx(share)
