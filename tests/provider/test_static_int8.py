"""Linear layers with fixed ranges, as quantize_static writes them: bits as in the optimized file."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
from onnx import helper, numpy_helper
from onnxruntime import quantization

import ortolan
from ortolan.models import tiny

from ..ops.single_node import assert_same_bits
from ..passes.int8_layers import ROUNDED, Int8Layer, adopt
from ..passes.small_models import relative_error, run
from .context_records import steps
from .fuzz_models import static_texts, token_feeds
from .int8_models import ACTIVATIONS, FLOAT, all_claims, dense_integers, with_nodes
from .sessions import claimed, needs_provider, plain_session
from .test_compiled_attention import bits, change
from .test_context import binary, check_round_trip, compile_model, mutate_in_a_process, refuse

pytestmark = needs_provider

node = helper.make_node
QDQ = ["qdq", "qdq_transpose", "qdq_gemm", "qdq_gemm_trans_b"]
FORMS = [*QDQ, *ROUNDED, "to_float"]
LEVELS = [ort.GraphOptimizationLevel.ORT_ENABLE_ALL, ort.GraphOptimizationLevel.ORT_DISABLE_ALL]


def session_at(model: onnx.ModelProto, level: ort.GraphOptimizationLevel) -> ort.InferenceSession:
    options = ortolan.session_options(claims="all")
    options.graph_optimization_level = level
    options.log_severity_level = 4
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return ort.InferenceSession(model.SerializeToString(), options)


def check_as_optimized(model: onnx.ModelProto, *feeds: np.ndarray, **more: np.ndarray) -> list[str]:
    """Check that the output has the bits of the optimized file at each optimization level of ONNX Runtime.

    Returns the names of the nodes that are claimed in the unoptimized graph.
    """
    optimized = adopt(model, calibration=[{"x": feeds[0]} | more]).model
    for level in LEVELS:
        session = session_at(model, level)
        for x in feeds:
            found = session.run(None, {"x": x} | more)
            for ours, theirs in zip(found, run(optimized, {"x": x} | more, library=True), strict=True):
                assert_same_bits(ours, theirs)
    return claimed(session)


def rounding(source: str, made: str, scale: str, zero: str) -> list[onnx.NodeProto]:
    numbers = made + "_numbers"
    return [
        node("QuantizeLinear", [source, scale, zero], [numbers], name=made + "_quantize"),
        node("DequantizeLinear", [numbers, scale, zero], [made], name=made + "_dequantize"),
    ]


def constants_of(layer: Int8Layer, **more: np.ndarray) -> dict[str, np.ndarray]:
    return {name: layer.tensors[name] for name in ("y_scale", "y_zero")} | more


@pytest.mark.parametrize("size", [(1, 1), (31, 5), (64, 16), (100, 33), (300, 48)])
@pytest.mark.parametrize("form", FORMS)
def test_every_form(form: str, size: tuple[int, int]) -> None:
    layer = Int8Layer(form, q=dense_integers(*size), per_column=size[1] % 2 == 0, bias=size[0] % 2 == 1)
    model = layer.model()
    taken = check_as_optimized(model, *(layer.inputs(rows) for rows in (1, 7, 33)))
    assert len(taken) == len(model.graph.node)
    x = layer.inputs(33)
    exact = x @ layer.matrix + (layer.b if layer.bias and form != "qlinear" else 0)
    assert relative_error(exact, all_claims(model).run(None, {"x": x})[0]) < 0.02


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("x_unsigned", [False, True])
@pytest.mark.parametrize("offset", [0, 12])
def test_zero_points(form: str, unsigned: bool, x_unsigned: bool, offset: int) -> None:
    zero = (128 if unsigned else 0) + offset
    codes = np.random.default_rng(4).integers(0, 256, (70, 24)).astype(np.int16) - (0 if unsigned else 128)
    layer = Int8Layer(form, unsigned=unsigned, x_unsigned=x_unsigned, zero_point=zero, q=codes - zero)
    try:
        plain_session(layer.model())
    except Exception:  # ONNX Runtime has no kernel for this combination of types
        pytest.skip("ONNX Runtime does not run it")
    assert "linear" in check_as_optimized(layer.model(), layer.inputs(9))


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("form", ["qdq", "qlinear"])
def test_activations_behind_a_rounding(form: str, name: str) -> None:
    layer = Int8Layer(form, q=dense_integers(64, 24))
    more = [onnx.NodeProto.FromString(one.SerializeToString()) for one in ACTIVATIONS[name]]
    if form == "qdq":
        for one in more:
            one.input[:] = ["s" if of == "r" else of for of in one.input]
        more = [*rounding("r", "s", "y_scale", "y_zero"), *more]
    model = with_nodes(layer, [*more, node("Neg", ["a"], ["y"], name="behind")], **constants_of(layer))
    taken = check_as_optimized(model, layer.inputs(1), layer.inputs(40))
    # ONNX Runtime gives each consumer of a DequantizeLinear its own copy.
    assert "behind" not in taken and len(taken) >= len(model.graph.node) - 1


def layer_behind_a_relu(x_unsigned: bool) -> Int8Layer:
    layer = Int8Layer("qdq", q=dense_integers(64, 24), x_unsigned=x_unsigned)
    layer.x_zero = layer.y_zero = 0 if x_unsigned else -128
    layer.y_scale = np.float32(2**-6)  # small, so that many values are beyond 255 steps
    return layer


def beyond_bounds(layer: Int8Layer) -> np.ndarray:
    x = layer.inputs(9)
    x[0, :5] = [9, -9, np.inf, -0.0, 1e30]
    return x


@pytest.mark.parametrize("x_unsigned", [False, True])
def test_a_range_that_begins_at_zero_stands_for_a_relu(x_unsigned: bool) -> None:
    """A range that begins at 0 clips like a Relu, before a layer and after it."""
    layer = layer_behind_a_relu(x_unsigned)
    model = with_nodes(layer, rounding("r", "y", "y_scale", "y_zero"), **constants_of(layer))
    x = beyond_bounds(layer)
    taken = check_as_optimized(model, x[1:], x)
    assert len(taken) == len(model.graph.node)
    y = all_claims(model).run(None, {"x": x})[0]
    assert y.min() == 0 and y.max() == 255 * layer.y_scale


def test_a_relu_needs_no_bounds() -> None:
    """The output of the Relu is quantized to a range that begins at 0, so the second layer needs no clipping."""
    layer = Int8Layer("qdq", q=dense_integers(64, 32), bias=True)
    more = [
        node("Relu", ["r"], ["a"], name="relu"),
        *rounding("a", "h", "narrow", "lowest"),
        node("DequantizeLinear", ["W2", "narrow", "zero"], ["V"], name="weight2"),
        node("MatMul", ["h", "V"], ["p2"], name="linear2"),
        *rounding("p2", "y", "y_scale", "y_zero"),
    ]
    numbers = {"narrow": np.float32(2**-9), "lowest": np.uint8(0), "zero": np.int8(0)}
    model = with_nodes(layer, more, W2=dense_integers(32, 16, 1), **constants_of(layer), **numbers)
    assert len(check_as_optimized(model, layer.inputs(9))) == len(model.graph.node)


def residuals(layer: Int8Layer) -> onnx.ModelProto:
    """Return linear layers that share the quantized x, which is also a residual.

    x has three axes, because ONNX Runtime would fuse MatMul and Add of matrices into Gemm.
    """
    more = [
        node("DequantizeLinear", ["W2", "y_scale", "zero"], ["V"], name="weight2"),
        node("MatMul", ["xd", "V"], ["p2"], name="linear2"),
        *rounding("p2", "pd", "y_scale", "y_zero"),
        node("Mul", ["pd", "r"], ["m"], name="mul"),
        *rounding("m", "md", "y_scale", "y_zero"),
        node("DequantizeLinear", ["W3", "y_scale", "zero"], ["U"], name="weight3"),
        node("MatMul", ["md", "U"], ["q"], name="linear3"),
        node("Add", ["q", "xd"], ["s"], name="add"),
        node("LayerNormalization", ["s", "weight", "shift"], ["y"], name="norm", axis=-1),
        node("Neg", ["xd"], ["z"], name="outside"),
    ]
    norm = dict(zip(("weight", "shift"), np.random.default_rng(1).random((2, 32), np.float32), strict=True))
    numbers = {"W2": dense_integers(32, 32, 1), "W3": dense_integers(32, 32, 2), "zero": np.int8(0)}
    model = with_nodes(layer, more, **constants_of(layer), **numbers, **norm)
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, None))
    model.graph.input[0].type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_param="texts"))
    return model


def test_layers_and_a_residual_of_one_rounding() -> None:
    """Consumers outside of the group get x as floats, each from a DequantizeLinear of its own."""
    layer = Int8Layer("qdq", q=dense_integers(32, 32))
    model = residuals(layer)
    taken = check_as_optimized(model, layer.inputs(1)[None], layer.inputs(10).reshape(2, 5, 32))
    assert {"linear", "linear2", "linear3", "add", "norm"} <= set(taken) and "outside" not in taken


def test_rounding_that_leads_back_to_its_layer() -> None:
    """A residual is not fused if it depends on the layer's quantized input: the fused nodes would form a cycle."""
    layer = Int8Layer("qdq", q=dense_integers(64, 64))
    more = [node("Tanh", ["xd"], ["t"], name="tanh"), node("Add", ["r", "t"], ["y"], name="add")]
    model = with_nodes(layer, more)
    model.graph.input[0].type.tensor_type.shape.dim.insert(0, onnx.TensorShapeProto.Dimension(dim_param="texts"))
    taken = check_as_optimized(model, layer.inputs(9)[None])
    assert "linear" in taken and not {"tanh", "add"} & set(taken)


