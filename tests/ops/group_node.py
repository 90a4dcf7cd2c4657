"""Models of one W4A8MatMul or W8A8MatMul node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.linear_function import NORM_INPUTS
from ortolan.graph_passes.operators.w4a8_matmul_function import INPUTS, Uses, w4a8_matmul_function
from ortolan.graph_passes.operators.w8a8_matmul_function import w8a8_matmul_function

from .groups import GroupLayer
from .k_quants import KQuantLayer
from .subgroups import SubgroupLayer


def function(uses: Uses, opset: int = 17, unpack_once: bool = True, bits: int = 4) -> onnx.FunctionProto:
    make = w8a8_matmul_function if bits == 8 else w4a8_matmul_function
    proto: onnx.FunctionProto = ir.to_proto(make(opset, uses, unpack_once))
    return proto


def node_model(
    layer: GroupLayer,
    bias: np.ndarray | None = None,
    rank: int = 2,
    uses: Uses | None = None,
    opset: int = 17,
    residual: Sequence[int] | None = None,
    activation: Activation = Activation.NONE,
    unpack_once: bool = True,
    gated_columns: int = 0,
) -> onnx.ModelProto:
    """Return a model of one node "linear" with its function: input x [d0, …, k], output y.

    residual: shape of the residual input.
    """
    k, n = layer.q.shape
    tensors = {"weights": layer.packed_weights, "scales": layer.packed_scales.view(layer.scales.dtype)}
    tensors["bias"] = np.zeros(n, np.float32) if bias is None else bias
    leading = [f"d{i}" for i in range(rank - 1)]
    graph_inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*leading, k])]
    if residual is not None:
        graph_inputs.append(helper.make_tensor_value_info("residual", TensorProto.FLOAT, list(residual)))
    elif layer.zero_points is not None or layer.minimums is not None:
        tensors["residual"] = np.zeros(1, np.float32)
    if layer.zero_points is not None:
        tensors["zero_points"] = _native.pack_group_rows(layer.zero_points)
    if layer.minimums is not None:
        tensors["zero_points"] = np.zeros(1, np.uint8)
        tensors |= {name: np.ones(gated_columns or n, np.float32) for name in NORM_INPUTS}
        tensors["minimums"] = layer.packed_minimums.view(layer.minimums.dtype)
    inputs = ["x", *(name for name in INPUTS if name in tensors or (name == "residual" and residual is not None))]
    uses = uses or Uses(
        "zero_points" in tensors,
        "minimums" in tensors,
        activations=frozenset({activation}),
        residual=residual is not None,
        gated=gated_columns != 0,
    )
    node = helper.make_node(
        f"W{layer.bits}A8MatMul",
        inputs,
        ["y"],
        "linear",
        domain="ai.ortolan",
        k=k,
        n=n,
        format_version=1,
        group_size=layer.group,
        activation=int(activation),
        gated_columns=gated_columns,
        norm_epsilon=-1.0,
        **({"zero_point_steps": layer.steps} if layer.bits == 4 else {}),
    )
    shape = [*leading, gated_columns or n] if residual is None else None
    graph = helper.make_graph(
        [node],
        "single",
        graph_inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    return helper.make_model(
        graph,
        functions=[function(uses, opset, unpack_once, layer.bits)],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def subgroup_node_model(layer: SubgroupLayer | KQuantLayer) -> onnx.ModelProto:
    """Return a model of one node "linear" without a function: input x [m, k], output y [m, n]."""
    k, n = layer.q.shape
    given = {
        "weights": layer.packed_weights,
        "scales": layer.packed_scales.view(layer.scales.dtype),
        "minimums": None if layer.minimums is None else layer.packed_minimums.view(layer.minimums.dtype),
        "subgroup_scales": layer.packed_subgroup_scales,
        "high_bits": layer.packed_high_bits,
    }
    attributes = {"format_version": 2}
    if isinstance(layer, KQuantLayer):
        given["subgroup_minimums"] = layer.packed_subgroup_minimums
        attributes = {"format_version": 3, "subgroup_scale_bits": 8, "subgroup_zero_point": layer.kind.zero_point}
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    inputs = [name if name in tensors else "" for name in INPUTS[1:]]
    node = helper.make_node(
        "W4A8MatMul",
        ["x", *inputs],
        ["y"],
        "linear",
        domain="ai.ortolan",
        k=k,
        n=n,
        group_size=layer.group,
        subgroup_size=layer.subgroup,
        bits=layer.bits,
        activation=0,
        gated_columns=0,
        norm_epsilon=-1.0,
        **attributes,
    )
    graph = helper.make_graph(
        [node],
        "single",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["m", k])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, ["m", n])],
        [numpy_helper.from_array(array, name) for name, array in tensors.items()],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("ai.ortolan", 1)]
    return helper.make_model(graph, ir_version=8, opset_imports=opsets)
