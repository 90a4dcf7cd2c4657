"""Dynamic int8 linear layers with 4x1 blocks of zeros run on VNNISpMM's kernels.

They must be the same layers as in the optimized file, and give the bits of that file.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper
from onnxruntime import quantization

import ortolan
from ortolan import _native
from ortolan.graph_passes.auto.candidates import CANDIDATES
from ortolan.graph_passes.forms import ADOPT
from ortolan.models import tiny

from ..ops.isa_process import run_with_isa
from ..ops.single_node import assert_same_bits
from ..passes.attention_graphs import S, feeds
from ..passes.int8_layers import DYNAMIC, Int8Layer, adopt, sparse_integers
from ..passes.small_models import op_types, relative_error, run
from .context_records import LAYERS, steps
from .int8_models import ACTIVATIONS, FLOAT, all_claims, dense_integers, in_blocks, with_nodes, with_zero_blocks
from .sessions import claimed, exact_session, needs_provider
from .test_attention import TAKEN, built, check, int8, with_biases
from .test_context import binary, check_round_trip, compile_model, context_nodes, ids, refuse

pytestmark = needs_provider

__all__ = ["int8"]  # a fixture

node = helper.make_node


def check_as_optimized(model: onnx.ModelProto, *given: dict[str, np.ndarray], taken: bool = True) -> None:
    """Check that layers run as block-sparse if `taken`, as in the optimized file, and give the bits of that file."""
    session, optimized = all_claims(model), adopt(model).model
    assert set(in_blocks(model).values()) == {taken}
    assert op_types(optimized).count("VNNISpMM") == int(taken)
    for one in given:
        assert_same_bits(session.run(None, one)[0], run(optimized, one, library=True)[0])


def rounding_bound(layer: Int8Layer, x: np.ndarray) -> np.ndarray:
    """Return the error bound of x W (ops/matmul/block_sparse_weight.h)."""
    half_steps = (np.maximum(x.max(axis=1), 0) - np.minimum(x.min(axis=1), 0))[:, None] / 2 / 255
    magnitude = np.abs(layer.matrix)
    bound: np.ndarray = half_steps * magnitude.sum(axis=0) * (1 + 2**-12) + 2**-20 * (np.abs(x) @ magnitude) + 1e-6
    return bound


@pytest.mark.parametrize("size", [(1, 1), (31, 5), (64, 16), (100, 33), (300, 48), (129, 70)])
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("form", DYNAMIC)
def test_every_form(form: str, unsigned: bool, size: tuple[int, int]) -> None:
    q = sparse_integers(*size, fraction=0.7 if size[0] > 1 else 1.0)
    layer = Int8Layer(form, unsigned=unsigned, zero_point=128 if unsigned else 0, q=q, per_column=size[1] % 2 == 0)
    layer.bias = size[0] % 2 == 1
    model = layer.model()
    check_as_optimized(model, *({"x": layer.inputs(rows)} for rows in (1, 4, 7, 33, 70)))
    x = layer.inputs(33)
    (y,) = all_claims(model).run(None, {"x": x})
    exact = x.astype(np.float64) @ layer.matrix + (layer.b if layer.bias else 0)
    assert (np.abs(y - exact) <= rounding_bound(layer, x)).all()
    if q.any():
        assert relative_error(exact_session(model).run(None, {"x": x})[0], y) < 0.02


@pytest.mark.parametrize("form", DYNAMIC)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "unsigned, zero_point, least, most, taken",
    [
        (False, 0, -128, 127, True),
        (False, 12, -128, 115, True),
        (False, 12, -140, 115, False),
        (True, 128, -128, 127, True),
        (True, 140, -128, 115, True),
        (True, 140, -129, 115, False),
        (True, 0, 0, 127, True),
        (True, 0, 0, 128, False),
    ],
)
def test_zero_points(
    form: str, bias: bool, unsigned: bool, zero_point: int, least: int, most: int, taken: bool
) -> None:
    """Weights minus zero points must fit an int8, because VNNISpMM has no zero points for weights."""
    rng = np.random.default_rng(4)
    q = np.where(sparse_integers(70, 24) != 0, rng.integers(least, most + 1, (70, 24)), 0).astype(np.int16)
    row, column = (int(one) for one in np.argwhere(q)[0])
    q[row, column], q[row, column + 1] = least, most
    layer = Int8Layer(form, unsigned=unsigned, zero_point=zero_point, q=q, bias=bias)
    check_as_optimized(layer.model(), {"x": layer.inputs(1)}, {"x": layer.inputs(9)}, taken=taken)


def test_a_zero_point_for_each_column() -> None:
    layer = Int8Layer("chain", unsigned=True, q=sparse_integers(70, 26).clip(-100, 100))
    zeros = np.random.default_rng(1).integers(101, 155, 26)
    layer.changes = {"zeros": zeros.astype(np.uint8), "W": (layer.q + zeros).astype(np.uint8)}
    check_as_optimized(layer.model(), {"x": layer.inputs(1)}, {"x": layer.inputs(9)})


# --- which ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "n, zeros, taken",
    [
        (24, (30, 0), True),  # zeros: zero blocks among the 10 x 6 whole blocks, and among the 10 at the edge
        (24, (29, 0), False),
        (26, (32, 1), True),  # the last 2 of the 26 columns form blocks of half width
        (26, (32, 0), False),
        (26, (30, 5), True),
        (26, (30, 4), False),
        (3, (0, 5), True),
        (3, (0, 4), False),
    ],
)
def test_half_of_the_weight_must_be_blocks_of_zeros(n: int, zeros: tuple[int, int], taken: bool) -> None:
    rng = np.random.default_rng(n)
    whole, edge = np.ones(10 * (n // 4), bool), np.ones(10, bool)
    for blocks, count in zip((whole, edge), zeros, strict=True):
        blocks[rng.permutation(len(blocks))[:count]] = False
    kept = np.repeat(np.column_stack([whole.reshape(10, -1), edge]), 4, axis=1)[:, :n]
    # A block counts as nonzero even if only one of its weights is nonzero.
    first = kept & (np.arange(n) % 4 == 0)
    for q in (np.where(kept, dense_integers(10, n) | 1, 0), np.where(first, 1, 0)):
        layer = Int8Layer("chain", q=q.astype(np.int8))
        check_as_optimized(layer.model(), {"x": layer.inputs(3)}, taken=taken)


def test_the_rule_of_the_passes_is_the_same_number() -> None:
    assert [step["min_sparsity"] for step in ADOPT["pass"] if step.get("op") == "VNNISpMM"] == [
        _native.LEAST_ZERO_BLOCKS
    ]
    assert {one.replace["min_sparsity"] for one in CANDIDATES if one.op == "VNNISpMM"} == {_native.LEAST_ZERO_BLOCKS}


def test_zeros_that_are_no_blocks_are_none() -> None:
    q = np.where(np.random.default_rng(2).random((150, 40)) < 0.75, 0, dense_integers(150, 40))
    layer = Int8Layer("chain", q=q.astype(np.int8))
    check_as_optimized(layer.model(), {"x": layer.inputs(3)}, taken=False)


@pytest.mark.parametrize("k, taken", [(1 << 16, True), ((1 << 16) + 1, False)])
def test_the_longest_layer(k: int, taken: bool) -> None:
    layer = Int8Layer("dynamic", q=sparse_integers(k, 8, fraction=0.9))
    check_as_optimized(layer.model(), {"x": layer.inputs(2)}, taken=taken)


def test_a_layer_of_zeros() -> None:
    layer = Int8Layer("chain", q=np.zeros((40, 20), np.int8), bias=True)
    check_as_optimized(layer.model(), {"x": layer.inputs(3)})
    np.testing.assert_array_equal(all_claims(layer.model()).run(None, {"x": layer.inputs(2)})[0], [layer.b, layer.b])


def test_what_is_said_of_them() -> None:
    layer = Int8Layer("chain", q=sparse_integers(64, 24))
    model = with_nodes(layer, [node("Relu", ["r"], ["y"])])
    (found,) = (one for one in ortolan.inspect_provider(model, claims="all").nodes if one.node == "linear")
    assert found.what == "64 x 24, int8 in blocks of 4 x 1, with relu"


WITHOUT_VNNI = """
import json
import numpy as np
import ortolan
from tests.passes.int8_layers import Int8Layer, adopt, sparse_integers
from tests.ops.single_node import assert_same_bits
from tests.passes.small_models import run
from tests.provider.int8_models import all_claims
from tests.provider.sessions import provider_session
found = {}
for zeros in (0, 50, 79, 80, 100):
    kept = np.arange(400) >= 4 * zeros
    q = sparse_integers(100, 16, fraction=0.0) | 1
    q *= np.repeat(np.random.default_rng(zeros).permutation(kept).reshape(100, 4), 4, axis=1).astype(np.int8)
    layer = Int8Layer("chain", q=q)
    (node,) = ortolan.inspect_provider(layer.model()).nodes
    found[zeros] = node.reason
    x, optimized = layer.inputs(7), adopt(layer.model()).model
    for session in [all_claims(layer.model())] + [provider_session(layer.model(), claims="faster")] * node.taken:
        assert_same_bits(session.run(None, {"x": x})[0], run(optimized, {"x": x}, library=True)[0])
