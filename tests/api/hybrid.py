"""Small random hybrid decoders, with the operators and names of ONNX Runtime GenAI's builder.

Layer 0 is a causal convolution and a recurrence with their states, layer 1 grouped-query attention. The recurrence is a
gated delta rule, or Mamba 2, which the builder does not write, as ONNX Runtime's LinearAttention expresses it.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

VOCABULARY, HIDDEN, HEADS, SIZE, KERNEL = 61, 32, 2, 16, 4
MICROSOFT = "com.microsoft"


class _Graph:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def weight(self, name: str, *shape: int) -> str:
        values = self.rng.standard_normal(shape) / np.sqrt(shape[0])
        return self.constant(name, values.astype(np.float32))

    def constant(self, name: str, values: np.ndarray) -> str:
        self.weights.append(numpy_helper.from_array(values, name))
        return name

    def node(self, kind: str, inputs: list[str], *outputs: str, domain: str = "", **attributes: object) -> str:
        self.nodes.append(
            helper.make_node(kind, inputs, outputs, name="/".join((kind, *outputs)), domain=domain, **attributes)
        )
        return outputs[0]

    def linear(self, x: str, name: str, k: int, n: int) -> str:
        return self.node("MatMul", [x, self.weight(f"{name}.weight", k, n)], name)


def hybrid(kind: str = "delta", seed: int = 0) -> onnx.ModelProto:
    """Return a decoder whose layer 0 is a key of LAYERS."""
    graph = _Graph(seed)
    x = graph.node("Gather", [graph.weight("embed", VOCABULARY, HIDDEN), "input_ids"], "x")
    x = LAYERS[kind](graph, x)
    x = _attention_layer(graph, x)
    graph.linear(x, "logits", HIDDEN, VOCABULARY)
    floats = TensorProto.FLOAT
    sizes = {
        "past.0.conv": ("batch_size", 3 * HIDDEN, KERNEL - 1),
        "past.0.recurrent": ("batch_size", HEADS, SIZE, SIZE),
        **{f"past_key_values.1.{kind}": ("batch_size", 1, "past_sequence_length", SIZE) for kind in ("key", "value")},
    }
    ids = [("input_ids", "sequence_length"), ("attention_mask", "total_sequence_length")]
    inputs = [helper.make_tensor_value_info(name, TensorProto.INT64, ("batch_size", size)) for name, size in ids]
    inputs += [helper.make_tensor_value_info(name, floats, size) for name, size in sizes.items()]
    outputs = [helper.make_tensor_value_info("logits", floats, ("batch_size", "sequence_length", VOCABULARY))]
    for name, size in sizes.items():
        name = name.replace("past_key_values.", "present.").replace("past.", "present.")
        size = tuple("total_sequence_length" if one == "past_sequence_length" else one for one in size)
        outputs.append(helper.make_tensor_value_info(name, floats, size))
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(MICROSOFT, 1)]
    made = helper.make_graph(graph.nodes, "hybrid", inputs, outputs, graph.weights)
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def _delta_layer(graph: _Graph, x: str) -> str:
    _convolved(graph, x, "q", "k", "v")
    rates = graph.linear(x, "rates", HIDDEN, HEADS)
    decay = graph.node("Neg", [graph.node("Softplus", [rates], "softplus")], "decay")
    beta = graph.node("Sigmoid", [graph.linear(x, "beta_logits", HIDDEN, HEADS)], "beta")
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "update_rule": "gated_delta", "scale": SIZE**-0.5}
    mixed = ["mixed", "present.0.recurrent"]
    graph.node("LinearAttention", ["q", "k", "v", "past.0.recurrent", decay, beta], *mixed, domain=MICROSOFT, **heads)
    return graph.node("Add", [x, graph.linear("mixed", "delta_out", HIDDEN, HIDDEN)], "x1")


def _mamba_layer(graph: _Graph, x: str) -> str:
    """Mamba 2 with a group of B and C per head: keys are B, queries C, values x times the time step."""
    _convolved(graph, x, "C", "B", "inner")
    bias = graph.weight("step_bias", HEADS)
    steps = graph.node("Add", [graph.linear(x, "steps", HIDDEN, HEADS), bias], "biased_steps")
    steps = graph.node("Softplus", [steps], "dt")
    rates = graph.constant("A", -np.exp(graph.rng.uniform(-1, 1, HEADS)).astype(np.float32))
    decay = graph.node("Mul", [steps, rates], "decay")
    by_head = graph.constant("by_head", np.array([0, 0, HEADS, SIZE], np.int64))
    flat = graph.constant("flat", np.array([0, 0, HIDDEN], np.int64))
    last = graph.constant("last_axis", np.array([-1], np.int64))
    inner = graph.node("Reshape", ["inner", by_head], "inner_heads")
    steps = graph.node("Unsqueeze", [steps, last], "dt_heads")
    value = graph.node("Reshape", [graph.node("Mul", [inner, steps], "scaled_heads"), flat], "scaled")
    heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "update_rule": "gated", "scale": 1.0}
    scanned = ["scanned", "present.0.recurrent"]
    graph.node("LinearAttention", ["C", "B", value, "past.0.recurrent", decay], *scanned, domain=MICROSOFT, **heads)
    skipped = graph.node("Mul", [inner, graph.weight("D", HEADS, 1)], "skipped_heads")
    y = graph.node("Add", ["scanned", graph.node("Reshape", [skipped, flat], "skipped")], "y")
    z = graph.linear(x, "z", HIDDEN, HIDDEN)
    gated = graph.node("Mul", [y, graph.node("Mul", [z, graph.node("Sigmoid", [z], "z_gate")], "z_silu")], "gated")
    return graph.node("Add", [x, graph.linear(gated, "mamba_out", HIDDEN, HIDDEN)], "x1")


LAYERS: dict[str, Callable[[_Graph, str], str]] = {"delta": _delta_layer, "mamba2": _mamba_layer}


def _convolved(graph: _Graph, x: str, *parts: str) -> None:
    """Add a linear layer to three parts and their causal convolution."""
    wide = graph.linear(x, "in_proj", HIDDEN, 3 * HIDDEN)
    turned = graph.node("Transpose", [wide], "channels_first", perm=[0, 2, 1])
    weight = graph.weight("conv.weight", 3 * HIDDEN, 1, KERNEL)
    bias = graph.weight("conv.bias", 3 * HIDDEN)
    conv = ["conv", "present.0.conv"]
    options = {"ndim": 1, "activation": "silu"}
    turned = graph.node(
        "CausalConvWithState", [turned, weight, bias, "past.0.conv"], *conv, domain=MICROSOFT, **options
    )
    back = graph.node("Transpose", [turned], "channels_last", perm=[0, 2, 1])
    graph.node("Split", [back], *parts, axis=-1, num_outputs=len(parts))


def _attention_layer(graph: _Graph, x: str) -> str:
    q, k, v = (graph.linear(x, f"{name}_proj", HIDDEN, n) for name, n in (("q", HIDDEN), ("k", SIZE), ("v", SIZE)))
    one, axis = graph.constant("one", np.array([1], np.int64)), graph.constant("axis", np.array([1], np.int64))
    total = graph.node("ReduceSum", ["attention_mask", axis], "mask_sum", keepdims=0)
    last = graph.node("Sub", [total, one], "last")
    lengths = graph.node("Cast", [last], "lengths", to=TensorProto.INT32)
    shape = graph.node("Shape", ["attention_mask"], "mask_shape", start=1, end=2)
    squeezed = graph.node("Squeeze", [shape], "total64")
    count = graph.node("Cast", [squeezed], "total", to=TensorProto.INT32)
    inputs = [q, k, v, "past_key_values.1.key", "past_key_values.1.value", lengths, count]
    outputs = ["attended", "present.1.key", "present.1.value"]
    graph.node("GroupQueryAttention", inputs, *outputs, domain=MICROSOFT, num_heads=HEADS, kv_num_heads=1)
    return graph.node("Add", [x, graph.linear("attended", "o_proj", HIDDEN, HIDDEN)], "x2")
