"""Attention of unmodified quantized models: the provider gives the bits of the optimized file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization.matmul_nbits_quantizer import MatMulNBitsQuantizer

import ortolan
from ortolan.models import tiny

from ..ops.single_node import assert_same_bits
from ..passes.attention_forms import (
    FORMS,
    filled,
    learned_scale,
    masked_by,
    other_axis,
    other_width_of_values,
    shown_weights,
    unknown_heads,
    used_scores,
)
from ..passes.attention_graphs import FLOAT, INT64, LOWEST, B, D, Graph, H, S, W, feeds, plain
from ..passes.small_models import op_types, random_weight, relative_error, run
from ..passes.test_attention_by_heads import BY_HEADS
from ..recipes.forms import NAMED
from .nbits_models import NBits
from .sessions import ORT_VERSION, claimed, needs_provider, plain_session, provider_session

pytestmark = needs_provider

Build = Callable[[Graph], str]
# quantize_dynamic turns ONNX's Attention into an operator that ONNX Runtime lacks.
OPERATORS = [name for name in FORMS | BY_HEADS if name.startswith("Attention")]
# The causal mask is computed from the sizes of the queries and keys of the attention itself.
TAKEN = {name: form for name, form in FORMS.items() if name not in (*OPERATORS, "causal")}


@pytest.fixture
def int8(tmp_path: Path) -> Callable[[onnx.ModelProto], onnx.ModelProto]:
    def quantized(model: onnx.ModelProto) -> onnx.ModelProto:
        onnx.save(model, tmp_path / "float.onnx")
        weight_type = quantization.QuantType.QInt8
        quantization.quantize_dynamic(tmp_path / "float.onnx", tmp_path / "int8.onnx", weight_type=weight_type)
        return onnx.load(tmp_path / "int8.onnx")

    return quantized


def four_bits(model: onnx.ModelProto) -> onnx.ModelProto:
    quantizer = MatMulNBitsQuantizer(model, block_size=32, is_symmetric=True)
    quantizer.process()
    quantized: onnx.ModelProto = quantizer.model.model
    return quantized


def built(form: Build) -> onnx.ModelProto:
    graph = Graph()
    return graph.model(form(graph))


def attentions(session: ort.InferenceSession) -> int:
    return sum("Softmax" in name or "Attention" in name for name in claimed(session))


def layers(session: ort.InferenceSession) -> int:
    """Return the number of claimed int8 linear layers."""
    return sum(name.endswith("_quant") for name in claimed(session))


def optimized(model: onnx.ModelProto, **options: Any) -> onnx.ModelProto:
    """Optimize with padding kept, as the provider does."""
    options = {"verify.seconds": 0.0, "may_grow": True, **options}
    found = ortolan.optimize_onnx(model, recipe=NAMED["adopt"].without_pass("unpad"), options=options).model
    assert found is not None
    return found


def check(model: onnx.ModelProto, *given: dict[str, np.ndarray], threads: int = 1) -> None:
    """Check that all attention is claimed, and that the outputs have the bits of the optimized file."""
    session, expected = provider_session(model, threads), optimized(model)
    count = op_types(expected).count("NoMADAttention")
    assert count > 0 and attentions(session) == count
    assert sum(op_type in ("Softmax", "MultiHeadAttention", "Attention") for op_type in op_types(model)) == count
    for one in given:
        for y, wanted in zip(session.run(None, one), run(expected, one, library=True), strict=True):
            assert_same_bits(y, wanted)


def check_answers(model: onnx.ModelProto, *given: dict[str, np.ndarray]) -> None:
    """Check that the provider's answers are close to ONNX Runtime's."""
    session = provider_session(model)
    for one in given:
        for y, expected in zip(session.run(None, one), run(model, one), strict=True):
            assert np.linalg.norm(y - expected) <= 0.04 * np.linalg.norm(expected)


def reasons(model: onnx.ModelProto, **options: Any) -> dict[str, str]:
    """Return the reasons for nodes that are not claimed, by the node's name."""
    nodes = ortolan.inspect_provider(model, claims="all", **options).nodes
    return {one.node: one.reason for one in nodes if not one.taken}


