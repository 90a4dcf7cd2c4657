"""ONNX Runtime's int8 cache, for comparison with compressed caches: keys and values of GroupQueryAttention in int8."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx

from ..errors import OrtolanError
from ..generate import Decoder
from ..session import create_session

_SCALES = 12  # input index of GroupQueryAttention for the keys' scales; the values' scales follow
_LARGEST = 127


def write_int8_cache(path: str | os.PathLike[str], ids: Sequence[int]) -> None:
    """Change a model file to int8 caches, with a scale per channel: the largest value of the tokens `ids`.

    The model has GroupQueryAttention with float32 caches, as build_llama makes it with "gqa". Weights in an external
    file stay in that file.

    Raises:
        OrtolanError: The model has no such attention.
    """
    path = Path(path)
    model = onnx.load(path, load_external_data=False)
    nodes = [node for node in model.graph.node if node.op_type == "GroupQueryAttention"]
    if not nodes:
        raise OrtolanError(f"{path} has no GroupQueryAttention; expected a model built with attention='gqa'")
    decoder = Decoder(create_session(path))
    decoder.step(ids)
    cache = decoder.cache()
    for node in nodes:
        names = []
        for past, kind in zip(node.input[3:5], ("k_scale", "v_scale"), strict=True):
            largest = np.abs(cache[past][0]).max(axis=1)  # [heads, head size]
            scale = np.maximum(largest, np.float32(1e-6)).ravel() / np.float32(_LARGEST)
            names.append(f"{past}.{kind}")
            model.graph.initializer.append(onnx.numpy_helper.from_array(scale.astype(np.float32), names[-1]))
        node.input.extend([""] * (_SCALES - len(node.input)) + names)
        for name, value in {
            "k_quant_type": "PER_CHANNEL",
            "v_quant_type": "PER_CHANNEL",
            "kv_cache_bit_width": 8,
        }.items():
            node.attribute.append(onnx.helper.make_attribute(name, value))
    for value in (*model.graph.input, *model.graph.output):
        if value.name.startswith(("past_key_values.", "present.")):
            value.type.tensor_type.elem_type = onnx.TensorProto.INT8
    del model.graph.value_info[:]
    onnx.save(model, path)
