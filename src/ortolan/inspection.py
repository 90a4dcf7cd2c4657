"""inspect_onnx: lists the layers of a model, and tells which layers Ortolan can replace or has replaced."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from ortolan.graph_passes.files.model_file import ModelFile, external_tensors, load_model, release_maps
from ortolan.graph_passes.find.attention import NotAttention, find_attentions
from ortolan.graph_passes.find.cached_attention import find_cached_attentions
from ortolan.graph_passes.find.constants import DEFAULT_DOMAINS, constant_tensor
from ortolan.graph_passes.find.convolutions import unfold_convolutions
from ortolan.graph_passes.find.dimensions import Dimensions
from ortolan.graph_passes.find.epilogue import Activation, describe_epilogue
from ortolan.graph_passes.find.fused_forms import unfuse
from ortolan.graph_passes.find.linear import Linear, find_linears, node_name, op_name
from ortolan.graph_passes.find.quantized_forms import unify_quantized
from ortolan.graph_passes.names import MINIMUM_OPSET, ORTOLAN_DOMAIN, RECIPE_KEY, VERSION_KEY
from ortolan.graph_passes.operators import sparse_amx_matmul_function as sparse
from ortolan.graph_passes.operators import w4a8_matmul_function as w4a8
from ortolan.graph_passes.operators import w8a8_matmul_function as w8a8
from ortolan.graph_passes.operators.nodes import NewNames
from ortolan.graph_passes.operators.sparse_amx_matmul_storage import BITMAP, DENSE, TWO_FOUR, storage_of, stored_in
from ortolan.graph_passes.passes import fuse_lut as lut
from ortolan.graph_passes.passes.normalize import (
    drop_listed_initializers,
    inline_functions,
    optimized_with,
    squeeze_weights,
)
from ortolan.graph_passes.report.figures import human_bytes
from ortolan.graph_passes.report.lines import WIDTH, first_of, lay_out, percent, table, wrap
from ortolan.graph_passes.report.optimization import SPARSE

from .errors import ModelError, OrtolanError

if TYPE_CHECKING:
    import onnx


_REPLACED = "already replaced"
_LEAST_TWO_FOUR = 0.4  # weights with fewer zeros than this fraction are not called 2:4 sparse
_STORAGES = {DENSE: "dense ", BITMAP: "bitmap + ", TWO_FOUR: "2:4 "}
# Maps the dtype of SparseAMXMatMul's input `values` to the name of the weight type.
_KINDS = {ir.DataType.BFLOAT16: "bf16", ir.DataType.INT8: "int8", ir.DataType.UINT8: "int4"}
_INPUTS = {"SparseAMXMatMul": sparse.INPUTS, "W4A8MatMul": w4a8.INPUTS, "W8A8MatMul": w8a8.INPUTS}


@dataclass
class TensorInfo:
    """An input or output of the model. Dimensions are integers, names, or None."""

    name: str
    dtype: str
    shape: list[int | str | None] | None


@dataclass
class LinearInfo:
    """A linear layer, or another matrix product.

    Attributes:
        k: The number of inputs.
        n: The number of outputs.
        weight_bytes: The size of the stored weight.
        weight_format: FLOAT, FLOAT16, …, followed by ", 2:4" if the weight is 2:4 sparse; for weights that Ortolan
            packed "bitmap + int8", "2:4 int8", "dense int4, groups of 128", …
        sparsity: The fraction of zeros.
        replaceable: Ortolan can replace it.
        fused: Other operations that Ortolan's operator computes: "gelu", "residual", …
    """

    name: str
    op: str
    k: int | None = None
    n: int | None = None
    weight_bytes: int | None = None
    weight_format: str | None = None
    sparsity: float | None = None
    replaceable: bool = False
    reason: str | None = None
    fused: list[str] = field(default_factory=list)


@dataclass
class Inspection:
    """The result of `inspect_onnx`. `print` shows a summary, `details()` all layers, `to_json()` everything.

    Attributes:
        file_size: The size of the model and its data files in bytes.
        optimized: The name of the recipe, if Ortolan made the model.
        ortolan_version: The version of Ortolan that made it.
        operators: The count of each operator.
        fusions: The count of each operator that belongs neither to the ONNX standard nor to Ortolan.
    """

    model: str
    file_size: int
    opset: int
    ir_version: int
    producer: str
    optimized: str | None
    ortolan_version: str | None
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)
    linears: list[LinearInfo] = field(default_factory=list)
    operators: dict[str, int] = field(default_factory=dict)
    fusions: dict[str, int] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as plain values."""
        return dataclasses.asdict(self)

    def to_json(self, indent: int | None = 2) -> str:
        """Return the result as JSON."""
        return json.dumps(self.to_dict(), indent=indent)

    def __str__(self) -> str:
        return self.summary()

    def summary(self, width: int = WIDTH) -> str:
        """Return the text that `print` shows: inputs, outputs, and the layers, with equal layers grouped."""
        heads = [
            f"{self.model}: {human_bytes(self.file_size)}, opset {self.opset}, IR version {self.ir_version}"
            + (f", made by {self.producer}" if self.producer else ""),
            self._state(),
        ]
        facts = [
            *(("input", _signature(value)) for value in self.inputs),
            *(("output", _signature(value)) for value in self.outputs),
            *(("layers", text) for text in self._groups()),
        ]
        if self.fusions:
            facts.append(("fused", ", ".join(f"{times} {name}" for name, times in self.fusions.items())))
        reasons: dict[str, list[str]] = {}
        for layer in self.linears:
            if layer.reason is not None and layer.reason != _REPLACED:
                reasons.setdefault(layer.reason, []).append(layer.name)
        facts += [("left alone", f"{reason}: {first_of(names)}") for reason, names in reasons.items()]
        return "\n".join([*(wrap(head, width) for head in heads), "", lay_out(facts, width)])

    def details(self, width: int = WIDTH, table_width: int | None = None) -> str:
        """Return the summary and the table of layers, like the option -v. Widths are as for OptimizationReport."""
        layers = self.table(table_width)
        return f"{self.summary(width)}\n\n{layers}" if layers else self.summary(width)

    def table(self, width: int | None = None) -> str:
        """Return a table of the layers. Long names are wrapped to fit `width`, unless it is None."""
        layers = [layer for layer in self.linears if layer.k is not None]
        columns = {
            "layer": [layer.name for layer in layers],
            "op": [layer.op.removeprefix(f"{ORTOLAN_DOMAIN}::") for layer in layers],
            "k x n": [f"{layer.k} x {layer.n}" for layer in layers],
            "weight": [layer.weight_format or "" for layer in layers],
            "bytes": [human_bytes(layer.weight_bytes) for layer in layers],
            "sparsity": [percent(layer.sparsity) for layer in layers],
            "fused": [", ".join(layer.fused) for layer in layers],
        }
        return table(columns, ("layer", "op", "weight", "fused"), width) if layers else ""

    def _state(self) -> str:
        if self.optimized:
            return f"optimized by Ortolan {self.ortolan_version or ''} ({self.optimized})"
        replaceable = [layer for layer in self.linears if layer.replaceable]
        attention = sum(layer.k is None for layer in replaceable)
        inside = f", {attention} of them in attention" if attention else ""
        return f"{len(replaceable)} of {len(self.linears)} matrix products can be replaced{inside}"

    def _groups(self) -> list[str]:
        """Return one line per size, format and kind of layer, without the names of Ortolan's operators."""
        groups: dict[tuple[str, ...], list[LinearInfo]] = {}
        for layer in self.linears:
            if layer.k is not None:
                op = () if layer.op.startswith(f"{ORTOLAN_DOMAIN}::") else (layer.op,)
                fused = (f"with {' and '.join(layer.fused)}",) if layer.fused else ()
                key = (f"{layer.k} x {layer.n}", *op, layer.weight_format or "", *fused)
                groups.setdefault(key, []).append(layer)
        texts = []
        for (size, *kind), layers in groups.items():
            parts = [*filter(None, kind), human_bytes(sum(layer.weight_bytes or 0 for layer in layers))]
            zeros = [layer.sparsity for layer in layers if layer.sparsity is not None]
            if zeros and sum(zeros) / len(zeros) >= SPARSE:
                parts.append(f"{percent(sum(zeros) / len(zeros))} zeros")
            texts.append(f"{len(layers)} of {size}: {', '.join(parts)}")
        return texts