def check_left(model: onnx.ModelProto, *given: dict[str, np.ndarray]) -> None:
    """Check that linear layers are claimed, but no attention, and that outputs have the optimized file's bits."""
    session, expected = provider_session(model), optimized(model, **{"fuse_attention.exclude": ["*"]})
    assert attentions(session) == 0
    assert layers(session) == op_types(model).count("MatMulInteger")
    for one in given:
        for y, wanted in zip(session.run(None, one), run(expected, one, library=True), strict=True):
            assert_same_bits(y, wanted)


@pytest.mark.parametrize("form", TAKEN)
def test_every_form_in_int8(form: str, int8: Any) -> None:
    model = int8(built(TAKEN[form]))
    check(model, *(feeds(model, rows) for rows in (1, 2, S, 70)))


@pytest.mark.parametrize("form", ["usual", "shape chains", "zeros for NaN", "position bias and mask"])
def test_forms_in_four_bits(form: str) -> None:
    model = four_bits(built(TAKEN[form]))
    assert "MatMulNBits" in op_types(model)
    check(model, *(feeds(model, rows) for rows in (1, S, 70)))


@pytest.mark.parametrize("form", OPERATORS)
def test_operators_of_onnx(form: str) -> None:
    model = four_bits(built((FORMS | BY_HEADS)[form]))
    check(model, *(feeds(model, rows) for rows in (1, S, 70)))


@pytest.mark.parametrize("form", ["usual", "filled", "position bias and mask"])
def test_several_threads(form: str, int8: Any) -> None:
    model = int8(built(TAKEN[form]))
    check(model, *(feeds(model, rows) for rows in (1, 70, 200)), threads=3)


@pytest.mark.parametrize(
    "form", ["usual", "filled", "filled with -Inf", "zeros for NaN", "zeros for rows without keys"]
)
def test_rows_that_see_nothing(form: str, int8: Any) -> None:
    """The first sequence is fully masked, the second is not. Masks of -Inf give NaN."""
    model = int8(built(TAKEN[form]))
    given = feeds(model)
    given["mask"][:] = np.array([[0], [1]])
    check(model, given)


def multi_head(**attributes: Any) -> Build:
    def build(graph: Graph) -> str:
        inputs = [graph.linear(name) for name in ("q", "kk", "vvv")]
        return graph.op("MultiHeadAttention", *inputs, domain="com.microsoft", num_heads=H, **attributes)

    return build


@pytest.mark.parametrize("attributes", [{}, {"scale": 0.4}, {"unidirectional": 1}])
def test_multi_head_attention(attributes: dict[str, Any], int8: Any) -> None:
    model = int8(built(multi_head(**attributes)))
    check(model, *(feeds(model, rows) for rows in (1, S, 70)))


def key_padding(graph: Graph, rank: int = 2) -> str:
    """Return a mask for MultiHeadAttention.

    rank 2: int32 [batch, keys]; rank 3: [batch, rows, keys]; rank 1: key counts [batch].
    """
    graph.inputs["mask"] = (INT64, ["batch", "rows"])
    whole = graph.op("Cast", "mask", to=TensorProto.INT32)
    if rank == 1:
        return graph.op("ReduceSum", whole, np.array([1]), keepdims=0)  # type: ignore[arg-type]
    if rank == 2:
        return whole
    columns = graph.op("Unsqueeze", whole, np.array([1]))  # type: ignore[arg-type]
    return graph.op("Mul", columns, graph.op("Unsqueeze", whole, np.array([2])))  # type: ignore[arg-type]


def with_biases(*, bias: bool = True, padding: int = 0, added: bool = False, **attributes: Any) -> Build:
    """Build MultiHeadAttention with biases as ONNX Runtime's optimizer writes it. padding: rank of its mask, or 0."""

    def build(graph: Graph) -> str:
        given: list[Any] = [graph.op("MatMul", "x", random_weight(W, W, seed=seed)) for seed in (1, 2, 3)]
        given.append(np.linspace(-1, 1, 3 * W, dtype=np.float32) if bias else "")
        given.append(key_padding(graph, padding) if padding else "")
        if added:
            square = graph.op("Cast", key_padding(graph, rank=3), to=FLOAT)
            by_heads = graph.op("Unsqueeze", square, np.array([1]))  # type: ignore[arg-type]
            factors = np.linspace(-2, 2, H, dtype=np.float32).reshape(1, H, 1, 1)
            given.append(graph.op("Mul", by_heads, factors))  # type: ignore[arg-type]
        return graph.op("MultiHeadAttention", *given, domain="com.microsoft", num_heads=H, **attributes)

    return build


