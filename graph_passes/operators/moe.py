"""MoE: a mixture of experts whose weights are stacked, with 4, 5, 6 or 8 bits in groups (ops/moe/README.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np
import onnx_ir as ir

from ..find.epilogue import Activation
from ..find.experts import ExpertsForm
from ..find.quantized_weight import QuantizedWeight
from ..weights.quantizers.grid import Quantization
from .function_body import PANEL_COLUMNS
from .moe_function import INPUTS, LAYERS, OP_TYPE, MoEUses, moe_function
from .nodes import fill_missing, input_of, nodes_of
from .replacement import LayerWeight, PackedTensor, PackedWeight
from .w4a8_matmul import K_QUANT_SCALE_BITS, W4A8MatMul, scale_bits
from .w4a8_matmul_function import MIDDLE_ZERO_POINT, Uses
from .w8a8_matmul import W8A8MatMul

_FORMAT_VERSION = 1


def pack_experts(experts: Iterable[QuantizedWeight]) -> dict[str, PackedTensor]:
    """Return the packed weights of one layer of all experts, stacked along a new first axis."""
    return stack_packed([_packed(weight) for weight in experts])


def stack_packed(packed: list[PackedWeight]) -> dict[str, PackedTensor]:
    """Stack the packed weights of experts along a new first axis. All must have the same parts and shapes."""
    stacked = {}
    for part in packed[0]:
        arrays = [one[part].array for one in packed]
        # Scales of some experts may be exact in float16 only.
        dtypes = {one[part].dtype for one in packed}
        dtype = ir.DataType.FLOAT if len(dtypes) > 1 else packed[0][part].dtype
        array = np.stack(arrays) if len(dtypes) == 1 else np.stack(arrays, dtype=np.float32)
        if part == "weights":
            array, dtype = array.view(np.uint8), ir.DataType.UINT8
        stacked[part] = PackedTensor(array, dtype)
    if "minimums" in stacked and stacked["minimums"].dtype != stacked["scales"].dtype:
        for part in ("scales", "minimums"):
            stacked[part] = PackedTensor(stacked[part].array.astype(np.float32), ir.DataType.FLOAT)
    return stacked


def pack_bias(bias: np.ndarray, halves: int = 1) -> np.ndarray:
    """Return the bias [experts, n] of a layer with every half padded to whole panels."""
    experts, n = bias.shape
    width = n // halves
    room = -(-width // PANEL_COLUMNS) * PANEL_COLUMNS
    padded = np.zeros((experts, halves, room), np.float32)
    padded[:, :, :width] = bias.reshape(experts, halves, width)
    return padded.reshape(experts, -1)


def moe_attributes(form: ExpertsForm, layers: Mapping[str, Quantization]) -> list[ir.Attr]:
    """Return the attributes of a node. layers: the format of each layer, by its prefix."""
    integers = {
        "format_version": _FORMAT_VERSION,
        "expert_count": form.count,
        "hidden_size": form.hidden,
        "inner_size": form.inner,
        "gated": int(form.gated),
        "activation": int(form.activation),
    }
    for layer, quantization in layers.items():
        assert quantization.group_size is not None
        integers |= {
            f"{layer}bits": quantization.bits,
            f"{layer}group_size": quantization.group_size,
            f"{layer}zero_point_steps": quantization.zero_point_steps,
            f"{layer}subgroup_size": quantization.subgroup_size or 0,
            f"{layer}subgroup_scale_bits": scale_bits(quantization),
            f"{layer}subgroup_zero_point": quantization.k_quant_zero or 0,
        }
    floats = {"alpha": form.alpha, "beta": form.beta, "limit": form.limit}
    return [
        *(ir.AttrInt64(name, value) for name, value in integers.items()),
        *(ir.AttrFloat32(name, value) for name, value in floats.items()),
    ]


def finish_moe(model: ir.Model, new_name: Callable[[str], str]) -> ir.Function:
    """Fill in the inputs of all MoE nodes of a model, and return the operator's ONNX function for them."""
    nodes = nodes_of(model, OP_TYPE)
    uses = MoEUses(
        activations=frozenset(Activation(node.attributes["activation"].as_int()) for node in nodes),
        up=_uses(nodes, "up_"),
        down=_uses(nodes, "down_"),
        int8=any(node.attributes[f"{layer}bits"].as_int() == 8 for node in nodes for layer in LAYERS),
    )

    def neutral(node: ir.Node) -> dict[str, np.ndarray]:
        made: dict[str, np.ndarray] = {}
        for layer in LAYERS:
            scales = input_of(node, INPUTS, f"{layer}scales")
            assert scales is not None and scales.shape is not None and scales.dtype is not None
            points = np.zeros(1, np.uint8)
            has_zero = _has_subgroups(node, layer) or input_of(node, INPUTS, f"{layer}minimums") is not None
            eight = node.attributes[f"{layer}bits"].as_int() == 8
            if getattr(uses, layer[:-1]).zero_points and not has_zero and not eight:
                middle = MIDDLE_ZERO_POINT * node.attributes[f"{layer}zero_point_steps"].as_int()
                points = np.full(scales.shape.numpy(), middle, np.uint8)
            made |= {
                f"{layer}bias": np.zeros(1, np.float32),
                f"{layer}zero_points": points,
                f"{layer}minimums": np.zeros(1, scales.dtype.numpy()),
                f"{layer}subgroup_scales": np.ones(1, np.uint8),
                f"{layer}high_bits": np.zeros(1, np.uint8),
                f"{layer}subgroup_minimums": np.ones(1, np.uint8),
            }
        return made

    fill_missing(nodes, INPUTS, INPUTS, neutral, new_name)
    return moe_function(model.opset_imports[""], uses)


def _uses(nodes: list[ir.Node], layer: str) -> Uses:
    def any_has(part: str) -> bool:
        return any(input_of(node, INPUTS, f"{layer}{part}") is not None for node in nodes)

    minimums, subgroups = any_has("minimums"), any(_has_subgroups(node, layer) for node in nodes)
    int8 = any(node.attributes[f"{layer}bits"].as_int() == 8 for node in nodes)
    zero_points = minimums or subgroups or any_has("zero_points")
    return Uses(
        zero_points=zero_points,
        minimums=minimums or (int8 and zero_points),
        subgroups=subgroups,
        high_bits=any_has("high_bits"),
        k_quants=any(node.attributes[f"{layer}subgroup_scale_bits"].as_int() == K_QUANT_SCALE_BITS for node in nodes),
        subgroup_minimums=any_has("subgroup_minimums"),
    )


def _has_subgroups(node: ir.Node, layer: str) -> bool:
    return node.attributes[f"{layer}subgroup_size"].as_int() != 0


def _packed(weight: QuantizedWeight) -> PackedWeight:
    operator = W8A8MatMul() if weight.bits == 8 else W4A8MatMul()
    return operator.pack(LayerWeight(np.empty((0, 0), np.float32), weight))
