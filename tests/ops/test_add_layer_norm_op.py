"""Test AddLayerNorm in ORT: against float64, the kernel's bits and its ONNX function, and on invalid input."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortolan.graph_passes.operators.add_layer_norm import INPUTS

from ..sampling import examples
from .add_layer_norm import added, answer, digest, kernel_answer, node_model, random_operands
from .isa_process import each_isa, run_with_isa
from .layer_norm import assert_normalized, random_vectors
from .single_node import assert_same_bits, save_at_odd_places, session, with_constants

Floats = NDArray[np.float32]
Shape = tuple[int, ...]


def check(operands: Sequence[Floats], epsilon: float = 1e-12) -> None:
    """Check the kernel's bits and the error bound with one and two threads, and that the ONNX function is close."""
    weight, bias = random_vectors(np.random.default_rng(7), operands[0].shape[-1])
    expected = kernel_answer(operands, weight, bias, epsilon)
    total, n = added(operands), operands[0].shape[-1]
    for threads in (1, 2):
        y = answer(operands, weight, bias, epsilon, threads=threads)
        assert y.shape == total.shape
        assert_same_bits(y, expected)
    assert_normalized(y.reshape(-1, n), total.reshape(-1, n), weight, bias, epsilon)
    body = answer(operands, weight, bias, epsilon, library=False)
    assert body.shape == total.shape
    np.testing.assert_allclose(body, y, rtol=1e-4, atol=1e-4)


SHAPES: dict[str, list[Shape]] = {
    "one": [(2, 5, 24)],
    "two": [(2, 5, 24), (2, 5, 24)],
    "three": [(2, 5, 24), (2, 5, 24), (2, 5, 24)],
    "positions": [(3, 5, 24), (1, 5, 24)],
    "types and positions": [(3, 5, 24), (1, 1, 24), (1, 5, 24)],
    "positions first": [(1, 5, 24), (3, 5, 24)],
    "positions and types first": [(1, 5, 24), (24,), (3, 5, 24)],
    "of other axes": [(3, 5, 24), (5, 24), (24,)],
    "more axes behind": [(24,), (5, 24), (3, 5, 24)],
    "of sequences and of tokens": [(3, 1, 24), (1, 5, 24)],
    "of sequences": [(3, 5, 24), (3, 1, 24), (5, 24)],
    "four axes": [(2, 3, 4, 24), (3, 1, 24), (2, 1, 1, 24)],
    "rows": [(7, 24), (1, 24)],
    "a vector": [(24,), (24,)],
    "no sequences": [(0, 5, 24), (1, 5, 24)],
    "no tokens": [(3, 0, 24), (1, 1, 24)],
    "many rows": [(1, 3000, 24), (1, 3000, 24)],
    "many rows of few": [(70, 40, 24), (1, 40, 24), (70, 1, 24)],
    "wide": [(2, 9, 5000), (9, 5000)],
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    rng = np.random.default_rng(1)
    check(random_operands(rng, SHAPES[name]))
    check(random_operands(rng, SHAPES[name]), 1e-5)


@pytest.mark.parametrize("n", [1, 2, 3, 15, 16, 17, 63, 64, 65, 127, 384, 768, 1000])
def test_every_length(n: int) -> None:
    rng = np.random.default_rng(n)
    for shapes in ([(2, 3, n)], [(2, 3, n), (1, 3, n)], [(2, 3, n), (1, 3, n), (n,)]):
        operands = random_operands(rng, shapes)
        weight, bias = random_vectors(rng, n)
        assert_same_bits(answer(operands, weight, bias), kernel_answer(operands, weight, bias, 1e-12))


@examples(150)
@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    n=st.integers(1, 70),
    repeated=st.lists(st.tuples(st.integers(0, 7), st.integers(0, 3)), min_size=1, max_size=3),
    seed=st.integers(0, 2**32 - 1),
)
def test_any_shape(shape: list[int], n: int, repeated: list[tuple[int, int]], seed: int) -> None:
    """Any shapes that broadcast.

    repeated: one (bits, lacks) per operand: a set bit makes that axis 1; `lacks` is the number of leading axes to drop.
    """
    shapes = []
    for bits, lacks in repeated:
        own = [1 if bits >> axis & 1 else size for axis, size in enumerate(shape)]
        shapes.append((*own[min(lacks, len(own)) :], n))
    rng = np.random.default_rng(seed)
    operands = random_operands(rng, shapes)
    weight, bias = random_vectors(rng, n)
    y = answer(operands, weight, bias, threads=2)
    assert y.shape == added(operands).shape
    assert_same_bits(y, kernel_answer(operands, weight, bias, 1e-12))