@pytest.mark.parametrize("quantize", ["int8", "four bits"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"unidirectional": 1},
        {"padding": 2},
        {"padding": 3},
        {"padding": 1},
        {"padding": 2, "unidirectional": 1},
        {"padding": 2, "bias": False},
        {"padding": 2, "added": True},
        {"padding": 3, "added": True, "mask_filter_value": -3.5, "scale": 0.4},
    ],
)
def test_multi_head_attention_with_biases_and_key_padding(given: dict[str, Any], quantize: str, int8: Any) -> None:
    model = built(with_biases(**given))
    model = int8(model) if quantize == "int8" else four_bits(model)
    fed = [feeds(model, rows) for rows in (1, S, 70)]
    for one in fed if given.get("padding") else ():
        one["mask"][0, one["mask"].shape[1] // 2 :] = 0
        one["mask"][1] = np.arange(one["mask"].shape[1]) % 3 - 1
    check(model, *fed)


def test_key_padding_of_another_size(int8: Any) -> None:
    model = int8(built(with_biases(padding=2)))
    session = provider_session(model)
    given = feeds(model)
    for shape in ((B, S + 1), (B + 1, S)):
        with pytest.raises(Exception, match=r"MultiHeadAttention node .* its mask has shape .* does not broadcast to"):
            session.run(None, given | {"mask": np.ones(shape, np.int64)})
    assert_same_bits(session.run(None, given)[0], run(optimized(model), given, library=True)[0])


def test_biases_of_layers_without_their_attention(int8: Any) -> None:
    """The mask depends on a linear layer of the same input, so the linear layers are claimed separately."""

    def build(graph: Graph) -> str:
        largest = graph.op("ReduceMax", graph.op("MatMul", "x", random_weight(W, W, seed=4)), axes=[-1], keepdims=0)
        shown = graph.op("Cast", graph.op("Greater", largest, graph.number(0.0)), to=TensorProto.INT32)
        y = with_biases()(graph)
        graph.nodes[-1].input[4] = shown
        return y

    model = int8(built(build))
    check_left(model, *(feeds(model, rows) for rows in (1, S, 70)))


@pytest.mark.parametrize("given", ["padding of its sizes", "other keys", "biases of its layers too", "cache"])
def test_multi_head_attention_apart_from_its_layers(given: str, int8: Any) -> None:
    """Layers that read another input, whose sizes are read, or with two biases are not part of the attention's step."""

    def build(graph: Graph) -> str:
        other = graph.op("Tanh", "x") if given == "other keys" else "x"
        inputs: list[Any] = [graph.linear("q"), graph.linear("kk", other), graph.linear("vvv", other)]
        if given == "biases of its layers too":
            numbers = np.linspace(-1, 1, 3 * W, dtype=np.float32)
            inputs[1] = graph.op("Add", inputs[1], numbers[:W])  # type: ignore[arg-type]
            inputs.append(numbers)
        if given == "padding of its sizes":
            sizes = graph.op("Gather", graph.op("Shape", inputs[0]), np.array([0, 1]))  # type: ignore[arg-type]
            inputs += ["", graph.op("Expand", np.ones(1, np.int32), sizes)]  # type: ignore[arg-type]
        y = graph.op("MultiHeadAttention", *inputs, domain="com.microsoft", num_heads=H)
        if given == "cache":
            graph.nodes[-1].output.extend(["key", "value"])
            graph.outputs |= {name: (FLOAT, ["batch", H, "rows", D]) for name in ("key", "value")}
        return y

    model = int8(built(build))
    given_feeds = [feeds(model, rows) for rows in (1, S)]
    check_answers(model, *given_feeds)
    if given == "cache":
        assert layers(provider_session(model)) == 3
        assert list(reasons(model).values()) == ["it has a cache of keys and values"]
    else:
        check(model, *given_feeds)


# --- sizes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantize", ["int8", "four bits"])
@pytest.mark.parametrize(("hidden", "heads"), [(40, 4), (72, 3), (39, 3), (64, 1), (130, 2)])
def test_encoders_of_any_sizes(quantize: str, hidden: int, heads: int, int8: Any) -> None:
    """Sizes whose columns do not fill whole panels, so that query, key and value weights stay separate."""
    sizes = {"hidden_size": hidden, "num_attention_heads": heads}
    model = ir.to_proto(tiny.tiny_bert(**sizes))
    model = int8(model) if quantize == "int8" else four_bits(model)
    check(model, *(tokens(model, batch, rows) for batch, rows in ((1, 1), (1, 16), (3, 33))))


def test_an_encoder_with_a_position_bias(int8: Any) -> None:
    model = int8(ir.to_proto(tiny.tiny_mpnet()))
    check(model, *(tokens(model, batch, rows) for batch, rows in ((1, 1), (3, 33))))


def tokens(model: onnx.ModelProto, batch: int, rows: int) -> dict[str, np.ndarray]:
    mask = (np.arange(rows) < np.linspace(rows, 1, batch, dtype=int)[:, None]).astype(np.int64)
    ids = np.where(mask, np.random.default_rng(rows).integers(2, 100, (batch, rows)), 1)
    given = {"input_ids": ids, "attention_mask": mask, "token_type_ids": np.zeros_like(ids)}
    return {value.name: given[value.name] for value in model.graph.input}


def of_different_kinds() -> onnx.ModelProto:
    """Return attention with 4-bit queries, 8-bit keys, and 4-bit values with another block size and a bias."""
    layers = [NBits(W, W, 32), NBits(W, W, 32, bits=8), NBits(W, W, 64, bias=True)]
    graph = Graph()
    names = []
    for index, layer in enumerate(layers):
        names.append(f"part{index}")
        graph.nodes.append(layer.node("x", names[-1], f"/MatMul_{index}", f"w{index}."))
        graph.weights |= {f"w{index}.{name}": array for name, array in layer.tensors.items()}
    scores = graph.op("MatMul", graph.heads(names[0]), graph.transpose(graph.heads(names[1]), 0, 1, 3, 2))
    weights = graph.op("Softmax", graph.op("Mul", scores, graph.number(0.3)), axis=-1)
    return graph.model(graph.merge(graph.op("MatMul", weights, graph.heads(names[2]))))


def test_layers_of_different_kinds() -> None:
    model = of_different_kinds()
    check(model, *(feeds(model, rows) for rows in (1, S, 70)))


def test_the_number_of_heads_is_not_known(int8: Any) -> None:
    model = int8(built(unknown_heads))
    (reason,) = reasons(model).values()
    assert reason == "Reshape '/Reshape_2', which its query passes through, is not supported"
    assert layers(provider_session(model)) == 3
    for shape in ([B, S, 1, W], [B, S, 6, W // 6], [0, -1, 2 * H, D // 2]):
        check_answers(model, {"x": feeds(model)["x"], "shape": np.array(shape)})


def rows_are_fixed(graph: Graph) -> str:
    q, k, v = (
        graph.transpose(graph.reshape(graph.linear(name), -1, S, H, D), 0, 2, 1, 3) for name in ("q", "kk", "vvv")
    )
    weights = graph.op("Softmax", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), axis=-1)
    return graph.reshape(graph.transpose(graph.op("MatMul", weights, v), 0, 2, 1, 3), -1, S, W)


def test_another_number_of_rows_than_it_is_made_for(int8: Any) -> None:
    model = int8(built(rows_are_fixed))
    session = provider_session(model)
    assert attentions(session) == 1
    check_answers(model, feeds(model, S), feeds(model, 2 * S))  # rows of each of two sequences
    for runner in (session, plain_session(model)):
        with pytest.raises(Exception, match="reshape"):
            runner.run(None, feeds(model, S + 1))
    session.run(None, feeds(model, S))


def mask_as_given(graph: Graph) -> str:
    graph.inputs["bias"] = (FLOAT, [None] * 4)
    return masked_by(lambda _: "bias")(graph)


def test_masks_of_any_shape(int8: Any) -> None:
    model = int8(built(mask_as_given))
    session, expected = provider_session(model), optimized(model)
    assert attentions(session) == 1
    rng = np.random.default_rng(3)
    x = feeds(model)["x"]
    for shape in ((1, 1, 1, 1), (B, 1, 1, S), (1, H, S, S), (B, H, S, S), (B, H, S, 1), (1, 1, S, S)):
        given = {"x": x, "bias": rng.standard_normal(shape, dtype=np.float32)}
        assert_same_bits(session.run(None, given)[0], run(expected, given, library=True)[0])
    for shape in ((1, 1, 1, S + 1), (3, 1, 1, S), (1, H, 2, S), (0, 1, 1, S)):
        with pytest.raises(Exception, match=r"mask has shape|broadcast"):
            session.run(None, {"x": x, "bias": np.zeros(shape, np.float32)})


def cut_mask(graph: Graph) -> str:
    """Build attention with a bias that is sliced to the number of keys, as in BART."""
    graph.inputs["bias"] = (FLOAT, ["batch", 1, 1, "most"])
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    rows = graph.op("Gather", graph.op("Shape", k), np.array([2]), axis=0)
    mask = graph.op("Slice", "bias", np.array([0]), rows, np.array([3]), np.array([1]))
    scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.number(D**-0.5))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", graph.op("Add", scores, mask), axis=-1), v))


@pytest.mark.parametrize("longer", [0, 5])
def test_a_mask_that_is_cut_to_the_keys(longer: int, int8: Any) -> None:
    model = int8(built(cut_mask))
    session = provider_session(model)
    assert attentions(session) == 1
    bias = np.random.default_rng(0).standard_normal((B, 1, 1, S + longer), dtype=np.float32)
    given = {"x": feeds(model)["x"], "bias": bias}
    (y,) = session.run(None, given)
    assert relative_error(run(model, given)[0], y) < 0.03
    (exact,) = provider_session(int8(built(mask_as_given))).run(None, given | {"bias": bias[..., :S]})
    assert_same_bits(y, exact)


def constant_mask(form: str) -> Build:
    """Build attention with a constant causal mask, as in GPT-2."""

    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.number(D**-0.5))
        mask: Any = np.triu(np.full((1, 1, S, S + (4 if form == "cut" else 0)), -1e4, np.float32), 1)
        if form == "expanded":
            mask = graph.op("Expand", mask, graph.op("Shape", scores))
        if form == "cut":
            rows = graph.op("Shape", k, start=2, end=3)
            mask = graph.op("Slice", mask, np.array([0]), rows, np.array([3]))
        scores = graph.op("Add", scores, mask)
        return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))

    return build


