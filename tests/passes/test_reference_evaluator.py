"""onnx's reference evaluator runs the operator's function with the same answers as the kernels."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from ortolan import _native
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.operators.sparse_amx_matmul_function import Uses, sparse_amx_matmul_function

from ..ops.linear_kinds import GROUPS, attributes, packed, scales, uses
from ..ops.quantized import Layer
from ..ops.single_node import session, sparse_amx_matmul_model, sparse_weight
from .small_models import relative_error

ALL = Uses(frozenset({16, 8, 4}), True, activations=frozenset(Activation), residual=True)


@pytest.mark.parametrize("unpack_once", [True, False])
@pytest.mark.parametrize("opset", [13, 18, 23])
@pytest.mark.parametrize("kind", ["bf16", *GROUPS])
def test_function_in_the_reference_evaluator(kind: str, opset: int, unpack_once: bool) -> None:
    """Test the function for this node alone, and the function of a model with layers of all kinds."""
    k, n = 70, 19
    rng = np.random.default_rng(opset)
    x, residual = (rng.standard_normal((3, size), dtype=np.float32) for size in (k, n))
    for activation in Activation:
        dense = activation % 2 == 0
        if kind == "bf16":
            weight = _native.pack_bitmap(sparse_weight(rng, k, n, 0.5), dense)
            weight_scales = np.ones((2, 1, 16), np.float32)
        else:
            layer = Layer.random(rng, k, n, 0.5, GROUPS[kind], scale=0.01)
            weight, weight_scales = packed(layer, dense), scales(layer)
        for needed in (uses(kind, dense, activation, True), ALL):
            model = sparse_amx_matmul_model(
                weight,
                k,
                n,
                rng.standard_normal(n, dtype=np.float32),
                functions=(ir.to_proto(sparse_amx_matmul_function(opset, needed, unpack_once)),),
                opset=opset,
                scales=weight_scales,
                residual=residual,
                **attributes(kind, activation),
            )
            model.graph.output[0].CopyFrom(helper.make_tensor_value_info("y", TensorProto.FLOAT, ["d0", n]))
            onnx.checker.check_model(model, full_check=True)
            found = ReferenceEvaluator(model).run(None, {"x": x})[0]
            expected = session(model).run(None, {"x": x})[0]
            assert found.shape == expected.shape and relative_error(expected, found) < 1e-6