@pytest.mark.parametrize("count", [1, 2])
def test_a_rounding_that_nobody_reads(count: int) -> None:
    """A quantization whose result nothing reads, between a layer and its bias, does not matter."""
    layer = Int8Layer("qdq", q=dense_integers(64, 24))
    bias = node("Add", ["r", "shift"], ["y"], name="add")
    constants = constants_of(layer, shift=np.random.default_rng(3).random(24, np.float32))
    model = with_nodes(layer, [*rounding("r", "unread", "y_scale", "y_zero")[:count], bias], **constants)
    session, x = session_at(model, LEVELS[1]), layer.inputs(9)
    assert "linear" in claimed(session)
    expected = with_nodes(layer, [bias], shift=constants["shift"])
    assert_same_bits(session.run(None, {"x": x})[0], session_at(expected, LEVELS[1]).run(None, {"x": x})[0])


def test_biases_of_whole_numbers() -> None:
    """Biases may be quantized: int32 before Gemm, as quantize_static writes it, and uint8 before Add."""
    layer = Int8Layer("qdq_gemm", q=dense_integers(64, 24))
    nodes = layer.nodes("r")
    nodes[-1].input.append("b_floats")
    steps = np.asarray(layer.scales * layer.x_scale)
    more = [
        *nodes[:-1],
        node("DequantizeLinear", ["b_int32", "steps"], ["b_floats"], name="bias", axis=0),
        nodes[-1],
        node("DequantizeLinear", ["b_uint8", "y_scale", "y_zero"], ["c"], name="bias2"),
        node("Add", ["c", "r"], ["y"], name="add"),
    ]
    base = with_nodes(layer, [node("Identity", ["r"], ["y"])])
    del base.graph.node[:]
    base.graph.node.extend(more)
    codes = np.random.default_rng(2).integers(0, 256, 24).astype(np.uint8)
    tensors = {"b_int32": layer.tensors["b_int32"], "steps": steps, "b_uint8": codes} | constants_of(layer)
    base.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in tensors.items())
    taken = check_as_optimized(base, layer.inputs(9))
    assert {"linear", "bias"} <= set(taken)


