"""Random models for the provider. A seed gives the same model on every machine."""

from __future__ import annotations

import functools
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper
from onnxruntime import quantization
from onnxruntime.quantization import matmul_nbits_quantizer

from ortolan.models import tiny

from ..passes.cached_llama import llama, prompt
from ..passes.int8_layers import DYNAMIC, FIXED, ROUNDED, Int8Layer, sparse_integers
from .cached_models import Form
from .int8_models import ACTIVATIONS, FLOAT, NUMBERS, dense_integers, with_nodes, with_zero_blocks
from .nbits_models import NBits, whole

Rng = np.random.Generator
Feeds = dict[str, np.ndarray]


def pick(rng: Rng, some: Any) -> Any:
    return some[int(rng.integers(len(some)))]


def nbits_layer(rng: Rng, k: int, n: int) -> NBits:
    bits = pick(rng, [4, 8])
    return NBits(
        k,
        n,
        pick(rng, [16, 32, 64, 128]),
        bits,
        pick(rng, ["", "packed", "whole", "fractions"][: 4 if bits == 4 else 3]),
        bias=bool(rng.integers(2)),
        flat=bool(rng.integers(2)),
        accuracy_level=pick(rng, [None, 0, 4]),
    )


def following_nodes(rng: Rng, n: int) -> tuple[list[NodeProto], tuple[str, ...], dict[str, np.ndarray]]:
    """Return nodes that compute y from r, the names of their inputs, and their constants.

    The nodes are some of: an activation, an addition of the residual z, LayerNormalization.
    """
    node, nodes, value, inputs = helper.make_node, [], "r", ()
    if rng.random() < 0.5:
        nodes += pick(rng, list(ACTIVATIONS.values()))
        value = "a"
    if rng.random() < 0.5:
        nodes.append(node("Add", pick(rng, [[value, "z"], ["z", value]]), ["s"], name="residual"))
        value, inputs = "s", ("z",)
    if rng.random() < 0.5:
        nodes.append(node("LayerNormalization", [value, "weight", "shift"], ["l"], name="norm", axis=-1))
        value = "l"
    nodes.append(node("Identity" if rng.random() < 0.5 else "Neg", [value], ["y"], name="behind"))
    constants = {name: rng.standard_normal(n).astype(np.float32) for name in ("weight", "shift")}
    return nodes, inputs, constants


def feeds_of(rng: Rng, k: int, n: int) -> Feeds:
    rows = int(rng.integers(1, 40))
    return {name: rng.standard_normal((rows, size)).astype(np.float32) for name, size in (("x", k), ("z", n))}


def int8_weights(rng: Rng, k: int, n: int, seed: int = 0) -> np.ndarray:
    """Return dense or block-sparse weights with fractions of zeros below and above the provider's threshold."""
    return pick(rng, [dense_integers(k, n, seed), sparse_integers(k, n, pick(rng, [0.45, 0.55, 0.8, 1.0]), seed)])


def int8_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    k, n = pick(rng, [1, 31, 32, 64, 100]), pick(rng, [1, 16, 24, 32])
    flags = [bool(flag) for flag in rng.integers(0, 2, 3)]
    q = int8_weights(rng, k, n)
    layer = Int8Layer(pick(rng, DYNAMIC), q=q, unsigned=flags[0], per_column=flags[1], bias=flags[2])
    layer.zero_point = 128 if layer.unsigned else 0
    nodes, inputs, constants = following_nodes(rng, n)
    return with_nodes(layer, nodes, inputs, **constants), feeds_of(rng, k, n)


