"""1-D convolutions become linear layers over windows, and Transposes around them cancel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortolan
from ortolan.graph_passes.find.constants import constant_tensor
from ortolan.graph_passes.find.convolutions import Windows, fold_convolutions, unfold_convolutions
from ortolan.graph_passes.operators.nodes import NewNames, new_initializer
from ortolan.graph_passes.passes.normalize import normalize

from .small_models import make_model, op_types, optimize, random_weight, relative_error, run

FLOAT = TensorProto.FLOAT
CHANNELS, WIDTH, FRAMES = 20, 32, 26
RECIPES = {"sparse-bf16": ({"sparsity": 0.0}, 2e-2), "sparse-int8": ({"sparsity": 0.0}, 5e-2), "int4": ({}, 0.3)}


def conv(x: str, y: str, weight: str, bias: str = "", **attributes: object) -> NodeProto:
    inputs = [x, weight, bias] if bias else [x, weight]
    return helper.make_node("Conv", inputs, [y], name=y, **attributes)


def swap(x: str, y: str) -> NodeProto:
    return helper.make_node("Transpose", [x], [y], name=f"{y}_swap", perm=[0, 2, 1])


def gelu(x: str, y: str) -> list[NodeProto]:
    """Return the activation as exporters write it below opset 20."""
    steps = [("Div", [x, "root"], "d"), ("Erf", ["d"], "e"), ("Add", ["e", "one"], "f"), ("Mul", [x, "f"], "g")]
    nodes = [
        helper.make_node(kind, [name if len(name) > 1 else f"{y}_{name}" for name in inputs], [f"{y}_{out}"])
        for kind, inputs, out in steps
    ]
    return [*nodes, helper.make_node("Mul", [f"{y}_g", "half"], [y])]


def model_of(
    nodes: Sequence[NodeProto],
    weights: Mapping[str, np.ndarray],
    outputs: Mapping[str, Sequence[int | str | None]],
    inputs: Mapping[str, Sequence[int | str | None]] | None = None,
) -> onnx.ModelProto:
    given = {"x": ["batch", CHANNELS, "frames"]} | dict(inputs or {})
    scalars = {"root": np.sqrt(2), "one": np.ones(()), "half": np.full((), 0.5)}
    used = {name for node in nodes for name in node.input}
    initializers = dict(weights) | {name: np.float32(one) for name, one in scalars.items() if name in used}
    return make_model(
        nodes,
        {name: (FLOAT, shape) for name, shape in given.items()},
        {name: (FLOAT, shape) for name, shape in outputs.items()},
        {name: np.asarray(one) for name, one in initializers.items()},
    )


def kernel(outputs: int, channels: int, size: int, seed: int = 0) -> np.ndarray:
    weight = random_weight(channels * size, outputs, seed=seed).reshape(size, channels, outputs)
    return np.ascontiguousarray(weight.transpose(2, 1, 0))


def speech_encoder() -> onnx.ModelProto:
    """Return the start of Whisper's encoder: two convolutions with GELU, positions, and an MLP with a residual."""
    nodes = [
        conv("x", "one_conv", "W1", "b1", pads=[1, 1], kernel_shape=[3]),
        *gelu("one_conv", "h1"),
        conv("h1", "two_conv", "W2", "b2", pads=[1, 1], strides=[2], kernel_shape=[3]),
        *gelu("two_conv", "h2"),
        swap("h2", "tokens"),
        helper.make_node("Add", ["tokens", "positions"], ["h3"]),
        helper.make_node("MatMul", ["h3", "W3"], ["h4"], name="up"),
        *gelu("h4", "h5"),
        helper.make_node("MatMul", ["h5", "W4"], ["h6"], name="down"),
        helper.make_node("Add", ["h6", "h3"], ["y"]),
    ]
    weights = {
        "W1": kernel(WIDTH, CHANNELS, 3),
        "b1": random_weight(WIDTH, seed=1),
        "W2": kernel(WIDTH, WIDTH, 3, seed=2),
        "b2": random_weight(WIDTH, seed=3),
        "positions": random_weight(FRAMES // 2, WIDTH, seed=4),
        "W3": random_weight(WIDTH, 64, seed=5),
        "W4": random_weight(64, WIDTH, seed=6),
    }
    return model_of(nodes, weights, {"y": ["batch", FRAMES // 2, WIDTH]}, {"x": ["batch", CHANNELS, FRAMES]})


def check(
    model: onnx.ModelProto, feeds: Mapping[str, np.ndarray], recipe: str = "sparse-bf16", **arguments: object
) -> onnx.ModelProto:
    """Optimize, and check the answers with the library and without it."""
    options, error = RECIPES[recipe]
    report = optimize(model, recipe=recipe, options=options | arguments)
    assert report.model is not None
    onnx.checker.check_model(report.model)
    for library in (True, False):
        for expected, found in zip(run(model, feeds), run(report.model, feeds, library), strict=True):
            assert found.shape == expected.shape
            assert relative_error(expected, found) < error
    return report.model


def values(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def attributes(model: onnx.ModelProto, name: str) -> dict[str, int]:
    (node,) = (node for node in model.graph.node if node.name == name)
    return {one.name: one.i for one in node.attribute if one.name.startswith("window") or one.name == "activation"}


def swapped(model: onnx.ModelProto) -> int:
    """Return the number of Transposes that ONNX Runtime computes in each run."""
    constants = {one.name for one in model.graph.initializer}
    return sum(node.op_type == "Transpose" and node.input[0] not in constants for node in model.graph.node)


@pytest.mark.parametrize("recipe", RECIPES)
def test_speech_encoder(recipe: str) -> None:
    """Convolutions, activations and residuals become Ortolan's nodes; only the Transpose of the input stays."""
    optimized = check(speech_encoder(), {"x": values(3, CHANNELS, FRAMES)}, recipe)
    ours = [kind for kind in op_types(optimized) if kind not in ("Transpose", "Add")]
    assert len(ours) == 4 and len(set(ours)) == 1
    assert swapped(optimized) == 1
    window = {"window": 3, "window_stride": 1, "window_pads_begin": 1, "window_pads_end": 1, "activation": 2}
    assert attributes(optimized, "one_conv") == window
    assert attributes(optimized, "two_conv") == window | {"window_stride": 2}
    # The output of a sequence does not depend on the batch.
    x = values(3, CHANNELS, FRAMES)
    (whole,), (alone,) = (run(optimized, {"x": one}, True) for one in (x, x[1:2]))
    np.testing.assert_array_equal(whole[1:2], alone)


def test_layers_that_are_not_replaced_stay_convolutions() -> None:
    """An excluded convolution is a Conv again, with its weight, whether or not its neighbour is replaced."""
    x = {"x": values(2, CHANNELS, FRAMES)}
    one = check(speech_encoder(), x, **{"replace.exclude": ["two_conv"], "prune.exclude": ["two_conv"]})
    assert op_types(one).count("Conv") == 1
    assert attributes(one, "one_conv")["window"] == 3
    none = check(speech_encoder(), x, **{"replace.exclude": ["*_conv"], "prune.exclude": ["*_conv"]})
    assert op_types(none).count("Conv") == 2
    assert swapped(none) == 1
    (weight,) = (one for one in none.graph.initializer if one.name == "W2")
    assert list(weight.dims) == [WIDTH, WIDTH, 3]


def test_changed_weights_become_convolutions() -> None:
    """A convolution whose weight a pass has changed gets the new weight."""
    model = ir.from_proto(speech_encoder())
    new_name = NewNames(model)
    normalize(model, "model")
    products = unfold_convolutions(model, new_name)
    assert [node.name for node in products] == ["one_conv", "two_conv"]
    for node in products:
        halved = constant_tensor(node.inputs[1]).numpy() / 2  # type: ignore[union-attr]
        weight = new_initializer(model.graph, ir.tensor(halved, name=new_name("changed")))
        node.replace_input_with(1, weight)
    fold_convolutions(model, products, new_name)
    expected = speech_encoder()
    for tensor in expected.graph.initializer:
        if tensor.name in ("W1", "W2"):
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor) / 2, tensor.name))
    folded = ir.to_proto(model)
    assert op_types(folded).count("Conv") == 2
    x = {"x": values(2, CHANNELS, FRAMES)}
    assert relative_error(run(expected, x)[0], run(folded, x)[0]) < 1e-5


def test_masks_and_pointwise_layers() -> None:
    """A text encoder's feed-forward network: masks [batch, 1, frames] before and between convolutions of width 3."""
    nodes = [
        helper.make_node("Mul", ["x", "mask"], ["m1"]),
        conv("m1", "wide", "W1", "b1", pads=[1, 1]),
        helper.make_node("Relu", ["wide"], ["r"]),
        helper.make_node("Mul", ["r", "mask"], ["m2"]),
        conv("m2", "narrow", "W2", "b2", pads=[2, 0]),
        helper.make_node("Add", ["narrow", "x"], ["sum"]),
        conv("sum", "point", "W3"),
        helper.make_node("Mul", ["point", "scale"], ["scaled"]),
        swap("scaled", "y"),
    ]
    weights = {
        "W1": kernel(48, CHANNELS, 3),
        "b1": random_weight(48, seed=1),
        "W2": kernel(CHANNELS, 48, 3, seed=2),
        "b2": random_weight(CHANNELS, seed=3),
        "W3": kernel(40, CHANNELS, 1, seed=4).repeat(2, 1),
        "scale": random_weight(40, 1, seed=5),
    }
    nodes.insert(6, helper.make_node("Concat", ["sum", "x"], ["both"], axis=1))
    nodes[7].input[0] = "both"
    inputs = {"mask": ["batch", 1, "frames"]}
    model = model_of(nodes, weights, {"y": ["batch", "frames", 40]}, inputs)
    mask = (np.arange(9) < np.array([[[9]], [[5]]])).astype(np.float32)
    optimized = check(model, {"x": values(2, CHANNELS, 9), "mask": mask})
    assert "Conv" not in op_types(optimized)
    assert attributes(optimized, "wide")["activation"] == 1
    assert attributes(optimized, "point") == Windows(1).attributes() | {"activation": 0}
    assert swapped(optimized) == 4  # the masked x, the mask, and the input and output of the Concat


def test_gates() -> None:
    """Conformers split channels into halves and gate one with the other."""
    nodes = [
        conv("x", "point", "W1"),
        helper.make_node("Split", ["point"], ["a", "b"], axis=1),
        helper.make_node("Sigmoid", ["b"], ["s"]),
        helper.make_node("Mul", ["a", "s"], ["g"]),
        conv("g", "depthwise", "W2", group=WIDTH, pads=[1, 1]),
        helper.make_node("Sigmoid", ["depthwise"], ["t"]),
        helper.make_node("Mul", ["depthwise", "t"], ["swish"]),
        conv("swish", "y", "W3", "b3"),
    ]
    weights = {
        "W1": kernel(2 * WIDTH, 2 * CHANNELS, 1),
        "W2": random_weight(WIDTH, 1, 3, seed=1),
        "W3": kernel(CHANNELS, WIDTH, 1, seed=2),
        "b3": random_weight(CHANNELS, seed=3),
    }
    shape = ["batch", 2 * CHANNELS, 12]
    model = model_of(nodes, weights, {"y": ["batch", CHANNELS, 12]}, {"x": shape})
    optimized = check(model, {"x": values(2, 2 * CHANNELS, 12)})
    kinds = op_types(optimized)
    assert (kinds.count("SparseAMXMatMul"), kinds.count("Conv"), kinds.count("Transpose")) == (2, 1, 4)


@pytest.mark.parametrize(
    ("attributes", "weight"),
    [
        ({"dilations": [2], "pads": [2, 2]}, kernel(8, CHANNELS, 3)),
        ({"group": 2, "pads": [1, 1]}, kernel(8, CHANNELS // 2, 3)),
        ({"auto_pad": "SAME_UPPER"}, kernel(8, CHANNELS, 3)),
        ({}, kernel(8, CHANNELS, 1)),
    ],
    ids=["dilated", "groups", "automatic padding", "few inputs"],
)
def test_other_convolutions_stay(attributes: dict[str, object], weight: np.ndarray) -> None:
    nodes = [
        conv("x", "h", "W", **attributes),
        helper.make_node("MatMul", ["h", "V"], ["y"], name="linear"),
    ]
    model = model_of(
        nodes, {"W": weight, "V": random_weight(64, 40)}, {"y": ["batch", 8, 40]}, {"x": ["batch", CHANNELS, 64]}
    )
    optimized = check(model, {"x": values(2, CHANNELS, 64)})
    assert op_types(optimized) == ["Conv", "SparseAMXMatMul"]


def test_inspection_lists_convolutions() -> None:
    layers = {layer.name: layer for layer in ortolan.inspect_onnx(speech_encoder()).linears}
    assert (layers["one_conv"].k, layers["one_conv"].n) == (3 * CHANNELS, WIDTH)
    assert layers["two_conv"].replaceable
