"""Low-bit weights that a model dequantizes with Cast and Mul or DequantizeLinear: the integers are kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan
from ortolan import NothingToReplaceError, OptimizationReport

from ..pairwise import pairwise
from .small_models import make_model, op_types, relative_error, run
from .stored_layers import DequantizedLayer

TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16}
RNG = np.random.default_rng(0)


@dataclass
class Written:
    """Constants, the nodes that compute `W` from them, and the expected weight."""

    nodes: list[onnx.NodeProto]
    constants: dict[str, Any]
    matrix: np.ndarray  # expected weight, float64 [k, n]
    turned: bool = False  # `W` has shape [n, k]

    @property
    def dtype(self) -> str:
        return str(self.constants["scales"].dtype)

    def model(self) -> onnx.ModelProto:
        k, n = self.matrix.shape
        last = helper.make_node("Gemm" if self.turned else "MatMul", ["x", "W"], ["y"], name="linear")
        if self.turned:
            last.attribute.append(helper.make_attribute("transB", 1))
        kind = TYPES[self.dtype]
        return make_model(
            [*self.nodes, last],
            {"x": (kind, ["batch", k])},
            {"y": (kind, ["batch", n])},
            self.constants,
            opset=21,
            ir_version=10,
        )


def adopt(model: onnx.ModelProto) -> OptimizationReport:
    return ortolan.optimize_onnx(model, options={"verify.seconds": 0.0})


def without_casts(model: onnx.ModelProto) -> list[str]:
    """Return the operator types of the model except Cast."""
    return [op for op in op_types(model) if op != "Cast"]


def check(written: Written, op: str, bits: int, original_error: float = 1e-5) -> OptimizationReport:
    """Check that the integers are kept, and that only the rounding of inputs to int8 changes answers.

    original_error: error of the original model, which also rounds inputs if ONNX Runtime runs it as MatMulNBits.
    """
    model = written.model()
    report = adopt(model)
    assert without_casts(report.model) == [op]
    (layer,) = report.layers
    assert (layer.status, layer.weight_bits, layer.reason) == ("replaced", bits, None)
    assert any(f"keeps the model's stored {bits}-bit weights exactly" in note for note in report.notes)
    half = written.dtype == "float16"
    k = len(written.matrix)
    one = np.eye(k, dtype=written.dtype)
    for library in (True, False):  # quantizing a row with one nonzero input is exact
        found = run(report.model, {"x": one}, library=library)[0]
        np.testing.assert_allclose(found, written.matrix, rtol=2e-3 if half else 2e-6, atol=1e-5 if half else 1e-9)
    x = np.random.default_rng(1).standard_normal((5, k)).astype(written.dtype)
    exact = x.astype(np.float64) @ written.matrix
    (answer,) = run(report.model, {"x": x}, library=True)
    (original,) = run(model, {"x": x})
    assert relative_error(exact, original.astype(np.float64)) < max(original_error, 2e-3 if half else 0)
    assert relative_error(exact, answer.astype(np.float64)) < 0.02
    return report


def refused(written: Written | onnx.ModelProto, *reasons: str) -> None:
    with pytest.raises(NothingToReplaceError) as caught:
        ortolan.optimize_onnx(written.model() if isinstance(written, Written) else written, recipe=ADOPT)
    for reason in reasons:
        assert reason in str(caught.value)
    assert "run time" not in str(caught.value)


ADOPT = ortolan.Recipe.from_dict(
    {
        "name": "keep",
        "pass": [
            {"name": "normalize"},
            {"name": "replace", "op": "W4A8MatMul"},
            {"name": "replace", "op": "W8A8MatMul", "quantized_only": True},
            {"name": "replace", "op": "SparseAMXMatMul", "quantized_only": True},
            {"name": "verify", "seconds": 0.0},
        ],
    }
)


def scales_of(*shape: int, dtype: str = "float32") -> np.ndarray:
    return (np.random.default_rng(2).uniform(0.5, 1.5, shape) / 1000).astype(dtype)


def codes_of(*shape: int, dtype: Any = np.int8) -> np.ndarray:
    low, high = (0, 256) if dtype == np.uint8 else (-128, 128)
    return np.random.default_rng(3).integers(low, high, shape).astype(dtype)


def by_column(
    k: int,
    n: int,
    dtype: str = "float32",
    codes: Any = np.int8,
    zero: Any = None,
    shape: Sequence[int] | None = None,
    scale_first: bool = False,
    divides: bool = False,
    whole: bool = False,
) -> Written:
    """Return Cast -> (Sub) -> Mul with one scale or a scale per column. whole: subtract zero points as integers."""
    q = codes_of(k, n, dtype=codes)
    scales = scales_of(*([n] if shape is None else shape), dtype=dtype)
    floats = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes = [helper.make_node("Cast", ["q"], ["cast"], to=TensorProto.INT32 if whole else floats)]
    constants: dict[str, Any] = {"q": q, "scales": 1 / scales if divides else scales}
    matrix = q.astype(np.float64)
    last = "cast"
    if zero is not None:
        constants["zero"] = np.asarray(zero, np.int32 if whole else dtype)
        nodes.append(helper.make_node("Sub", [last, "zero"], ["less"]))
        last, matrix = "less", matrix - constants["zero"].astype(np.float64)
    if whole:
        nodes.append(helper.make_node("Cast", [last], ["floats"], to=floats))
        last = "floats"
    inputs = ["scales", last] if scale_first else [last, "scales"]
    nodes.append(helper.make_node("Div" if divides else "Mul", inputs, ["W"]))
    kept = constants["scales"].astype(np.float64)
    return Written(nodes, constants, matrix / kept if divides else matrix * kept)


@pytest.mark.parametrize(
    ("k", "n", "dtype", "shape", "scale_first"),
    pairwise([(64, 48), (300, 33), (7, 5)], ["float32", "float16"], [[], [1], None, "row"], [False, True]),
)
def test_cast_and_scale(k: int, n: int, dtype: str, shape: Any, scale_first: bool) -> None:
    written = by_column(k, n, dtype, shape=[1, n] if shape == "row" else shape, scale_first=scale_first)
    check(written, "SparseAMXMatMul", 8)


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("codes", [np.int8, np.uint8])
def test_zero_points_in_the_middle(codes: Any, whole: bool) -> None:
    middle = 128 if codes == np.uint8 else 0
    check(by_column(65, 33, codes=codes, zero=middle, whole=whole), "SparseAMXMatMul", 8)
    check(by_column(65, 33, codes=codes, zero=np.full((1, 33), middle), whole=whole), "SparseAMXMatMul", 8)


def test_divided_by_scales() -> None:
    check(by_column(64, 33, divides=True), "SparseAMXMatMul", 8)


def test_transposed_reshaped_and_identical() -> None:
    """A 1-D weight with a scale per output: Reshape -> Cast -> Mul -> Identity -> Transpose."""
    k, n = 70, 33
    q, scales = codes_of(n * k), scales_of(n, 1)
    nodes = [
        helper.make_node("Reshape", ["q", "shape"], ["rows"]),
        helper.make_node("Cast", ["rows"], ["cast"], to=TensorProto.FLOAT),
        helper.make_node("Mul", ["scales", "cast"], ["product"]),
        helper.make_node("Identity", ["product"], ["same"]),
        helper.make_node("Transpose", ["same"], ["W"], perm=[1, 0]),
    ]
    constants = {"q": q, "scales": scales, "shape": np.array([n, k])}
    check(Written(nodes, constants, (q.reshape(n, k) * scales.astype(np.float64)).T), "SparseAMXMatMul", 8)


def by_group(
    k: int,
    n: int,
    group: int,
    dtype: str = "float32",
    form: str = "rows",
    zero: Any = None,
    codes: Any = np.int8,
) -> Written:
    """A weight with a scale and a zero point for each group of inputs.

    form: "rows" stores [k, n]; "turned" stores [n, k] and adds a Transpose; "gemm" stores [n, k] and uses Gemm's
    transB.
    """
    groups = k // group
    shape = (groups, group, n) if form == "rows" else (n, groups, group)
    few = (groups, 1, n) if form == "rows" else (n, groups, 1)
    floats = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    q, scales = codes_of(*shape, dtype=codes), scales_of(*few, dtype=dtype)
    nodes = [helper.make_node("Cast", ["q"], ["cast"], to=floats)]
    constants: dict[str, Any] = {"q": q, "scales": scales}
    numbers, last = q.astype(np.float64), "cast"
    if zero is not None:
        constants["zero"] = np.broadcast_to(np.asarray(zero, dtype), few).copy()
        nodes.append(helper.make_node("Sub", [last, "zero"], ["less"]))
        numbers, last = numbers - constants["zero"].astype(np.float64), "less"
    end = {"rows": [k, n]}.get(form, [n, k])
    constants["shape"] = np.array(end)
    nodes += [
        helper.make_node("Mul", [last, "scales"], ["product"]),
        helper.make_node("Reshape", ["product", "shape"], ["T" if form == "turned" else "W"]),
    ]
    if form == "turned":
        nodes.append(helper.make_node("Transpose", ["T"], ["W"], perm=[1, 0]))
    matrix = (numbers * scales.astype(np.float64)).reshape(end)
    return Written(nodes, constants, matrix if form == "rows" else matrix.T, turned=form == "gemm")


@pytest.mark.parametrize(
    ("form", "k", "n", "group", "dtype"),
    pairwise(
        ["rows", "turned", "gemm"],
        [(128, 33, 32), (192, 48, 64), (256, 5, 128), (512, 7, 256), (192, 9, 96)],
        ["float32", "float16"],
    ),
)
def test_groups(form: str, k: int, n: int, group: int, dtype: str) -> None:
    report = check(by_group(k, n, group, dtype, form), "W8A8MatMul", 8)
    node = next(node for node in report.model.graph.node if node.op_type == "W8A8MatMul")
    attributes = {one.name: one.i for one in node.attribute}
    assert attributes["group_size"] == {256: 128, 96: 32}.get(group, group)
    assert report.layers[0].reason is None


def test_groups_with_zero_points_that_int8_numbers_take_in() -> None:
    check(by_group(128, 33, 32, codes=np.uint8, zero=128), "W8A8MatMul", 8)
    written = by_group(64, 6, 32, zero=3)
    written.constants["q"] = np.clip(written.constants["q"], -100, 100)
    q = written.constants["q"].astype(np.float64)
    written.matrix = ((q - 3) * written.constants["scales"].astype(np.float64)).reshape(64, 6)
    check(written, "W8A8MatMul", 8)


def test_one_group_is_a_column() -> None:
    check(by_group(40, 6, 40), "SparseAMXMatMul", 8)


def dequantized(k: int, n: int, block: int, turned: bool, dtype: str, codes: Any, zero: bool) -> Written:
    axis = int(turned)
    blocks = -(-k // block)
    few = (n, blocks) if turned else (blocks, n)
    q = codes_of(*((n, k) if turned else (k, n)), dtype=codes)
    constants: dict[str, Any] = {"q": q, "scales": scales_of(*few, dtype=dtype)}
    middle = 128 if codes == np.uint8 else 0
    if zero:
        constants["zero"] = np.full(few, middle, codes)
    node = helper.make_node("DequantizeLinear", list(constants), ["T" if turned else "W"], axis=axis, block_size=block)
    wide = np.repeat(constants["scales"].astype(np.float64), block, axis=axis)[: q.shape[0], : q.shape[1]]
    matrix = (q.astype(np.float64) - (middle if zero else 0)) * wide
    nodes = [node] + ([helper.make_node("Transpose", ["T"], ["W"])] if turned else [])
    return Written(nodes, constants, matrix.T if turned else matrix)


@pytest.mark.parametrize(
    ("turned", "k", "n", "block", "codes", "zero", "dtype"),
    pairwise(
        [False, True],
        [(128, 33, 32), (200, 5, 64), (300, 48, 128)],
        [(np.int8, False), (np.int8, True), (np.uint8, True)],
        ["float32", "float16"],
    ),
)
def test_dequantize_linear_with_blocks(
    turned: bool, k: int, n: int, block: int, codes: Any, zero: bool, dtype: str
) -> None:
    check(dequantized(k, n, block, turned, dtype, codes, zero), "W8A8MatMul", 8, original_error=0.02)


def four_bits(k: int, n: int, group: int, zero: Any, signed: bool = False, dtype: str = "float32") -> Written:
    """Return Cast -> Sub of zero points -> Mul for 4-bit integers [groups, group, n]."""
    groups, low = k // group, -8 if signed else 0
    q = RNG.integers(low, low + 16, (groups, group, n))
    scales = scales_of(groups, 1, n, dtype=dtype)
    constants: dict[str, Any] = {"scales": scales, "shape": np.array([k, n])}
    floats = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    nodes, last, numbers = [helper.make_node("Cast", ["q"], ["cast"], to=floats)], "cast", q.astype(np.float64)
    if zero is not None:
        constants["zero"] = np.broadcast_to(np.asarray(zero, dtype), (groups, 1, n)).copy()
        nodes.append(helper.make_node("Sub", [last, "zero"], ["less"]))
        last, numbers = "less", numbers - constants["zero"].astype(np.float64)
    nodes += [
        helper.make_node("Mul", [last, "scales"], ["product"]),
        helper.make_node("Reshape", ["product", "shape"], ["W"]),
    ]
    kind = ml_dtypes.int4 if signed else ml_dtypes.uint4
    constants["q"] = q.astype(kind)
    return Written(nodes, constants, (numbers * scales.astype(np.float64)).reshape(k, n))


@pytest.mark.parametrize(
    ("k", "n", "group", "zero", "signed", "dtype"),
    pairwise(
        [(128, 33, 32), (192, 6, 64), (256, 48, 128)],
        [None, 8, 0, 15, 7.4375, -3.25, "each"],
        [False, True],
        ["float32", "float16"],
    ),
)
def test_four_bits(k: int, n: int, group: int, zero: Any, signed: bool, dtype: str) -> None:
    """Integer zero points are kept; fractional zero points are stored as the minimum of each group."""
    given = np.random.default_rng(4).uniform(0, 15, (k // group, 1, n)) if zero == "each" else zero
    check(four_bits(k, n, group, given, signed, dtype), "W4A8MatMul", 4)


# --- MatMulNBits of 8 bits --------------------------------------------------------------------------------------------


def nbits(
    k: int,
    n: int,
    block: int,
    dtype: str = "float32",
    zero: Any = None,
    bias: bool = False,
    **attributes: int,
) -> tuple[onnx.ModelProto, np.ndarray]:
    """Return a model, and its dequantized weight [k, n]."""
    blocks = -(-k // block)
    q = codes_of(n, blocks, block, dtype=np.uint8)
    constants: dict[str, Any] = {"B": q, "scales": scales_of(n, blocks, dtype=dtype)}
    if zero is not None:
        constants["zero"] = np.broadcast_to(zero, (n, blocks)).astype(np.asarray(zero).dtype)
    less = q.astype(np.float64) - (128.0 if zero is None else np.float64(constants["zero"])[:, :, None])
    matrix = (less * constants["scales"].astype(np.float64)[:, :, None]).reshape(n, -1)[:, :k].T
    inputs = ["x", *constants]
    if bias:
        inputs += [""] * (5 - len(inputs)) + ["bias"]
        constants["bias"] = np.linspace(-1, 1, n).astype(dtype)
    node = helper.make_node(
        "MatMulNBits",
        inputs,
        ["y"],
        name="linear",
        domain="com.microsoft",
        **{"K": k, "N": n, "bits": 8, "block_size": block} | attributes,
    )
    kind = TYPES[dtype]
    model = make_model(
        [node],
        {"x": (kind, ["batch", k])},
        {"y": (kind, ["batch", n])},
        constants,
        opset=21,
        ir_version=10,
        domains={"com.microsoft": 1},
    )
    return model, matrix


@pytest.mark.parametrize(("k", "n", "block"), [(128, 33, 32), (200, 5, 64), (300, 48, 128), (512, 6, 256), (20, 5, 32)])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("zero", [None, np.uint8(128)])
def test_matmul_nbits(k: int, n: int, block: int, dtype: str, zero: Any) -> None:
    model, matrix = nbits(k, n, block, dtype, zero, accuracy_level=4)
    report = adopt(model)
    assert without_casts(report.model) == ["W8A8MatMul"]
    (layer,) = report.layers
    assert (layer.status, layer.weight_bits, layer.op) == ("replaced", 8, "MatMulNBits")
    half = dtype == "float16"
    for library in (True, False):
        (found,) = run(report.model, {"x": np.eye(k, dtype=dtype)}, library=library)
        np.testing.assert_allclose(found, matrix, rtol=2e-3 if half else 2e-6, atol=1e-5 if half else 1e-9)
    x = np.random.default_rng(1).standard_normal((5, k)).astype(dtype)
    exact = x.astype(np.float64) @ matrix
    (answer,), (original,) = run(report.model, {"x": x}, library=True), run(model, {"x": x})
    assert relative_error(exact, original.astype(np.float64)) < 0.02
    assert relative_error(exact, answer.astype(np.float64)) < 0.02


def test_matmul_nbits_with_a_bias() -> None:
    report = adopt(nbits(64, 33, 32, bias=True)[0])
    (found,) = run(report.model, {"x": np.zeros((1, 64), np.float32)}, library=True)
    np.testing.assert_allclose(found[0], np.linspace(-1, 1, 33), rtol=1e-6)


def test_other_recipes_keep_eight_bits_or_round_them_once_more() -> None:
    forms = [("linear", "int8", "W8A8MatMul"), ("linear", "int4", "W4A8MatMul")]
    for name, weights, op in [*forms, ("lm_head", "int8", "W8A8MatMul"), ("lm_head", "int4", "W8A8MatMul")]:
        model, matrix = nbits(128, 64, 32)
        model.graph.node[0].name = name
        report = ortolan.optimize_onnx(model, weights=weights, options={"verify.seconds": 0.0, "may_grow": True})
        assert op_types(report.model) == [op]
        assert any("stored in 8 bits, but" in note for note in report.notes) == (weights == "int4")
        assert any("stored 8-bit weights" in note for note in report.notes) == (weights == "int8")
        x = np.random.default_rng(1).standard_normal((5, 128)).astype(np.float32)
        (answer,) = run(report.model, {"x": x}, library=True)
        assert relative_error(x @ matrix, answer) < (0.15 if op == "W4A8MatMul" else 0.02)


# --- refused weights, and the reasons ---------------------------------------------------------------------------------


def test_int4_keeps_four_bits_unless_they_are_to_be_rounded_again() -> None:
    written = four_bits(256, 48, 32, None)
    options = {"verify.seconds": 0.0, "verify.feeds": 1}
    kept = ortolan.optimize_onnx(written.model(), weights="int4", options=options)
    again = ortolan.optimize_onnx(written.model(), weights="int4", options=options | {"requantize": True})
    for report, size in ((kept, 32), (again, 256)):
        assert report.model is not None
        (node,) = (node for node in report.model.graph.node if node.op_type == "W4A8MatMul")
        assert next(one.i for one in node.attribute if one.name == "group_size") == size
    assert any("requantize is true, so the weights are rounded once more" in note for note in again.notes)
    with pytest.raises(ortolan.RecipeError, match=r"no option 'requantize'|requantize is true, which needs op"):
        ortolan.Recipe.of(weights="bf16").with_options({"requantize": True})


def test_blocks_of_16() -> None:
    blocks = "its scales are per block of 16 inputs, expected one per output, or blocks of a multiple of 32 inputs"
    refused(by_group(64, 6, 16), "linear", "stored in 8 bits", blocks)
    refused(dequantized(64, 6, 16, False, "float32", np.int8, False), blocks)
    refused(nbits(64, 6, 16)[0], "linear: com.microsoft::MatMulNBits", blocks)
    refused(four_bits(64, 6, 16, 8), "block of 16 inputs")


def test_the_report_says_why_stored_weights_are_not_kept() -> None:
    report = ortolan.optimize_onnx(by_group(64, 6, 16).model(), options={"verify.seconds": 0.0})
    assert any(
        "1 layer stores quantized weights that cannot be kept, such as 'linear'" in note and "block of 16" in note
        for note in report.notes
    )
    assert not any("which the default keeps" in line for line in str(report).splitlines())
    four = DequantizedLayer(128, 64, 16).model()
    with pytest.raises(NothingToReplaceError, match=r"in int8, more than .*it is stored in 4 bits, but its block_size"):
        ortolan.optimize_onnx(four, weights="int8")


def test_a_scale_an_input() -> None:
    refused(by_column(64, 6, shape=[64, 1]), "its scales are per input, expected one per output")


def test_zero_points_that_no_form_takes() -> None:
    refused(by_group(64, 6, 32, codes=np.uint8, zero=100), "its codes minus zero points are from", "8-bit groups")
    refused(nbits(64, 6, 32, zero=np.uint8(100))[0], "its codes minus zero points are from")
    refused(
        by_column(64, 6, codes=np.uint8, zero=127.5),
        "its zero points are fractions, which 8-bit formats do not support",
    )
    refused(nbits(64, 6, 32, zero=np.float32(127.5))[0], "its zero points are fractions")


@pytest.mark.parametrize(("codes", "zero"), [(np.int8, 128), (np.int8, 200), (np.int8, -129)])
def test_zero_points_beyond_int8(codes: Any, zero: int) -> None:
    refused_and_read_as_floats(
        by_column(64, 48, codes=codes, zero=zero), f"from {zero} to {zero}, expected -128 to 127"
    )


@pytest.mark.parametrize("zero", [256, -1])
def test_zero_points_beyond_uint8(zero: int) -> None:
    written = by_column(64, 48, codes=np.uint8, zero=zero)
    refused_and_read_as_floats(
        written, f"its zero points are from {zero} to {zero}, expected 0 to 255, the range of its uint8"
    )
    some = np.where(np.arange(48) % 7 == 0, zero, 128)[None]
    refused_and_read_as_floats(by_column(64, 48, codes=np.uint8, zero=some), "expected 0 to 255")


def refused_and_read_as_floats(written: Written, reason: str) -> None:
    refused(written, reason)
    computed_as_floats(written.model())


def computed_as_floats(model: onnx.ModelProto) -> list[OptimizationReport]:
    """Check that recipes which quantize weights start from the values that ONNX Runtime computes."""
    x = np.random.default_rng(1).standard_normal((5, 64)).astype(np.float32)
    (expected,) = run(model, {"x": x})
    reports = []
    for weights, most in (("int8", 0.02), ("int4", 0.15)):
        options = {"verify.seconds": 0.0, "may_grow": True}
        reports.append(ortolan.optimize_onnx(model, weights=weights, options=options))
        (answer,) = run(reports[-1].model, {"x": x}, library=True)
        assert relative_error(expected, answer) < most, weights
    return reports


Steps = list[tuple[str, Any]]
INT32, INT16 = np.int32, np.int16


@pytest.mark.parametrize(
    ("codes", "steps"),
    [
        (np.int8, [("Add", np.array(100, np.int8)), ("Cast", np.float32), ("Mul", np.float32(0.01))]),
        (np.uint8, [("Sub", np.array(100, np.uint8)), ("Cast", np.float32), ("Mul", np.float32(0.01))]),
        (np.int8, [("Cast", INT32), ("Mul", INT32(2**25)), ("Cast", np.float32), ("Mul", np.float32(1e-9))]),
        (np.int8, [("Cast", INT32), ("Mul", INT32(3)), ("Cast", np.float32), ("Mul", np.float32(0.01))]),
        (np.int8, [("Cast", INT32), ("Div", INT32(3)), ("Cast", np.float32), ("Mul", np.float32(0.01))]),
        (np.int8, [("Cast", INT16), ("Sub", INT16(32760)), ("Cast", np.float32), ("Mul", np.float32(1e-5))]),
        (np.int8, [("Cast", np.float32), ("Mul", np.float32(0.01)), ("Cast", INT32), ("Cast", np.float32)]),
        (
            np.int8,
            [
                ("Cast", np.float32),
                ("Sub", np.float32(0.5)),
                ("Cast", INT32),
                ("Cast", np.float32),
                ("Mul", np.float32(0.01)),
            ],
        ),
    ],
)
def test_integers_that_wrap_or_round_are_floats(codes: Any, steps: Steps) -> None:
    for report in computed_as_floats(in_steps(codes, steps)):
        assert not any("stored in 8 bits" in note for note in report.notes)


@pytest.mark.parametrize("kind", [INT16, INT32, np.int64])
@pytest.mark.parametrize("op", ["Add", "Sub"])
def test_integers_that_do_neither_keep_their_numbers(kind: Any, op: str) -> None:
    steps: Steps = [("Cast", kind), (op, kind(100)), ("Cast", np.float32), ("Mul", np.float32(0.01))]
    report = adopt(in_steps(np.int8, steps))
    assert op_types(report.model) == ["SparseAMXMatMul"] and report.layers[0].weight_bits == 8
    (found,) = run(report.model, {"x": np.eye(64, dtype=np.float32)}, library=True)
    expected = (codes_of(64, 48).astype(np.float64) + (100 if op == "Add" else -100)) * 0.01
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def in_steps(codes: Any, steps: Steps) -> onnx.ModelProto:
    """Return a MatMul whose weight passes through steps: Cast to a type, or arithmetic with a constant."""
    constants: dict[str, Any] = {"q": codes_of(64, 48, dtype=codes)}
    nodes, last = [], "q"
    for place, (op, given) in enumerate(steps):
        output = "W" if place == len(steps) - 1 else f"made{place}"
        if op == "Cast":
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(given))
            nodes.append(helper.make_node("Cast", [last], [output], to=kind))
        else:
            constants[f"c{place}"] = np.asarray(given)
            nodes.append(helper.make_node(op, [last, f"c{place}"], [output]))
        last = output
    nodes.append(helper.make_node("MatMul", ["x", "W"], ["y"], name="linear"))
    sides = [{name: (TensorProto.FLOAT, ["batch", size])} for name, size in (("x", 64), ("y", 48))]
    return make_model(nodes, *sides, constants, opset=21, ir_version=10)


@pytest.mark.parametrize("scale_first", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (48,)])
def test_scales_that_are_quantized_themselves(shape: tuple[int, ...], scale_first: bool) -> None:
    q, few = codes_of(64, 48), np.abs(codes_of(*shape).astype(np.int16)).clip(1, 127).astype(np.int8)
    constants = {"few": few, "own": np.float32(0.001), "q": q, "scales": np.float32(0.02)}
    nodes = [
        helper.make_node("DequantizeLinear", ["few", "own"], ["factor"]),
        helper.make_node("DequantizeLinear", ["q", "scales"], ["numbers"]),
        helper.make_node("Mul", ["factor", "numbers"] if scale_first else ["numbers", "factor"], ["W"]),
    ]
    matrix = q.astype(np.float64) * 0.02 * (few * 0.001)
    check(Written(nodes, constants, matrix), "SparseAMXMatMul", 8)


@pytest.mark.filterwarnings("ignore:overflow encountered")
@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e38])
def test_scales_that_are_no_numbers(bad: float) -> None:
    written = by_group(64, 6, 32)
    written.constants["scales"][1, 0, 3] = bad
    refused(written, "linear")
    model, _ = nbits(64, 6, 32)
    scales = numpy_helper.to_array(model.graph.initializer[1]).copy()
    scales[3, 1] = bad
    model.graph.initializer[1].CopyFrom(numpy_helper.from_array(scales, "scales"))
    refused(model, "its largest scale is")


def test_sums_behind_the_scales() -> None:
    written = by_column(64, 6)
    written.nodes[-1].output[0] = "product"
    written.nodes.append(helper.make_node("Add", ["product", "offset"], ["W"], name="shift"))
    written.constants["offset"] = np.ones(6, np.float32)
    refused(written, "Add ('shift') adds a zero point after the scales, expected before them")


def test_malformed_matmul_nbits() -> None:
    for change, reason in (
        ({"block_size": 0}, "its block_size is 0"),
        ({"block_size": 64}, "its B 'B' have shape [6, 2, 32], expected [6, 1, 64]"),
        ({"K": 1 << 40}, ""),
        ({"weight_prepacked": 1}, "packed for another device"),
    ):
        model, _ = nbits(64, 6, 32)
        for attribute in list(model.graph.node[0].attribute):
            if attribute.name in change:
                model.graph.node[0].attribute.remove(attribute)
        for name, number in change.items():
            model.graph.node[0].attribute.append(helper.make_attribute(name, number))
        refused(model, reason)


def test_an_order_of_inputs() -> None:
    model, _ = nbits(64, 6, 32)
    model.graph.node[0].input.extend(["", "order"])
    order = np.arange(64, dtype=np.int32)[::-1] // 32
    model.graph.initializer.append(numpy_helper.from_array(order.copy(), "order"))
    refused(model, "its g_idx 'order' assigns inputs to groups out of order")


def test_what_is_no_stored_weight_stays_a_float_one() -> None:
    """The weight is a scaled float tensor, or a product of two weights, so no stored integers are reported."""
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.int32):
        constants = {"q": rng.integers(-9, 9, (64, 32)).astype(dtype), "scales": scales_of(32)}
        nodes = [
            helper.make_node("Cast", ["q"], ["cast"], to=TensorProto.FLOAT),
            helper.make_node("Mul", ["cast", "scales"], ["W"]),
        ]
        written = Written(nodes, constants, constants["q"] * constants["scales"].astype(np.float64))
        report = ortolan.optimize_onnx(written.model(), weights="bf16", options={"verify.seconds": 0.0})
        assert op_types(report.model) == ["SparseAMXMatMul"] and report.layers[0].weight_bits is None