def test_a_weight_of_8_bits_alone() -> None:
    layer = Int8Layer("qdq", q=dense_integers(64, 24))
    model = layer.model()
    kept = [one for one in model.graph.node if one.name not in ("quantize", "dequantize")]
    kept[-1].input[0] = "x"
    del model.graph.node[:]
    model.graph.node.extend(kept)
    assert len(check_as_optimized(model, layer.inputs(9))) == 2


@pytest.mark.parametrize("form", ["qdq", "qlinear", "qgemm"])
def test_numbers_that_are_an_output_keep_the_layer(form: str) -> None:
    layer = Int8Layer(form, q=dense_integers(64, 24))
    model = layer.model()
    for name in ("xq",) if form == "qdq" else ("xq", "yq"):
        changed = onnx.ModelProto.FromString(model.SerializeToString())
        changed.graph.output.append(helper.make_empty_tensor_value_info(name))
        session = all_claims(changed)
        assert claimed(session) == []
        for ours, plain in zip(
            *(one.run(None, {"x": layer.inputs()}) for one in (session, plain_session(changed))), strict=True
        ):
            assert_same_bits(ours, plain)


WRONG: dict[str, dict[str, np.ndarray]] = {
    "weight scales of zero": {"scales": np.zeros(24, np.float32)},
    "weight scales of NaN": {"scales": np.full(24, np.nan, np.float32)},
    "negative weight scales": {"scales": np.full(24, -1, np.float32)},
    "weight scales of another number": {"scales": np.ones(23, np.float32)},
    "weight in three dimensions": {"W": np.ones((1, 64, 24), np.int8)},
    "empty weight": {"W": np.ones((64, 0), np.int8)},
    "weight zero points of another type": {"zeros": np.zeros(24, np.uint8)},
    "a scale of zero": {"x_scale": np.float32(0)},
    "a negative scale": {"x_scale": np.float32(-1)},
    "a NaN scale": {"x_scale": np.float32(np.nan)},
    "an infinite scale": {"x_scale": np.float32(np.inf)},
    "scales an input": {"x_scale": np.ones(64, np.float32)},
    "16 bits": {"x_zero": np.uint16(5)},
    "half floats": {"x_scale": np.float16(0.5)},
}