def static_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    """Return a linear layer with a fixed quantization range.

    Its output may be quantized again, also for other nodes.
    """
    node, k, n = helper.make_node, pick(rng, [1, 31, 32, 64, 100]), pick(rng, [1, 16, 24, 32])
    flags = [bool(flag) for flag in rng.integers(0, 2, 4)]
    layer = Int8Layer(
        pick(rng, [*FIXED, *ROUNDED]), q=dense_integers(k, n), unsigned=flags[0], per_column=flags[1], bias=flags[2],
        x_unsigned=flags[3], zero_point=128 if flags[0] else 0,
    )  # fmt: skip
    layer.y_scale = np.float32(0.5)
    nodes, inputs, constants = following_nodes(rng, n)
    names = ["y_scale", pick(rng, ["y_zero", "lowest"])]
    constants |= {"y_scale": layer.tensors["y_scale"], "y_zero": layer.tensors["y_zero"]}
    constants["lowest"] = np.array(0 if layer.x_unsigned else -128, layer.tensors["y_zero"].dtype)
    if rng.random() < 0.6:
        # Copy the nodes, because other models use them too.
        nodes = [NodeProto.FromString(one.SerializeToString()) for one in nodes]
        for one in nodes:
            one.input[:] = ["rd" if name == "r" else name for name in one.input]
        rounding = [node("QuantizeLinear", ["r", *names], ["rq"]), node("DequantizeLinear", ["rq", *names], ["rd"])]
        nodes = [*rounding, *nodes]
    reads_too, made = rng.random() < 0.4, {name for one in layer.nodes("r") for name in one.output}
    if reads_too:
        product = ["MatMul", ["xd" if "xd" in made and rng.random() < 0.7 else "x", "V"], ["p2"]]
        nodes = [*nodes, node(*product, name="linear2"), node("Relu", ["p2"], ["y2"])]
        constants["V"] = dense_integers(k, n, 1).astype(np.float32)
    model = with_nodes(layer, nodes, inputs, **constants)
    if reads_too:
        model.graph.output.append(helper.make_tensor_value_info("y2", FLOAT, None))
    return model, feeds_of(rng, k, n)


def nbits_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    k, n = pick(rng, [1, 31, 64, 100, 160]), pick(rng, [1, 16, 24, 32])
    layer = nbits_layer(rng, k, n)
    more, inputs, constants = following_nodes(rng, n)
    return joined([layer.node("x", "r")], more, layer.initializers(), inputs, constants, k), feeds_of(rng, k, n)


def joined(nodes: Any, more: Any, tensors: Any, inputs: Any, constants: dict[str, np.ndarray], k: int) -> ModelProto:
    value, nodes = helper.make_tensor_value_info, [*nodes, *more]
    used = {name for node in nodes for name in node.input}
    arrays = {name: np.asarray(number) for name, number in NUMBERS.items()} | constants
    tensors = [*tensors, *(numpy_helper.from_array(array, name) for name, array in arrays.items() if name in used)]
    values = [value("x", FLOAT, ["batch", k]), *(value(name, FLOAT, None) for name in inputs)]
    model = whole(helper.make_graph(nodes, "layers", values, [value("y", FLOAT, None)], tensors))
    del model.opset_import[:]
    model.opset_import.extend([helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)])
    return model


def gated_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    """Return act(x G) * (x U), with MatMulNBits or int8 linear layers that may share the quantized x."""
    node, k, n = helper.make_node, pick(rng, [31, 64, 100]), pick(rng, [16, 32, 24])
    activation = pick(rng, list(ACTIVATIONS.values()))
    more = [*activation, node("Mul", pick(rng, [["a", "u"], ["u", "a"]]), ["y"], name="gate")]
    if rng.random() < 0.5:
        gate = nbits_layer(rng, k, n)
        up = gate if rng.random() < 0.5 else nbits_layer(rng, k, n)
        nodes = [gate.node("x", "r", "linear", "gate."), up.node("x", "u", "linear2", "up.")]
        tensors = [*gate.initializers("gate."), *up.initializers("up.")]
        return joined(nodes, more, tensors, (), {}, k), feeds_of(rng, k, n)
    layer = Int8Layer("chain", q=int8_weights(rng, k, n))
    second = [
        node("MatMulInteger", ["xq", pick(rng, ["W", "W2"]), "xz", "zeros"], ["sums2"], name="linear2"),
        node("Cast", ["sums2"], ["floats2"], to=FLOAT),
        node("Mul", ["floats2", "step"], ["u"]),
    ]
    return with_nodes(layer, [*second, *more], W2=int8_weights(rng, k, n, 1)), feeds_of(rng, k, n)


def token_feeds(rng: Rng, batch: int, length: int) -> Feeds:
    ids = rng.integers(0, 101, (batch, length))
    return {"input_ids": ids, "attention_mask": np.ones_like(ids), "token_type_ids": np.zeros_like(ids)}


def static_texts() -> quantization.CalibrationDataReader:
    class Texts(quantization.CalibrationDataReader):
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self._left = [token_feeds(rng, 2, 16) for _ in range(3)]

        def get_next(self) -> Feeds | None:
            return self._left.pop() if self._left else None

    return Texts()