@pytest.mark.parametrize("form", ["whole", "expanded", "cut"])
def test_constant_masks(form: str, int8: Any) -> None:
    model = int8(built(constant_mask(form)))
    session = provider_session(model)
    assert attentions(session) == 1
    given = feeds(model)
    causal = np.triu(np.full((1, 1, S, S), -1e4, np.float32), 1)
    (exact,) = provider_session(int8(built(mask_as_given))).run(None, {**given, "bias": causal})
    assert_same_bits(session.run(None, given)[0], exact)


@pytest.mark.parametrize("shape", [(0, 5, W), (3, 0, W), (0, 0, W)])
def test_nothing_to_do(shape: tuple[int, ...], int8: Any) -> None:
    session = provider_session(int8(built(TAKEN["no mask"])))
    (y,) = session.run(None, {"x": np.zeros(shape, np.float32)})
    assert y.shape == shape


# --- attention apart from its layers ----------------------------------------------------------------------------------


def shown_query(graph: Graph) -> str:
    q = graph.linear("q")
    graph.outputs["shown"] = (FLOAT, ["batch", "rows", W])
    graph.nodes.append(helper.make_node("Identity", [q], ["shown"], "/shown"))
    return attend_from(graph, q)


def query_that_others_use(graph: Graph) -> str:
    q = graph.linear("q")
    return graph.op("Add", attend_from(graph, q), graph.op("Tanh", q))


