"""Sizes of image and sound inputs whose shapes are symbolic.

The sizes follow from the convolution that reads the input, and from the table of positions, which fits one image size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import onnx_ir as ir

from ..find.constants import constant_tensor
from ..find.node_checks import integer_attribute

_PIXELS = 224  # the usual height and width of images
_SPECIAL_TOKENS = (1, 0, 2, 101, 11)  # possible numbers of class and detection tokens
_PASS_THROUGH = ("Cast", "Identity", "Unsqueeze", "Squeeze", "Sub", "Div", "Mul", "Add")
_MAX_NODES = 8
_SAMPLES = 400  # approximate number of samples per encoder step: 25 ms at 16 kHz
_MEDIA = "ortolan.media"  # key in value.meta


@dataclass(frozen=True)
class Media:
    """The sizes of an input that follow from its convolution."""

    picture: tuple[int, int, int] | None  # channels, height and width of an image [batch, channels, height, width]
    samples_per_step: int  # ratio of the length to the sequence length in attention: above 1 for sound [batch, samples]
    frames: int | None  # length of a spectrogram [batch, bins, frames] that fits a table of positions


def media_of(value: ir.Value) -> Media:
    """Return the sizes of an input, as `keep_media` found them if it was called."""
    kept: Media | None = value.meta.get(_MEDIA)
    return kept or Media(_picture_shape(value), _samples_per_step(value), _frame_count(value))


def keep_media(model: ir.Model) -> None:
    """Keep the sizes of the model's inputs, for calls after convolutions were rewritten as linear layers."""
    for value in model.graph.inputs:
        value.meta[_MEDIA] = media_of(value)


def _picture_shape(value: ir.Value) -> tuple[int, int, int] | None:
    """Return channels, height and width of an input [batch, channels, height, width]; None if it is not an image."""
    if value.shape is None or len(value.shape) != 4:
        return None
    convolution = _convolution(value)
    weight = None if convolution is None else constant_tensor(convolution.inputs[1])
    if convolution is None or weight is None or len(weight.shape) != 4:
        return None
    width, channels, patch = weight.shape.numpy()[:3]
    stride = convolution.attributes["strides"].as_ints()[0] if "strides" in convolution.attributes else 1
    side = _PIXELS
    if stride == patch and convolution.graph is not None:
        side = _side_in_patches(convolution.graph, width) * patch or side
    return channels * integer_attribute(convolution, "group", 1), side, side


def _samples_per_step(value: ir.Value) -> int:
    """Return the ratio of an input's length to the sequence length in attention: above 1 for sound [batch, samples]."""
    floats = value.dtype is not None and value.dtype.is_floating_point()
    is_sound = floats and value.shape is not None and len(value.shape) == 2 and _convolution(value) is not None
    return _SAMPLES if is_sound else 1


def _frame_count(value: ir.Value) -> int | None:
    """Return the length of a spectrogram [batch, bins, frames] for a table of positions with a fixed length.

    None if no convolution reads the input, or no table is added to its steps.
    """
    current, steps_per_frame = value, 1
    if value.shape is None or len(value.shape) != 3 or _convolution(value) is None:
        return None
    for _ in range(_MAX_NODES):
        uses = tuple(current.uses())
        if len(uses) != 1:
            return None
        node = uses[0].node
        if node.op_type == "Conv" and "strides" in node.attributes:
            steps_per_frame *= node.attributes["strides"].as_ints()[0]
        table = None
        if node.op_type in ("Add", "SkipLayerNormalization"):
            table = next(filter(None, map(constant_tensor, node.inputs[:2])), None)
        if table is not None and len(table.shape) > 1:
            return int(table.shape.numpy()[-2]) * steps_per_frame
        current = node.outputs[0]
    return None


def _convolution(value: ir.Value) -> ir.Node | None:
    """Return the convolution that reads an input, directly or after normalization."""
    front, seen = [value], 0
    while front and seen < _MAX_NODES:
        current = front.pop(0)
        for node, index in current.uses():
            seen += 1
            if node.op_type == "Conv" and index == 0:
                return node
            if node.op_type in _PASS_THROUGH or node.op_type in ("ReduceMean", "Sqrt"):
                front += node.outputs
    return None


def _side_in_patches(graph: ir.Graph | ir.Function, width: int) -> int:
    """Return the image's height and width in patches, from the size of the table of positions; 0 without a table."""
    if not isinstance(graph, ir.Graph):
        return 0
    for value in graph.initializers.values():
        shape = () if value.const_value is None else value.const_value.shape.numpy()
        if len(shape) not in (2, 3) or shape[-1] != width or (shape[0] != 1 and len(shape) == 3):
            continue
        for tokens in _SPECIAL_TOKENS:
            patches = shape[-2] - tokens
            side = math.isqrt(max(patches, 0))
            if side > 1 and side * side == patches:
                return side
    return 0
