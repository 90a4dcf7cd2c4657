"""Splits ONNX Runtime's fused operators into the operators that the passes support.

    Attention, QAttention, MultiHeadAttention     linear layers, MultiHeadAttention without bias (fused_attention.py)
    SkipLayerNormalization, SkipSimplified…       Add and LayerNormalization, only after a linear layer
    BiasGelu, FastGelu with a bias                Add and Gelu; Add and FastGelu
    FusedMatMul, FusedGemm                        Transpose, MatMul, Mul; Gemm and its activation
    EmbedLayerNormalization                       Gather, Add and LayerNormalization, if `tables` is set

ONNX Runtime fuses most of these nodes again when it loads the model. A node that cannot be split is kept, and why_left
returns the reason.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from .constants import constant_tensor
from .dimensions import Dimensions
from .fused_attention import attention, multi_head_attention, q_attention
from .fused_writer import Write, Writer, expect_floats, is_used, only_attributes, real_number, required, unused
from .node_checks import MICROSOFT_DOMAIN, UnfitError, constant_input, expect, integer_attribute, node_input

EMBED_LAYER_NORMALIZATION = "EmbedLayerNormalization"
_REASON = "ortolan.why_left"  # key of the reason in node.meta
_SKIP_EPSILON = 1e-12  # default of SkipLayerNormalization and EmbedLayerNormalization
_FLOATS = (ir.DataType.FLOAT,)
_MAY_BE_LAYERS = (
    "MatMul", "Gemm", "MatMulNBits", "MatMulInteger", "MatMulIntegerToFloat", "DynamicQuantizeMatMul", "QLinearMatMul",
    "QGemm", "FusedMatMul",
)  # fmt: skip
_BETWEEN = ("Add", "Mul", "Cast", "Reshape", "DequantizeLinear", "QuantizeLinear")
_MOST_STEPS = 8
# Maps the activations of FusedGemm that are ONNX operators to the attributes of the operator.
_ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "Relu": (),
    "Sigmoid": (),
    "Tanh": (),
    "Softplus": (),
    "LeakyRelu": ("alpha",),
    "HardSigmoid": ("alpha", "beta"),
}


def unfuse(model: ir.Model, new_name: Callable[[str], str], tables: bool) -> None:
    """Split all fused operators of the model, in place. tables: split EmbedLayerNormalization as well."""
    made: dict[Hashable, ir.Value] = {}
    # All nodes are read before the first is replaced, so that dimensions are computed only once per graph.
    found: list[tuple[ir.Node, Write]] = []
    for graph in model.graphs():
        dims: Dimensions | None = None
        for node in graph:
            read = _READERS.get(node.op_type) if node.domain == MICROSOFT_DOMAIN else None
            if read is None or (node.op_type == EMBED_LAYER_NORMALIZATION and not tables):
                continue
            dims = dims or Dimensions(graph)
            try:
                write = read(node, dims)
            except UnfitError as reason:
                node.meta[_REASON] = str(reason)
                continue
            if write is not None:
                found.append((node, write))
    for node, write in found:
        try:
            Writer(node, made, new_name).put(write)
        except UnfitError as reason:
            node.meta[_REASON] = str(reason)


def why_left(node: ir.Node) -> str | None:
    """Return why unfuse could not split a node, or None."""
    return node.meta.get(_REASON)


def _skip_layer_normalization(node: ir.Node, dims: Dimensions) -> Write | None:
    """Rewrite SkipLayerNormalization; None if no linear layer before it could include the addition.

    Inputs: input, skip, gamma, beta, bias; of the simplified form input, skip, gamma, bias.
    """
    simplified = node.op_type == "SkipSimplifiedLayerNormalization"
    only_attributes(node, "epsilon")
    unused(node, 1, 2)
    last = 3 if simplified else 4
    weight = constant_input(node, 2, "gamma", _FLOATS)
    sizes = tuple(weight.shape.numpy())
    for index, name in ((3, "beta"), (4, "bias")) if not simplified else ((3, "bias"),):
        if node_input(node, index) is not None:
            constant_input(node, index, name, _FLOATS, sizes)
    operands = [required(node, index) for index in range(2)]
    for value in operands:
        expect_floats(dims, value)
    if not any(map(_may_be_layer, operands)):
        return None
    epsilon = real_number(node, "epsilon", _SKIP_EPSILON)

    def write(to: Writer) -> Sequence[ir.Value | None]:
        x, skip, gamma = (required(node, index) for index in range(3))
        bias = node_input(node, last)
        if bias is not None:
            x = to.op("Add", x, bias, name="add_bias")
        total = to.op("Add", x, skip, name="skip")
        if simplified:
            y = to.op("SimplifiedLayerNormalization", total, gamma, name="", axis=-1, epsilon=epsilon)
        else:
            y = to.layer_norm(total, gamma, node_input(node, 3), epsilon)
        return [y, None, None, total if is_used(node, 3) else None]

    return write


def _may_be_layer(value: ir.Value) -> bool:
    """Return whether a value is the output of a linear layer, perhaps after a bias, scales or quantization."""
    for _ in range(_MOST_STEPS):
        node = value.producer()
        if node is None:
            return False
        if node.op_type in _MAY_BE_LAYERS:
            return any(constant_tensor(one) is not None for one in node.inputs[1:])
        computed = [one for one in node.inputs if one is not None and constant_tensor(one) is None]
        if node.op_type not in _BETWEEN or not computed:
            return False
        value = computed[0]
    return False


def _gelu(node: ir.Node, dims: Dimensions) -> Write | None:
    """Rewrite BiasGelu or FastGelu; None for a FastGelu without bias, which is kept."""
    if node_input(node, 1) is None:
        return None
    only_attributes(node)
    expect_floats(dims, required(node, 0))
    op_type = "Gelu" if node.op_type == "BiasGelu" else "FastGelu"

    def write(to: Writer) -> Sequence[ir.Value | None]:
        return [to.contrib(op_type, to.op("Add", required(node, 0), required(node, 1), name="add_bias"))]

    return write


def _fused_matmul(node: ir.Node, dims: Dimensions) -> Write:
    only_attributes(node, "alpha", "transA", "transB", "transBatchA", "transBatchB")
    for name in ("transBatchA", "transBatchB"):
        expect(integer_attribute(node, name, 0) == 0, f"its {name} is 1, expected 0")
    alpha = real_number(node, "alpha", 1.0)
    operands, ranks = [required(node, 0), required(node, 1)], [0, 0]
    for index, name in enumerate(("transA", "transB")):
        expect_floats(dims, operands[index])
        if integer_attribute(node, name, 0) == 1:
            shape = dims.shape(operands[index])
            ranks[index] = 0 if shape is None else len(shape)
            expect(ranks[index] > 1, f"the rank of {operands[index].name!r} is not known, but {name} transposes it")
    constant = constant_tensor(operands[1]) is not None

    def write(to: Writer) -> Sequence[ir.Value | None]:
        factors = [required(node, 0), required(node, 1)]
        for index, rank in enumerate(ranks):
            if rank:
                perm = [*range(rank - 2), rank - 1, rank - 2]
                factors[index] = to.op("Transpose", factors[index], perm=perm)
        if alpha != 1 and constant:
            factors[1] = to.op("Mul", factors[1], to.number(alpha), name="scaled")
        product = to.op("MatMul", *factors, name="")
        return [product if alpha == 1 or constant else to.op("Mul", product, to.number(alpha), name="scaled")]

    return write


def _fused_gemm(node: ir.Node, dims: Dimensions) -> Write:
    parameters = {f"activation_{name}": name for name in ("alpha", "beta", "gamma")}
    only_attributes(node, "activation", "alpha", "beta", "transA", "transB", *parameters)
    attr = node.attributes.get("activation")
    activation = attr.value if attr is not None else "none"
    expect(activation in _ACTIVATIONS, f"its activation is {activation}, expected one of {', '.join(_ACTIVATIONS)}")
    given: dict[str, Any] = {
        parameters[name]: real_number(node, name, 0.0) for name in parameters if name in node.attributes
    }
    missing = [name for name in _ACTIVATIONS[activation] if name not in given]
    expect(not missing, f"its activation_{' and activation_'.join(missing)} is missing")
    expect_floats(dims, required(node, 0))
    given = {name: given[name] for name in _ACTIVATIONS[activation]}
    of_product: dict[str, Any] = {name: integer_attribute(node, name, 0) for name in ("transA", "transB")}
    of_product |= {name: real_number(node, name, 1.0) for name in ("alpha", "beta")}

    def write(to: Writer) -> Sequence[ir.Value | None]:
        product = to.op("Gemm", *node.inputs, name="", **of_product)
        return [to.op(activation, product, **given)]

    return write


def _embeddings(node: ir.Node, dims: Dimensions) -> Write:
    """Rewrite EmbedLayerNormalization.

    Inputs: input_ids, segment_ids, word, position and segment tables, gamma, beta, mask, position_ids.
    """
    only_attributes(node, "epsilon", "mask_index_type")
    for index, name in ((2, "words"), (3, "positions"), (5, "gamma"), (6, "beta")):
        constant_input(node, index, name, _FLOATS)
    has_segments = node_input(node, 1) is not None
    if has_segments:
        constant_input(node, 4, "segments", _FLOATS)
    epsilon = real_number(node, "epsilon", _SKIP_EPSILON)
    shape = dims.shape(required(node, 0))
    expect(shape is not None and len(shape) == 2, "its ids are not known to be 2-D")

    def write(to: Writer) -> Sequence[ir.Value | None]:
        ids, segments, word_table, position_table, segment_table = (node_input(node, index) for index in range(5))
        mask, positions = node_input(node, 7), node_input(node, 8)
        total = to.op("Gather", word_table, ids, name="words")
        if positions is None:
            size = to.op("Gather", to.op("Shape", ids, dtype=ir.DataType.INT64), to.ints(1), dtype=ir.DataType.INT64)
            rows = to.op("Slice", position_table, to.ints(0), size, to.ints(0), name="positions")
        else:
            rows = to.op("Gather", position_table, positions, name="positions")
        total = to.op("Add", total, rows)
        if segments is not None:
            total = to.op("Add", total, to.op("Gather", segment_table, segments, name="segments"))
        lengths = _lengths(to, ids, mask) if is_used(node, 1) else None
        y = to.layer_norm(total, required(node, 5), required(node, 6), epsilon)
        return [y, lengths, total if is_used(node, 2) else None]

    return write


def _lengths(to: Writer, ids: ir.Value | None, mask: ir.Value | None) -> ir.Value:
    """Return int32 [batch]: the number of ones in each row of the mask; zeros if there is no mask."""
    kind = ir.DataType.INT32
    if mask is None:
        batch = to.op("Gather", to.op("Shape", ids, dtype=ir.DataType.INT64), to.ints(0), dtype=ir.DataType.INT64)
        return to.op("Expand", to.constant(np.array(0, np.int32)), batch, dtype=kind)
    shown = to.op("Cast", to.op("Equal", mask, to.constant(np.array(1, np.int32))), to=kind.value, dtype=kind)
    return to.op("ReduceSum", shown, to.ints(1), keepdims=0, dtype=kind)


_READERS: dict[str, Callable[[ir.Node, Dimensions], Write | None]] = {
    "Attention": attention,
    "QAttention": q_attention,
    "MultiHeadAttention": multi_head_attention,
    "SkipLayerNormalization": _skip_layer_normalization,
    "SkipSimplifiedLayerNormalization": _skip_layer_normalization,
    "BiasGelu": _gelu,
    "FastGelu": _gelu,
    "FusedMatMul": _fused_matmul,
    "FusedGemm": _fused_gemm,
    EMBED_LAYER_NORMALIZATION: _embeddings,
}
