"""LayerNormalization with the additions before it, if no linear layer precedes it.

The provider claims it in models with integer linear layers. The bits are those of AddLayerNorm in the optimized file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortolan
from ortolan.models import tiny

from ..ops.add_layer_norm import kernel_answer
from ..ops.layer_norm import assert_normalized
from ..ops.single_node import assert_same_bits
from ..passes.int8_layers import adopt
from ..passes.small_models import make_model, op_types, run
from ..passes.test_fuse_norm import CONSTANTS as PASS_CONSTANTS
from ..passes.test_fuse_norm import FEEDS, LEFT_ALONE, SHAPES, SUMS, N, formula, norm
from ..passes.test_fuse_norm import node as op
from .context_records import NORM, steps
from .nbits_models import NBits
from .sessions import claimed, needs_provider, plain_session, provider_session
from .test_compiled_attention import bits, change
from .test_context import check_round_trip, compile_model, compiled_session, mutate_in_a_process, refuse

pytestmark = needs_provider

FLOAT = TensorProto.FLOAT
LAYER, FIRST = NBits(N, 20, 32), NBits(N, N, 32)
CONSTANTS = {
    **{f"first.{name}": array for name, array in FIRST.tensors.items()},
    **PASS_CONSTANTS,
    "table": np.random.default_rng(8).standard_normal((5, N)).astype(np.float32),
    "W": np.random.default_rng(3).standard_normal((N, 20)).astype(np.float32),
    "kinds": np.random.default_rng(9).standard_normal((1, 1, N)).astype(np.float32),
}
OPERATORS = [name for name in SUMS if "formula" not in name]


def model_of(
    nodes: Sequence[NodeProto],
    outputs: Sequence[str] = ("y",),
    layer: NodeProto | None = None,
    shapes: dict[str, list[int | str | None]] | None = None,
    opset: int = 21,
) -> onnx.ModelProto:
    """Return a model of `nodes` and a 4-bit linear layer that reads `y` and computes the output "answer"."""
    nodes = [*nodes, layer or LAYER.node("y", "answer", prefix="layer.")]
    read = {name for one in nodes for name in one.input}
    known = SHAPES | (shapes or {})
    return make_model(
        nodes,
        {name: (FLOAT, shape) for name, shape in known.items() if name in read},
        {name: (FLOAT, ["batch", "tokens", None]) for name in (*outputs, "answer")},
        {
            **{name: array for name, array in CONSTANTS.items() if name in read},
            **{f"layer.{name}": array for name, array in LAYER.tensors.items()},
        },
        opset,
        10,
        domains={"com.microsoft": 1},
    )


def feeds_of(model: onnx.ModelProto) -> dict[str, np.ndarray]:
    return {value.name: FEEDS[value.name] for value in model.graph.input}


def as_optimized(model: onnx.ModelProto, *feeds: dict[str, np.ndarray], threads: int = 1) -> list[str]:
    """Check that the output has the bits of the optimized file with AddLayerNorm, and return the claimed nodes."""
    session, optimized = provider_session(model, threads), adopt(model).model
    assert "AddLayerNorm" in op_types(optimized) and "LayerNormalization" not in op_types(optimized)
    for one in feeds or (feeds_of(model),):
        for y, expected in zip(session.run(None, one), run(optimized, one, library=True), strict=True):
            assert_same_bits(y, expected)
    return claimed(session)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", OPERATORS)
def test_sums_that_nothing_else_reads_become_part(name: str, threads: int) -> None:
    nodes, operands, left = SUMS[name]
    taken = as_optimized(model_of(nodes), threads=threads)
    sums = [one.name for one in nodes if one.op_type == "Add"]
    # The first additions, which are not fused, are in `left`.
    assert taken == sorted([*sums[len(left) :], "y", "linear"])
    assert len(sums) - len(left) == len(operands) - 1


def test_what_is_written_out_in_nodes() -> None:
    """ONNX Runtime fuses the nodes of the formula to LayerNormalization first, unless there is no bias."""
    taken = as_optimized(model_of(SUMS["a formula"][0], opset=17))
    assert "s" in taken and any("LayerNormFusion" in one for one in taken)
    nodes = SUMS["a formula without bias"][0]
    assert set(as_optimized(model_of(nodes, opset=17))) == {*(one.name for one in nodes), "linear"}


def test_the_formula_after_a_layer_becomes_part_of_it() -> None:
    nodes = [FIRST.node("x", "f", prefix="first."), op("Add", "f t", "s"), *formula(bias=False)]
    model = model_of(nodes, opset=17)
    model.graph.node[0].name = "first"
    session, optimized = provider_session(model), adopt(model).model
    assert set(claimed(session)) == {one.name for one in model.graph.node}
    assert len(op_types(optimized)) == 2
    feeds = feeds_of(model)
    for y, expected in zip(session.run(None, feeds), run(optimized, feeds, library=True), strict=True):
        assert_same_bits(y, expected)


def test_against_the_kernel_and_the_exact_formula() -> None:
    """Additions run from left to right and round each sum; the norm is within its error bound."""
    model = model_of([op("Add", "x t", "s1"), op("Add", "s1 p", "s"), norm()])
    (y, _), w, b = provider_session(model).run(None, feeds_of(model)), CONSTANTS["w"], CONSTANTS["b"]
    operands = [FEEDS[name] for name in "xtp"]
    assert_same_bits(y, kernel_answer(operands, w, b, 1e-12))
    total = (operands[0] + operands[1]) + operands[2]
    assert_normalized(y.reshape(-1, N), total.reshape(-1, N), w, b, 1e-12)


@pytest.mark.parametrize(
    ("nodes", "outputs", "taken"),
    [
        ([op("Add", "x t", "s"), norm()], ("y", "s"), {"y"}),
        ([op("Add", "x t", "s"), norm(), op("Neg", "s", "out")], ("y", "out"), {"y"}),
        ([op("Add", "x t", "s1"), op("Add", "s1 p", "s"), norm(), op("Neg", "s1", "out")], ("y", "out"), {"s", "y"}),
        ([op("Add", "x t", "s"), norm(), norm("s w", "other")], ("y", "other"), {"y", "other"}),
        (
            [op("Add", "x t", "s"), norm(output="n"), op("Add", "n p", "s2"), norm("s2 w b")],
            ("y",),
            {"s", "n", "s2", "y"},
        ),
    ],
    ids=["an output", "a sum that is read", "a sum in front", "two norms of a sum", "a norm behind a norm"],
)
def test_sums_that_others_read_stay(nodes: list[NodeProto], outputs: tuple[str, ...], taken: set[str]) -> None:
    assert set(as_optimized(model_of(nodes, outputs))) == {*taken, "linear"}


@pytest.mark.parametrize(
    "nodes",
    [
        [op("Add", "x table", "s"), norm()],
        [op("Add", "kinds x", "s1"), op("Add", "table s1", "s"), norm()],
        [op("Add", "x b", "s"), norm()],
    ],
    ids=["one", "two", "a vector"],
)
def test_constants_are_operands(nodes: list[NodeProto], tmp_path: Path) -> None:
    model = model_of(nodes)
    assert {one.name for one in nodes} < set(as_optimized(model))
    check_round_trip(model, tmp_path, feeds_of(model))


@pytest.mark.parametrize("name", [name for name in LEFT_ALONE if "LayerNormalization" not in name])
def test_what_is_left_alone(name: str) -> None:
    model = model_of(LEFT_ALONE[name])
    session = provider_session(model)
    assert claimed(session) == ["linear"]
    expected = plain_session(model_of(LEFT_ALONE[name])).run(["y"], feeds_of(model))
    assert_same_bits(session.run(["y"], feeds_of(model))[0], expected[0])


def test_constants_alone_are_left() -> None:
    model = model_of([norm("table w b", "c"), op("Add", "x c", "y")])
    assert claimed(provider_session(model)) == ["linear"]
    assert "AddLayerNorm" not in op_types(adopt(model).model)


def float_layer() -> NodeProto:
    return helper.make_node("MatMul", ["y", "W"], ["answer"], name="linear")


@pytest.mark.parametrize(
    ("precision", "taken"), [("float32", []), ("bf16", ["linear"]), ("int8", ["linear", "s", "y"])]
)
def test_it_takes_layers_of_whole_numbers(precision: str, taken: list[str]) -> None:
    """A norm is only claimed if the next linear layer is an integer layer, as in the optimized file."""
    model = model_of([op("Add", "x t", "s"), norm()], layer=float_layer())
    session = provider_session(model, ep__ortolanexecutionprovider__precision=precision)
    assert claimed(session) == taken
    (y, _) = session.run(None, feeds_of(model))
    ours = kernel_answer([FEEDS["x"], FEEDS["t"]], CONSTANTS["w"], CONSTANTS["b"], 1e-12)
    theirs = plain_session(model).run(["y"], feeds_of(model))[0]
    assert_same_bits(y, ours if precision == "int8" else theirs)


def test_a_layer_that_is_left_brings_no_norm() -> None:
    layer = NBits(N, 20, 16)
    model = model_of([norm("x w b")], layer=layer.node("y", "answer", prefix="layer."))
    tensors = {f"layer.{name}": array for name, array in layer.tensors.items()}
    for tensor in model.graph.initializer:
        if tensor.name in tensors:
            tensor.CopyFrom(numpy_helper.from_array(tensors[tensor.name], tensor.name))
    assert claimed(provider_session(model)) == []


def test_a_sum_of_other_rows_is_an_error() -> None:
    """A row length that the model does not declare is checked in the call."""
    model = model_of([norm("x w b")], shapes={"x": ["batch", "tokens", None]})
    session = provider_session(model)
    assert claimed(session) == ["linear", "y"]
    with pytest.raises(
        Exception, match=r"LayerNormalization node 'y': 'x' has shape \[3, 5, 7\], expected \[..., 24\]"
    ):
        session.run(None, {"x": np.ones((3, 5, 7), np.float32)})


def test_sums_that_do_not_fit_are_an_error() -> None:
    session = provider_session(model_of([op("Add", "x t", "s"), norm()]))
    with pytest.raises(
        Exception, match=r"'t' has shape \[2, 5, 24\], expected a shape that broadcasts with \[3, 5, 24\]"
    ):
        session.run(None, {"x": FEEDS["x"], "t": FEEDS["t"][:2]})


@pytest.mark.parametrize("shape", [(0, 5, N), (3, 0, N), (1, 1, N), (2, 300, N)])
def test_any_number_of_rows(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(1)
    feeds = {"x": rng.standard_normal(shape, np.float32), "p": rng.standard_normal((1, *shape[1:]), np.float32)}
    as_optimized(model_of([op("Add", "x p", "s"), norm()]), feeds, threads=2)


def in_both_branches(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with the nodes in both branches of an If; initializers stay outside."""
    graph, branches = model.graph, {}
    for side in ("then_branch", "else_branch"):
        nodes, prefix = [NodeProto() for _ in graph.node], side[:4]
        made = {name for one in graph.node for name in one.output}
        for copy, one in zip(nodes, graph.node, strict=True):
            copy.CopyFrom(one)
            copy.name = f"{prefix} {one.name}"
            copy.input[:] = [f"{prefix} {name}" if name in made else name for name in one.input]
            copy.output[:] = [f"{prefix} {name}" for name in one.output]
        ends = [helper.make_tensor_value_info(f"{prefix} {one.name}", FLOAT, None) for one in graph.output]
        branches[side] = helper.make_graph(nodes, side, [], ends)
    choice = helper.make_node("If", ["choice"], [one.name for one in graph.output], "if", **branches)
    del graph.node[:]
    graph.node.append(choice)
    graph.input.append(helper.make_tensor_value_info("choice", TensorProto.BOOL, []))
    return model


