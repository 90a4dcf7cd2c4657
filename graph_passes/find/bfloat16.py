"""Converts models that compute in bfloat16 to float32: ONNX Runtime's CPU provider has few bfloat16 operators."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from ..files.model_file import ModelFile, tensor_slots
from ..names import ORTOLAN_DOMAIN
from .constants import DEFAULT_DOMAINS, lazy
from .dimensions import Dimensions

_BFLOAT16 = ir.DataType.BFLOAT16
# Operators that ONNX Runtime's CPU provider supports with bfloat16 values: they only move or convert them.
_NAMES = """
Cast CastLike Concat Constant DequantizeLinear Expand Flatten Gather GatherElements GatherND Identity If Loop
QuantizeLinear Reshape Scan Shape Size Slice Split Squeeze Tile Transpose Unsqueeze
"""
_RUNS = frozenset(_NAMES.split())
_TYPES = ("to", "dtype", "output_dtype")  # attributes that name an element type


def widen_bfloat16(file: ModelFile) -> None:
    """Convert a model that computes in bfloat16 to float32, in memory, and set `file.widened`."""
    if _computes_in_bfloat16(file.model):
        _widen(file.model)
        file.widened = True


def _computes_in_bfloat16(model: ir.Model) -> bool:
    """Return whether a standard operator computes on bfloat16."""
    nodes = list(model.graph.all_nodes())
    stores = any(tensor.dtype == _BFLOAT16 for tensor, _ in tensor_slots(model))
    if not (stores or any(_named_type(node) for node in nodes) or any(map(_is_bfloat16, model.graph.inputs))):
        return False
    if any(node.domain == ORTOLAN_DOMAIN for node in nodes):
        return False
    for graph in model.graphs():
        dims = Dimensions(graph)
        for node in graph:
            known = node.domain not in DEFAULT_DOMAINS or node.op_type in _RUNS
            if not known and any(dims.dtype(value) == _BFLOAT16 for value in node.inputs):
                return True
    return False


def _widen(model: ir.Model) -> None:
    """Change all bfloat16 values to float32. Tensors are converted lazily, when they are read."""
    for tensor, put in list(tensor_slots(model)):
        if tensor.dtype == _BFLOAT16:
            put(
                lazy(
                    lambda tensor=tensor: tensor.numpy().astype(np.float32),  # type: ignore[misc]
                    ir.DataType.FLOAT,
                    ir.Shape(tensor.shape.numpy()),
                    tensor.name,
                )
            )
    for graph in model.graphs():
        values = [*graph.inputs, *graph.outputs, *graph.initializers.values()]
        for value in [*values, *(output for node in graph for output in node.outputs)]:
            if _is_bfloat16(value):
                value.dtype = ir.DataType.FLOAT
    for node in model.graph.all_nodes():
        for name in _named_type(node):
            node.attributes[name] = ir.AttrInt64(name, ir.DataType.FLOAT.value)


def _is_bfloat16(value: ir.Value) -> bool:
    return value.dtype == _BFLOAT16


def _named_type(node: ir.Node) -> list[str]:
    """Return the names of the attributes whose value is the type bfloat16."""
    found = [name for name in _TYPES if name in node.attributes]
    return [
        name
        for name in found
        if node.attributes[name].type == ir.AttributeType.INT
        and not node.attributes[name].is_ref()
        and node.attributes[name].as_int() == _BFLOAT16.value
    ]
