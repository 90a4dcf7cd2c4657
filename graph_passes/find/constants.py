"""Values that are known before the model runs: initializers, Constant nodes, and the few operators that exporters put
between a stored weight and its MatMul (Identity, Transpose, Cast, DequantizeLinear).

Everything is lazy: a tensor here computes its array each time it is asked, from the mapped file, and keeps nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator

import numpy as np
import onnx_ir as ir

DEFAULT_DOMAINS = ("", "ai.onnx")
_FLOAT_TYPES = (ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.DOUBLE)


def constant_tensor(value: ir.Value | None) -> ir.TensorProtocol | None:
    """The tensor that this value always is, or None if that is only known at run time (or not worth working out)."""
    if value is None:
        return None
    if value.is_initializer():
        # An initializer that is also a graph input is only a default: whoever runs the model may pass another one.
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if node is None or node.domain not in DEFAULT_DOMAINS:
        return None
    compute = _OPERATORS.get(node.op_type)
    return compute(node) if compute else None


def constant_key(value: ir.Value) -> Hashable:
    """Equal for two constant values that hold the same numbers because they come from the same initializer."""
    node = value.producer()
    if node is None or node.op_type == "Constant":
        return value
    attributes = tuple(sorted((name, str(attr.value)) for name, attr in node.attributes.items()))
    inputs = tuple(constant_key(source) for source in node.inputs if source is not None)
    return inputs[0] if node.op_type == "Identity" else (node.op_type, attributes, *inputs)


def constant_values(value: ir.Value) -> Iterator[ir.Value]:
    """The value and all values that it is computed from: their names are those by which people know the weight."""
    yield value
    node = value.producer()
    for source in node.inputs if node is not None else ():
        if source is not None:
            yield from constant_values(source)


def stored_bytes(value: ir.Value) -> int:
    """How many bytes the initializers (or Constant nodes) behind a constant take in the file."""
    roots = [source for source in constant_values(value) if source.producer() is None or not source.producer().inputs]  # type: ignore[union-attr]
    tensors = [constant_tensor(root) for root in {id(root): root for root in roots}.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def float_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """The tensor as float32. It may be a read-only view of a mapped file: copy before writing, and do not keep it."""
    return np.asarray(tensor.numpy()).astype(np.float32, copy=False)


def remove_unused(value: ir.Value) -> None:
    """Removes a constant that nothing uses any more, and whatever was only there for it."""
    if value.uses() or value.is_graph_output() or value.is_graph_input():
        return
    node = value.producer()
    if value.is_initializer():
        assert value.graph is not None and value.name is not None
        value.graph.initializers.pop(value.name)
    elif node is not None and node.graph is not None and len(node.outputs) == 1:
        sources = [source for source in node.inputs if source is not None]
        node.graph.remove(node, safe=True)
        for source in sources:
            remove_unused(source)


def remove_dead(value: ir.Value) -> None:
    """Removes what only computed a value that nothing uses any more."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        node = one.producer()
        if node is None:
            if one.is_initializer():
                remove_unused(one)
        elif node.graph is not None and not any(out.uses() or out.is_graph_output() for out in node.outputs):
            waiting += [source for source in node.inputs if source is not None]
            node.graph.remove(node, safe=True)


def lazy(
    compute: Callable[[], np.ndarray], dtype: ir.DataType, shape: ir.Shape, name: str | None = None
) -> ir.LazyTensor:
    """A tensor whose array is computed anew each time."""
    return ir.LazyTensor(lambda: ir.Tensor(np.ascontiguousarray(compute())), dtype=dtype, shape=shape, name=name)


def _constant(node: ir.Node) -> ir.TensorProtocol | None:
    attr = node.attributes.get("value")
    return attr.as_tensor() if attr is not None and not attr.is_ref() else None


def _identity(node: ir.Node) -> ir.TensorProtocol | None:
    return constant_tensor(node.inputs[0])


def _transpose(node: ir.Node) -> ir.TensorProtocol | None:
    source = constant_tensor(node.inputs[0])
    if source is None:
        return None
    rank = len(source.shape)
    perm = tuple(node.attributes["perm"].as_ints()) if "perm" in node.attributes else tuple(reversed(range(rank)))
    shape = ir.Shape([source.shape.numpy()[axis] for axis in perm])
    return lazy(lambda: np.transpose(source.numpy(), perm), source.dtype, shape)


def _cast(node: ir.Node) -> ir.TensorProtocol | None:
    source = constant_tensor(node.inputs[0])
    to = ir.DataType(node.attributes["to"].as_int())
    if source is None or source.dtype not in _FLOAT_TYPES or to not in _FLOAT_TYPES:
        return None
    return lazy(lambda: source.numpy().astype(to.numpy()), to, ir.Shape(source.shape.numpy()))


def _dequantize(node: ir.Node) -> ir.TensorProtocol | None:
    tensors = [constant_tensor(source) for source in node.inputs if source is not None]
    codes, scale = tensors[0], tensors[1]
    if codes is None or scale is None or None in tensors or not scale.dtype.is_floating_point():
        return None
    axis = node.attributes["axis"].as_int() if "axis" in node.attributes else 1
    block = node.attributes["block_size"].as_int() if "block_size" in node.attributes else 0
    made = node.attributes["output_dtype"].as_int() if "output_dtype" in node.attributes else 0
    dtype = ir.DataType(made) if made else scale.dtype

    def spread(tensor: ir.TensorProtocol) -> np.ndarray:
        """One number for each code: the parameter is a scalar, one a slice of `axis`, or one a block along it."""
        array = float_array(tensor)
        if array.size == 1:
            return array.reshape(())
        if block:
            return np.take(np.repeat(array, block, axis), range(codes.shape.numpy()[axis]), axis)
        shape = [1] * len(codes.shape)
        shape[axis] = -1
        return array.reshape(shape)

    def compute() -> np.ndarray:
        centred = float_array(codes)
        if len(tensors) > 2 and tensors[2] is not None:
            centred = centred - spread(tensors[2])
        weights: np.ndarray = (centred * spread(scale)).astype(dtype.numpy())
        return weights

    return lazy(compute, dtype, ir.Shape(codes.shape.numpy()))


_OPERATORS: dict[str, Callable[[ir.Node], ir.TensorProtocol | None]] = {
    "Constant": _constant,
    "Identity": _identity,
    "Transpose": _transpose,
    "Cast": _cast,
    "DequantizeLinear": _dequantize,
}
