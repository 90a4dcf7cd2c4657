"""A small encoder-decoder model in the files that Optimum writes, and a greedy decoder for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import NodeProto, TensorProto, helper, numpy_helper

import ortolan

H, D, VOCABULARY, START = 2, 16, 40, 1
W = H * D
FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
KINDS = ("decoder.key", "decoder.value", "encoder.key", "encoder.value")
ENCODER, DECODER, WITH_PAST, MERGED = (
    f"{name}.onnx" for name in ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged")
)
Types = dict[str, tuple[int, list[Any]]]
BATCH, TEXT, NEW, PAST = (
    "batch_size",
    "encoder_sequence_length",
    "decoder_sequence_length",
    "past_decoder_sequence_length",
)
TOTAL = f"{PAST} + {NEW}"


def weight(name: str, *shape: int) -> np.ndarray:
    """Return a random weight that depends only on the name, so it is equal in all files."""
    rng = np.random.default_rng(sum(map(ord, name)))
    return (rng.standard_normal(shape) / np.sqrt(shape[0]) * 1.5).astype(np.float32)


class Graph:
    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self.weights: dict[str, np.ndarray] = {}

    def op(self, op_type: str, *inputs: str | np.ndarray, output: str | None = None, **attributes: Any) -> str:
        names = []
        for one in inputs:
            if not isinstance(one, str):
                self.weights[f"c{len(self.weights)}"] = np.asarray(one)
                one = f"c{len(self.weights) - 1}"
            names.append(one)
        output = output or f"{op_type}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op_type, names, [output], f"/{output}", **attributes))
        return output

    def linear(self, name: str, x: str, width: int = W) -> str:
        self.weights[name] = weight(name, W, width)
        product = self.op("MatMul", x, name)
        self.nodes[-1].name = f"/{name}/MatMul"  # node names must also be equal in all files
        return product

    def embedded(self, ids: str) -> str:
        self.weights["embedding"] = weight("embedding", VOCABULARY, W)
        return self.op("Gather", "embedding", ids)

    def heads(self, x: str, output: str | None = None) -> str:
        split = self.op("Reshape", x, np.array([0, 0, H, D], np.int64))
        return self.op("Transpose", split, perm=[0, 2, 1, 3], output=output)

    def attention(self, name: str, x: str, key: str, value: str, mask: str) -> str:
        query = self.heads(self.linear(f"{name}.q", x))
        scores = self.op("MatMul", query, self.op("Transpose", key, perm=[0, 1, 3, 2]))
        scores = self.op("Add", self.op("Mul", scores, np.float32(D**-0.5)), mask)
        context = self.op("MatMul", self.op("Softmax", scores, axis=-1), value)
        merged = self.op("Reshape", self.op("Transpose", context, perm=[0, 2, 1, 3]), np.array([0, 0, W], np.int64))
        return self.op("Add", x, self.linear(f"{name}.o", merged))

    def hidden(self, visible: str) -> str:
        return self.op("Where", visible, np.float32(0), np.finfo(np.float32).min)

    def text_mask(self, mask: str) -> str:
        seen = self.op("Cast", self.op("Unsqueeze", mask, np.array([1, 2], np.int64)), to=BOOL)
        return self.hidden(seen)


def encoder() -> onnx.ModelProto:
    graph = Graph()
    x = graph.embedded("input_ids")
    key, value = (graph.heads(graph.linear(f"encoder.{name}", x)) for name in "kv")
    x = graph.attention("encoder", x, key, value, graph.text_mask("attention_mask"))
    graph.op("Add", x, graph.op("Tanh", graph.linear("encoder.mlp", x)), output="last_hidden_state")
    text = {"input_ids": (INT64, [BATCH, TEXT]), "attention_mask": (INT64, [BATCH, TEXT])}
    return model(graph.nodes, text, {"last_hidden_state": (FLOAT, [BATCH, TEXT, W])}, graph.weights)


def decoder_graph(with_past: bool) -> Graph:
    graph = Graph()
    x = graph.embedded("input_ids")
    new = [graph.linear(f"self.{name}", x) for name in "kv"]
    if with_past:
        key, value = (
            graph.op("Concat", f"past_key_values.0.{kind}", graph.heads(one), axis=2, output=f"present.0.{kind}")
            for kind, one in zip(KINDS[:2], new, strict=True)
        )
        text = [f"past_key_values.0.{kind}" for kind in KINDS[2:]]
    else:
        key, value = (graph.heads(one, f"present.0.{kind}") for kind, one in zip(KINDS[:2], new, strict=True))
        projected = [graph.linear(f"cross.{name}", "encoder_hidden_states") for name in "kv"]
        text = [graph.heads(one, f"present.0.{kind}") for kind, one in zip(KINDS[2:], projected, strict=True)]
    size = [graph.op("Gather", graph.op("Shape", one), np.array(axis, np.int64)) for one, axis in ((key, 2), (x, 1))]
    zero, one = np.array(0, np.int64), np.array(1, np.int64)
    places = graph.op("Add", graph.op("Range", zero, size[1], one), graph.op("Sub", *size))
    rows = graph.op("Unsqueeze", places, np.array([1], np.int64))
    causal = graph.hidden(graph.op("LessOrEqual", graph.op("Range", zero, size[0], one), rows))
    x = graph.attention("self", x, key, value, causal)
    x = graph.attention("cross", x, text[0], text[1], graph.text_mask("encoder_attention_mask"))
    x = graph.op("Add", x, graph.op("Tanh", graph.linear("mlp", x)))
    graph.weights["head"] = weight("head", W, VOCABULARY)
    graph.op("MatMul", x, "head", output="logits")
    return graph


def cache(prefix: str, tokens: str, kinds: tuple[str, ...] = KINDS) -> Types:
    length = {"decoder": tokens, "encoder": TEXT}
    return {f"{prefix}.0.{kind}": (FLOAT, [BATCH, H, length[kind.split(".")[0]], D]) for kind in kinds}


IDS: Types = {"encoder_attention_mask": (INT64, [BATCH, TEXT]), "input_ids": (INT64, [BATCH, NEW])}
HIDDEN: Types = {"encoder_hidden_states": (FLOAT, [BATCH, TEXT, W])}
LOGITS: Types = {"logits": (FLOAT, [BATCH, NEW, VOCABULARY])}


def decoder(with_past: bool) -> onnx.ModelProto:
    graph = decoder_graph(with_past)
    if with_past:
        outputs = LOGITS | cache("present", TOTAL, KINDS[:2])
        return model(graph.nodes, IDS | cache("past_key_values", PAST), outputs, graph.weights)
    return model(graph.nodes, IDS | HIDDEN, LOGITS | cache("present", NEW), graph.weights)


def merged() -> onnx.ModelProto:
    """Return an If with both decoders as branches; the branch with a past returns empty encoder caches."""
    weights: dict[str, np.ndarray] = {}
    branches = {}
    outputs = LOGITS | cache("present", TOTAL)
    for name, with_past in (("then_branch", True), ("else_branch", False)):
        graph = decoder_graph(with_past)
        if with_past:
            for kind in KINDS[2:]:
                empty = numpy_helper.from_array(np.zeros((0, H, 1, D), np.float32))
                graph.nodes.append(helper.make_node("Constant", [], [f"present.0.{kind}"], f"/{kind}", value=empty))
        renamed = {one: f"{name}.{one}" if one.startswith("c") and one[1:].isdigit() else one for one in graph.weights}
        for node in graph.nodes:
            node.input[:] = [renamed.get(one, one) for one in node.input]
            node.name = node.name if node.name.endswith("/MatMul") else f"/{name}{node.name}"
        weights |= {renamed[one]: array for one, array in graph.weights.items()}
        values = [helper.make_tensor_value_info(one, FLOAT, shape) for one, (_, shape) in outputs.items()]
        branches[name] = helper.make_graph(graph.nodes, name, [], values)
    node = helper.make_node("If", ["use_cache_branch"], list(outputs), "/if", **branches)
    flag: Types = {"use_cache_branch": (BOOL, [1])}
    return model([node], IDS | HIDDEN | cache("past_key_values", PAST) | flag, outputs, weights)


def model(nodes: list[NodeProto], inputs: Types, outputs: Types, weights: Mapping[str, np.ndarray]) -> onnx.ModelProto:
    sides = [
        [helper.make_tensor_value_info(name, dtype, shape) for name, (dtype, shape) in side.items()]
        for side in (inputs, outputs)
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "test", *sides, initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)


def write(folder: Path) -> Path:
    folder.mkdir()
    files = {ENCODER: encoder(), DECODER: decoder(False), WITH_PAST: decoder(True), MERGED: merged()}
    for name, made in files.items():
        onnx.checker.check_model(made)
        onnx.save(made, folder / name)
    (folder / "config.json").write_text(json.dumps({"model_type": "t5", "decoder_start_token_id": START}))
    return folder


def tokens(folder: Path, ids: np.ndarray, mask: np.ndarray, use_merged: bool, count: int = 12) -> np.ndarray:
    """Return the tokens of greedy decoding, int64 [batch, count + 1]."""
    first, later = (MERGED, MERGED) if use_merged else (DECODER, WITH_PAST)
    sessions = {name: ortolan.create_session(folder / name) for name in {ENCODER, first, later}}
    hidden = sessions[ENCODER].run(None, {"input_ids": ids, "attention_mask": mask})[0]
    found = np.full((len(ids), 1), START, np.int64)
    past = {f"past_key_values.0.{kind}": np.zeros((len(ids), H, 1, D), np.float32) for kind in KINDS}
    for step in range(count):
        session = sessions[later if step else first]
        given = {"encoder_attention_mask": mask, "input_ids": found[:, -1:], "encoder_hidden_states": hidden, **past}
        given["use_cache_branch"] = np.array([step > 0])
        wanted = {value.name for value in session.get_inputs()}
        answers = session.run(None, {name: array for name, array in given.items() if name in wanted})
        named = dict(zip((value.name for value in session.get_outputs()), answers, strict=True))
        for name, array in named.items():
            if name.startswith("present") and array.size:
                past[name.replace("present", "past_key_values")] = array
        found = np.concatenate([found, named["logits"][:, -1:].argmax(-1)], axis=1)
    return found
