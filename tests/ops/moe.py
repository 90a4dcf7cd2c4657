"""Random mixtures of experts as models of one MoE node, and their answers from single layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper

from ortolan import _testing
from ortolan.graph_passes.find.epilogue import Activation
from ortolan.graph_passes.find.experts import ExpertsForm
from ortolan.graph_passes.operators.moe import finish_moe, moe_attributes, pack_bias
from ortolan.graph_passes.operators.moe_function import INPUTS, OP_TYPE
from ortolan.graph_passes.operators.nodes import NewNames, put_function
from ortolan.graph_passes.weights.quantizers.grid import Quantization

from .groups import GroupLayer
from .k_quants import KINDS as K_QUANTS
from .k_quants import KQuantLayer
from .subgroups import SubgroupLayer

# Arguments of GroupLayer.random or SubgroupLayer.in_subgroups, by the kind of weight; or the name of a K-quant.
KINDS: dict[str, dict[str, Any] | str] = {
    "int8": {"bits": 8},
    "int4": {"zero_points": False},
    "zero_points": {},
    "fractions": {"fractions": True},
    "minimums": {"minimums": True},
    "four": {"subgroup": 16, "bits": 4},
    "six": {"subgroup": 32, "bits": 6},
    **{name: name for name in ("Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q5_1")},
}
# Scales that give weights of about 0.05, as the scales of subgroups are random integers.
_K_QUANT_SCALES = dict.fromkeys(("Q4_K", "Q5_K"), 0.0002) | {"Q6_K": 0.00005}


@dataclass(frozen=True)
class Mixture:
    """A mixture of experts: gate and up have panels of their own columns, as in the operator's weight."""

    form: ExpertsForm
    gates: list[GroupLayer]
    ups: list[GroupLayer]  # empty without a gate
    downs: list[GroupLayer]
    up_bias: np.ndarray | None = None  # [experts, columns of gate and up]
    down_bias: np.ndarray | None = None

    @classmethod
    def random(
        cls,
        rng: np.random.Generator,
        form: ExpertsForm,
        kinds: tuple[str, str] = ("int4", "int4"),
        *,
        bias: bool = False,
        groups: tuple[int, int] = (64, 64),
    ) -> Mixture:
        def layer(k: int, n: int, kind: str, group: int) -> GroupLayer:
            given = KINDS[kind]
            if isinstance(given, str):
                return KQuantLayer.of_kind(rng, k, n, K_QUANTS[given], scale=_K_QUANT_SCALES.get(given, 0.005))
            if "subgroup" in given:
                return SubgroupLayer.in_subgroups(rng, k, n, group, scale=0.004, **given)
            scale = 0.001 if given.get("bits") == 8 else 0.015
            return GroupLayer.random(rng, k, n, group, half=True, scale=scale, **given)

        count, hidden, inner = form.count, form.hidden, form.inner
        gates = [layer(hidden, inner, kinds[0], groups[0]) for _ in range(count)]
        ups = [layer(hidden, inner, kinds[0], groups[0]) for _ in range(count if form.gated else 0)]
        downs = [layer(inner, hidden, kinds[1], groups[1]) for _ in range(count)]
        width = inner * (2 if form.gated else 1)
        biases = [rng.standard_normal((count, n), dtype=np.float32) if bias else None for n in (width, hidden)]
        return cls(form, gates, ups, downs, *biases)

    def model(self, opset: int = 17, rank: int = 2) -> onnx.ModelProto:
        """Return a model of one node "moe": inputs x [d0, …, hidden], experts and routing_weights [m, k], output y."""
        tensors = {f"up_{name}": array for name, array in _stacked(self.gates, self.ups).items()}
        tensors |= {f"down_{name}": array for name, array in _stacked(self.downs, []).items()}
        for name, bias, halves in (("up", self.up_bias, 2 if self.ups else 1), ("down", self.down_bias, 1)):
            if bias is not None:
                tensors[f"{name}_bias"] = pack_bias(bias, halves)
        feeds = {"X": "x", "experts": "experts", "routing_weights": "routing_weights"}
        inputs = [feeds.get(name, name if name in tensors else "") for name in INPUTS]
        while not inputs[-1]:
            inputs.pop()
        formats = {"up_": _format(self.gates[0]), "down_": _format(self.downs[0])}
        node = helper.make_node(OP_TYPE, inputs, ["y"], "moe", domain="ai.ortolan")
        node.attribute.extend(ir.to_proto(attr) for attr in moe_attributes(self.form, formats))
        shape = [*(f"d{i}" for i in range(rank - 1)), self.form.hidden]
        graph = helper.make_graph(
            [node],
            "single",
            [
                helper.make_tensor_value_info("x", TensorProto.FLOAT, shape),
                helper.make_tensor_value_info("experts", TensorProto.INT64, ["m", "k"]),
                helper.make_tensor_value_info("routing_weights", TensorProto.FLOAT, ["m", "k"]),
            ],
            [helper.make_tensor_value_info("y", TensorProto.FLOAT, shape)],
            [numpy_helper.from_array(array, name) for name, array in tensors.items()],
        )
        opsets = [helper.make_opsetid("", opset), helper.make_opsetid("ai.ortolan", 1)]
        return helper.make_model(graph, ir_version=8, opset_imports=opsets)

    def route(self, rng: np.random.Generator, m: int, k: int) -> dict[str, np.ndarray]:
        """Return random feeds: x, distinct experts of each row, and their weights."""
        experts = np.argsort(rng.random((m, self.form.count)), axis=1)[:, :k]
        weights = rng.random((m, k), dtype=np.float32)
        x = rng.standard_normal((m, self.form.hidden), dtype=np.float32)
        return {"x": x, "experts": experts.astype(np.int64), "routing_weights": weights}

    def expected(self, feeds: dict[str, np.ndarray], *, exact: bool = True) -> np.ndarray:
        """Return y: each expert's layers by the kernels of single layers, added in ascending order of experts.

        exact: the operator's own bits. Otherwise the unrounded product in float64.
        """
        x, chosen, weights = feeds["x"], feeds["experts"], feeds["routing_weights"]
        y = np.zeros((len(x), self.form.hidden), np.float32 if exact else np.float64)
        for e in range(self.form.count):
            rows, slots = np.nonzero(chosen == e)
            if len(rows):
                y[rows] += weights[rows, slots, None] * self._expert(e, x[rows], exact)
        return y

    def _expert(self, e: int, x: np.ndarray, exact: bool) -> np.ndarray:
        form = self.form
        biases = [None, None] if self.up_bias is None else np.split(self.up_bias[e], 2 if self.ups else 1)
        gate = _product(self.gates[e], x, biases[0], exact)
        factor = None
        if self.ups:
            factor = _product(self.ups[e], x, biases[1], exact)
            one = gate.dtype.type
            gate = np.minimum(gate, one(form.limit)) * one(form.alpha)
            factor = (np.clip(factor, -one(form.limit), one(form.limit)) + one(form.beta)) / one(form.alpha)
        if exact:
            h = _testing.epilogue(gate, int(form.activation), factor=factor)
        else:
            h = activated(form.activation, gate) * (1 if factor is None else factor)
        return _product(self.downs[e], h, None if self.down_bias is None else self.down_bias[e], exact)