def test_branches() -> None:
    model = in_both_branches(model_of([op("Add", "x t", "s"), norm()]))
    feeds = {name: FEEDS[name] for name in "xt"}
    both = [feeds | {"choice": np.array(choice)} for choice in (True, False)]
    taken = as_optimized(model, *both)
    assert {f"{side} {name}" for side in ("then", "else") for name in ("s", "y", "linear")} <= set(taken)


def test_inspection_shows_them() -> None:
    nodes = [op("Add", "x t", "s1"), op("Add", "s1 p", "s"), norm(output="n"), op("Add", "n b", "m"), norm("m w", "y")]
    found = {
        one.node: one for one in ortolan.inspect_provider(model_of([*nodes, norm("y b", "alone")], ("alone",))).nodes
    }
    assert {name: one.what for name, one in found.items() if one.op == "LayerNormalization"} == {
        "n": "24 numbers, with 2 additions in front",
        "y": "24 numbers, with 1 addition in front",
        "alone": "24 numbers",
    }
    assert all(one.taken for one in found.values())


@pytest.mark.parametrize("encoder", ["bert", "mpnet"])
def test_a_whole_encoder_has_none_of_onnx_runtime(encoder: str) -> None:
    made = ir.to_proto({"bert": tiny.tiny_bert, "mpnet": tiny.tiny_mpnet}[encoder]())
    session = provider_session(made, ep__ortolanexecutionprovider__precision="int8")
    norms = {one.name for one in made.graph.node if one.op_type == "LayerNormalization"}
    assert norms and norms <= set(claimed(session))


