"""Select the layers whose weights an operator supports, and report why other layers are not replaced."""

from __future__ import annotations

from collections.abc import Set

import numpy as np
import onnx_ir as ir

from ...find.linear import Linear, layer_key
from ...find.quantized_weight import QuantizedWeight
from ...find.stored_int4 import StoredInt4
from ...find.stored_int8 import StoredInt8
from ...operators.replacement import LayerWeight, Stored
from ...report.optimization import LayerReport
from ...weights.quantizers.fixed_range import FixedRange, choose_range
from ...weights.quantizers.grid import Quantization
from ..context import PassContext
from ..plan.replace import LayerState, ReplaceRule


class AcceptedWeights:
    """Weights of the layers that one pass `replace` replaces."""

    def __init__(self, context: PassContext, rule: ReplaceRule, in_mlps: Set[Linear]) -> None:
        """Use fixed ranges for `in_mlps`, the layers of hidden.Mlp, which need them to become one operator."""
        self._context = context
        self._rule = rule
        self._in_mlps = in_mlps
        self._ranges: dict[ir.Value, FixedRange] = {}  # ranges of layers' inputs

    def quantization(self, linear: Linear) -> Quantization | None:
        """Return the format of the weight that is packed for the operator; None: float."""
        return self._rule.quantization(linear, self._state(linear))

    def of(self, linear: Linear) -> LayerWeight | None:
        """Return the weight to pack for the operator; if the layer is not replaced, report why and return None."""
        layer, state, replacement = self._context.layer(linear), self._state(linear), self._rule.replacement
        if not self._rule.is_chosen(linear):
            # Another pass's reason is more useful than "not selected".
            if layer.reason is None or linear.matches(self._rule.options.select):
                layer.reason = self._rule.why_not(linear, Stored(0, ""), state)
            return None
        quantization = self._rule.quantization(linear, state)
        layer.storage = None
        if isinstance(quantization, StoredInt4):
            quantization.check_scales()
        matrix = linear.matrix()
        if problem := self._why_not_weight(linear, quantization, matrix):
            if self._replaces_reason(linear, layer):
                layer.reason = f"weight {linear.weight_names[-1]!r} {problem}"
            return None
        layer.sparsity = 1 - int(np.count_nonzero(matrix)) / matrix.size
        stored = replacement.stored_weights(matrix)
        if self._context.dry_run and self._context.plan.prunes_to_two_four(linear):
            stored = Stored(stored.count, "")
        if reason := self._rule.why_not(linear, stored, state):
            if self._replaces_reason(linear, layer):
                layer.reason = reason
            return None
        layer.reason = None
        layer.bytes_after = self._rule.packed_bytes(linear, stored, state)
        layer.storage = replacement.foreseen_storage(linear.k, linear.n, stored, quantization)
        quantized = quantization if isinstance(quantization, QuantizedWeight) else None
        threshold = state.threshold if isinstance(state.threshold, float) else 0.0
        return LayerWeight(matrix, quantized, self._x_range(linear), threshold)

    def _replaces_reason(self, linear: Linear, layer: LayerReport) -> bool:
        """Return True if this pass's reason for skipping the layer replaces an earlier one.

        The reason of pass quantize is never replaced. The reason for a layer that keeps its stored weight is replaced
        only by a pass that keeps stored weights.
        """
        if layer_key(linear) in self._context.layers.left:
            return False
        takes_them = self._rule.stored_weight(linear) is not None
        return layer.reason is None or takes_them or not self._context.plan.keeps_stored(linear)

    def _state(self, linear: Linear) -> LayerState:
        """Return the layer's state; in a dry run, the expected one."""
        state = self._context.layers.state(linear)
        return self._context.plan.foreseen(linear, state, self._rule) if self._context.dry_run else state

    def _why_not_weight(self, linear: Linear, quantization: Quantization | None, matrix: np.ndarray) -> str | None:
        problem = self._rule.replacement.why_not(linear.k, quantization)
        if problem and linear.why_not_stored:
            return f"{problem} ({linear.why_not_stored})"
        if problem is None and isinstance(quantization, StoredInt4 | StoredInt8):
            problem = self._rule.replacement.why_not_quantized(quantization)
        if problem or quantization is not None:
            return problem
        return self._rule.replacement.why_not_matrix(matrix)

    def _x_range(self, linear: Linear) -> FixedRange | None:
        """Return the fixed range of the layer's input: the model's own, or chosen from samples of pass ranges."""
        if not self._rule.replacement.takes_ranges:
            return None
        sample = self._context.layers.activations.get(linear.x.name or "")
        if linear.x_range is not None or sample is None:
            return linear.x_range
        if self._rule.options.fixed_ranges == "mlp" and linear not in self._in_mlps:
            return None
        if linear.x not in self._ranges:
            self._ranges[linear.x] = choose_range(sample)
        return self._ranges[linear.x]