def test_sums_are_made_from_the_left() -> None:
    """(1 + 2^-24) + 2^-24 rounds to 1, but 1 + (2^-24 + 2^-24) does not."""
    n = 8
    x, small = np.zeros((1, n), np.float32), np.full((1, n), 2.0**-24, np.float32)
    x[0, 0] = 1
    x[0, 1:] = 1 + 2.0**-23
    weight, bias = np.ones(n, np.float32), np.zeros(n, np.float32)
    left, right = answer([x, small, small], weight, bias), answer([small, small, x], weight, bias)
    assert_same_bits(left, kernel_answer([x, small, small], weight, bias, 1e-12))
    assert_same_bits(right, kernel_answer([small, small, x], weight, bias, 1e-12))
    assert not np.array_equal(left, right)


def test_rows_depend_on_nothing_else() -> None:
    """A row has the same bits alone and among other rows, with any number of threads."""
    rng, n = np.random.default_rng(3), 96
    operands = random_operands(rng, [(40, 30, n), (1, 30, n), (40, 30, n)])
    weight, bias = random_vectors(rng, n)
    whole = answer(operands, weight, bias)
    for threads in (2, 3, 4):
        assert_same_bits(answer(operands, weight, bias, threads=threads), whole)
    for sequence, token in ((0, 0), (17, 29), (39, 3)):
        alone = [operand[min(sequence, len(operand) - 1)][None, token : token + 1] for operand in operands]
        assert_same_bits(answer(alone, weight, bias), whole[sequence, token][None, None])


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_infinity_and_nan_fill_their_row(value: float) -> None:
    rng, n = np.random.default_rng(4), 33
    x, addend = random_operands(rng, [(4, n), (4, n)])
    addend[1, 0] = x[2, n - 1] = value
    weight, bias = random_vectors(rng, n)
    y = answer([x, addend], weight, bias, 1e-5)
    assert np.isnan(y[1:3]).all()
    assert_normalized(y[[0, 3]], added([x, addend])[[0, 3]], weight, bias, 1e-5)


def test_rows_of_one_number_give_the_bias() -> None:
    weight, bias = random_vectors(np.random.default_rng(5), 24)
    y = answer([np.full((3, 24), 4.5, np.float32), np.full(24, -1.5, np.float32)], weight, bias)
    np.testing.assert_array_equal(y, np.broadcast_to(bias, (3, 24)))


def test_operands_may_be_constants(tmp_path: Path) -> None:
    """Operands may be constants at any file offset; a constant scalar 0 means that there is no such operand."""
    rng, n = np.random.default_rng(6), 24
    operands = random_operands(rng, [(2, 5, n), (1, 5, n), (n,)])
    weight, bias = random_vectors(rng, n)
    model = node_model([3, 3, 1], weight, bias)
    constants = dict(zip(INPUTS[1:3], operands[1:], strict=True))
    save_at_odd_places(with_constants(model, constants), tmp_path)
    y = session(tmp_path / "model.onnx").run(None, {"X": operands[0]})[0]
    assert_same_bits(y, kernel_answer(operands, weight, bias, 1e-12))
    zeros = {"addend": np.float32(0).reshape(()), "second_addend": np.zeros((2, 1, n), np.float32)}
    y = session(with_constants(model, zeros)).run(None, {"X": operands[1]})[0]
    assert_same_bits(y, kernel_answer([operands[1], zeros["second_addend"]], weight, bias, 1e-12))


