"""State of a run for linear layers."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ..find.linear import Linear, NotLinear, layer_key, op_name
from ..find.quantized_weight import QuantizedWeight
from ..operators.embedding import StoredEmbedding
from ..report.optimization import LayerReport
from .plan.replace import LayerState


@dataclass
class Layers:
    """State of the linear layers, by layer_key.

    The key is the output of the layer's node, because names are not unique: nodes may share one, and so may values in
    both branches of an If.
    """

    reports: dict[ir.Value, LayerReport] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # names of layers and their weights, before any pass changed them
    # Each layer's weight [k, n] before any pass changed it, read from the model's file on each call.
    originals: dict[ir.Value, Callable[[], np.ndarray]] = field(default_factory=dict)
    # recorded inputs of each layer, float32 [rows, k]
    captured: dict[ir.Value, np.ndarray] = field(default_factory=dict)
    # samples recorded by pass ranges, by value name
    activations: dict[str, np.ndarray] = field(default_factory=dict)
    # Magnitude up to which a layer's inputs count as zero, or why it has no threshold (activations.py).
    thresholds: dict[ir.Value, float | str] = field(default_factory=dict)
    quantized: dict[Hashable, QuantizedWeight] = field(default_factory=dict)  # by Linear.weight_key
    # ||Y - XW|| / ||XW|| of each replaced layer, with the packed weight W.
    rounding: dict[ir.Value, float] = field(default_factory=dict)
    # bits of each weight before any pass changed it
    stored_bits: dict[ir.Value, int | None] = field(default_factory=dict)
    # Why pass quantize has skipped a layer; pass replace does not change this reason.
    left: dict[ir.Value, str] = field(default_factory=dict)
    routers: set[ir.Value] = field(default_factory=set)  # layers that select experts, which no pass changes
    packed_weights: int = 0  # total number of elements in packed weights
    embeddings: list[StoredEmbedding] = field(default_factory=list)  # word tables that pass embeddings has stored
    freed: int = 0  # activations whose fixed-range quantization was removed
    unpadded: bool = False  # padding tokens are skipped
    # outputs that are 0 at skipped padding tokens
    zero_at_padding: list[str] = field(default_factory=list)
    pad_token_id: int | None = None  # token id of padding; None: every masked position is padding
    # MatMul and Gemm nodes that fold_back can undo (find/quantized_forms.py)
    unified: list[ir.Node] = field(default_factory=list)
    # MatMul nodes that fold_convolutions can undo (find/convolutions.py)
    unfolded: list[ir.Node] = field(default_factory=list)

    def add(self, layer: Linear | NotLinear) -> None:
        """Start the layer's report, and remember its weight."""
        key = layer_key(layer)
        self.names.append(layer.name)
        if isinstance(layer, Linear):
            self.names += layer.weight_names
            self.originals[key] = layer.matrix_as_it_is()
            self.stored_bits[key] = layer.stored_bits
            self.reports[key] = LayerReport(layer.name, layer.op, k=layer.k, n=layer.n, bytes_before=layer.stored_bytes)
        else:
            self.reports[key] = LayerReport(layer.name, op_name(layer.node), reason=layer.reason)

    def take(self, layer: Linear, weight: QuantizedWeight) -> None:
        """Record given integers as the layer's weight; the graph already holds their dequantized values."""
        self.quantized[layer.weight_key] = weight
        self.reports[layer_key(layer)].weight_bits = weight.bits

    @property
    def changed(self) -> bool:
        """Return True if weights are changed, or quantized activations became floats."""
        return self.weights_changed or bool(self.freed)

    @property
    def weights_changed(self) -> bool:
        """Return True if tables are stored, or layers are pruned or quantized but not replaced."""
        pruned_or_quantized = any(report.status in ("pruned", "quantized") for report in self.reports.values())
        return pruned_or_quantized or bool(self.embeddings)

    @property
    def masked(self) -> bool:
        """Return True if a layer has a threshold above 0."""
        return any(threshold for threshold in self.thresholds.values() if isinstance(threshold, float))

    def state(self, linear: Linear) -> LayerState:
        """Return the state of a layer after the passes so far."""
        key = layer_key(linear)
        before = self.reports[key].bytes_before or 0
        quantized, threshold = self.quantized.get(linear.weight_key), self.thresholds.get(key)
        return LayerState(before, quantized, threshold, self.stored_bits.get(key))