def attend_from(graph: Graph, q: str, k: str = "", v: str = "") -> str:
    k, v = k or graph.linear("kk"), v or graph.linear("vvv")
    scores = graph.op("MatMul", graph.heads(q), graph.transpose(graph.heads(k), 0, 1, 3, 2))
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), graph.heads(v)))


def keys_are_values(graph: Graph) -> str:
    shared = graph.linear("kk")
    return graph.op("Add", attend_from(graph, graph.linear("q"), shared, shared), graph.linear("vvv"))


def keys_of_something_else(graph: Graph) -> str:
    other = graph.op("Tanh", "x")
    return attend_from(graph, graph.linear("q"), graph.linear("kk", other), graph.linear("vvv", other))


def merged_otherwise(graph: Graph) -> str:
    weights, value = plain(graph)
    return graph.reshape(graph.transpose(graph.op("MatMul", weights, value), 0, 1, 2, 3), 0, -1, W)


def cross(graph: Graph) -> str:
    """Build attention with keys and values of another input, whose sequences are longer and padded."""
    graph.inputs |= {"other": (FLOAT, ["batch", "keys", W]), "padding": (FLOAT, ["batch", 1, 1, "keys"])}
    q, k, v = (graph.heads(graph.linear(name, of)) for name, of in (("q", "x"), ("kk", "other"), ("vvv", "other")))
    scores = graph.op("Add", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), "padding")
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