# --- compiled models --------------------------------------------------------------------------------------------------

TWO_ADDENDS = [op("Add", "x table", "s1"), op("Add", "s1 p", "s"), norm()]


@pytest.mark.parametrize("embed_mode", ["0", "1"])
@pytest.mark.parametrize("name", OPERATORS)
def test_compiled(name: str, embed_mode: str, tmp_path: Path) -> None:
    model = model_of(SUMS[name][0])
    check_round_trip(model, tmp_path, feeds_of(model), ep__context_embed_mode=embed_mode)
    assert "LayerNormalization" not in op_types(onnx.load(tmp_path / "model_ctx.onnx"))


LARGE = 1 << 40


@pytest.mark.parametrize(
    ("numbers", "pattern"),
    [
        ({"kind": 4}, "a step has kind 4, expected 0 to 3"),
        ({"kind": 1}, "."),
        ({"y": 1}, "input/output index 1"),
        ({"y": -1}, "its 1 steps do not compute all of its 1 outputs"),
        ({"epsilon": bits(np.nan)}, "has 24 weights, 24 bias values and epsilon -?nan"),
        ({"epsilon": bits(np.inf)}, "epsilon inf"),
        ({"epsilon": bits(-1.0)}, "epsilon -1"),
        ({"weight__bytes": 0}, "a normalization has 0 weights, 24 bias values"),
        ({"weight__bytes": 23 * 4}, "a normalization has 23 weights, 24 bias values"),
        ({"shift__bytes": 25 * 4}, "a normalization has 24 weights, 25 bias values"),
        ({"shift__first": LARGE}, "a section of 4-byte elements"),
        ({"operands": 0}, "a normalization has no operands"),
        ({"operands": 4}, "the number of operands of a normalization is 4, expected 0 to 3"),
        ({"operands": -1}, "the number of operands of a normalization is -1"),
        ({"operands": 2}, "."),
        ({"operand0": 9}, "input/output index 9"),
        ({"operand0": -2}, "input/output index -2"),
        ({"operand0": -1}, "."),
        ({"operand1__axes": -1}, "there are -1 axes of an operand of a normalization"),
        ({"operand1__axes": LARGE}, "."),
        ({"operand1__axis0": 6}, r"an operand of a normalization of shape \[6, 24\] has 120 numbers"),
        ({"operand1__axis0": 0}, r"of shape \[0, 24\] has 120 numbers"),
        ({"operand1__axis0": 1 << 62, "operand1__axis1": 8}, "has 120 numbers"),
        ({"operand1__numbers__bytes": 119 * 4}, "has 119 numbers"),
    ],
)
def test_wrong_numbers(numbers: dict[str, int], pattern: str, tmp_path: Path) -> None:
    compile_model(model_of(TWO_ADDENDS), tmp_path)
    change(tmp_path, norm_step(tmp_path), **numbers)
    refuse(tmp_path, pattern)


def norm_step(folder: Path) -> int:
    content = (folder / "model_ctx_ortolan.bin").read_bytes()
    kinds = [content[places["kind"]] for places in steps(content)]
    assert kinds.count(NORM) == 1
    return kinds.index(NORM)


def test_a_constant_of_other_rows_is_an_error_of_the_call(tmp_path: Path) -> None:
    """An operand [10, 12] in the record instead of [5, 24] is reported by the call."""
    model = model_of(TWO_ADDENDS)
    compile_model(model, tmp_path)
    change(tmp_path, norm_step(tmp_path), operand1__axis0=10, operand1__axis1=12)
    with pytest.raises(Exception, match=r"'table' has shape \[10, 12\], expected \[..., 24\]"):
        compiled_session(tmp_path).run(None, feeds_of(model))


def test_mutated_files_never_crash(tmp_path: Path) -> None:
    model = model_of(TWO_ADDENDS)
    mutate_in_a_process(model, feeds_of(model), tmp_path)
