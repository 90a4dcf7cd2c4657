"""Values that are known before the model runs: initializers, and results of standard operators on constants.

Such operators are Transpose, Cast, Mul, DequantizeLinear, Slice or Concat, which exporters put between a stored weight
and its MatMul. Everything is lazy: a tensor here computes its array each time it is read, from the mapped file, and
keeps nothing. A model is untrusted: walks are short, and a computed constant is not much larger than its inputs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from types import MappingProxyType

import numpy as np
import onnx
import onnx_ir as ir

from ortolan.errors import ModelError, one_line

DEFAULT_DOMAINS = ("", "ai.onnx")
_RANDOM = ("Random", "Bernoulli", "Multinomial")
GRAPHS = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)
_MOST_VISITS = 64  # limit of the nodes between a constant and its initializers
_MOST_GROWTH = 16  # limit of a constant's bytes relative to its inputs; 16 allows float64 from 4-bit integers
_SMALL = 1 << 24  # bytes that a computed constant may have in addition
_MOST_NUMBERS = 64  # limit of the elements of a constant that shapes may depend on


def constant_tensor(
    value: ir.Value | None, known: Mapping[ir.Value, ir.TensorProtocol] = MappingProxyType({})
) -> ir.TensorProtocol | None:
    """Return the tensor of a constant value; None if it depends on the model's inputs or is too costly to compute.

    known: results of earlier calls, which are not computed again.
    """
    if value is None:
        return None
    if value in known:
        return known[value]
    if value.is_initializer():
        # An initializer that is also a graph input is only a default value: the caller may pass another tensor.
        return None if value.is_graph_input() else value.const_value
    node = value.producer()
    if node is None or not _is_constant(value):
        return None
    if node.op_type == "Identity":
        return constant_tensor(node.inputs[0], known) if node.inputs else None
    return _constant(node) if node.op_type == "Constant" else _computed(value, known)


def required_constant(value: ir.Value | None) -> ir.TensorProtocol:
    """Return the tensor of a value that is known to be constant."""
    tensor = constant_tensor(value)
    assert tensor is not None
    return tensor


def constant_key(value: ir.Value) -> Hashable:
    """Return a key that is equal for constants computed in the same way from the same initializers."""
    node = value.producer()
    if node is None or node.op_type == "Constant":
        return value
    attributes = tuple(sorted((name, str(attr.value)) for name, attr in node.attributes.items()))
    inputs = tuple(constant_key(source) for source in node.inputs if source is not None)
    return inputs[0] if node.op_type == "Identity" else (node.op_type, value.index(), attributes, *inputs)


def constant_values(value: ir.Value) -> Iterator[ir.Value]:
    """Yield a constant and all values it is computed from; patterns for a weight match any of their names."""
    yield value
    node = value.producer()
    for source in node.inputs if node is not None else ():
        if source is not None:
            yield from constant_values(source)


def stored_bytes(value: ir.Value) -> int:
    """Return the total size in bytes of the initializers and Constant nodes that a constant is computed from."""
    roots = [source for source in constant_values(value) if source.producer() is None or not source.producer().inputs]  # type: ignore[union-attr]
    tensors = [constant_tensor(root) for root in {id(root): root for root in roots}.values()]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def float_array(tensor: ir.TensorProtocol) -> np.ndarray:
    """Return a tensor as float32, perhaps a read-only view of a mapped file: copy to write, and do not keep it."""
    return np.asarray(tensor.numpy()).astype(np.float32, copy=False)


def remove_unused(value: ir.Value) -> None:
    """Remove the nodes and initializers that only computed a value without consumers."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        node = one.producer()
        if node is None:
            if one.is_initializer() and not (one.uses() or one.is_graph_output() or one.is_graph_input()):
                assert one.graph is not None and one.name is not None
                one.graph.initializers.pop(one.name)
        elif node.graph is not None and not _is_used(node):
            waiting += [source for source in node.inputs if source is not None]
            node.graph.remove(node, safe=True)


def _is_used(node: ir.Node) -> bool:
    return any(value.uses() or value.is_graph_output() for value in node.outputs)


def lazy(
    compute: Callable[[], np.ndarray], dtype: ir.DataType, shape: ir.Shape, name: str | None = None
) -> ir.LazyTensor:
    """Return a tensor whose array is computed each time it is read."""
    return ir.LazyTensor(lambda: ir.Tensor(np.ascontiguousarray(compute())), dtype=dtype, shape=shape, name=name)


