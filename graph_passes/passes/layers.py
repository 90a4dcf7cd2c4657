"""What the passes of a run know of the linear layers."""

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
    """By the output of their node (layer_key), not by a name: those of nodes need not be unique, and those of values
    may be the same in both branches of an If."""

    reports: dict[ir.Value, LayerReport] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)  # and of their weights, before any pass changed them
    # Each layer's weight [k, n] before any pass changed it. The numbers stay in the model's file until it is called.
    originals: dict[ir.Value, Callable[[], np.ndarray]] = field(default_factory=dict)
    captured: dict[ir.Value, np.ndarray] = field(default_factory=dict)  # rows of inputs to each layer: [rows, k]
    # Numbers of values that a pass ranges has recorded, by name.
    activations: dict[str, np.ndarray] = field(default_factory=dict)
    # Below which magnitude a layer's inputs count as zero, or why there is none; see activations.py.
    thresholds: dict[ir.Value, float | str] = field(default_factory=dict)
    quantized: dict[Hashable, QuantizedWeight] = field(default_factory=dict)  # by Linear.weight_key
    # Of each replaced layer: ||Y - XW|| / ||XW|| with the weight W that was packed.
    rounding: dict[ir.Value, float] = field(default_factory=dict)
    stored_bits: dict[ir.Value, int | None] = field(default_factory=dict)  # of each weight before any pass changed it
    # Why a pass quantize has left a layer as it is. No pass replace knows better.
    left: dict[ir.Value, str] = field(default_factory=dict)
    packed_weights: int = 0  # in all matrices that were packed so far
    embeddings: list[StoredEmbedding] = field(default_factory=list)  # tables of words that pass embeddings has stored
    freed: int = 0  # activations that were rounded to fixed ranges, and are floats now
    unpadded: bool = False  # padding is left out
    zero_at_padding: list[str] = field(default_factory=list)  # outputs that are 0 there, if it is left out
    pad_token_id: int | None = None  # what padding holds; None: every hidden position is padding
    unified: list[ir.Node] = field(default_factory=list)  # products of int8 layers in another form (quantized_forms.py)

    def add(self, layer: Linear | NotLinear) -> None:
        """Begins its report, and remembers its weight."""
        key = layer_key(layer)
        self.names.append(layer.name)
        if isinstance(layer, Linear):
            self.names += layer.weight_names
            self.originals[key] = layer.matrix_as_it_is()
            self.stored_bits[key] = layer.stored_bits
            self.reports[key] = LayerReport(layer.name, layer.op, k=layer.k, n=layer.n, bytes_before=layer.stored_bytes)
        else:
            self.reports[key] = LayerReport(layer.name, op_name(layer.node), reason=layer.reason)

    def take(self, layer: Linear, numbers: QuantizedWeight) -> None:
        """The layer's weight stands for these numbers already."""
        self.quantized[layer.weight_key] = numbers
        self.reports[layer_key(layer)].weight_bits = numbers.bits

    @property
    def changed(self) -> bool:
        """Whether weights are changed, or activations are floats that were rounded before."""
        return self.weights_changed or bool(self.freed)

    @property
    def weights_changed(self) -> bool:
        """Whether there are tables of words in few bits, or layers that are pruned or quantized, and not replaced."""
        pruned_or_quantized = any(report.status in ("pruned", "quantized") for report in self.reports.values())
        return pruned_or_quantized or bool(self.embeddings)

    @property
    def masked(self) -> bool:
        """Whether inputs of some layer count as zero that are not."""
        return any(threshold for threshold in self.thresholds.values() if isinstance(threshold, float))

    def state(self, linear: Linear) -> LayerState:
        """What the passes so far have made of the layer."""
        key = layer_key(linear)
        before = self.reports[key].bytes_before or 0
        quantized, threshold = self.quantized.get(linear.weight_key), self.thresholds.get(key)
        return LayerState(before, quantized, threshold, self.stored_bits.get(key))