def activated(activation: Activation, x: np.ndarray) -> np.ndarray:
    if activation == Activation.RELU:
        return np.maximum(x, 0)
    return x / (1 + np.exp(-x)) if activation == Activation.SILU else x


def with_function(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return the model with all inputs filled in and the operator's ONNX function."""
    whole = ir.from_proto(model)
    put_function(whole, finish_moe(whole, NewNames(whole)))
    proto: onnx.ModelProto = ir.to_proto(whole)
    return proto


def joined(models: list[onnx.ModelProto]) -> onnx.ModelProto:
    """Return one model with the nodes of all models, which share their inputs; outputs y0, y1, …"""
    whole = onnx.ModelProto.FromString(models[0].SerializeToString())
    del whole.graph.node[:], whole.graph.initializer[:], whole.graph.output[:]
    for index, model in enumerate(models):
        graph = onnx.ModelProto.FromString(model.SerializeToString()).graph
        names = {tensor.name: f"{tensor.name} {index}" for tensor in graph.initializer}
        for tensor in graph.initializer:
            tensor.name = names[tensor.name]
        (node,) = graph.node
        node.input[:] = [names.get(name, name) for name in node.input]
        node.name, node.output[0], graph.output[0].name = f"moe {index}", f"y{index}", f"y{index}"
        whole.graph.node.append(node)
        whole.graph.initializer.extend(graph.initializer)
        whole.graph.output.append(graph.output[0])
    return whole


def _product(layer: GroupLayer, x: np.ndarray, bias: np.ndarray | None, exact: bool) -> np.ndarray:
    if exact:
        return layer.multiply(np.ascontiguousarray(x), bias)
    return x.astype(np.float64) @ layer.matrix() + (0 if bias is None else bias)


def _stacked(first: list[GroupLayer], second: list[GroupLayer]) -> dict[str, np.ndarray]:
    """Return the packed tensors of all experts; the panels of a second layer follow those of the first."""
    halves = [_tensors(layer) for layer in first], [_tensors(layer) for layer in second]
    return {
        name: np.stack(
            [np.concatenate([part[name] for part in parts]) for parts in zip(*filter(None, halves), strict=True)]
        )
        for name in halves[0][0]
    }


def _tensors(layer: GroupLayer) -> dict[str, np.ndarray]:
    tensors = {
        "weights": layer.packed_weights.view(np.uint8),
        "scales": layer.packed_scales.view(layer.scales.dtype),
        "zero_points": layer.packed_zero_points,
        "minimums": None if layer.packed_minimums is None else layer.packed_minimums.view(layer.scales.dtype),
    }
    if isinstance(layer, SubgroupLayer | KQuantLayer):
        tensors |= {"subgroup_scales": layer.packed_subgroup_scales, "high_bits": layer.packed_high_bits}
    if isinstance(layer, KQuantLayer):
        tensors["subgroup_minimums"] = layer.packed_subgroup_minimums
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


def _format(layer: GroupLayer) -> Quantization:
    if isinstance(layer, KQuantLayer):
        kind = layer.kind
        return Quantization(kind.bits, kind.group, subgroup_size=kind.subgroup, k_quant_zero=kind.zero_point)
    subgroup = layer.subgroup if isinstance(layer, SubgroupLayer) else None
    symmetric = subgroup is None and layer.zero_points is None and layer.minimums is None
    fractions = layer.steps != 1
    return Quantization(layer.bits, layer.group, symmetric=symmetric, fractions=fractions, subgroup_size=subgroup)
