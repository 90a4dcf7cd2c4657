"""Models of one fused ONNX Runtime operator, and the same models with the operator split."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.find.fused_forms import unfuse, why_left
from ortolan.graph_passes.operators.nodes import NewNames

MICROSOFT = "com.microsoft"


def fused_model(
    op_type: str,
    inputs: Sequence[str],
    given: Mapping[str, tuple[np.ndarray, Sequence[int | str]]],
    constants: Mapping[str, np.ndarray],
    outputs: Sequence[str] = ("y",),
    opset: int = 17,
    domain: str = MICROSOFT,
    before: Sequence[onnx.NodeProto] = (),
    ranks: Mapping[str, int] | None = None,
    **attributes: Any,
) -> onnx.ModelProto:
    """Return a model of one operator.

    given: inputs with their dimensions.
    before: nodes before the operator.
    ranks: ranks of the outputs, by default 3; outputs of rank 1 are int32.
    """
    ranks = ranks or {}
    values = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), shape)
        for name, (array, shape) in given.items()
    ]
    graph = helper.make_graph(
        [*before, helper.make_node(op_type, inputs, outputs, name="fused", domain=domain, **attributes)],
        "test",
        values,
        [_output(name, ranks.get(name, 3)) for name in outputs if name],
        [numpy_helper.from_array(array, name) for name, array in constants.items()],
    )
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=8)


def _output(name: str, rank: int) -> onnx.ValueInfoProto:
    kind = TensorProto.INT32 if rank == 1 else TensorProto.FLOAT
    return helper.make_tensor_value_info(name, kind, [f"{name}_{axis}" for axis in range(rank)])


def unfused(model: onnx.ModelProto, tables: bool = True) -> tuple[onnx.ModelProto, list[str]]:
    """Split the fused operators; return the model, and the reasons for operators that stay fused."""
    loaded = ir.from_proto(model)
    unfuse(loaded, NewNames(loaded), tables)
    reasons = [reason for node in loaded.graph.all_nodes() if (reason := why_left(node)) is not None]
    return ir.to_proto(loaded), reasons