def inspect_onnx(model: str | os.PathLike[str] | onnx.ModelProto) -> Inspection:
    """List the layers of a model, without changing or running it.

    Args:
        model: The path of an ONNX file or of its folder, or a ModelProto.

    Raises:
        ArgumentTypeError: The model is not a path or a ModelProto.
        ModelError: The model cannot be read.
    """
    file = load_model(model)
    try:
        return _inspect(file)
    except OrtolanError:
        raise
    except Exception as error:  # a malformed model can cause any error
        raise ModelError(f"{file.name} is not a well-formed ONNX model: {type(error).__name__}: {error}") from error


def _inspect(file: ModelFile) -> Inspection:
    graph_model = file.model
    mapped = list(external_tensors(graph_model))
    result = Inspection(
        model=file.name,
        file_size=file.size,
        opset=graph_model.opset_imports.get("", graph_model.opset_imports.get("ai.onnx", 0)),
        ir_version=graph_model.ir_version,
        producer=" ".join(part for part in (graph_model.producer_name, graph_model.producer_version) if part),
        optimized=graph_model.metadata_props.get(RECIPE_KEY) or optimized_with(graph_model),
        ortolan_version=graph_model.metadata_props.get(VERSION_KEY),
        inputs=[_tensor_info(value) for value in graph_model.graph.inputs if not value.is_initializer()],
        outputs=[_tensor_info(value) for value in graph_model.graph.outputs],
    )
    drop_listed_initializers(graph_model)
    inline_functions(graph_model)  # ONNX functions may contain linear layers
    standard = (*DEFAULT_DOMAINS, ORTOLAN_DOMAIN)
    outside = {op_name(node) for node in graph_model.graph.all_nodes() if node.domain not in standard}
    for node in graph_model.graph.all_nodes():
        if node.domain == ORTOLAN_DOMAIN and node.op_type != lut.OP_TYPE:
            result.linears.append(_packed_info(node))
    counts = Counter(op_name(node) for node in graph_model.graph.all_nodes())
    _write_known_forms(graph_model)
    for found in find_linears(graph_model):
        if isinstance(found, Linear):
            matrix = found.matrix()
            stored = stored_in(matrix)
            sparsity = 1 - stored.count / matrix.size
            # Any weight with one or two inputs satisfies the 2:4 pattern, even without zeros.
            pattern = ", 2:4" if stored.is_two_four and sparsity >= _LEAST_TWO_FOUR else ""
            result.linears.append(
                LinearInfo(
                    found.name,
                    found.op,
                    found.k,
                    found.n,
                    found.stored_bytes,
                    found.stored_type + pattern,
                    sparsity,
                    result.optimized is None,
                )
            )
            del matrix
            release_maps(mapped)
        else:
            result.linears.append(LinearInfo(found.name, op_name(found.node), reason=found.reason))
    _mark_attention(graph_model, result)
    result.operators = dict(sorted(counts.items()))
    result.fusions = {name: count for name, count in result.operators.items() if name in outside}
    return result


