"""Test MaskedMatMul in ORT, with the library and as a function, against NumPy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.operators.masked_matmul_function import NO_MASK, NO_SCALE, OP_TYPE, masked_matmul_function

from ..sampling import examples
from .isa_process import check_with_isa, each_isa
from .masked import PATTERNS, assert_product_close, expected_product, random_matrix
from .single_node import save_at_odd_places, session, with_constants


def masked_model(
    constants: dict[str, np.ndarray] | None = None, opset: int = 17, functions: bool = True, **attributes: Any
) -> onnx.ModelProto:
    """Return a model of one MaskedMatMul node "product".

    constants: inputs stored in the model; all other inputs are fed. b_scale is a placeholder unless it is given.
    """
    numbers: dict[str, Any] = {
        "format_version": 1,
        "a_threshold": 0.0,
        "b_threshold": 0.0,
        "group_size": 0,
        "b_finite": 0,
        **attributes,
    }
    given_constants = {"b_scale": NO_SCALE, **(constants or {})}
    feeds = [name for name in ("A", "B", "a_mask", "b_mask") if name not in given_constants]
    types = {"A": TensorProto.FLOAT, "B": TensorProto.FLOAT, "a_mask": TensorProto.BOOL, "b_mask": TensorProto.BOOL}
    node = helper.make_node(
        OP_TYPE, ["A", "B", "b_scale", "a_mask", "b_mask"], ["y"], "product", domain="ai.ortolan", **numbers
    )
    graph = helper.make_graph(
        [node],
        "single",
        [helper.make_tensor_value_info(name, types[name], None) for name in feeds],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(array, name) for name, array in given_constants.items()],
    )
    return helper.make_model(
        graph,
        functions=[ir.to_proto(masked_matmul_function(opset))] if functions else [],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def run(model: onnx.ModelProto, feeds: dict[str, np.ndarray], *, library: bool = True, threads: int = 1) -> np.ndarray:
    names = {value.name for value in model.graph.input}
    feeds = {"a_mask": NO_MASK, "b_mask": NO_MASK, **feeds}
    y: np.ndarray = session(model, library=library, threads=threads).run(
        None, {name: array for name, array in feeds.items() if name in names}
    )[0]
    return y


@examples(60)
@given(
    sizes=st.tuples(*[st.integers(1, 200)] * 3),
    patterns=st.tuples(st.sampled_from(PATTERNS), st.sampled_from(PATTERNS)),
    sparsity=st.tuples(*[st.sampled_from([0.0, 0.3, 0.6, 0.8, 0.95, 1.0])] * 2),
    specials=st.sampled_from(["none", "none", "nan in a", "inf in a", "nan in b", "inf in b"]),
    thresholds=st.tuples(*[st.sampled_from([0.0, 0.0, 0.5])] * 2),
    masks=st.tuples(*[st.sampled_from(["none", "none", "full", "row", "column"])] * 2),
    constant_b=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_every_pattern_and_size(
    sizes: tuple[int, int, int],
    patterns: tuple[str, str],
    sparsity: tuple[float, float],
    specials: str,
    thresholds: tuple[float, float],
    masks: tuple[str, str],
    constant_b: bool,
    seed: int,
) -> None:
    """The result is the dense product of the masked inputs for every pattern of zeros, including NaN and Inf."""
    m, k, n = sizes
    rng = np.random.default_rng(seed)
    a, b = random_matrix(rng, m, k, patterns[0], sparsity[0]), random_matrix(rng, k, n, patterns[1], sparsity[1])
    if specials != "none":
        matrix = a if specials.endswith("a") else b
        matrix[rng.integers(matrix.shape[0]), rng.integers(matrix.shape[1])] = float(specials[:3])
    shapes = {"none": lambda s: (1,), "full": lambda s: s, "row": lambda s: (s[0], 1), "column": lambda s: (s[1],)}
    kept = [
        NO_MASK if kind == "none" else rng.random(shapes[kind](x.shape)) < 0.6
        for kind, x in zip(masks, (a, b), strict=True)
    ]
    feeds = {"A": a, "B": b, "a_mask": kept[0], "b_mask": kept[1]}
    model = masked_model(
        {"B": b} if constant_b else {}, functions=False, a_threshold=thresholds[0], b_threshold=thresholds[1]
    )
    masked = [
        np.where(mask & ~(np.abs(x) <= t), x, np.float32(0))
        for x, mask, t in zip((a, b), kept, thresholds, strict=True)
    ]
    assert_product_close(run(model, feeds), *masked)


REGIMES = [
    (300, 500, 700, "random", 0.8, "blocks", 0.8),  # two-sided
    (300, 500, 700, "random", 0.97, "blocks", 0.9),
    (100, 2300, 200, "random", 0.2, "blocks", 0.8),  # blocks of B, in two passes over k
    (100, 2300, 200, "random", 0.9, "blocks", 0.8),
    (200, 400, 300, "columns", 0.9, "random", 0.0),  # active inputs
    (200, 400, 300, "columns", 1.0, "random", 0.0),
    (200, 400, 300, "random", 0.0, "rows", 0.9),
    (600, 400, 500, "random", 0.8, "random", 0.8),  # numbers of A
    (100, 2300, 200, "random", 0.7, "random", 0.0),
    (200, 400, 300, "random", 0.1, "random", 0.1),  # dense
    (1, 1000, 5000, "random", 0.9, "random", 0.0),  # decode
    (7, 1000, 5000, "random", 0.9, "random", 0.0),
]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("m", "k", "n", "a_pattern", "a_sparsity", "b_pattern", "b_sparsity"), REGIMES)
def test_regimes(
    m: int,
    k: int,
    n: int,
    a_pattern: str,
    a_sparsity: float,
    b_pattern: str,
    b_sparsity: float,
    threads: int,
) -> None:
    rng = np.random.default_rng(m + k + n)
    a, b = random_matrix(rng, m, k, a_pattern, a_sparsity), random_matrix(rng, k, n, b_pattern, b_sparsity)
    for constant in (False, True):
        model = masked_model({"B": b} if constant else {}, functions=False)
        y = run(model, {"A": a, "B": b}, threads=threads)
        assert_product_close(y, a, b)
        np.testing.assert_array_equal(y, run(model, {"A": a, "B": b}, threads=3 - threads))


@pytest.mark.parametrize("where", [(0, 0), (3, 77), (39, 299)])
@pytest.mark.parametrize("special", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_spreads_as_in_the_dense_product(where: tuple[int, int], special: float) -> None:
    """A NaN or Inf of B that meets zeros of A gives NaN, and vice versa; also if rows of B are skipped."""
    rng = np.random.default_rng(0)
    for m in (1, 5, 40):
        a, b = random_matrix(rng, m, 40, "random", 0.8), random_matrix(rng, 40, 300, "blocks", 0.8)
        b[where] = special
        for constants in ({}, {"B": b}):
            assert_product_close(run(masked_model(constants, functions=False), {"A": a, "B": b}), a, b)
        b[where] = 0
        a[where[0] % m, 5] = special
        for constants in ({}, {"B": b}):
            assert_product_close(run(masked_model(constants, functions=False), {"A": a, "B": b}), a, b)
        finite = masked_model({}, functions=False, b_finite=1)
        assert_product_close(run(finite, {"A": a, "B": b}), a, b)


@pytest.mark.parametrize("m", [1, 4, 16, 17, 100])
@pytest.mark.parametrize(("kind", "group_size"), [("bf16", 0), ("int8", 0), ("int8", 32), ("int8", 1)])
def test_packed_weights(kind: str, group_size: int, m: int) -> None:
    k, n = 150, 700
    rng = np.random.default_rng(m)
    a = random_matrix(rng, m, k, "random", 0.7)
    constants: dict[str, np.ndarray] = {}
    if kind == "bf16":
        constants["B"] = rng.standard_normal((k, n)).astype(ml_dtypes.bfloat16)
        weight = constants["B"].astype(np.float32)
    else:
        constants["B"] = rng.integers(-127, 128, (k, n), dtype=np.int8)
        groups = -(-k // group_size) if group_size else 1
        constants["b_scale"] = rng.random((groups, n), dtype=np.float32)
        rows = np.arange(k) // (group_size or k)
        weight = constants["B"].astype(np.float32) * constants["b_scale"][rows]
    model = masked_model(constants, group_size=group_size)
    for library in (True, False):
        assert_product_close(run(model, {"A": a}, library=library), a, weight, products=2)


SCRIPT = """
from tests.ops.test_masked_matmul_op import REGIMES, test_packed_weights, test_regimes
for regime in REGIMES:
    test_regimes(*regime, threads=2)
