"""Runs onnx's shape inference on single nodes."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import onnx
import onnx_ir as ir

_MOST_NUMBERS = 64  # limit of the elements of a constant that shapes may depend on

Dims = tuple[Hashable, ...]
Sizes = tuple[int | str | None, ...]


def opset_of(graph: ir.Graph | ir.Function | None) -> int:
    """Return a graph's opset, at most the newest of the installed onnx; the newest for subgraphs, which import none."""
    newest = onnx.defs.onnx_opset_version()
    return newest if graph is None else min(graph.opset_imports.get("", newest), newest)


def infer_node(
    proto: onnx.NodeProto, version: int, types: dict[str, onnx.TypeProto], small: dict[str, onnx.TensorProto]
) -> dict[str, tuple[ir.DataType, Sizes]]:
    """Return type and dimensions (integers, names or None) of outputs that are certainly tensors of a known rank.

    small: constants of few elements. The result is empty for an unknown operator, or if the inputs do not fit.
    """
    try:
        schema = onnx.defs.get_schema(proto.op_type, version)
        imports = [onnx.helper.make_opsetid("", version)]
        found = onnx.shape_inference.infer_node_outputs(schema, proto, types, small, opset_imports=imports)
    except Exception:
        return {}
    made = {}
    for name, one in found.items():
        if one.HasField("tensor_type") and one.tensor_type.HasField("shape"):
            dims = one.tensor_type.shape.dim
            made[name] = ir.DataType(one.tensor_type.elem_type), tuple(map(_size, dims))
    return made


def small_constant(name: str, tensor: ir.TensorProtocol) -> onnx.TensorProto | None:
    """Return a small int64 or float32 constant as a proto for shape inference, else None."""
    if tensor.dtype not in (ir.DataType.INT64, ir.DataType.FLOAT) or tensor.size > _MOST_NUMBERS:
        return None
    return onnx.numpy_helper.from_array(np.asarray(tensor.numpy()), name)


class SymbolicInference:
    """infer_node for shapes with arbitrary symbols as dimensions; each symbol gets a name that is mapped back."""

    def __init__(self, version: int) -> None:
        self._version = version
        self._names: dict[Hashable, str] = {}
        self._symbols: dict[str, Hashable] = {}

    def outputs(
        self,
        node: ir.Node,
        shapes: Sequence[Dims | None],
        types: Sequence[ir.DataType | None],
        constants: Sequence[ir.TensorProtocol | None],
        fresh: Callable[[ir.Value, int], Hashable],
    ) -> dict[ir.Value, Dims]:
        """Return the shapes of outputs with a certain rank. fresh: returns a new symbol for an unknown axis."""
        proto = ir.to_proto(node)
        del proto.input[:], proto.output[:]
        given, small = {}, {}
        for place, (value, shape, dtype, tensor) in enumerate(zip(node.inputs, shapes, types, constants, strict=True)):
            proto.input.append("" if value is None else f"x{place}")
            if value is None:
                continue
            if shape is None:
                return {}
            dims = [dim if isinstance(dim, int) else self._name(dim) for dim in shape]
            given[f"x{place}"] = onnx.helper.make_tensor_type_proto((dtype or ir.DataType.FLOAT).value, dims)
            number = None if tensor is None else small_constant(f"x{place}", tensor)
            if number is not None:
                small[f"x{place}"] = number
        proto.output.extend(f"y{place}" for place in range(len(node.outputs)))
        found = infer_node(proto, self._version, given, small)
        made = {}
        for place, output in enumerate(node.outputs):
            _, sizes = found.get(f"y{place}", (None, None))
            if sizes is not None:
                made[output] = tuple(
                    size if isinstance(size, int) else self._symbols.get(size or "", fresh(output, axis))
                    for axis, size in enumerate(sizes)
                )
        return made

    def _name(self, dim: Hashable) -> str:
        name = self._names.setdefault(dim, f"d{len(self._names)}")
        self._symbols[name] = dim
        return name


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None
