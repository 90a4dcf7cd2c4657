"""Reads the packed weight of an optimized model."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import numpy_helper

from ortolan import _native
from ortolan.graph_passes.operators.sparse_amx_matmul_function import INPUTS


def dense_integers(model: onnx.ModelProto, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the weight of the SparseAMXMatMul node of this name: int8 [k, n], scales and zero points [n]."""
    (node,) = [node for node in model.graph.node if node.op_type == "SparseAMXMatMul" and node.name == name]
    sizes = {attribute.name: attribute.i for attribute in node.attribute}
    tensors = {tensor.name: numpy_helper.to_array(tensor) for tensor in model.graph.initializer}
    of = dict(zip(INPUTS, node.input, strict=False))
    masks, values, offsets, scales = (tensors[of[part]] for part in ("masks", "values", "offsets", "scales"))
    k, n = sizes["k"], sizes["n"]
    zeros = tensors.get(of.get("zero_points", ""), np.zeros(1, np.int8))
    zeros = np.broadcast_to(zeros.reshape(-1), scales.size)
    return _native.unpack_bitmap_int8(masks, values, offsets, k, n), scales.reshape(-1)[:n], zeros[:n]
