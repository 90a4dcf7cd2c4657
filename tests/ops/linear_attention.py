"""Models of one LinearAttention node, random feeds, and the recurrence in float64."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from ortolan.graph_passes.operators.linear_attention import (
    INPUTS,
    UPDATE_RULES,
    linear_attention_function,
    linear_attention_node,
    unused_inputs,
)

from .single_node import session

Floats = NDArray[np.float32]
RULES = tuple(UPDATE_RULES)


@dataclass(frozen=True)
class Setup:
    """A node and the sizes of its inputs."""

    rule: str = "gated_delta"
    heads: tuple[int, int, int] = (2, 2, 4)  # of query, key and value
    key_size: int = 24
    value_size: int = 40
    row_decays: bool = False
    head_betas: bool = True
    scale: float = 0.0  # 0: 1 / sqrt(key_size)


def node_model(setup: Setup, opset: int = 21, **attributes: Any) -> onnx.ModelProto:
    """Return a model of one LinearAttention node "scan" with its function. Outputs are y and state."""
    queries, _, values = setup.heads
    given = {"q_num_heads": queries, "kv_num_heads": values, "update_rule": setup.rule, "scale": setup.scale}
    node = linear_attention_node([ir.val(name) for name in INPUTS], given, "scan")
    unused = {name: array for name, array in unused_inputs(node).items() if name not in UPDATE_RULES[setup.rule]}
    for output, name in zip(node.outputs, ("y", "state"), strict=True):
        output.name = name
    proto = ir.to_proto(node)
    for name, value in attributes.items():
        kept = [one for one in proto.attribute if one.name != name]
        del proto.attribute[:]
        proto.attribute.extend(kept)
        if value is not None:
            proto.attribute.append(helper.make_attribute(name, value))
    ranks = {name: 4 if name == "past_state" else 3 for name in INPUTS if name not in unused}
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [f"{name}{axis}" for axis in range(rank)])
        for name, rank in ranks.items()
    ]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "state")]
    initializers = [numpy_helper.from_array(array, name) for name, array in unused.items()]
    graph = helper.make_graph([proto], "single", inputs, outputs, initializers)
    domains = {"": opset, "ai.ortolan": 1, "com.microsoft": 1}
    return helper.make_model(
        graph,
        functions=[ir.to_proto(linear_attention_function(opset))],
        ir_version=10,
        opset_imports=[helper.make_opsetid(domain, version) for domain, version in domains.items()],
    )


def random_feeds(setup: Setup, batch: int, tokens: int, seed: int = 0) -> dict[str, Floats]:
    """Return feeds such as those of trained models: keys of length 1, and states that decay slowly."""
    rng = np.random.default_rng(seed)
    queries, keys, values = setup.heads

    def normal(*shape: int) -> Floats:
        return rng.standard_normal(shape, dtype=np.float32)

    key = normal(batch, tokens, keys, setup.key_size)
    key /= np.sqrt((key * key).sum(-1, keepdims=True)) + 1e-6
    feeds = {
        "query": normal(batch, tokens, queries * setup.key_size),
        "key": key.reshape(batch, tokens, keys * setup.key_size),
        "value": normal(batch, tokens, values * setup.value_size),
        "past_state": normal(batch, values, setup.key_size, setup.value_size),
        "decay": -0.2 * np.abs(normal(batch, tokens, values * (setup.key_size if setup.row_decays else 1))),
        "beta": 1 / (1 + np.exp(-normal(batch, tokens, values if setup.head_betas else 1))),
    }
    return {name: feeds[name] for name in (*INPUTS[:4], *UPDATE_RULES[setup.rule])}


def reference(setup: Setup, feeds: dict[str, Floats]) -> tuple[np.ndarray, np.ndarray]:
    """Return the outputs in float64, token by token."""
    queries, keys, values = setup.heads
    wide = {name: array.astype(np.float64) for name, array in feeds.items()}
    batch, tokens = wide["query"].shape[:2]

    def split(name: str, heads: int, repeat: int) -> np.ndarray:
        size = wide[name].shape[2] // heads
        return wide[name].reshape(batch, tokens, heads, size).repeat(repeat, axis=2)

    query = split("query", queries, max(1, values // queries))
    key, value = split("key", keys, values // keys), split("value", values, 1)
    decay = split("decay", values, 1) if "decay" in wide else np.zeros((batch, tokens, values, 1))
    beta = wide["beta"][..., None] if "beta" in wide else np.ones((batch, tokens, values, 1))
    state = wide["past_state"].copy()
    outputs = np.empty((batch, tokens, max(queries, values), setup.value_size))
    for t in range(tokens):
        state *= np.exp(decay[:, t])[..., None]
        update = value[:, t]
        if "beta" in wide:
            update = beta[:, t] * (update - np.einsum("bhkv,bhk->bhv", state, key[:, t]))
        state += np.einsum("bhk,bhv->bhkv", key[:, t], update)
        shared = state.repeat(max(1, queries // values), axis=1)
        outputs[:, t] = np.einsum("bhkv,bhk->bhv", shared, query[:, t])
    outputs = outputs.reshape(batch, tokens, outputs.shape[2] * setup.value_size)
    return outputs * (setup.scale or setup.key_size**-0.5), state


def answer(setup: Setup, feeds: dict[str, Floats], **how: Any) -> list[Floats]:
    return session(node_model(setup), **how).run(None, feeds)


def digest() -> str:
    """Return a digest of LinearAttention's results on the instruction set of this process."""
    found = hashlib.sha256()
    for rule in RULES:
        for row_decays in (False, True):
            setup = Setup(rule, value_size=70, row_decays=row_decays)
            for output in answer(setup, random_feeds(setup, 2, 9)):
                found.update(output.tobytes())
    return found.hexdigest()
