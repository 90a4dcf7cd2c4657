"""Rewrites 1-D convolutions as linear layers, which the passes support.

    Conv of x [batch, channels, frames]
        becomes Transpose -> windows -> MatMul (-> Add) -> Transpose, with rows [batch, frames, channels]

A window is a row of the product's input: neighbouring frames, one after another. Between the passes, windows are Slices
of the padded rows and a Concat. Pass replace leaves them out, because operators read windows from the rows without a
copy (ops/matmul/windows.h). fold_convolutions restores the layers that no pass has replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import onnx_ir as ir

from .channels_last import SWAP, Layout
from .constants import DEFAULT_DOMAINS, constant_tensor
from .fused_writer import Writer, only_attributes, required
from .node_checks import UnfitError, constant_input, expect, integer_attribute, node_input

NewName = Callable[[str], str]

_WINDOWS, _CONVOLUTION = "ortolan.windows", "ortolan.convolution"  # keys in node.meta
_FLOATS = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
_MOST_INPUTS = 1 << 17  # equals kMostLayerInputs in ops/match/linear.h
# Kernels pad rows to tiles of 64 inputs, so a convolution of few inputs would be slower.
_LEAST_INPUTS = 32
_MOST_WINDOW = 1 << 10  # a limit of the Slices of a convolution
_NO_END = np.iinfo(np.int32).max


@dataclass(frozen=True)
class Windows:
    """Windows over rows. The members are the attributes of the linear layers' operators."""

    window: int  # frames in a window
    window_stride: int = 1
    window_pads_begin: int = 0
    window_pads_end: int = 0

    def attributes(self) -> dict[str, int]:
        """Return the operators' attributes."""
        return asdict(self)


_ROWS = Windows(1)  # each window is one row
WINDOW_DEFAULTS = _ROWS.attributes()


@dataclass(frozen=True, eq=False)
class _Convolution:
    """A convolution that became a product, for fold_convolutions."""

    weight: ir.Value  # [outputs, channels, window]
    flat: ir.Value  # the same weight as a matrix [window * channels, outputs]
    attributes: tuple[ir.Attr, ...]


def windows_of(value: ir.Value) -> tuple[Windows, ir.Value] | None:
    """Return windows and the rows [batch, frames, channels] that a value consists of; None if it has no windows."""
    node = value.producer()
    found: tuple[Windows, ir.Node] | None = None if node is None else node.meta.get(_WINDOWS)
    return None if found is None else (found[0], required(found[1], 0))


def has_windows(node: ir.Node) -> bool:
    """Return whether a layer of our operators is a convolution. Attributes of windows may have their defaults."""
    return any(
        name in node.attributes and node.attributes[name].as_int() != default
        for name, default in WINDOW_DEFAULTS.items()
    )


def unfold_convolutions(model: ir.Model, new_name: NewName) -> list[ir.Node]:
    """Rewrite the 1-D convolutions of the model, in place; return the MatMul nodes that fold_convolutions can undo."""
    products: list[ir.Node] = []
    for graph in list(model.graphs()):
        nodes = [node for node in graph if node.op_type == "Conv" and node.domain in DEFAULT_DOMAINS]
        unfolder = _Unfolder(new_name)
        layout = Layout(graph, new_name) if nodes else None
        for node in nodes:
            unfolder.put(node)
        if layout is not None:
            layout.settle(unfolder.swaps)
        products += unfolder.products
    return products


def fold_convolutions(model: ir.Model, products: Sequence[ir.Node], new_name: NewName) -> None:
    """Turn layers that no pass has replaced back into convolutions."""
    swaps: dict[ir.Graph, list[ir.Node]] = {}
    for product in products:
        if isinstance(product.graph, ir.Graph):
            swaps.setdefault(product.graph, []).extend(_fold(product, new_name))
    for graph, nodes in swaps.items():
        Layout(graph, new_name).settle(nodes)


class _Unfolder:
    """Rewrites the convolutions of a graph."""

    def __init__(self, new_name: NewName) -> None:
        self._new_name = new_name
        self._made: dict[Hashable, ir.Value] = {}
        self.products: list[ir.Node] = []
        self.swaps: list[ir.Node] = []  # Transposes around the products

    def put(self, node: ir.Node) -> None:
        """Rewrite a convolution unless it is unsupported."""
        try:
            windows = _windows(node)
        except UnfitError:
            return
        Writer(node, self._made, self._new_name).put(lambda to: [self._write(to, node, windows)])

    def _write(self, to: Writer, node: ir.Node, windows: Windows) -> ir.Value:
        x, weight = required(node, 0), required(node, 1)
        rows = to.op("Transpose", x, name="rows", perm=SWAP)
        flat = to.op("Flatten", to.op("Transpose", weight, name="weight", perm=(2, 1, 0)), name="weight", axis=2)
        y = to.op("MatMul", rows if windows == _ROWS else _windows_over(to, rows, windows), flat, name="")
        product = _producer(y)
        product.meta[_CONVOLUTION] = _Convolution(weight, flat, tuple(node.attributes.values()))
        bias = node_input(node, 2)
        if bias is not None:
            y = to.op("Add", y, bias, name="bias")
        channels = to.op("Transpose", y, name="channels", perm=SWAP)
        self.products.append(product)
        self.swaps += [_producer(rows), _producer(channels)]
        return channels