APART: dict[str, Build] = {name: form for name, form in BY_HEADS.items() if name not in OPERATORS} | {
    "query shown": shown_query,
    "query used": query_that_others_use,
    "keys are values": keys_are_values,
    "keys of something else": keys_of_something_else,
    "heads not merged": merged_otherwise,
    "cross attention": cross,
}


OF_NINE_ROWS = ("sequences last", "windows")


def apart_feeds(model: onnx.ModelProto, rows: int) -> dict[str, np.ndarray]:
    """Return inputs. Keys of another input are 7 more than the queries, and the first sequence has 3 of padding."""
    rng, given = np.random.default_rng(rows), {}
    names = {value.name for value in model.graph.input}
    if "other" in names:
        given["other"] = rng.standard_normal((B, rows + 7, W), np.float32)
        given["padding"] = np.zeros((B, 1, 1, rows + 7), np.float32)
        given["padding"][0, ..., -3:] = LOWEST
        given["x"] = rng.standard_normal((B, rows, W), np.float32)
        return given
    return feeds(model, rows)


@pytest.mark.parametrize("form", APART)
def test_attention_apart_from_its_layers(form: str, int8: Any) -> None:
    """The layers are claimed too, in groups of their own."""
    model = int8(built(APART[form]))
    given = [apart_feeds(model, rows) for rows in ((9,) if form in OF_NINE_ROWS else (1, S, 70))]
    assert layers(provider_session(model)) == op_types(model).count("MatMulInteger")
    check_answers(model, *given)
    check(model, *given)


# --- branches ---------------------------------------------------------------------------------------------------------


def scaled(scale: float) -> Build:
    def build(graph: Graph) -> str:
        q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
        scores = graph.op("Mul", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), graph.number(scale))
        return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))

    return build


