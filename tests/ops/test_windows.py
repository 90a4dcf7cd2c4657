"""Test linear layers whose rows are windows over X: 1-D convolutions."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import helper

from ortolan import _native
from ortolan.graph_passes.find.convolutions import WINDOW_DEFAULTS, Windows
from ortolan.graph_passes.operators.linear_function import LayerUses
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses, sparse_amx_matmul_function
from ortolan.graph_passes.operators.w4a8_matmul_function import Uses as GroupUses

from .group_node import function, node_model
from .groups import GroupLayer
from .linear_kinds import attributes as attributes_of
from .quantized import Layer
from .single_node import assert_same_bits, session, sparse_amx_matmul_model, sparse_weight

N = 21


def bf16_model(rng: np.random.Generator, k: int) -> onnx.ModelProto:
    packed = _native.pack_bitmap(sparse_weight(rng, k, N, 0.5), dense=True)
    return sparse_amx_matmul_model(packed, k, N, rng.standard_normal(N, dtype=np.float32), rank=3)


def int8_model(rng: np.random.Generator, k: int) -> onnx.ModelProto:
    layer = Layer.random(rng, k, N, 0.5, None)
    packed = _native.pack_bitmap_int8(layer.weights, dense=True)
    scales = _native.pack_scales(layer.scales, bf16=False)
    bias = rng.standard_normal(N, dtype=np.float32)
    return sparse_amx_matmul_model(packed, k, N, bias, 3, scales=scales, weight_bits=8, x_zero_points=1)


def w8a8_model(rng: np.random.Generator, k: int) -> onnx.ModelProto:
    return node_model(GroupLayer.random(rng, k, N, 32, bits=8), rng.standard_normal(N, dtype=np.float32), rank=3)


def w4a8_model(rng: np.random.Generator, k: int) -> onnx.ModelProto:
    return node_model(GroupLayer.random(rng, k, N, 32), rng.standard_normal(N, dtype=np.float32), rank=3)


MODELS = {"bf16": bf16_model, "int8": int8_model, "w8a8": w8a8_model, "w4a8": w4a8_model}
Make = Callable[[np.random.Generator, int], onnx.ModelProto]
all_kinds = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS.keys())
# Size, stride and padding of windows, and the channels.
WINDOWS = [
    (Windows(3, 1, 1, 1), 20),
    (Windows(3, 2, 1, 1), 40),
    (Windows(2, 3, 0, 5), 17),
    (Windows(1, 2), 40),
    (Windows(1, 1, 2, 0), 40),
    (Windows(5, 1, 9, 4), 8),
    (Windows(127, 64), 1),
    (Windows(9, 4, 4, 4), 70),
]


def with_windows(model: onnx.ModelProto, windows: Windows) -> onnx.ModelProto:
    """Return a model of one node whose input has frames instead of whole rows."""
    changed = onnx.ModelProto.FromString(model.SerializeToString())
    (node,) = changed.graph.node
    node.attribute.extend(helper.make_attribute(name, value) for name, value in windows.attributes().items())
    changed.graph.input[0].type.tensor_type.shape.dim[2].ClearField("dim_value")
    changed.graph.output[0].type.tensor_type.shape.dim[1].ClearField("dim_param")
    return changed


def copied(x: np.ndarray, windows: Windows) -> np.ndarray:
    """Return the windows over x [sequences, frames, channels] as rows."""
    padded = np.pad(x, ((0, 0), (windows.window_pads_begin, windows.window_pads_end), (0, 0)))
    starts = range(0, padded.shape[1] - windows.window + 1, windows.window_stride)
    return np.stack([padded[:, at : at + windows.window].reshape(len(x), -1) for at in starts], axis=1)


@all_kinds
@pytest.mark.parametrize(("windows", "channels"), WINDOWS, ids=lambda one: str(one) if isinstance(one, int) else "")
def test_windows_have_the_bits_of_copied_rows(make: Make, windows: Windows, channels: int) -> None:
    """Each answer has the bits of the operator on a copy of the window, in any batch and with any threads."""
    rng = np.random.default_rng(0)
    model = make(rng, windows.window * channels)
    plain = session(model)
    own = [session(with_windows(model, windows), threads=threads) for threads in (1, 3)]
    least = max(1, windows.window - windows.window_pads_begin - windows.window_pads_end)
    for sequences, frames in ((1, least), (3, least + 4), (2, least + 37), (1, least + 700)):
        x = rng.standard_normal((sequences, frames, channels), dtype=np.float32)
        (expected,) = plain.run(None, {"x": copied(x, windows)})
        for one in own:
            assert_same_bits(one.run(None, {"x": x})[0], expected)
        assert_same_bits(own[0].run(None, {"x": x[:1]})[0], expected[:1])


def test_no_sequences() -> None:
    windows = Windows(3, 2, 1, 1)
    model = with_windows(bf16_model(np.random.default_rng(0), 30), windows)
    assert session(model).run(None, {"x": np.zeros((0, 9, 10), np.float32)})[0].shape == (0, 5, N)


@pytest.mark.parametrize("kind", ["bf16", "w4a8", "w8a8"])
def test_function(kind: str) -> None:
    """Without the library, one ONNX function computes nodes with windows and plain nodes, of any rank."""
    windows, rng = Windows(3, 2, 1, 1), np.random.default_rng(0)
    model = MODELS[kind](rng, 60)
    if kind == "bf16":
        made = ir.to_proto(sparse_amx_matmul_function(17, Uses(dense=True, bitmap=False, windows=True)))
        attributes = attributes_of("bf16")
        model.graph.node[0].attribute.extend(helper.make_attribute(name, one) for name, one in attributes.items())
    else:
        uses = GroupUses(True, windows=True) if kind == "w4a8" else LayerUses(windows=True)
        made = function(uses, bits=int(kind[1]))  # type: ignore[arg-type]
    del model.functions[:]
    model.functions.append(made)
    conv, plain = with_windows(model, windows), with_windows(model, Windows(**WINDOW_DEFAULTS))
    for one, shape in ((conv, (2, 7, 20)), (conv, (1, 1, 20)), (plain, (2, 4, 60)), (plain, (0, 4, 60))):
        x = rng.standard_normal(shape, dtype=np.float32)
        expected, found = (session(one, library=library).run(None, {"x": x})[0] for library in (True, False))
        assert found.shape == expected.shape
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"window": 7}, r"'linear': window is 7 with 60 inputs, expected a divisor"),
        ({"window": 0}, "window is 0, expected 1 to 1048576"),
        ({"window_stride": -1}, "window_stride is -1, expected 1 to"),
        ({"window_pads_end": 2**40}, "window_pads_end is 1099511627776, expected 0 to"),
    ],
)
def test_bad_attributes(changed: dict[str, int], message: str) -> None:
    windows = Windows(**(Windows(3).attributes() | changed))
    with pytest.raises(Exception, match=message):
        session(with_windows(bf16_model(np.random.default_rng(0), 60), windows))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((1, 2, 20), "2 frames are too few for a window of 3 with 0 frames of padding"),
        ((1, 5, 60), r"X 'x' has shape \[1, 5, 60\], expected \[..., frames, 20\]"),
    ],
)
def test_inputs_that_do_not_fit(shape: tuple[int, ...], message: str) -> None:
    model = with_windows(bf16_model(np.random.default_rng(0), 60), Windows(3))
    with pytest.raises(Exception, match=message):
        session(model).run(None, {"x": np.zeros(shape, np.float32)})