print(json.dumps(found))
"""


@pytest.mark.parametrize("isa, taken", [("avx2", ["80", "100"]), ("scalar", [])])
def test_without_vnni_they_are_taken_where_they_are_faster(isa: str, taken: list[str]) -> None:
    if isa not in _native.cpu_info()["detected_features"]:
        pytest.skip(f"this CPU has no {isa}")
    done = run_with_isa(isa, WITHOUT_VNNI)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [zeros for zeros, reason in found.items() if not reason] == taken
    more = ", unless 80 % of the weights are in zero blocks of 4 x 1" if isa == "avx2" else ""
    reasons = {reason for zeros, reason in found.items() if zeros not in taken}
    assert reasons == {f"without VNNI instructions ONNX Runtime's int8 layers are faster{more}"}


# --- with the nodes around them
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str, tmp_path: Path) -> None:
    layer = Int8Layer("chain", q=sparse_integers(64, 24), bias=True)
    model = with_nodes(layer, [*ACTIVATIONS[name], node("Neg", ["a"], ["y"], name="behind")])
    given = [{"x": layer.inputs(rows)} for rows in (1, 40)]
    check_as_optimized(model, *given)
    assert len(claimed(all_claims(model))) == len(model.graph.node) - 1
    check_round_trip(model, tmp_path, *given)


def with_residual_and_norm() -> onnx.ModelProto:
    layer = Int8Layer("chain", q=sparse_integers(64, 32), bias=True)
    weight, bias = np.random.default_rng(7).standard_normal((2, 32)).astype(np.float32)
    more = [
        node("Neg", ["z"], ["residual"], name="in front"),
        node("Add", ["residual", "r"], ["s"]),
        node("LayerNormalization", ["s", "weight", "shift"], ["n"], axis=-1, epsilon=1e-6),
        node("Neg", ["n"], ["y"], name="behind"),
    ]
    return with_nodes(layer, more, ("z",), weight=weight, shift=bias)


def residual_feeds(*rows: int) -> list[dict[str, np.ndarray]]:
    rng = np.random.default_rng(3)
    return [
        {"x": rng.standard_normal((m, 64), np.float32), "z": rng.standard_normal((m, 32), np.float32)} for m in rows
    ]


@pytest.mark.parametrize("threads", [1, 3])
def test_residual_and_layer_norm(threads: int, tmp_path: Path) -> None:
    model, given = with_residual_and_norm(), residual_feeds(1, 9, 70, 200)
    session, optimized = all_claims(model, threads), adopt(model, calibration=residual_feeds(3, 5)).model
    assert {"in front", "behind"}.isdisjoint(claimed(session)) and len(claimed(session)) == len(model.graph.node) - 2
    assert "VNNISpMM" in op_types(optimized) and "LayerNormalization" not in op_types(optimized)
    for one in given:
        assert_same_bits(session.run(None, one)[0], run(optimized, one, library=True)[0])
    check_round_trip(model, tmp_path, *given)


def gated(up: np.ndarray, columns: int = 32) -> tuple[onnx.ModelProto, Int8Layer]:
    layer = Int8Layer("chain", q=sparse_integers(64, columns))
    more = [
        node("MatMulInteger", ["xq", "W2", "xz", "zeros"], ["sums2"], name="linear2"),
        node("Cast", ["sums2"], ["floats2"], to=FLOAT),
        node("Mul", ["floats2", "step"], ["r2"]),
        node("Sigmoid", ["r"], ["g"]),
        node("Mul", ["r", "g"], ["a"]),
        node("Mul", ["a", "r2"], ["y"], name="product"),
    ]
    return with_nodes(layer, more, W2=up), layer


@pytest.mark.parametrize("columns", [32, 24])
@pytest.mark.parametrize("up", ["blocks", "dense"])
def test_gated_layers(up: str, columns: int, tmp_path: Path) -> None:
    """Two layers of one kind with whole panels are joined; otherwise each is claimed separately."""
    second = sparse_integers(64, columns, seed=5) if up == "blocks" else dense_integers(64, columns, 5)
    model, layer = gated(second, columns)
    given = [{"x": layer.inputs(rows)} for rows in (1, 9, 40)]
    if up == "blocks" and columns == 32:
        check_as_optimized(model, *given)
    session = all_claims(model)
    assert {"linear", "linear2"} <= set(claimed(session))
    assert ("product" in claimed(session)) == (up == "blocks" and columns == 32)
    for one in given:
        assert relative_error(run(model, one)[0], session.run(None, one)[0]) < 0.03
    check_round_trip(model, tmp_path, *given)


@pytest.mark.parametrize("form", TAKEN)
def test_attention(form: str, int8: Any) -> None:
    model = with_zero_blocks(int8(built(TAKEN[form])))
    assert set(in_blocks(model).values()) == {True}
    check(model, *(feeds(model, rows) for rows in (1, 2, S, 70)))


@pytest.mark.parametrize("some", [[0], [1], [2], [0, 1], [1, 2], [0, 2]])
def test_attention_of_different_kinds(some: list[int], int8: Any, tmp_path: Path) -> None:
    """Some of the query, key and value layers are block-sparse."""
    model = with_zero_blocks(int8(built(TAKEN["usual"])), only=some)
    assert list(in_blocks(model).values()).count(True) == len(some)
    given = [feeds(model, rows) for rows in (1, S, 70)]
    check(model, *given)
    check_round_trip(model, tmp_path, *given)


def test_attention_with_biases(int8: Any) -> None:
    model = with_zero_blocks(int8(built(with_biases())))
    check(model, *(feeds(model, rows) for rows in (1, S, 70)))


def encoder(folder: Path, kind: str = "int8", share: float = 0.8, **sizes: Any) -> onnx.ModelProto:
    onnx.save(ir.to_proto(tiny.tiny_bert(**sizes)), folder / "float.onnx")
    weight_type = quantization.QuantType.QUInt8 if kind == "uint8" else quantization.QuantType.QInt8
    quantization.quantize_dynamic(
        folder / "float.onnx", folder / "int8.onnx", weight_type=weight_type, per_channel="column" in kind
    )
    return with_zero_blocks(onnx.load(folder / "int8.onnx"), share)


@pytest.mark.parametrize("kind", ["int8", "uint8", "int8 a column"])
def test_a_whole_encoder(kind: str, tmp_path: Path) -> None:
    model = encoder(tmp_path, kind)
    optimized = ortolan.optimize_onnx(model, options={"verify.seconds": 0.0, "may_grow": True}).model
    # 12 linear layers; query, key and value layers are joined to one node.
    assert list(in_blocks(model).values()) == [True] * 12 and op_types(optimized).count("VNNISpMM") == 8
    session = all_claims(model)
    for given in (ids(1, 1), ids(1, 16), ids(3, 40)):
        assert_same_bits(session.run(None, given)[0], run(optimized, given, library=True)[0])


# --- compiled models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("embed_mode", ["0", "1"])
@pytest.mark.parametrize("size", [(31, 5), (64, 16), (150, 40)])
def test_a_compiled_layer(size: tuple[int, int], embed_mode: str, tmp_path: Path) -> None:
    layer = Int8Layer("dynamic", q=sparse_integers(*size), bias=size[0] % 2 == 0)
    given = [{"x": layer.inputs(rows)} for rows in (1, 7, 70)]
    check_round_trip(layer.model(), tmp_path, *given, ep__context_embed_mode=embed_mode)


def test_a_compiled_layer_of_zeros(tmp_path: Path) -> None:
    """The packed weight has no blocks, so its arrays are empty."""
    layer = Int8Layer("chain", q=np.zeros((40, 20), np.int8), bias=True)
    check_round_trip(layer.model(), tmp_path, {"x": layer.inputs(3)})


@pytest.mark.parametrize("embed_mode", ["0", "1"])
@pytest.mark.parametrize("width", [32, 40])
def test_a_compiled_encoder(width: int, embed_mode: str, tmp_path: Path) -> None:
    """Sizes whose 40 columns do not fill whole panels, so that query, key and value weights stay separate."""
    model = encoder(tmp_path, hidden_size=width, num_attention_heads=4)
    assert set(in_blocks(model).values()) == {True}
    check_round_trip(model, tmp_path, ids(1, 1), ids(1, 16), ids(3, 40), ep__context_embed_mode=embed_mode)
    assert len(context_nodes(tmp_path)) >= 6


BLOCKS = 3  # value of "part0" for block-sparse weights


def change(folder: Path, **numbers: int) -> dict[str, int]:
    """Change integers in the record of the only layer, and return the positions of all its integers.

    numbers: new values by the names in context_records; two underscores in a name become a dot.
    """
    content = bytearray(binary(folder).read_bytes())
    (places,) = steps(bytes(content))
    assert struct.unpack_from("<q", content, places["kind"]) == (LAYERS,)
    assert struct.unpack_from("<q", content, places["part0"]) == (BLOCKS,)
    for name, number in numbers.items():
        struct.pack_into("<q", content, places[name.replace("__", ".")], number)
    binary(folder).write_bytes(content)
    return places


@pytest.fixture
def compiled(tmp_path: Path) -> Path:
    """Compile a layer with 32 inputs and 10 outputs: three groups of outputs, each with two quads of inputs."""
    q = np.where(np.arange(32)[:, None] % 4 == 0, dense_integers(32, 10) | 1, 0)
    layer = Int8Layer("dynamic", q=q, bias=True)
    compile_model(layer.model(), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "numbers, pattern",
    [
        ({"part0": 4}, "a weight has kind 4, expected 0 to 3"),
        ({"part0": -1}, "a weight has kind -1, expected 0 to 3"),
        ({"part0": 1}, "."),
        ({"part0": 2}, "."),
        ({"part0__k": 0}, "k x n is 0 x 10, expected 1 to 65536"),
        ({"part0__k": 65537}, "k x n is 65537 x 10"),
        ({"part0__k": -1}, "k x n is -1 x 10"),
        ({"part0__k": 28}, "indices hold 28, expected less than k, 28"),
        ({"part0__n": 0}, "k x n is 32 x 0"),
        ({"part0__n": 1 << 40}, "k x n is 32 x 1099511627776"),
        ({"part0__n": 13}, "starts have 4 elements, expected 5"),
        ({"part0__n": 9}, "scales have 10 elements, expected 9"),
        ({"part0__values__bytes": 80}, "values have 80 elements, expected 96 for 24 indices"),
        ({"part0__values__bytes": -1}, "."),
        ({"part0__values__first": 1 << 40}, "a section of 1-byte elements"),
        ({"part0__indices__bytes": 46}, "indices have 23 elements, expected a multiple of 4"),
        ({"part0__indices__bytes": 47}, "a section of 2-byte elements has 47 bytes"),
        ({"part0__starts__bytes": 24}, "starts have 3 elements, expected 4"),
        ({"part0__scales__bytes": 36}, "scales have 9 elements, expected 10"),
        ({"part0__bias__bytes": 4}, "a bias has 1 values, expected 10"),
        ({"gated": 1}, "a step of 10 columns has 1 gated columns"),
    ],
)
def test_wrong_records(numbers: dict[str, int], pattern: str, compiled: Path) -> None:
    change(compiled, **numbers)
    refuse(compiled, pattern)


@pytest.mark.parametrize(
    "array, item, number, pattern",
    [
        ("starts", "<q", (0, 1), "starts begin with 1"),
        ("starts", "<q", (3, 5), "starts end with 5, expected the number of quads, 6"),
        ("starts", "<q", (1, 1 << 40), "starts decrease or exceed the 6 quads after element 0"),
        ("starts", "<q", (1, -1), "starts decrease or exceed the 6 quads after element 0"),
        ("indices", "<H", (0, 32), "indices hold 32, expected less than k, 32"),
        ("indices", "<H", (23, 65535), "indices hold 65535"),
        ("indices", "<H", (1, 0), "indices of the group at output 0 do not ascend: 0 after 0"),
        ("values", "<b", (95, 1), "values hold nonzero weights for outputs from 10 on"),
    ],
)
def test_wrong_weights(array: str, item: str, number: tuple[int, int], pattern: str, compiled: Path) -> None:
    """Weights whose indices would make kernels read out of bounds are rejected."""
    places = change(compiled)
    content = bytearray(binary(compiled).read_bytes())
    (records,) = struct.unpack_from("<q", content, 24)
    (first,) = struct.unpack_from("<q", content, places[f"part0.{array}.first"])
    sections = -(-(64 + records) // 64) * 64
    place, value = number
    struct.pack_into(item, content, sections + first + place * struct.calcsize(item), value)
    binary(compiled).write_bytes(content)
    refuse(compiled, pattern)