for m in (1, 17, 100):
    for kind, group_size in (("bf16", 0), ("int8", 32)):
        test_packed_weights(kind, group_size, m)
"""


@each_isa
def test_with_each_isa(isa: str) -> None:
    check_with_isa(isa, SCRIPT)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.int8])
def test_weights_at_odd_places_of_a_file(dtype: type, tmp_path: Path) -> None:
    """External data need not be aligned, and the operator reads the mapped file."""
    rng = np.random.default_rng(2)
    constants = {"B": (10 * rng.standard_normal((40, 50))).astype(dtype)}
    if dtype is np.int8:
        constants["b_scale"] = rng.random((1, 50), dtype=np.float32)
    model = masked_model(constants, functions=False)
    for m in (3, 40):
        feeds = {"A": random_matrix(rng, m, 40, "random", 0.5)} | {name: NO_MASK for name in ("a_mask", "b_mask")}
        expected = run(model, feeds)
        moved = onnx.ModelProto.FromString(model.SerializeToString())
        save_at_odd_places(moved, tmp_path)
        (y,) = session(tmp_path / "model.onnx").run(None, {name: feeds[name] for name in ("A", "a_mask", "b_mask")})
        np.testing.assert_array_equal(y, expected)


@pytest.mark.parametrize("m", [3, 40])
def test_all_inputs_at_odd_places_of_a_file(m: int, tmp_path: Path) -> None:
    rng = np.random.default_rng(m)
    feeds = {"A": random_matrix(rng, m, 40, "random", 0.5), "B": random_matrix(rng, 40, 50, "random", 0.5)}
    feeds |= {"a_mask": rng.random((m, 40)) < 0.5, "b_mask": NO_MASK}
    model = masked_model(functions=False)
    expected = run(model, feeds)
    save_at_odd_places(with_constants(model, feeds), tmp_path)
    np.testing.assert_array_equal(session(tmp_path / "model.onnx").run(None, {})[0], expected)


@pytest.mark.parametrize("true", [2, 128, 255])
def test_bytes_of_masks_in_a_file(true: int) -> None:
    """Every mask byte except 0 means true."""
    rng = np.random.default_rng(true)
    a, b = rng.standard_normal((20, 30), dtype=np.float32), rng.standard_normal((30, 40), dtype=np.float32)
    a_mask = (rng.random((20, 30)) < 0.5).astype(np.uint8) * np.uint8(true)
    masks = {"a_mask": a_mask.view(np.bool_), "b_mask": np.array([true], np.uint8).view(np.bool_)}
    y = run(masked_model(functions=False), {"A": a, "B": b} | masks)
    np.testing.assert_array_equal(y, run(masked_model(functions=False), {"A": a, "B": b, "a_mask": a_mask != 0}))
    for name, mask in masks.items():
        constant = masked_model({name: mask}, functions=False)
        (tensor,) = [tensor for tensor in constant.graph.initializer if tensor.name == name]
        assert tensor.raw_data == mask.tobytes()
        np.testing.assert_array_equal(run(constant, {"A": a, "B": b} | masks), y)


def test_a_bf16_weight_that_is_not_finite() -> None:
    rng = np.random.default_rng(1)
    b = rng.standard_normal((40, 50)).astype(ml_dtypes.bfloat16)
    b[7, 3], b[20, 49] = np.nan, np.inf
    for m in (1, 5, 40):
        a = random_matrix(rng, m, 40, "random", 0.9)
        assert_product_close(run(masked_model({"B": b}, functions=False), {"A": a}), a, b.astype(np.float32))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize("opset", [13, 17, 21])
def test_the_function_says_the_same(opset: int, library: bool) -> None:
    rng = np.random.default_rng(opset)
    a, b = random_matrix(rng, 20, 33, "random", 0.5), random_matrix(rng, 33, 70, "blocks", 0.5)
    a[3, 4] = np.nan
    a_mask, b_mask = rng.random((20, 33)) < 0.7, rng.random((33, 1)) < 0.7
    a_mask[3, 4] = False
    model = masked_model({}, opset, a_threshold=0.3, b_threshold=0.2)
    feeds = {"A": a, "B": b, "a_mask": a_mask, "b_mask": b_mask}
    for value, shape in [(v, feeds[v.name].shape) for v in model.graph.input] + [(model.graph.output[0], (20, 70))]:
        value.CopyFrom(helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, shape))
    onnx.checker.check_model(model)
    y = run(model, feeds, library=library)
    masked_a = np.where(a_mask & ~(np.abs(a) <= np.float32(0.3)), a, np.float32(0))
    assert_product_close(y, masked_a, np.where(b_mask & ~(np.abs(b) <= np.float32(0.2)), b, np.float32(0)))


@pytest.mark.parametrize("library", [True, False])
@pytest.mark.parametrize(
    ("a_shape", "b_shape"),
    [
        ((2, 3, 20, 30), (30, 40)),
        ((2, 3, 20, 30), (2, 3, 30, 40)),
        ((2, 1, 20, 30), (3, 30, 40)),
        ((20, 30), (2, 3, 30, 40)),
        ((3, 1, 30), (3, 30, 40)),
        ((0, 20, 30), (30, 40)),
        ((2, 0, 30), (30, 40)),
        ((20, 0), (0, 40)),
        ((20, 30), (30, 0)),
    ],
)
def test_ranks_and_empty_matrices(a_shape: tuple[int, ...], b_shape: tuple[int, ...], library: bool) -> None:
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal(a_shape, dtype=np.float32), rng.standard_normal(b_shape, dtype=np.float32)
    a[rng.random(a_shape) < 0.8] = 0
    y = run(masked_model(), {"A": a, "B": b}, library=library)
    np.testing.assert_allclose(y, np.matmul(a, b), atol=1e-4, strict=True)


def test_masks_and_scale_may_be_left_out() -> None:
    rng = np.random.default_rng(3)
    a, b = random_matrix(rng, 40, 50, "random", 0.8), random_matrix(rng, 50, 60, "blocks", 0.8)
    model = masked_model(functions=False)
    for _ in range(4):
        assert_product_close(run(model, {"A": a, "B": b}), a, b)
        model.graph.node[0].input.pop()
        names = set(model.graph.node[0].input)
        for value in [value for value in model.graph.input if value.name not in names]:
            model.graph.input.remove(value)
        if len(names) == 2:
            break


def test_output_shape_is_inferred() -> None:
    model = masked_model({"B": np.ones((8, 6), np.float32)}, functions=False)
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("A", TensorProto.FLOAT, ["batch", "tokens", 8]))
    assert session(model).get_outputs()[0].shape == ["batch", "tokens", 6]


@pytest.mark.parametrize(
    ("a_shape", "b_shape", "message"),
    [
        ((4, 5), (6, 7), r"A has shape \[4, 5\] and B \[6, 7\], expected \[..., m, k\] and \[..., k, n\]"),
        ((5,), (5, 7), "expected at least two dimensions of each"),
        ((2, 4, 5), (3, 5, 7), "expected leading dimensions that broadcast"),
    ],
)
def test_refuses_shapes(a_shape: tuple[int, ...], b_shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(Exception, match=f"MaskedMatMul node 'product': .*{message}"):
        run(masked_model(functions=False), {"A": np.ones(a_shape, np.float32), "B": np.ones(b_shape, np.float32)})


@pytest.mark.parametrize(
    ("a_shape", "b_shape"), [((2**58, 0, 3), (3, 2)), ((0, 2**55, 3), (3, 8)), ((2**20, 0, 3), (2**20, 3, 0))]
)
def test_huge_dimensions_beside_one_of_zero(a_shape: tuple[int, ...], b_shape: tuple[int, ...]) -> None:
    y = run(masked_model(functions=False), {"A": np.zeros(a_shape, np.float32), "B": np.zeros(b_shape, np.float32)})
    assert y.shape == (*a_shape[:-1], b_shape[-1])


def test_refuses_an_answer_of_more_numbers_than_can_be_counted() -> None:
    feeds = {"A": np.zeros((2**40, 0), np.float32), "B": np.zeros((0, 2**40), np.float32)}
    with pytest.raises(Exception, match=r"Y has shape \[1099511627776, 1099511627776\], which is too large"):
        run(masked_model(functions=False), feeds)


@pytest.mark.parametrize("mask_shape", [(3, 5), (4, 4), (1, 4, 5), (2,)])
def test_refuses_masks_that_do_not_fit(mask_shape: tuple[int, ...]) -> None:
    feeds = {"A": np.ones((4, 5), np.float32), "B": np.ones((5, 7), np.float32)}
    with pytest.raises(Exception, match=r"a_mask has shape .*, expected a shape that broadcasts to A's, \[4, 5\]"):
        run(masked_model(functions=False), {**feeds, "a_mask": np.ones(mask_shape, np.bool_)})


@pytest.mark.parametrize("name", ["a_threshold", "b_threshold"])
@pytest.mark.parametrize("value", [-0.1, float("nan"), float("inf")])
def test_refuses_thresholds(name: str, value: float) -> None:
    with pytest.raises(Exception, match=f"node 'product': {name} is .*, expected a finite value of at least 0"):
        session(masked_model(functions=False, **{name: value}))


@pytest.mark.parametrize(
    ("constants", "attributes", "message"),
    [
        ({}, {"format_version": 2}, "format_version is 2, this library reads 1"),
        ({}, {"group_size": -1}, "group_size is -1, expected at least 0"),
        ({}, {"group_size": 32}, "group_size is 32, expected 0 because B is not an initializer"),
        ({"B": np.ones((4, 3), np.float32)}, {"group_size": 32}, "group_size is 32, expected 0 because B is not int8"),
        (
            {"B": np.ones((40, 3), np.int8), "b_scale": np.ones((0, 3), np.float32)},
            {"group_size": 2**63 - 1},
            r"b_scale 'b_scale' has shape \[0, 3\], expected \[1, 3\]",
        ),
        ({"B": np.ones((4, 3), np.float64)}, {}, "B 'B' is .*, expected float or bfloat16 or int8"),
        ({"B": np.ones((4, 3), np.int8)}, {}, r"b_scale 'b_scale' has shape \[1, 1\], expected \[1, 3\]"),
        (
            {"B": np.ones((40, 3), np.int8), "b_scale": np.ones((1, 3), np.float32)},
            {"group_size": 32},
            r"b_scale 'b_scale' has shape \[1, 3\], expected \[2, 3\]",
        ),
        (
            {"B": np.ones((4, 3), np.int8), "b_scale": np.full((1, 3), np.nan, np.float32)},
            {},
            "contains Inf or NaN, expected finite values",
        ),
        (
            {"B": np.ones((4, 3), np.int8), "b_scale": np.ones((1, 3), np.float32)},
            {"b_threshold": 0.5},
            "b_threshold is 0.5, expected 0 because B 'B' is not float",
        ),
        ({"B": np.ones((2, 4, 3), np.int8)}, {}, r"B 'B' has shape \[2, 4, 3\], expected \[k, n\]"),
    ],
)
def test_refuses_weights(constants: dict[str, np.ndarray], attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(Exception, match=f"MaskedMatMul node 'product': .*{message}"):
        session(masked_model(constants, functions=False, **attributes))


def test_refuses_a_mask_of_a_packed_weight() -> None:
    constants = {"B": np.ones((4, 3), np.int8), "b_scale": np.ones((1, 3), np.float32)}
    feeds = {"A": np.ones((2, 4), np.float32), "b_mask": np.ones((4, 3), np.bool_)}
    with pytest.raises(Exception, match="b_mask requires a floating-point B"):
        run(masked_model(constants, functions=False), feeds)


def test_expected_product_is_the_dense_one() -> None:
    """Check the NumPy reference itself: it has NaN where the dense product has NaN."""
    a, b = np.array([[0.0, 1.0]], np.float32), np.array([[np.inf, 1.0], [2.0, 3.0]], np.float32)
    np.testing.assert_array_equal(expected_product(a, b), [[np.nan, 3.0]])