@pytest.mark.parametrize("opset", [13, 17, 18, 21, 23])
def test_function_body_serves_every_opset_and_evaluator(opset: int) -> None:
    rng, n = np.random.default_rng(8), 24
    operands = random_operands(rng, [(2, 5, n), (1, 5, n), (2, 5, n)])
    weight, bias = random_vectors(rng, n)
    model = node_model([3, 3, 3], weight, bias, opset=opset)
    onnx.checker.check_model(model)
    feeds = dict(zip(INPUTS, operands, strict=False))
    y = kernel_answer(operands, weight, bias, 1e-12)
    np.testing.assert_allclose(session(model, library=False).run(None, feeds)[0], y, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(ReferenceEvaluator(model).run(None, feeds)[0], y, rtol=1e-5, atol=1e-5)


@each_isa
def test_every_instruction_set_gives_the_same_bits(isa: str) -> None:
    done = run_with_isa(isa, "from tests.ops.add_layer_norm import digest\nprint(digest())")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == digest()


def refused(model: onnx.ModelProto, message: str, *operands: np.ndarray) -> None:
    with pytest.raises(Exception, match=message):
        session(model).run(None, dict(zip(INPUTS, operands, strict=False)))


VECTOR = np.ones(4, np.float32)


@pytest.mark.parametrize(
    ("weight", "bias", "message"),
    [
        (np.ones((1, 4), np.float32), VECTOR, r"norm_weight 'norm_weight' has shape \[1, 4\], expected \[n\]"),
        (
            np.ones(0, np.float32),
            VECTOR,
            r"norm_weight 'norm_weight' has shape \[0\], expected \[n\] with n at least 1",
        ),
        (VECTOR, np.ones(5, np.float32), r"norm_bias 'norm_bias' has shape \[5\], expected \[4\] like norm_weight"),
        (VECTOR, np.ones((4, 1), np.float32), r"norm_bias 'norm_bias' has shape \[4, 1\], expected \[4\]"),
    ],
)
def test_vectors_of_other_shapes_are_refused(weight: np.ndarray, bias: np.ndarray, message: str) -> None:
    refused(node_model([2], weight, bias), f"AddLayerNorm node 'norm': {message}", np.ones((3, 4), np.float32))


@pytest.mark.parametrize("name", ["norm_weight", "norm_bias"])
def test_vectors_that_are_computed_are_refused(name: str) -> None:
    model = node_model([2], VECTOR, VECTOR)
    (constant,) = (one for one in model.graph.initializer if one.name == name)
    model.graph.initializer.remove(constant)
    model.graph.input.append(helper.make_tensor_value_info(name, TensorProto.FLOAT, [4]))
    with pytest.raises(Exception, match=rf"AddLayerNorm node 'norm': input \d \({name}\) '{name}' is computed at run"):
        session(model)


@pytest.mark.parametrize("epsilon", [-1e-5, np.nan, np.inf, None])
def test_an_epsilon_that_is_no_size_is_refused(epsilon: float | None) -> None:
    model = node_model([2], VECTOR, VECTOR, epsilon)
    with pytest.raises(
        Exception, match=r"AddLayerNorm node 'norm': epsilon is .*, expected a finite value of at least 0"
    ):
        session(model)


@pytest.mark.parametrize(
    ("version", "message"), [(2, "format_version is 2, this library reads 1"), (None, "'format_version' is missing")]
)
def test_other_versions_are_refused(version: int | None, message: str) -> None:
    with pytest.raises(Exception, match=f"AddLayerNorm node 'norm': .*{message}"):
        session(node_model([2], VECTOR, VECTOR, format_version=version))


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(3, 5)], r"X has shape \[3, 5\], expected \[..., 4\], because norm_weight has 4 elements"),
        ([(3, 1), (3, 4)], r"X has shape \[3, 1\], expected \[..., 4\]"),
        ([(3, 4), (3, 1)], r"addend has shape \[3, 1\], expected \[..., 4\]"),
        ([(3, 4), ()], r"addend has shape \[\], expected \[..., 4\]"),
        ([(3, 4), (2, 4)], r"addend has shape \[2, 4\], expected a shape that broadcasts with \[3, 4\]"),
        ([(3, 4), (3, 4), (2, 4)], r"second_addend has shape \[2, 4\], expected a shape that broadcasts with \[3, 4\]"),
        ([(1, 4), (3, 1, 4), (2, 4, 4)], r"second_addend has shape \[2, 4, 4\], expected .* with \[3, 1, 4\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(shapes: list[Shape], message: str) -> None:
    model = node_model([len(shape) for shape in shapes], VECTOR, VECTOR)
    refused(model, f"AddLayerNorm node 'norm': {message}", *(np.ones(shape, np.float32) for shape in shapes))