def _mark_attention(model: ir.Model, result: Inspection) -> None:
    """Mark the MatMuls of attention as replaceable: NoMADAttention replaces them, and the report counts them."""
    if result.optimized is not None:
        return
    graphs = [Dimensions(graph) for graph in model.graphs()]
    found = [match for graph in graphs for match in (*find_attentions(graph), *find_cached_attentions(graph))]
    products = {node_name(node) for match in found if not isinstance(match, NotAttention) for node in match.products}
    for info in result.linears:
        if info.k is None and info.name in products:
            info.replaceable, info.reason = True, None


def _write_known_forms(model: ir.Model) -> None:
    """Rewrite layers as pass normalize does."""
    new_name = NewNames(model)
    if model.opset_imports.get("", 0) >= MINIMUM_OPSET:
        unfuse(model, new_name, tables=False)
        squeeze_weights(model, new_name)
    unify_quantized(model, new_name)
    unfold_convolutions(model, new_name)


def _packed_info(node: ir.Node) -> LinearInfo:
    """Return the information on a node of one of Ortolan's operators, which may compute one linear layer or two."""
    integers = {name: attr.as_int() for name, attr in node.attributes.items() if attr.type == ir.AttributeType.INT}
    info = LinearInfo(node_name(node), op_name(node), integers.get("k"), integers.get("n"), reason=_REPLACED)
    info.weight_format = "packed"
    gated_columns = integers.get("gated_columns", 0)
    if gated_columns:
        info.n = 2 * gated_columns
    inputs = _INPUTS.get(node.op_type)
    if inputs is None:
        tensors = [constant_tensor(value) for value in node.inputs[1:]]
        info.weight_bytes = sum(tensor.nbytes for tensor in tensors if tensor is not None)
        return info
    by_name = dict(zip(inputs, node.inputs, strict=False))
    constants = {name: tensor for name, value in by_name.items() if (tensor := constant_tensor(value)) is not None}
    describe = _describe_sparse if node.op_type == "SparseAMXMatMul" else _describe_groups
    weight = describe(info, constants, integers)
    info.weight_bytes = sum(constants[name].nbytes for name in weight if name in constants)
    residual = by_name.get("residual")
    info.fused = describe_epilogue(
        Activation(integers.get("activation", 0)), None if _is_nothing(residual) else residual, gated=gated_columns > 0
    )
    return info


