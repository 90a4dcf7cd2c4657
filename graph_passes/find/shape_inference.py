"""Runs onnx's shape inference on single nodes."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

_MOST_NUMBERS = 64  # limit of the elements of a constant that shapes may depend on

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


def _size(dim: onnx.TensorShapeProto.Dimension) -> int | str | None:
    if dim.HasField("dim_value"):
        return int(dim.dim_value)
    return dim.dim_param or None
