"""Changes the pools of a decoder in the form for serving from bfloat16 to int8.

    kv_cache.N.key, .value               int8 [blocks, 16, kv_heads, head size]
    kv_cache.N.key_scale, .value_scale   float [blocks, kv_heads, 16]: a scale for each token and head
    -> also new_kv_cache.N.key_scale and .value_scale

The weights stay as they are, so a server does this when it opens a model.
"""

from __future__ import annotations

import onnx_ir as ir

from ortolan.errors import ModelError

from ..operators.nodes import NewNames
from ..operators.paged_attention_function import BLOCK_TOKENS
from ..operators.paged_attention_function import INPUTS as PAGED_INPUTS
from .form import is_serving_form, paged_nodes, put_paged_function


def use_int8_cache(model: ir.Model, name: str) -> None:
    """Make the pools of keys and values int8, in place. No effect on a model with int8 pools.

    Args:
        model: A decoder in the form for serving.
        name: The model's name in error messages.

    Raises:
        ModelError: The model has not the form for serving, or an attention without pools.
    """
    if not is_serving_form(model):
        raise ModelError(f"{name} has not the form for serving, expected a model of optimize_onnx(serve=True)")
    new_name = NewNames(model)
    graph = model.graph
    for node in paged_nodes(graph):
        pools = [node.inputs[PAGED_INPUTS.index(part)] for part in ("key_pool", "value_pool")]
        if any(pool is None for pool in pools):
            raise ModelError(f"attention {node.name!r} of {name} has no pools, expected key_pool and value_pool")
        if all(pool is not None and pool.dtype == ir.DataType.INT8 for pool in pools):
            continue
        node.resize_inputs(len(PAGED_INPUTS))
        node.resize_outputs(1 + 2 * len(pools))
        for index, pool in enumerate(pools):
            assert pool is not None and pool.shape is not None
            new_pool = node.outputs[1 + index]
            pool.type = new_pool.type = ir.TensorType(ir.DataType.INT8)
            shape = ir.Shape([pool.shape[0], pool.shape[2], BLOCK_TOKENS])
            scales = ir.Value(name=f"{pool.name}_scale", type=ir.TensorType(ir.DataType.FLOAT), shape=shape)
            new_scales = node.outputs[1 + len(pools) + index]
            new_scales.name, new_scales.type, new_scales.shape = f"new_{scales.name}", scales.type, shape
            node.replace_input_with(PAGED_INPUTS.index("key_scales") + index, scales)
            graph.inputs.append(scales)
            graph.outputs.append(new_scales)
    put_paged_function(model, new_name)
