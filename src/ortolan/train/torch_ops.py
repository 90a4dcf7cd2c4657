"""ONNX operators of exported encoders in torch, for opset 13 or later.

An operator takes the node's attributes and inputs (None: missing), and returns its output, or a tuple of outputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import onnx_ir as ir
import torch
import torch.nn.functional as F

Tensor = Any  # torch.Tensor, which mypy does not see
Attributes = Mapping[str, Any]
Operator = Callable[..., Any]

TYPES = {
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
    ir.DataType.BOOL: torch.bool,
}


def tensor_of(stored: ir.TensorProtocol) -> Tensor:
    """Return a copy of a stored tensor. Raises KeyError for an unsupported type."""
    dtype = TYPES[stored.dtype]
    if stored.dtype == ir.DataType.BFLOAT16:
        return torch.tensor(stored.numpy().astype("float32")).to(dtype)
    return torch.tensor(stored.numpy(), dtype=dtype)


def _integers(tensor: Tensor) -> list[int]:
    return [int(number) for number in tensor.reshape(-1).tolist()]


def _axes(attributes: Attributes, given: Tensor | None, rank: int) -> list[int]:
    """Return the axes of a reduction: an input since opset 18 (ReduceSum: 13), before that an attribute.

    Default: all axes.
    """
    axes = _integers(given) if given is not None else list(attributes.get("axes", ()))
    return axes or list(range(rank))


def _reduction(operator: Operator) -> Operator:
    def reduced(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
        none = axes is None or not axes.numel()
        if none and not attributes.get("axes") and attributes.get("noop_with_empty_axes", 0):
            return x
        return operator(x, dim=_axes(attributes, axes, x.ndim), keepdim=bool(attributes.get("keepdims", 1)))

    return reduced


def _plain(operator: Operator) -> Operator:
    return lambda attributes, *inputs: operator(*inputs)


def _folded(operator: Operator) -> Operator:
    return lambda attributes, *inputs: reduce(operator, inputs)


def _div(attributes: Attributes, a: Tensor, b: Tensor) -> Tensor:
    return a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


def _constant(attributes: Attributes) -> Tensor:
    for name, value in attributes.items():
        if name == "value":
            return tensor_of(value)
        if name in ("value_int", "value_ints"):
            return torch.tensor(value, dtype=torch.int64)
        if name in ("value_float", "value_floats"):
            return torch.tensor(value, dtype=torch.float32)
    raise KeyError(*attributes)


def _shape(attributes: Attributes, x: Tensor) -> Tensor:
    return torch.tensor(list(x.shape)[attributes.get("start", 0) : attributes.get("end")], dtype=torch.int64)


def _reshape(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    sizes = _integers(shape)
    if not attributes.get("allowzero", 0):
        sizes = [x.shape[axis] if size == 0 else size for axis, size in enumerate(sizes)]
    return x.reshape(sizes)


def _unsqueeze(attributes: Attributes, x: Tensor, axes: Tensor) -> Tensor:
    rank = x.ndim + axes.numel()
    for axis in sorted(axis % rank for axis in _integers(axes)):
        x = x.unsqueeze(axis)
    return x


def _squeeze(attributes: Attributes, x: Tensor, axes: Tensor | None = None) -> Tensor:
    return x.squeeze() if axes is None else x.squeeze(tuple(_integers(axes)))


def _slice(
    attributes: Attributes,
    x: Tensor,
    starts: Tensor,
    ends: Tensor,
    axes: Tensor | None = None,
    steps: Tensor | None = None,
) -> Tensor:
    first = _integers(starts)
    along = range(len(first)) if axes is None else _integers(axes)
    by = [1] * len(first) if steps is None else _integers(steps)
    for start, end, axis, step in zip(first, _integers(ends), along, by, strict=True):
        chosen = range(x.shape[axis])[start:end:step]
        if step == 1:
            x = x.narrow(axis, chosen.start, len(chosen))
        else:
            x = x.index_select(axis, torch.tensor(list(chosen), dtype=torch.int64))
    return x


def _gather(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0) % x.ndim
    where = torch.where(indices < 0, indices + x.shape[axis], indices)
    if axis == 0:
        return F.embedding(where.long(), x) if x.ndim == 2 else x[where.long()]
    picked = x.index_select(axis, where.long().reshape(-1))
    return picked.reshape([*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :]])


def _gather_elements(attributes: Attributes, x: Tensor, indices: Tensor) -> Tensor:
    axis = attributes.get("axis", 0)
    return x.gather(axis, torch.where(indices < 0, indices + x.shape[axis], indices).long())


def _expand(attributes: Attributes, x: Tensor, shape: Tensor) -> Tensor:
    return x.expand(torch.broadcast_shapes(x.shape, _integers(shape)))


def _constant_of_shape(attributes: Attributes, shape: Tensor) -> Tensor:
    value = tensor_of(attributes["value"]) if "value" in attributes else torch.zeros(1)
    return value.reshape(()).expand(_integers(shape)).clone()


def _split(attributes: Attributes, x: Tensor, sizes: Tensor | None = None) -> tuple[Tensor, ...]:
    axis = attributes.get("axis", 0)
    if sizes is not None:
        return tuple(x.split(_integers(sizes), axis))
    count = attributes.get("num_outputs") or attributes["outputs"]
    return tuple(x.split(-(-x.shape[axis] // count), axis))


def _flatten(attributes: Attributes, x: Tensor) -> Tensor:
    axis = attributes.get("axis", 1)
    rows = 1
    for size in x.shape[:axis]:
        rows *= size
    return x.reshape(rows, -1)


def _layer_norm(attributes: Attributes, x: Tensor, scale: Tensor, bias: Tensor | None = None) -> Tensor:
    axis = attributes.get("axis", -1) % x.ndim
    return F.layer_norm(x.float(), x.shape[axis:], scale, bias, attributes.get("epsilon", 1e-5))


def _gemm(attributes: Attributes, a: Tensor, b: Tensor, c: Tensor | None = None) -> Tensor:
    a = a.t() if attributes.get("transA", 0) else a
    b = b.t() if attributes.get("transB", 0) else b
    product = torch.matmul(a, b)
    if (alpha := attributes.get("alpha", 1.0)) != 1:
        product = product * alpha
    return product if c is None else product + c * attributes.get("beta", 1.0)


def _clip(attributes: Attributes, x: Tensor, low: Tensor | None = None, high: Tensor | None = None) -> Tensor:
    return x if low is None and high is None else torch.clamp(x, low, high)


def _gelu(attributes: Attributes, x: Tensor) -> Tensor:
    return F.gelu(x, approximate=attributes.get("approximate", "none"))


def _trilu(attributes: Attributes, x: Tensor, k: Tensor | None = None) -> Tensor:
    diagonal = 0 if k is None else int(k)
    return torch.triu(x, diagonal) if attributes.get("upper", 1) else torch.tril(x, diagonal)


def _cum_sum(attributes: Attributes, x: Tensor, axis: Tensor) -> Tensor:
    total = x.cumsum(int(axis), dtype=x.dtype)
    if attributes.get("reverse", 0):
        total = x.sum(int(axis), keepdim=True) - total + x
    return total - x if attributes.get("exclusive", 0) else total


OPERATORS: dict[str, Operator] = {
    "Abs": _plain(torch.abs),
    "Add": _plain(torch.add),
    "And": _plain(torch.logical_and),
    "Cast": lambda attributes, x: x.to(TYPES[ir.DataType(attributes["to"])]),
    "Ceil": _plain(torch.ceil),
    "Clip": _clip,
    "Concat": lambda attributes, *inputs: torch.cat(inputs, attributes["axis"]),
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Cos": _plain(torch.cos),
    "CumSum": _cum_sum,
    "Div": _div,
    "Dropout": lambda attributes, x, *ignored: x,
    "Equal": _plain(torch.eq),
    "Erf": _plain(torch.erf),
    "Exp": _plain(torch.exp),
    "Expand": _expand,
    "Flatten": _flatten,
    "Floor": _plain(torch.floor),
    "Gather": _gather,
    "GatherElements": _gather_elements,
    "Gelu": _gelu,
    "Gemm": _gemm,
    "Greater": _plain(torch.gt),
    "GreaterOrEqual": _plain(torch.ge),
    "Identity": _plain(lambda x: x),
    "IsNaN": _plain(torch.isnan),
    "LayerNormalization": _layer_norm,
    "Less": _plain(torch.lt),
    "LessOrEqual": _plain(torch.le),
    "Log": _plain(torch.log),
    "MatMul": _plain(torch.matmul),
    "Max": _folded(torch.maximum),
    "Min": _folded(torch.minimum),
    "Mul": _plain(torch.mul),
    "Neg": _plain(torch.neg),
    "Not": _plain(torch.logical_not),
    "Or": _plain(torch.logical_or),
    "Pow": _plain(torch.pow),
    "Range": _plain(lambda start, end, step: torch.arange(start.item(), end.item(), step.item(), dtype=start.dtype)),
    "Reciprocal": _plain(torch.reciprocal),
    "ReduceMax": _reduction(torch.amax),
    "ReduceMean": _reduction(torch.mean),
    "ReduceSum": _reduction(torch.sum),
    "Relu": _plain(F.relu),
    "Reshape": _reshape,
    "Round": _plain(torch.round),
    "Shape": _shape,
    "Sigmoid": _plain(torch.sigmoid),
    "Sign": _plain(torch.sign),
    "Sin": _plain(torch.sin),
    "Slice": _slice,
    "Softmax": lambda attributes, x: torch.softmax(x, attributes.get("axis", -1)),
    "Split": _split,
    "Sqrt": _plain(torch.sqrt),
    "Squeeze": _squeeze,
    "Sub": _plain(torch.sub),
    "Tanh": _plain(torch.tanh),
    "Tile": _plain(lambda x, repeats: x.tile(_integers(repeats))),
    "Transpose": lambda attributes, x: x.permute(attributes.get("perm", list(range(x.ndim))[::-1])),
    "Trilu": _trilu,
    "Unsqueeze": _unsqueeze,
    "Where": _plain(torch.where),
    "Xor": _plain(torch.logical_xor),
}
