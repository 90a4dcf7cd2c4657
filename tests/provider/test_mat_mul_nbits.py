"""MatMulNBits of unmodified models: the provider uses the same weights, within the operators' error bounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

import ortolan

from ..ops.single_node import assert_same_bits
from .nbits_models import NBits, whole
from .sessions import ORT_VERSION, claimed, needs_provider, plain_session, provider_session

pytestmark = needs_provider

SIZES = [(1, 1), (31, 5), (64, 16), (100, 33), (129, 7), (300, 48)]


def check(layer: NBits, group: int, threads: int = 1) -> None:
    session = provider_session(layer.model(), threads)
    assert claimed(session) == ["linear"]
    oracle, bias = layer.oracle(group), layer.b if layer.bias else None
    for rows in (1, 7, 33):
        x = layer.x(rows)
        (y,) = session.run(None, {"x": x})
        oracle.check(y, x, bias)


@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("zero_points", ["", "packed", "whole", "fractions"])
def test_four_bits(k: int, n: int, block: int, zero_points: str) -> None:
    check(NBits(k, n, block, zero_points=zero_points, bias=n % 2 == 1, flat=k % 2 == 1), block)


@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize("block", [32, 64, 128])
@pytest.mark.parametrize("zero_points", ["", "packed", "whole"])
def test_eight_bits(k: int, n: int, block: int, zero_points: str) -> None:
    # If k is a single block, or neighbouring blocks have equal scales, groups have 128 inputs.
    check(NBits(k, n, block, bits=8, zero_points=zero_points, bias=n % 2 == 1), 128 if k <= block else block)


def test_eight_bits_of_equal_scales_are_longer_groups() -> None:
    layer = NBits(300, 20, 32, bits=8)
    layer.scales[:] = np.repeat(layer.scales[:, ::2], 2, axis=1)[:, : layer.blocks]
    check(layer, 64)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_block_may_be_several_groups(bits: int) -> None:
    check(NBits(520, 20, 256, bits), 128)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("half", [False, True])
def test_many_rows_on_threads(bits: int, half: bool) -> None:
    """half: scales are float16 values, which are stored as float16."""
    layer = NBits(512, 200, 32, bits, "packed" if bits == 4 else "")
    if half:
        layer.scales = layer.scales.astype(np.float16).astype(np.float32)
    x = layer.x(300)
    (y,) = provider_session(layer.model(), threads=4).run(None, {"x": x})
    layer.oracle(32).check(y, x)
    one_by_one = provider_session(layer.model())
    for row in (0, 150, 299):
        assert_same_bits(one_by_one.run(None, {"x": x[row : row + 1]})[0], y[row : row + 1])


@pytest.mark.parametrize("bits", [4, 8])
def test_large_weights_are_packed_on_threads(bits: int) -> None:
    """Weights of at least 2 MB, whose last panel is not full."""
    check(NBits(2048, 2117, 64, bits, "packed"), 64)


@pytest.mark.parametrize(
    "layer",
    [
        NBits(256, 64, 32),
        NBits(256, 40, 64, zero_points="packed", bias=True),
        NBits(256, 64, 128, zero_points="fractions"),
        NBits(300, 64, 32, bits=8),
        NBits(256, 64, 64, bits=8, zero_points="packed"),
    ],
    ids=lambda layer: f"{layer.bits} bits {layer.block} {layer.zero_points}",
)
def test_answers_are_those_of_the_optimized_model(layer: NBits) -> None:
    """The bits are equal, because the provider and the Python passes choose the same formats."""
    model = layer.model()
    report = ortolan.optimize_onnx(model, options={"verify.seconds": 0.0, "may_grow": True})
    assert [one.status for one in report.layers] == ["replaced"]
    optimized = ortolan.create_session(report.model)
    x = layer.x(20)
    assert_same_bits(provider_session(model).run(None, {"x": x})[0], optimized.run(None, {"x": x})[0])


@pytest.mark.parametrize("shape", [(2, 3, 64), (1, 64), (0, 64), (2, 0, 64), (64,)])
def test_shapes_of_x(shape: tuple[int, ...]) -> None:
    layer = NBits(64, 20, 32, bias=True)
    model = layer.model()
    value = helper.make_tensor_value_info
    model.graph.input[0].CopyFrom(value("x", TensorProto.FLOAT, [f"d{i}" for i in range(len(shape) - 1)] + [64]))
    session = provider_session(model)
    assert claimed(session) == ["linear"]
    x = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    (y,) = session.run(None, {"x": x})
    assert y.shape == (*shape[:-1], 20)
    if y.size:
        layer.oracle(32).check(y.reshape(-1, 20), x.reshape(-1, 64), layer.b)


def test_x_of_another_width_is_an_error() -> None:
    model = NBits(64, 20, 32).model()
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "k"
    session = provider_session(model)
    assert claimed(session) == ["linear"]
    with pytest.raises(Exception, match=r"linear.*X 'x' has shape \[3, 32\], expected \[\.\.\., 64\]"):
        session.run(None, {"x": np.zeros((3, 32), np.float32)})


def test_inf_and_nan_stay_in_their_rows() -> None:
    layer = NBits(64, 20, 32)
    x = layer.x(5)
    x[1, 3], x[4, 40] = np.inf, np.nan
    (y,) = provider_session(layer.model()).run(None, {"x": x})
    layer.oracle(32).check(y, x)


def test_external_data_and_the_memory_of_initializers(tmp_path: Path) -> None:
    layer = NBits(129, 20, 32, zero_points="packed", bias=True)
    onnx.save_model(
        layer.model(), tmp_path / "model.onnx", save_as_external_data=True, location="data", size_threshold=0
    )
    session = provider_session(str(tmp_path / "model.onnx"))
    assert claimed(session) == ["linear"]
    x = layer.x(3)
    layer.oracle(32).check(session.run(None, {"x": x})[0], x, layer.b)


def test_layers_in_branches_and_layers_of_one_weight() -> None:
    """A node in a subgraph reads a weight of the outer graph, and two nodes share a weight."""
    layer, value = NBits(64, 64, 32), helper.make_tensor_value_info
    y = [value("y", TensorProto.FLOAT, None)]
    then = helper.make_graph([layer.node("p", "y", "in then")], "then", [], y)
    other = helper.make_graph([helper.make_node("Identity", ["p"], ["y"])], "else", [], y)
    nodes = [
        layer.node("x", "p", "before"),
        helper.make_node("If", ["condition"], ["y"], then_branch=then, else_branch=other),
    ]
    inputs = [value("x", TensorProto.FLOAT, ["batch", 64]), value("condition", TensorProto.BOOL, [])]
    model = whole(helper.make_graph(nodes, "branches", inputs, y, layer.initializers()))
    session = provider_session(model)
    assert claimed(session) == ["before", "in then"][: 2 if ORT_VERSION >= (1, 25) else 1]
    x = layer.x(3)
    (p,) = session.run(None, {"x": x, "condition": np.array(False)})
    layer.oracle(32).check(p, x)
    (y,) = session.run(None, {"x": x, "condition": np.array(True)})
    if ORT_VERSION >= (1, 25):
        layer.oracle(32).check(y, p)
    else:
        np.testing.assert_allclose(y, p @ layer.oracle(32).matrix(), atol=1e-4)


# --- unclaimed nodes --------------------------------------------------------------------------------------------------


def log_of(model: onnx.ModelProto, capfd: pytest.CaptureFixture[str]) -> str:
    """Return the log at level INFO, in which the provider explains its choices."""
    import onnxruntime

    options = ortolan.session_options()
    options.log_severity_level = 1
    onnxruntime.InferenceSession(model.SerializeToString(), options)
    return capfd.readouterr().err


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"block_size": 16}, "its block_size is 16, expected a multiple of 32"),
        ({"accuracy_level": 1}, "its accuracy_level is 1"),
        ({"accuracy_level": 3}, "its accuracy_level is 3"),
        ({"g_idx": np.arange(64, dtype=np.int32)[::-1] // 32}, "assigns inputs to groups out of order"),
        ({"scales": np.full((20, 2), np.inf, np.float32)}, "its scales hold NaN, infinity"),
        ({"scales": np.full((20, 2), 1e38, np.float32)}, "values that make weights overflow"),
    ],
    ids=lambda one: next(iter(one)) if isinstance(one, dict) else "",
)
def test_left_with_a_reason(changed: dict[str, Any], reason: str, capfd: pytest.CaptureFixture[str]) -> None:
    layer = NBits(64, 20, changed.get("block_size", 32), changed=changed)
    model = layer.model()
    session = provider_session(model)
    assert claimed(session) == []
    x = layer.x(3)
    np.testing.assert_array_equal(session.run(None, {"x": x})[0], plain_session(model).run(None, {"x": x})[0])
    log = log_of(model, capfd)
    assert "Ortolan leaves MatMulNBits node 'linear': " in log and reason in log


def test_what_is_taken_is_logged(capfd: pytest.CaptureFixture[str]) -> None:
    model = NBits(64, 20, 32, zero_points="packed", accuracy_level=4).model()
    assert "Ortolan takes MatMulNBits node 'linear': 64 x 20, 4 bits in blocks of 32" in log_of(model, capfd)


def test_g_idx_in_order_changes_nothing() -> None:
    order = np.arange(64, dtype=np.int32) // 32
    layer = NBits(64, 20, 32, changed={"g_idx": order})
    check(layer, 32)


def test_eight_bits_whose_numbers_leave_an_int8_are_left() -> None:
    layer = NBits(64, 20, 32, bits=8, zero_points="packed")
    layer.q[3, 5] = 255
    layer.zeros[3, 0] = 100
    assert claimed(provider_session(layer.model())) == []


@pytest.mark.parametrize("name", ["B", "scales", "zero_points", "bias"])
def test_weights_that_may_be_fed_are_left(name: str) -> None:
    """A weight that is also a graph input may be replaced in a call, so the node is not claimed."""
    layer = NBits(64, 20, 32, zero_points="packed", bias=True)
    model = layer.model()
    array = layer.tensors[name]
    value = helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
    model.graph.input.append(value)
    session = provider_session(model)
    assert claimed(session) == []
    x = layer.x(3)
    fed = {"x": x, name: np.zeros_like(array)}
    np.testing.assert_array_equal(session.run(None, fed)[0], plain_session(model).run(None, fed)[0])


# --- malformed models -------------------------------------------------------------------------------------------------

_ZEROS = np.zeros
MALFORMED: dict[str, dict[str, Any]] = {
    "no numbers": {"B": None},
    "no scales": {"scales": None},
    "short numbers": {"B": _ZEROS((20, 2, 15), np.uint8)},
    "few columns": {"B": _ZEROS((19, 2, 16), np.uint8)},
    "few blocks": {"B": _ZEROS((20, 1, 16), np.uint8)},
    "flat numbers": {"B": _ZEROS(640, np.uint8)},
    "signed numbers": {"B": _ZEROS((20, 2, 16), np.int8)},
    "no elements": {"B": _ZEROS((0, 2, 16), np.uint8)},
    "short scales": {"scales": np.ones((20, 1), np.float32)},
    "long scales": {"scales": np.ones((20, 3), np.float32)},
    "a scale": {"scales": np.ones((), np.float32)},
    "double scales": {"scales": np.ones((20, 2))},
    "short zero points": {"zero_points": _ZEROS((19, 1), np.uint8)},
    "unpacked zero points": {"zero_points": _ZEROS((20, 2), np.uint8)},
    "int zero points": {"zero_points": _ZEROS((20, 2), np.int32)},
    "NaN zero points": {"zero_points": np.full((20, 2), np.nan, np.float32)},
    "short bias": {"bias": _ZEROS(19, np.float32)},
    "bias of two axes": {"bias": _ZEROS((1, 20), np.float32)},
    "short g_idx": {"g_idx": _ZEROS(3, np.int32)},
    "K is not B's": {"K": 96},
    "huge K": {"K": 1 << 60},
    "negative K": {"K": -64},
    "no K": {"K": None},
    "N is not B's": {"N": 21},
    "huge N": {"N": (1 << 63) - 1},
    "zero N": {"N": 0},
    "zero block": {"block_size": 0},
    "negative block": {"block_size": -32},
    "huge block": {"block_size": (1 << 63) - 1},
    "odd block": {"block_size": 33},
    "three bits": {"bits": 3},
    "two bits": {"bits": 2},
    "eight bits": {"bits": 8},
    "prepacked": {"weight_prepacked": 1},
    "K of text": {"K": "64"},
    "bits of floats": {"bits": 4.0},
}


@pytest.mark.parametrize("name", MALFORMED)
def test_malformed_layers_are_errors_or_left(name: str) -> None:
    if name == "no elements" and ORT_VERSION < (1, 29):
        pytest.skip("this onnxruntime's own MatMulNBits crashes where B has no elements")
    model = NBits(64, 20, 32, changed=MALFORMED[name]).model()
    try:
        session = provider_session(model)
    except Exception:  # ONNX Runtime's exceptions only share the base class Exception
        return
    assert claimed(session) == []


@pytest.mark.parametrize("cut", ["raw_data", "data file"])
def test_tensors_shorter_than_their_shapes(cut: str, tmp_path: Path) -> None:
    model = NBits(64, 20, 32).model()
    path = tmp_path / "model.onnx"
    if cut == "raw_data":
        model.graph.initializer[0].raw_data = model.graph.initializer[0].raw_data[:-7]
        path.write_bytes(model.SerializeToString())
    else:
        onnx.save_model(model, path, save_as_external_data=True, location="data", size_threshold=0)
        (tmp_path / "data").write_bytes((tmp_path / "data").read_bytes()[:100])
    with pytest.raises(Exception, match=r"."):  # ONNX Runtime's exceptions only share the base class Exception
        provider_session(str(path))


def test_random_damage() -> None:
    """Attributes and tensors of any size and type give an error, an unclaimed node or an output like ONNX Runtime's."""
    rng = np.random.default_rng(5)
    answers = 0
    for _ in range(150):
        layer = NBits(64, 20, 32, zero_points=str(rng.choice(["", "packed"])), bias=bool(rng.integers(2)))
        name = str(rng.choice([*layer.tensors, "K", "N", "block_size", "bits"]))
        if name in layer.tensors:
            array = layer.tensors[name]
            shape = [int(max(1, size + rng.integers(-1, 2))) for size in array.shape]
            dtype = rng.choice([array.dtype, np.dtype(np.uint8), np.dtype(np.float32), np.dtype(np.int64)])
            layer.changed[name] = rng.integers(0, 100, shape).astype(dtype)
        else:
            layer.changed[name] = int(rng.choice([-1, 0, 1, 2, 4, 8, 16, 31, 32, 63, 64, 65, 1 << 31, 1 << 62]))
        x = layer.x(2)
        try:
            session = provider_session(layer.model())
            (y,) = session.run(None, {"x": x})
        except Exception:  # ONNX Runtime's exceptions only share the base class Exception
            continue
        if not claimed(session):
            continue
        (expected,) = plain_session(layer.model()).run(None, {"x": x})
        assert np.linalg.norm(y - expected) <= 0.03 * np.linalg.norm(expected), layer.changed
        answers += 1
    assert answers > 5


def test_initializers_are_read_by_others_too() -> None:
    """A tensor that a claimed node reads is kept if another node or an output needs it."""
    layer, value = NBits(64, 20, 32), helper.make_tensor_value_info
    nodes = [layer.node(), helper.make_node("Identity", ["scales"], ["s"])]
    outputs = [value("y", TensorProto.FLOAT, None), value("s", TensorProto.FLOAT, [20, 2])]
    graph = helper.make_graph(
        nodes, "two readers", [value("x", TensorProto.FLOAT, ["batch", 64])], outputs, layer.initializers()
    )
    session = provider_session(whole(graph))
    assert claimed(session) == ["linear"]
    x = layer.x(3)
    y, scales = session.run(None, {"x": x})
    layer.oracle(32).check(y, x)
    np.testing.assert_array_equal(scales, layer.scales)


def test_constants_of_nodes_are_weights_too() -> None:
    layer = NBits(64, 20, 32)
    model = layer.model()
    tensor = model.graph.initializer.pop(0)
    model.graph.node.insert(0, helper.make_node("Constant", [], ["B"], value=tensor))
    assert numpy_helper.to_array(tensor).shape == (20, 2, 16)
    assert claimed(provider_session(model)) == ["linear"]