def _windows(node: ir.Node) -> Windows:
    """Return the windows of a convolution. Raises UnfitError if no operator can compute it."""
    only_attributes(node, "auto_pad", "dilations", "group", "kernel_shape", "pads", "strides")
    source = required(node, 1).producer()
    expect(source is None or source.op_type != "DequantizeLinear", "its weight is quantized")
    weight = constant_input(node, 1, "weight", _FLOATS)
    expect(len(weight.shape) == 3, f"its weight has {len(weight.shape)} axes, expected 3")
    outputs, channels, size = weight.shape.numpy()
    if node_input(node, 2) is not None:
        constant_input(node, 2, "bias", (weight.dtype,), (outputs,))
    expect(constant_tensor(required(node, 0)) is None, "its input is constant")
    expect(integer_attribute(node, "group", 1) == 1, "it has groups")
    expect(_integers(node, "dilations", [1]) == [1], "it is dilated")
    expect(_integers(node, "kernel_shape", [size]) == [size], "its kernel_shape differs from its weight")
    automatic = node.attributes.get("auto_pad")
    pads, strides = _integers(node, "pads", [0, 0]), _integers(node, "strides", [1])
    if automatic is not None and automatic.value not in ("NOTSET", b"NOTSET"):
        expect(automatic.value in ("VALID", b"VALID"), f"its auto_pad is {automatic.value!r}")
        pads = [0, 0]
    expect(len(pads) == 2 and len(strides) == 1, "its pads or strides are not those of one axis")
    fits = outputs > 0 and 0 < size <= _MOST_WINDOW and strides[0] > 0 and min(pads) >= 0
    inputs = channels * size
    expect(fits and max(*pads, *strides) <= _MOST_INPUTS, "its sizes are out of range")
    expect(_LEAST_INPUTS <= inputs <= _MOST_INPUTS, f"it has {inputs} inputs")
    return Windows(size, strides[0], *pads)


def _integers(node: ir.Node, name: str, missing: list[int]) -> list[int]:
    attr = node.attributes.get(name)
    if attr is None:
        return missing
    expect(attr.type == ir.AttributeType.INTS and not attr.is_ref(), f"its attribute {name!r} is not integers")
    return list(attr.as_ints())


def _windows_over(to: Writer, rows: ir.Value, windows: Windows) -> ir.Value:
    """Add the nodes that copy rows to windows."""
    size, first = windows.window, rows
    if windows.window_pads_begin or windows.window_pads_end:
        pads = to.ints(0, windows.window_pads_begin, 0, 0, windows.window_pads_end, 0)
        first = to.op("Pad", rows, pads, name="pad")
    frames, stride = to.ints(1), to.ints(windows.window_stride)
    parts = [
        to.op("Slice", first, to.ints(i), to.ints(i + 1 - size or _NO_END), frames, stride, name="frames")
        for i in range(size)
    ]
    value = parts[0] if size == 1 else to.op("Concat", *parts, name="windows", axis=-1)
    _producer(value).meta[_WINDOWS] = windows, _producer(parts[0] if first is rows else first)
    return value


def _fold(product: ir.Node, new_name: NewName) -> list[ir.Node]:
    """Replace a product by a convolution between Transposes, which are returned."""
    graph, convolution = product.graph, product.meta[_CONVOLUTION]
    assert isinstance(graph, ir.Graph)
    last, bias = product, None
    users = [use.node for use in product.outputs[0].uses()]
    if len(users) == 1 and users[0].op_type == "Add" and users[0].graph is graph:
        (other,) = (value for value in users[0].inputs if value is not product.outputs[0])
        if constant_tensor(other) is not None:
            last, bias = users[0], other
    x = required(product, 0)
    windows, rows = windows_of(x) or (_ROWS, x)
    swaps = list[ir.Node]()

    def write(to: Writer) -> list[ir.Value | None]:
        weight, flat = convolution.weight, required(product, 1)
        if flat is not convolution.flat:  # a pass has changed it
            tensor = constant_tensor(flat)
            assert tensor is not None
            inputs, outputs = tensor.shape.numpy()
            shape = to.ints(windows.window, inputs // windows.window, outputs)
            weight = to.op("Transpose", to.op("Reshape", flat, shape, name="kernel"), name="kernel", perm=(2, 1, 0))
        channels = to.op("Transpose", rows, name="channels", perm=SWAP)
        y = to.op("Conv", channels, weight, bias, name="convolution")
        node = _producer(y)
        for attr in convolution.attributes:
            node.attributes.add(attr)
        back = to.op("Transpose", y, name="rows", perm=SWAP)
        swaps.extend((_producer(channels), _producer(back)))
        return [back]

    name = product.name
    Writer(last, {}, new_name).put(write)
    conv = swaps[1].inputs[0]
    assert conv is not None
    _producer(conv).name = name
    return swaps


def _producer(value: ir.Value) -> ir.Node:
    node = value.producer()
    assert node is not None
    return node