def _constant(node: ir.Node) -> ir.TensorProtocol | None:
    attr = node.attributes.get("value")
    if attr is not None and attr.type == ir.AttributeType.TENSOR and not attr.is_ref():
        tensor: ir.TensorProtocol = attr.value  # as_tensor() checks the type, which is slow
        return tensor
    return _computed(node.outputs[0])


def _is_constant(value: ir.Value) -> bool:
    """Return whether only initializers determine the value, within _MOST_VISITS steps.

    A value with several consumers counts each time, so that no walk over a constant is longer.
    """
    waiting, visits = [value], 0
    while waiting:
        one = waiting.pop()
        if one.is_initializer():
            if one.is_graph_input():
                return False
            continue
        node = one.producer()
        visits += 1
        if node is None or visits > _MOST_VISITS or not _is_repeatable(node):
            return False
        waiting += [source for source in node.inputs if source is not None]
    return True


def _is_repeatable(node: ir.Node) -> bool:
    """Return whether it is a deterministic standard operator without subgraphs."""
    return (
        node.domain in DEFAULT_DOMAINS
        and not node.op_type.startswith(_RANDOM)
        and not any(attr.type in GRAPHS or attr.is_ref() for attr in node.attributes.values())
    )


def _computed(
    value: ir.Value, known: Mapping[ir.Value, ir.TensorProtocol] = MappingProxyType({})
) -> ir.TensorProtocol | None:
    """Return a constant node's output: its shape is inferred at once, its elements are computed by onnx when read."""
    node = value.producer()
    assert node is not None
    sources = {one.name or "": constant_tensor(one, known) for one in node.inputs if one is not None}
    found = {name: tensor for name, tensor in sources.items() if tensor is not None}
    if len(found) < len(sources):
        return None
    proto = ir.to_proto(node)
    version = opset_of(node.graph)
    made = _infer(proto, found, version)
    dtype, shape = made[value.name or ""] if value.name in made else (None, None)
    if dtype is None or shape is None:
        return None
    size = math.prod(shape) * dtype.itemsize
    if size > _MOST_GROWTH * sum(tensor.nbytes for tensor in found.values()) + _SMALL:
        return None

    def compute() -> np.ndarray:
        from onnx.reference import ReferenceEvaluator

        try:
            evaluator = ReferenceEvaluator(proto, opsets={"": version})
            arrays = list(evaluator.run(None, {name: tensor.numpy() for name, tensor in found.items()}))
            array = np.asarray(arrays[value.index() or 0])
        except Exception as error:  # ReferenceEvaluator raises many types, numpy's included
            raise ModelError(
                f"node {node.name!r} ({node.op_type}) cannot be computed from its constants: {one_line(error)}; "
                "export the model again"
            ) from error
        if array.size != math.prod(shape):
            raise ModelError(
                f"node {node.name!r} ({node.op_type}) computes shape {list(array.shape)} from its constants, expected "
                f"{list(shape)}; export the model again"
            )
        return array.reshape(shape)  # ReferenceEvaluator returns some scalars as vectors

    return lazy(compute, dtype, ir.Shape(shape))


def opset_of(graph: ir.Graph | ir.Function | None) -> int:
    """Return a graph's opset, at most the newest of the installed onnx; the newest for subgraphs, which import none."""
    newest = onnx.defs.onnx_opset_version()
    return newest if graph is None else min(graph.opset_imports.get("", newest), newest)


def _infer(
    proto: onnx.NodeProto, sources: Mapping[str, ir.TensorProtocol], version: int
) -> dict[str, tuple[ir.DataType, tuple[int, ...]]]:
    """Return type and shape of each output that certainly is a tensor of this type and shape."""
    types, small = {}, {}
    for name, tensor in sources.items():
        types[name] = onnx.helper.make_tensor_type_proto(tensor.dtype.value, tensor.shape.numpy())
        if tensor.dtype in (ir.DataType.INT64, ir.DataType.FLOAT) and tensor.size <= _MOST_NUMBERS:
            small[name] = onnx.numpy_helper.from_array(np.asarray(tensor.numpy()), name)
    try:
        schema = onnx.defs.get_schema(proto.op_type, version)
        imports = [onnx.helper.make_opsetid("", version)]
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, small, opset_imports=imports)
    except Exception:  # an unknown operator, or inputs that do not fit
        return {}
    made = {}
    for name, one in found.items():
        dims = one.tensor_type.shape.dim
        if one.tensor_type.HasField("shape") and all(dim.HasField("dim_value") for dim in dims):
            made[name] = ir.DataType(one.tensor_type.elem_type), tuple(dim.dim_value for dim in dims)
    return made
