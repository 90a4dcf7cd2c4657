"""The plan of a run: what each step of the recipe (a pass with options) will do to each layer, known before it runs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol

from ...find.linear import Linear
from ...operators.replacement import Stored
from ...operators.sparse_amx_matmul_function import OP_TYPE as SPARSE_AMX_MATMUL
from ...options import PassOptions
from ...weights.quantizers.grid import Quantization
from .activations import ActivationsOptions
from .experts import ExpertsOptions
from .prune import PruneOptions
from .quantize import QuantizeOptions
from .replace import LayerState, ReplaceOptions, ReplaceRule

SMALLEST = Stored(0, "")  # the weight with the smallest packed size: all elements are zero
_LAYER_PASSES = frozenset(("prune", "quantize", "replace", "fuse_attention", "fuse_cached_attention"))


class Step(Protocol):
    """A step of a recipe: recipe.RecipeStep."""

    @property
    def name(self) -> str:
        """Name of the pass."""
        ...

    @property
    def options(self) -> PassOptions:
        """Options of the pass."""
        ...


class Plan:
    """Decisions that follow from the options of a recipe's steps, a layer and its state."""

    def __init__(self, steps: Sequence[Step] = ()) -> None:
        names = [step.name for step in steps]
        options = [step.options for step in steps]
        self._rules = [ReplaceRule(one) for one in options if isinstance(one, ReplaceOptions)]
        self._quantizing = [one for one in options if isinstance(one, QuantizeOptions | PruneOptions)]
        self.replaces_experts = "experts" in names
        self._experts = [
            one for one in options if isinstance(one, ExpertsOptions) and one.join and one.expert_bits is not None
        ]
        self._activations = [one for one in options if isinstance(one, ActivationsOptions)]
        self.replaces = "replace" in names
        self.prunes = "prune" in names
        self.quantizes = "quantize" in names or any(_values(steps, "prune", "weight_bits"))
        # Pass normalize splits fused operators if a later pass matches linear layers or attention, or if it is the only
        # pass (ortolan inspect).
        self.unfuses = not _LAYER_PASSES.isdisjoint(names) or names == ["normalize"]
        self.stores_tables = "embeddings" in names
        self.records_ranges = "ranges" in names
        self.takes_prompt = "compress_cache" in names
        self.fuses_cached = self.takes_prompt or "fuse_cached_attention" in names
        self.applies_thresholds = any(rule.replacement.masks_inputs for rule in self._rules)
        self.requantizes = any(rule.options.requantize for rule in self._rules)
        self.feeds_to_verify: int = max(_values(steps, "verify", "feeds"), default=0)

    def is_last(self, options: ReplaceOptions) -> bool:
        """Return True if these are the options of the last pass `replace`."""
        return bool(self._rules) and self._rules[-1].options is options

    def keeps_stored(self, linear: Linear) -> bool:
        """Return True if a pass `replace` keeps the 4-bit or 8-bit weights that the model stores for the layer."""
        return any(rule.stored_weight(linear) is not None and not rule.refuses_range(linear) for rule in self._rules)

    def keeps_range(self, linear: Linear) -> bool:
        """Return True if a pass `replace` keeps the layer's stored weight in an operator with fixed input ranges."""
        state = LayerState(linear.stored_bytes)
        return linear.x_range is not None and any(
            rule.replacement.takes_ranges
            and rule.stored_weight(linear) is not None
            and rule.why_not(linear, rule.replacement.stored_weights(linear.matrix()), state) is None
            for rule in self._rules
        )

    def quantization(self, linear: Linear) -> Quantization | None:
        """Return how a pass will quantize the layer; None if none does, or if no pass would replace the result."""
        chosen = self._chosen_quantization(linear)
        return chosen if chosen is not None and self.why_not_quantized(linear) is None else None

    def why_not_quantized(
        self, linear: Linear, stored: Stored = SMALLEST, state: LayerState | None = None
    ) -> str | None:
        """Explain why no pass `replace` replaces the layer after it is quantized; prefer reasons of its operator.

        None if a pass replaces it, or if no pass quantizes it or replaces layers.
        """
        chosen = self._chosen_quantization(linear)
        if chosen is None:
            return None
        if state is None:
            state = LayerState(linear.stored_bytes, stored_bits=linear.stored_bits)
        reasons = self._reasons(linear, stored, dataclasses.replace(state, quantized=chosen))
        return None if None in reasons else next(iter(reasons), None)

    def _chosen_quantization(self, linear: Linear) -> Quantization | None:
        if self.keeps_stored(linear):
            return None
        found = (one.quantization_of(linear) for one in self._quantizing)
        return next((one for one in found if one is not None), None)

    def needs_bf16_scales(self, linear: Linear) -> bool:
        """Return True if the layer's 4-bit scales must be bf16.

        They must if a pass `replace` may choose SparseAMXMatMul, which supports only bf16 scales, or if no pass
        replaces layers.
        """
        return not self._rules or any(
            rule.options.op == SPARSE_AMX_MATMUL and rule.is_chosen(linear) for rule in self._rules
        )

    @property
    def calibrated_methods(self) -> list[str]:
        """Return the methods of passes `quantize` that fit weights to calibration data."""
        methods = {one.method for one in self._quantizing if isinstance(one, QuantizeOptions)}
        return [method for method in ("gptq", "awq") if method in methods]

    @property
    def joins_experts(self) -> bool:
        """Return True if a pass `experts` replaces mixtures whose experts are separate layers."""
        return bool(self._experts)

    def why_separate(self, name: str, layers: Sequence[Linear]) -> str | None:
        """Explain why the experts of a mixture with this name stay separate layers; None if pass `experts` joins them.

        No pass may prune one of these layers or choose a threshold for it. If passes quantize layers, they must
        quantize all of these to the bits of pass `experts`.
        """
        bits = next((one.expert_bits for one in self._experts if one.is_chosen(name)), None)
        if bits is None:
            return "excluded from pass experts"
        pruning = [one for one in self._quantizing if isinstance(one, PruneOptions)]
        for linear in layers:
            pruned = any(linear.is_chosen(one.select, one.exclude) for one in pruning)
            if pruned or self.chooses_threshold(linear):
                return f"layer {linear.name!r} is {'pruned' if pruned else 'given a threshold'}"
            chosen = self._chosen_quantization(linear)
            if self.quantizes and (chosen is None or chosen.bits != bits):
                found = "is not quantized" if chosen is None else f"gets {chosen.bits} bits"
                return f"layer {linear.name!r} {found}, mixtures get {bits} bits"
        return None

    def chooses_threshold(self, linear: Linear) -> bool:
        """Return True if a pass `activations` chooses a threshold for the layer's input."""
        return any(one.takes(linear) for one in self._activations)

    def prunes_to_two_four(self, linear: Linear) -> bool:
        """Return True if a pass prunes the layer to 2:4."""
        pruning = (one for one in self._quantizing if isinstance(one, PruneOptions))
        return any(one.units.is_two_four and linear.is_chosen(one.select, one.exclude) for one in pruning)

    def gains(self, linear: Linear, stored: Stored, state: LayerState) -> bool:
        """Return True if a pass replaces the layer once its weight is `stored`, or if no pass replaces layers."""
        return not self._rules or None in self._reasons(linear, stored, state)

    def _reasons(self, linear: Linear, stored: Stored, state: LayerState) -> list[str | None]:
        """Return, for each pass `replace`, why it does not replace the layer; None if it does.

        Only passes whose operator supports such a weight are included; if no operator does, all passes are.
        """
        pairs = [(rule, self.foreseen(linear, state, rule)) for rule in self._rules]
        able = [
            (rule, foreseen)
            for rule, foreseen in pairs
            if rule.is_chosen(linear)
            and rule.replacement.why_not(linear.k, rule.quantization(linear, foreseen)) is None
        ]
        return [rule.why_not(linear, stored, foreseen) for rule, foreseen in able or pairs]

    def foreseen(self, linear: Linear, state: LayerState, rule: ReplaceRule) -> LayerState:
        """Return the layer's expected state when the pass `replace` of this rule runs."""
        quantized, threshold = state.quantized, state.threshold
        if quantized is None:
            quantized = self.quantization(linear)
        if threshold is None and rule.replacement.masks_inputs and self.chooses_threshold(linear):
            threshold = 0.0
        return dataclasses.replace(state, quantized=quantized, threshold=threshold)


def _values(steps: Sequence[Step], name: str, option: str) -> list[Any]:
    return [getattr(step.options, option) for step in steps if step.name == name]