@pytest.mark.parametrize("name", WRONG)
@pytest.mark.parametrize("form", [*QDQ, *ROUNDED])
def test_malformed_layers_are_errors_or_left(form: str, name: str) -> None:
    model = Int8Layer(form, q=dense_integers(64, 24)).model(opset=21, ir_version=10)
    for tensor in model.graph.initializer:
        if tensor.name in WRONG[name]:
            tensor.CopyFrom(numpy_helper.from_array(np.asarray(WRONG[name][tensor.name]), tensor.name))
    try:
        session = all_claims(model)
    except Exception:  # ONNX Runtime's exceptions only share the base class Exception
        return
    assert "linear" not in claimed(session)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, onnx.ModelProto]:
    folder, made = tmp_path_factory.mktemp("encoders"), {}
    onnx.save(ir.to_proto(tiny.tiny_bert()), folder / "float.onnx")
    for form in quantization.QuantFormat:
        for name, types in (("layers", ["MatMul"]), ("all", None)):
            path = folder / f"{form}_{name}.onnx"
            quantization.quantize_static(
                folder / "float.onnx", path, static_texts(), quant_format=form, op_types_to_quantize=types,
                per_channel=form == quantization.QuantFormat.QDQ,
                extra_options={"MatMulConstBOnly": types is not None},
            )  # fmt: skip
            made[f"{form.name} {name}"] = onnx.load(path)
    made["float"] = onnx.load(folder / "float.onnx")
    return made


def counted(model: onnx.ModelProto, session: ort.InferenceSession, op_type: str) -> int:
    names = {one.name for one in model.graph.node if one.op_type == op_type}
    return len(names & set(claimed(session)))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", ["QDQ layers", "QOperator layers"])
def test_a_whole_encoder(name: str, level: ort.GraphOptimizationLevel, encoders: dict[str, onnx.ModelProto]) -> None:
    """A model with attention, residuals and norms gives the bits of the optimized file."""
    model = encoders[name]
    session = session_at(model, level)
    optimized = ortolan.optimize_onnx(model, options={"verify.seconds": 0.0}).model
    # All 5 norms are claimed, including the one after the embeddings.
    assert counted(model, session, "LayerNormalization") == 5 and counted(model, session, "Softmax") == 2
    for batch, length in ((1, 1), (1, 16), (3, 40)):
        feeds = token_feeds(np.random.default_rng(length), batch, length)
        (y,), (expected,) = session.run(None, feeds), run(optimized, feeds, library=True)
        assert_same_bits(y, expected)


def test_an_encoder_of_which_all_is_rounded(encoders: dict[str, onnx.ModelProto]) -> None:
    """QDQ pairs outside of claimed groups are kept; removing the others makes outputs closer to the float model's."""
    model = encoders["QDQ all"]
    session = all_claims(model)
    assert counted(model, session, "Softmax") == 2 and counted(model, session, "MatMul") == 16
    assert counted(model, session, "Erf") == 2
    feeds = token_feeds(np.random.default_rng(3), 3, 40)
    exact, ours, theirs = (
        one.run(None, feeds)[0] for one in (plain_session(encoders["float"]), session, plain_session(model))
    )
    assert relative_error(exact, ours) < relative_error(exact, theirs)


# --- compiled models --------------------------------------------------------------------------------------------------