@functools.cache
def encoders() -> list[ModelProto]:
    """Return whole encoders as written by ONNX Runtime's quantizers."""
    logging.disable(logging.WARNING)
    float_model, models = ir.to_proto(tiny.tiny_bert()), []
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "float.onnx", Path(folder) / "int8.onnx"
        onnx.save(float_model, source)
        for weight_type in (quantization.QuantType.QUInt8, quantization.QuantType.QInt8):
            per_channel = weight_type == quantization.QuantType.QInt8
            quantization.quantize_dynamic(source, made, weight_type=weight_type, per_channel=per_channel)
            models += [onnx.load(made), with_zero_blocks(onnx.load(made))]
        for form in quantization.QuantFormat:
            for types in (["MatMul"], None):
                quantization.quantize_static(
                    source, made, static_texts(), quant_format=form, op_types_to_quantize=types
                )
                models.append(onnx.load(made))
    for symmetric in (True, False):
        copied = ModelProto.FromString(float_model.SerializeToString())
        quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(
            copied, block_size=32, is_symmetric=symmetric, accuracy_level=4
        )
        quantizer.process()
        models.append(quantizer.model.model)
    logging.disable(logging.NOTSET)
    return models


def encoder_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    model = ModelProto.FromString(pick(rng, encoders()).SerializeToString())
    return model, token_feeds(rng, int(rng.integers(1, 3)), int(rng.integers(1, 12)))


def cached_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    """Return a model of attention with a cache."""
    form = Form(
        packed=bool(rng.integers(2)),
        rotary=pick(rng, [None, "half", "interleaved"]),
        scale=pick(rng, [0.0, 0.3]),
        heads=6,
        kv_heads=pick(rng, [1, 2, 6]),
        positions=48,
        window=pick(rng, [0, 0, 5]),
        sinks=pick(rng, [None, "head_sink", "smooth"]),
    )
    batch, rows, past = pick(rng, [(1, 1, 0), (2, 1, 9), (2, 7, 0), (1, 5, 9), (3, 1, 30)])
    # All sequences have the same length, because results for padding are arbitrary.
    return form.model(), form.feeds(batch, rows, past)


@functools.cache
def decoder() -> ModelProto:
    """Return a whole decoder with 4-bit weights."""
    logging.disable(logging.WARNING)
    quantizer = matmul_nbits_quantizer.MatMulNBitsQuantizer(llama("gqa"), block_size=32, is_symmetric=True)
    quantizer.process()
    logging.disable(logging.NOTSET)
    return quantizer.model.model


def decoder_model(rng: Rng) -> tuple[ModelProto, Feeds]:
    model = ModelProto.FromString(decoder().SerializeToString())
    return model, prompt(model, int(rng.integers(1, 3)), int(rng.integers(1, 12)))


def in_branches(rng: Rng, model: ModelProto, whole: bool = False) -> ModelProto:
    """Move all nodes, or the last ones, into both branches of an If node; the branches share values and tensors."""
    graph, value = model.graph, helper.make_tensor_value_info
    first = 0 if whole or rng.random() < 0.5 else int(rng.integers(len(graph.node)))
    inside, outputs = list(graph.node)[first:], [one.name for one in graph.output]
    made = {name for node in inside for name in node.output}
    if not set(outputs) <= made:
        return model
    branches = {}
    for name in ("then_branch", "else_branch"):
        renamed = [NodeProto.FromString(node.SerializeToString()) for node in inside]
        for node in renamed if name == "else_branch" else ():
            node.input[:] = [one + "_else" if one in made else one for one in node.input]
            node.output[:] = [one + "_else" if one in made else one for one in node.output]
        ends = [one + "_else" * (name == "else_branch") for one in outputs]
        branches[name] = helper.make_graph(renamed, name, [], [value(end, FLOAT, None) for end in ends])
    condition = helper.make_node("If", ["condition"], [name + "_of_if" for name in outputs], name="if", **branches)
    del graph.node[first:]
    graph.node.append(condition)
    for one in graph.output:
        one.name += "_of_if"
    graph.input.append(value("condition", TensorProto.BOOL, []))
    return model


def model_of(rng: Rng) -> tuple[ModelProto, Feeds]:
    makers = [int8_model, static_model, static_model, static_model, nbits_model, nbits_model, gated_model]
    make = pick(rng, [*makers, encoder_model, cached_model, cached_model, decoder_model])
    model, feeds = make(rng)
    if rng.random() < 0.15:
        model = in_branches(rng, model)
        feeds["condition"] = np.array(rng.random() < 0.5)
    return model, feeds
