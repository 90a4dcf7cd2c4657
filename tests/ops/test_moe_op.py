"""Test MoE in ORT: the same bits as single layers, its ONNX function, and invalid input."""

from __future__ import annotations

import dataclasses

import numpy as np
import onnx
import pytest

from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.find.experts import ExpertsForm

from .damages import damage
from .moe import KINDS, Mixture, joined, with_function
from .single_node import assert_same_bits, session

SMALL = ExpertsForm(6, 96, 40, Activation.SILU, gated=True)
GPT_OSS = dataclasses.replace(SMALL, alpha=1.702, beta=1.0, limit=0.5)
PLAIN = dataclasses.replace(SMALL, gated=False, activation=Activation.RELU)


@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_single_layers(kind: str) -> None:
    """Every row has the bits that the kernels of single layers give, for any batch and number of threads."""
    rng = np.random.default_rng(list(KINDS).index(kind))
    mixture = Mixture.random(rng, SMALL, (kind, kind), groups=(64, 128))
    model = mixture.model()
    one, three = session(model), session(model, threads=3)
    for m, k in ((1, 2), (7, 3), (90, 2), (90, 6)):
        feeds = mixture.route(rng, m, k)
        expected = mixture.expected(feeds)
        assert_same_bits(one.run(None, feeds)[0], expected)
        assert_same_bits(three.run(None, feeds)[0], expected)
        row = {name: array[m // 2 : m // 2 + 1] for name, array in feeds.items()}
        assert_same_bits(one.run(None, row)[0], expected[m // 2 : m // 2 + 1])


@pytest.mark.parametrize("form", [SMALL, GPT_OSS, PLAIN], ids=["silu", "gpt_oss", "relu"])
def test_kernel_and_function_agree_with_float_layers(form: ExpertsForm) -> None:
    """Nodes of all kinds in one model share a function; its answers and the kernel's differ by rounding only."""
    rng = np.random.default_rng(5)
    pairs = [(kind, kind) for kind in KINDS] + [("four", "six"), ("int4", "zero_points"), ("Q4_K", "Q6_K")]
    mixtures = [Mixture.random(rng, form, pair, bias=index % 2 == 0) for index, pair in enumerate(pairs)]
    model = with_function(joined([mixture.model() for mixture in mixtures]))
    onnx.checker.check_model(model)
    feeds = mixtures[0].route(rng, 9, 2)
    kernels, inlined = session(model).run(None, feeds), session(model, library=False).run(None, feeds)
    for mixture, kernel, function in zip(mixtures, kernels, inlined, strict=True):
        assert_same_bits(kernel, mixture.expected(feeds))
        floats = mixture.expected(feeds, exact=False)
        norm = np.linalg.norm(floats)
        assert np.linalg.norm(kernel - floats) < 0.05 * norm
        assert np.linalg.norm(kernel - function) < 0.005 * norm


@pytest.mark.parametrize("opset", [13, 18, 23])
def test_function_serves_every_opset_and_rank(opset: int) -> None:
    rng = np.random.default_rng(opset)
    mixture = Mixture.random(rng, GPT_OSS, ("zero_points", "int8"), bias=True)
    model = with_function(mixture.model(opset, rank=3))
    feeds = mixture.route(rng, 6, 2)
    expected = mixture.expected(feeds).reshape(2, 3, -1)
    feeds["x"] = feeds["x"].reshape(2, 3, -1)
    assert_same_bits(session(model).run(None, feeds)[0], expected)
    function = session(model, library=False).run(None, feeds)[0]
    assert np.linalg.norm(function - expected) < 0.005 * np.linalg.norm(expected)


def test_rows_with_nan_stay_alone() -> None:
    rng = np.random.default_rng(2)
    mixture = Mixture.random(rng, SMALL)
    feeds = mixture.route(rng, 20, 2)
    clean = session(mixture.model()).run(None, feeds)[0]
    feeds["x"][3, 5] = np.nan
    for library in (True, False):
        y = session(with_function(mixture.model()), library=library).run(None, feeds)[0]
        assert np.isnan(y[3]).all() and np.isfinite(np.delete(y, 3, axis=0)).all()
        if library:
            assert_same_bits(np.delete(y, 3, axis=0), np.delete(clean, 3, axis=0))


def test_no_rows() -> None:
    mixture = Mixture.random(np.random.default_rng(2), SMALL)
    feeds = mixture.route(np.random.default_rng(2), 0, 2)
    assert session(mixture.model()).run(None, feeds)[0].shape == (0, 96)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts": np.array([[0, 6]])}, "experts 'experts' holds 6, expected 0 to 5"),
        ({"experts": np.array([[-1, 0]])}, "experts 'experts' holds -1, expected 0 to 5"),
        (
            {"experts": np.array([[1, 2], [1, 2]])},
            r"experts .* has shape \[2, 2\], expected \[1, experts per row",
        ),
        ({"routing_weights": np.ones((1, 1), np.float32)}, r"routing_weights .* has shape \[1, 1\], expected \[1, 2\]"),
        ({"x": np.ones((2, 96), np.float32)}, r"experts 'experts' has shape \[1, 2\], expected \[2, experts per row"),
    ],
)
def test_invalid_inputs_are_refused(changes: dict[str, np.ndarray], message: str) -> None:
    mixture = Mixture.random(np.random.default_rng(2), SMALL)
    feeds = mixture.route(np.random.default_rng(2), 1, 2) | changes
    with pytest.raises(Exception, match="'moe': " + message):
        session(mixture.model()).run(None, feeds)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format_version", 2, "format_version is 2, this library reads 1"),
        ("expert_count", 7, "weights hold .* bytes, expected"),
        ("hidden_size", 0, "hidden_size is 0, expected 1 to"),
        ("inner_size", 64, "weights hold .* bytes, expected"),
        ("expert_count", 2**62, "expert_count is .*, expected 1 to"),
        ("activation", 5, "activation is 5, expected 0"),
        ("alpha", 0.0, "alpha is 0, beta 0 and limit inf, expected"),
        ("limit", float("nan"), "limit nan, expected"),
        ("up_bits", 8, "weights hold .* bytes, expected"),
        ("down_group_size", 48, "group_size is 48, expected 32, 64 or 128"),
        ("down_subgroup_size", 16, "subgroup_scales"),
    ],
)
def test_malformed_nodes_are_refused(name: str, value: float, message: str) -> None:
    model = Mixture.random(np.random.default_rng(2), SMALL).model()
    attribute = next(one for one in model.graph.node[0].attribute if one.name == name)
    if isinstance(value, float):
        attribute.f = value
    else:
        attribute.i = value
    with pytest.raises(Exception, match="'moe'.*" + message):
        session(model)


@pytest.mark.parametrize("kind", ["int8", "minimums", "six", "Q5_K"])
def test_damaged_models_give_an_error_or_an_answer(kind: str) -> None:
    rng = np.random.default_rng(list(KINDS).index(kind))
    mixture = Mixture.random(rng, SMALL, (kind, kind), bias=True)
    original, feeds = mixture.model().SerializeToString(), mixture.route(rng, 4, 2)
    refused = answered = 0
    for _ in range(200):
        model = onnx.ModelProto.FromString(original)
        damage(rng, model)
        try:
            (y,) = session(model).run(None, feeds)
        except Exception as error:
            assert str(error)
            refused += 1
        else:
            assert y.shape == (4, 96) and y.dtype == np.float32
            answered += 1
    assert refused > 20 and answered > 20