def bounded() -> tuple[onnx.ModelProto, np.ndarray]:
    """Return a layer whose input and output are clipped, and whose quantized input another node reads."""
    layer = layer_behind_a_relu(x_unsigned=True)
    more = [*rounding("r", "y", "y_scale", "y_zero"), node("Neg", ["xd"], ["z"], name="outside")]
    model = with_nodes(layer, more, **constants_of(layer))
    model.graph.output.append(helper.make_tensor_value_info("z", FLOAT, None))
    return model, beyond_bounds(layer)


@pytest.mark.parametrize("embed_mode", ["0", "1"])
@pytest.mark.parametrize("name", ["QDQ layers", "QOperator layers", "QDQ all"])
def test_a_compiled_encoder(name: str, embed_mode: str, encoders: dict[str, onnx.ModelProto], tmp_path: Path) -> None:
    feeds = [token_feeds(np.random.default_rng(length), batch, length) for batch, length in ((1, 1), (3, 40))]
    check_round_trip(encoders[name], tmp_path, *feeds, ep__context_embed_mode=embed_mode)


@pytest.mark.parametrize("embed_mode", ["0", "1"])
def test_compiled_bounds_and_copies(embed_mode: str, tmp_path: Path) -> None:
    model, x = bounded()
    check_round_trip(model, tmp_path, {"x": x}, ep__context_embed_mode=embed_mode)
    operators = [one.op_type for one in onnx.load(tmp_path / "model_ctx.onnx").graph.node]
    assert sorted(operators) == ["EPContext", "Neg"]


def test_compiled_copies_without_bounds(tmp_path: Path) -> None:
    layer = Int8Layer("qdq", q=dense_integers(32, 32))
    check_round_trip(residuals(layer), tmp_path, {"x": layer.inputs(10).reshape(2, 5, 32)})
    assert "MatMul" not in [one.op_type for one in onnx.load(tmp_path / "model_ctx.onnx").graph.node]


def test_a_compiled_layer_in_front_of_a_reshape(tmp_path: Path) -> None:
    """ONNX Runtime moves the second QuantizeLinear before the Reshape, and loses the type of the value there.

    The provider therefore leaves the first QDQ pair, after the layer, to ONNX Runtime.
    """
    layer = Int8Layer("qdq", q=dense_integers(64, 24))
    more = [
        *rounding("r", "s", "y_scale", "y_zero"),
        node("Reshape", ["s", "sizes"], ["t"], name="reshape"),
        *rounding("t", "y", "y_scale", "y_zero"),
    ]
    model = with_nodes(layer, more, **constants_of(layer), sizes=np.array([-1, 4, 6]))
    check_round_trip(model, tmp_path, {"x": layer.inputs(9)})
    operators = [one.op_type for one in onnx.load(tmp_path / "model_ctx.onnx").graph.node]
    assert operators[:3] == ["EPContext", "QuantizeLinear", "DequantizeLinear"]


@pytest.mark.parametrize(
    "step, numbers, pattern",
    [
        (0, {"x_bounds": 2}, "a flag is 2, expected 0 or 1"),
        (0, {"x_bounds__least": bits(np.nan)}, "clipping bounds are -?nan"),
        (0, {"x_bounds__most": bits(-1)}, "clipping bounds are 0 and -1"),
        (0, {"y_bounds__most": bits(np.nan)}, "clipping bounds are 0 and -?nan"),
        (0, {"y_bounds": 0}, "."),
        (1, {"kind": 4}, "a step has kind 4, expected 0 to 3"),
        (1, {"kind": 0}, "."),
        (1, {"x": 9}, "input/output index 9"),
        (1, {"y": -1}, "its 2 steps do not compute all of its 2 outputs"),
        (1, {"bounds__least": bits(np.inf)}, "clipping bounds are inf"),
    ],
)
def test_wrong_records(step: int, numbers: dict[str, int], pattern: str, tmp_path: Path) -> None:
    compile_model(bounded()[0], tmp_path)
    change(tmp_path, step, **numbers)
    refuse(tmp_path, pattern)


def test_two_steps_of_one_output(tmp_path: Path) -> None:
    compile_model(bounded()[0], tmp_path)
    layer, _ = steps(binary(tmp_path).read_bytes())
    (made,) = struct.unpack_from("<q", binary(tmp_path).read_bytes(), layer["y"])
    change(tmp_path, 1, y=made)
    refuse(tmp_path, "two steps compute output")


def test_mutated_files_never_crash(tmp_path: Path) -> None:
    model, x = bounded()
    mutate_in_a_process(model, {"x": x}, tmp_path)
