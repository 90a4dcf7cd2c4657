"""Models of one VNNISpMM node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.vnni_spmm_function import INPUTS, Uses, neutral_inputs, vnni_spmm_function

from .block_sparse import BlockSparseLayer, HiddenLayer, Range


def function(uses: Uses, opset: int = 17, unpack_once: bool = True) -> onnx.FunctionProto:
    proto: onnx.FunctionProto = ir.to_proto(vnni_spmm_function(opset, uses, unpack_once))
    return proto


@dataclass(frozen=True)
class LayerNorm:
    """The LayerNormalization after the linear layer."""

    weight: np.ndarray  # float32 [columns of y]
    bias: np.ndarray  # float32 [columns of y]
    epsilon: float

    @classmethod
    def random(cls, rng: np.random.Generator, n: int, epsilon: float = 1e-5) -> LayerNorm:
        return cls(rng.standard_normal(n, dtype=np.float32) + 1, rng.standard_normal(n, dtype=np.float32), epsilon)

    def check(self, y: np.ndarray, x: np.ndarray) -> None:
        """Check that y is the LayerNormalization of x within the error of float32 and of some roundings of x."""
        wide = x.astype(np.float64)
        s = np.sqrt(wide.var(axis=-1, keepdims=True) + self.epsilon)
        p = (wide - wide.mean(axis=-1, keepdims=True)) / s
        most = np.abs(wide).max(axis=-1, keepdims=True, initial=0)
        error = 2.0**-18 * (np.abs(self.weight) * (np.abs(p) + most / s) + np.abs(self.bias))
        assert y.shape == x.shape and y.dtype == np.float32
        assert np.all(np.abs(y - (p * self.weight + self.bias)) <= error)


def node_model(
    layer: BlockSparseLayer,
    bias: np.ndarray | None = None,
    rank: int = 2,
    opset: int = 17,
    residual: Sequence[int] | None = None,
    activation: Activation = Activation.NONE,
    unpack_once: bool = True,
    gated_columns: int = 0,
    x_range: Range | None = None,
    hidden: HiddenLayer | None = None,
    norm: LayerNorm | None = None,
    uses: Uses | None = None,
) -> onnx.ModelProto:
    """Return a model of one VNNISpMM node "linear" with its function: input x [d0, …, k], output y.

    Args:
        residual: shape of the residual input.
        hidden: a hidden layer before this one, with the range of x.
        uses: function features that other nodes need; this node then gets neutral inputs for them.
    """
    k, n = layer.q.shape
    own = uses is None
    if uses is None:
        fixed = x_range is not None or hidden is not None
        uses = Uses(
            activations=frozenset({activation}),
            residual=residual is not None,
            gated=gated_columns != 0,
            norm=norm is not None,
            own_ranges=not fixed,
            x_range=fixed,
            hidden=hidden is not None,
            plain=hidden is None,
        )
    tensors = dict(zip(("values", "indices", "starts"), _native.pack_block_sparse(layer.q), strict=True))
    tensors["scales"] = layer.scales
    if bias is not None:
        tensors["bias"] = bias
    if norm is not None:
        tensors |= {"norm_weight": norm.weight, "norm_bias": norm.bias}
    if hidden is not None:
        x_range = hidden.x
        packed = _native.pack_block_sparse(hidden.layer.q)
        tensors |= dict(zip(("hidden_values", "hidden_indices", "hidden_starts"), packed, strict=True))
        tensors |= {"hidden_scales": hidden.layer.scales, "table": hidden.table}
        tensors["hidden_bias"] = np.zeros(k, np.float32) if hidden.bias is None else hidden.bias
        tensors |= range_tensors("table_x", hidden.table_x) | range_tensors("table_y", hidden.table_y)
    if x_range is not None:
        tensors |= range_tensors("x", x_range)
    if not own or x_range is not None or norm is not None:
        after = "hidden_values" if uses.x_range else "x_scale"
        needed = INPUTS if uses.hidden else INPUTS[: INPUTS.index(after)]
        given = {"residual"} if residual is not None else set()
        tensors |= {
            name: array
            for name, array in neutral_inputs(k, n, gated_columns).items()
            if name in needed and name not in tensors and name not in given
        }
    inputs = ["x", *(name if name in tensors else "" for name in INPUTS[1:])]
    if residual is not None:
        inputs[INPUTS.index("residual")] = "residual"
    while not inputs[-1]:
        inputs.pop()
    leading = [f"d{i}" for i in range(rank - 1)]
    width = k if hidden is None else len(hidden.layer.q)
    graph_inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [*leading, width])]
    if residual is not None:
        graph_inputs.append(helper.make_tensor_value_info("residual", TensorProto.FLOAT, list(residual)))
    node = helper.make_node(
        "VNNISpMM",
        inputs,
        ["y"],
        "linear",
        domain="ai.ortolan",
        k=k,
        n=n,
        format_version=1,
        activation=int(activation),
        gated_columns=gated_columns,
        hidden_k=0 if hidden is None else width,
        norm_epsilon=-1.0 if norm is None else norm.epsilon,
    )
    shape = [*leading, gated_columns or n] if residual is None else None
    graph = helper.make_graph(
        [node],
        "single",
        graph_inputs,
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
        [numpy_helper.from_array(np.asarray(array), name) for name, array in tensors.items()],
    )
    return helper.make_model(
        graph,
        functions=[function(uses, opset, unpack_once)],
        ir_version=8,
        opset_imports=[helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)],
    )


def range_tensors(name: str, given: Range) -> dict[str, np.ndarray]:
    return {f"{name}_scale": np.float32(given.scale), f"{name}_zero_point": np.uint8(given.zero_point)}


def set_attribute(node: onnx.NodeProto, name: str, value: int) -> None:
    next(a for a in node.attribute if a.name == name).i = value