def _describe_sparse(
    info: LinearInfo, constants: Mapping[str, ir.TensorProtocol], integers: Mapping[str, int]
) -> list[str]:
    """Set format and sparsity; return the names of the inputs that hold the weight."""
    group_size = integers.get("group_size", 0)
    masks, values = constants.get("masks"), constants.get("values")
    kind = _KINDS.get(values.dtype) if values is not None else None
    if masks is not None and values is not None and kind is not None:
        offsets = constants.get("offsets")
        storage = storage_of(masks.size, 0 if offsets is None else offsets.size)
        info.weight_format = _STORAGES[storage] + kind + (f", groups of {group_size}" if group_size else "")
        if info.k and info.n:
            stored = _count_bits(masks) if storage == BITMAP else _count_nonzero(values.numpy(), kind)
            info.sparsity = 1 - stored / (info.k * info.n)
    # If other layers have scales, bf16 layers have scales of 1, which are not part of the weight.
    return ["masks", "values", "offsets", *(["scales"] if kind != "bf16" else [])]


def _describe_groups(
    info: LinearInfo, constants: Mapping[str, ir.TensorProtocol], integers: Mapping[str, int]
) -> list[str]:
    group_size, subgroup_size = integers.get("group_size", 0), integers.get("subgroup_size", 0)
    if subgroup_size:
        kind = f"int{integers.get('bits', 4)}"
        info.weight_format = f"{kind}, groups of {subgroup_size} with integer scales, float scales for {group_size}"
        # A single value of high_bits is a placeholder of 4-bit weights.
        has_high_bits = "high_bits" in constants and constants["high_bits"].size > 1
        return ["weights", "scales", "subgroup_scales", *(["high_bits"] if has_high_bits else [])]
    # A single value is a placeholder, which the node needs because other layers have zero points.
    offsets = [name for name in ("zero_points", "minimums") if name in constants and constants[name].size > 1]
    weights = constants.get("weights")
    kind = "int8" if weights is not None and weights.dtype == ir.DataType.INT8 else "int4"
    info.weight_format = f"{kind}, groups of {group_size}" + "".join(f", {name.replace('_', ' ')}" for name in offsets)
    return ["weights", "scales", *offsets]


def _count_bits(masks: ir.TensorProtocol) -> int:
    return int.from_bytes(masks.numpy().tobytes(), "little").bit_count()


def _count_nonzero(values: np.ndarray, kind: str) -> int:
    """Count the weights that are not zero."""
    if kind == "int4":
        return int(
            np.count_nonzero(values % 16 != sparse.INT4_BIAS) + np.count_nonzero(values // 16 != sparse.INT4_BIAS)
        )
    return int(np.count_nonzero(values.view(np.uint16) if kind == "bf16" else values))


def _is_nothing(residual: ir.Value | None) -> bool:
    """Return True if the layer has no residual: the input is missing, or is a placeholder 0."""
    tensor = constant_tensor(residual)
    if tensor is None or len(tensor.shape) > 1:
        return residual is None
    return tensor.size == 1 and not tensor.numpy().any()


def _tensor_info(value: ir.Value) -> TensorInfo:
    shape = None
    if value.shape is not None:
        shape = [size if isinstance(size, int) else size.value for size in value.shape]
    return TensorInfo(value.name or "", value.dtype.name if value.dtype is not None else str(value.type), shape)


def _signature(value: TensorInfo) -> str:
    shape = "?" if value.shape is None else ", ".join("?" if size is None else str(size) for size in value.shape)
    return f"{value.name}: {value.dtype} [{shape}]"