def in_branches(then: onnx.ModelProto, other: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that runs one of two models without a mask. Their values have the same names."""
    for model in (then, other):
        del model.graph.input[:]
    branches = {"then_branch": then.graph, "else_branch": other.graph}
    graph = helper.make_graph(
        [helper.make_node("If", ["first"], ["out"], "/If", **branches)],
        "branches",
        [
            helper.make_tensor_value_info("first", TensorProto.BOOL, []),
            helper.make_tensor_value_info("x", FLOAT, ["batch", "rows", W]),
        ],
        [helper.make_tensor_value_info("out", FLOAT, ["batch", "rows", W])],
    )
    return helper.make_model(graph, ir_version=then.ir_version, opset_imports=then.opset_import)


@pytest.mark.skipif(ORT_VERSION < (1, 25), reason="nodes in branches are not claimed")
@pytest.mark.parametrize("differ", ["the same", "in a constant of the attention", "in the weights", "in a node"])
def test_both_branches_of_an_if_have_attention_of_the_same_names(differ: str, int8: Any) -> None:
    then = int8(built(scaled(0.3)))
    other = int8(built(scaled(0.6 if differ == "in a constant of the attention" else 0.3)))
    if differ == "in the weights":
        for tensor in other.graph.initializer:
            if tensor.name.endswith("_quantized"):
                tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor)[::-1].copy(), tensor.name))
    if differ == "in a node":
        (scale,) = (node for node in other.graph.node if node.op_type == "Mul" and node.output[0].startswith("Mul_"))
        scale.op_type = "Div"
    model = in_branches(then, other)
    x = np.random.default_rng(0).standard_normal((B, S, W), np.float32)
    check_answers(model, *({"first": np.array(first), "x": x} for first in (True, False)))
    found = reasons(model)
    if differ == "in a constant of the attention":
        assert list(found.values()) == ["another branch has an attention of the same names and other constants"]
    else:
        assert found == {} and attentions(provider_session(model)) == 2


# --- unclaimed nodes --------------------------------------------------------------------------------------------------


def keys_by_queries(graph: Graph) -> str:
    """Build attention whose Softmax runs over queries instead of keys."""
    q, k, v = (graph.heads(graph.linear(name)) for name in ("q", "kk", "vvv"))
    scores = graph.transpose(graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), 0, 1, 3, 2)
    return graph.merge(graph.op("MatMul", graph.op("Softmax", scores, axis=-1), v))


def scaled_values(graph: Graph) -> str:
    weights, value = plain(graph)
    return graph.merge(graph.op("MatMul", weights, graph.op("Mul", value, graph.number(0.5))))


def mask_of_a_layer_of_the_same_input(graph: Graph) -> str:
    """Build attention whose mask depends on a linear layer of the same input.

    If all were fused into one call, its mask would depend on its own result.
    """
    mask = graph.op("Unsqueeze", graph.op("ReduceMean", graph.linear("mmmm"), axes=[2], keepdims=0), np.array([1, 2]))
    return masked_by(lambda _: mask)(graph)


def mask_is_a_layer_of_the_same_input(graph: Graph) -> str:
    return masked_by(lambda graph: graph.linear("mmmm", width=S))(graph)


def test_a_mask_that_a_layer_of_its_group_makes(int8: Any) -> None:
    model = int8(built(mask_is_a_layer_of_the_same_input))
    session = provider_session(model)
    assert attentions(session) == 0 and layers(session) == 4
    check_answers(model, {"x": feeds(model)["x"][:1]})


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (other_axis, "its Softmax is not over the last axis"),
        (shown_weights, "its intermediate value 'Softmax_17' is an output of the graph, or computes one"),
        (used_scores, "its intermediate value 'Softmax_17' is an output of the graph, or computes one"),
        (learned_scale, "Mul '/Mul_14' scales its scores by a factor that is not constant, or not finite and nonzero"),
        (other_width_of_values, "head widths of its queries, keys and values are [12, 12, 24], expected equal widths"),
        (filled(hides=True, fill=-10000.0), "replaces scores by a value other than -Inf or the lowest float"),
        (keys_by_queries, ""),  # does not resemble attention
        (scaled_values, "its values are scaled"),
        (mask_of_a_layer_of_the_same_input, "its operand depends on a layer of the same input"),
    ],
    ids=lambda one: getattr(one, "__name__", None),
)
def test_what_is_something_else_stays(form: Build, reason: str, int8: Any) -> None:
    model = int8(built(form))
    found = list(reasons(model).values())
    assert len(found) == (reason != "") and all(reason in one for one in found), found
    check_left(model, *(feeds(model, rows) for rows in (1, S)))


def test_attention_of_float_layers_stays() -> None:
    model = built(TAKEN["usual"])
    assert claimed(provider_session(model)) == []


def test_other_layers_of_the_same_input_are_in_its_group(int8: Any) -> None:
    def with_another(graph: Graph) -> str:
        return graph.op("Add", attend_from(graph, graph.linear("q")), graph.op("Relu", graph.linear("mmmm")))

    model = int8(built(with_another))
    check(model, *(feeds(model, rows) for rows in (1, S)))


def test_sizes_may_be_used_elsewhere_too(int8: Any) -> None:
    """The shape for the heads may also be a graph output, and may be that of the query layer's output."""

    def with_sizes(of: str) -> Build:
        def build(graph: Graph) -> str:
            q = graph.linear("q")
            rows = graph.op("Shape", "x" if of == "x" else q, start=1, end=2)
            shape = graph.op("Concat", np.array([-1]), rows, np.array([H, D]), axis=0)
            parts = [q, graph.linear("kk"), graph.linear("vvv")]
            q, k, v = (graph.transpose(graph.op("Reshape", part, shape), 0, 2, 1, 3) for part in parts)
            weights = graph.op("Softmax", graph.op("MatMul", q, graph.transpose(k, 0, 1, 3, 2)), axis=-1)
            y = graph.merge(graph.op("MatMul", weights, v))
            graph.outputs["shape"] = (INT64, [4])
            graph.nodes.append(helper.make_node("Identity", [shape], ["shape"], "/shape"))
            return y

        return build

    for of in ("x", "q"):
        model = int8(built(with_sizes(of)))
        check(model, *(feeds(model, rows) for rows in (1, S)))
