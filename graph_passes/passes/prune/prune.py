"""Set the least important weights of linear layers to zero, if a pass `replace` would then replace the layer.

The unit that is pruned is a single weight (pattern "unstructured"), a block of one input and four consecutive outputs
("4x1"), or all but N of M consecutive inputs of an output ("2:4" and others). The number of zeros is exact.

This module prunes by magnitude, or blocks by the sum of magnitudes. The pruned weights are lazy: each access computes
them from the original in the mapped file and a threshold. Of weights equal to the threshold, the first in row-major
order are pruned. Methods that need inputs are in calibrated.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir

from ortolan.errors import RecipeError
from ortolan.progress import Stage

from ...find.constants import lazy
from ...find.linear import Linear
from ...find.quantized_weight import MAX_INPUTS, QuantizedWeight, too_wide
from ...find.stored_int8 import StoredInt8
from ...measure.fits import Fit
from ...operators.replacement import Stored
from ...weights.pruners.masks import BLOCK_OUTPUTS, Pattern, keep_in_groups
from ...weights.quantizers.grid import QuantizedMatrix
from ..context import RecipePass
from ..magnitude import Threshold, find_threshold, pruned_tensor, tally_weight
from ..plan.prune import PruneOptions
from ..quantize.quantize import check_finite, put_quantized
from ..weight_groups import PruneGroup, check_patterns, group_layers
from .calibrated import allocate_by_sensitivity, fit_pruned, spilled, values_of


class PrunePass(RecipePass):
    """Prune each weight once, even if several layers share it."""

    options_type = PruneOptions
    options: PruneOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Prune the selected layers."""
        options, context = self.options, self.context
        groups = self._group(context.survey(model))
        self._int8: list[str] = []  # layers whose unpruned stored int8 weights are kept exactly
        groups = [group for group in groups if not self._is_sparse(group) or self._only_rounds(group)]
        if options.needs_inputs and context.dry_run and context.evidence.made_up:
            context.note("pass 'prune' needs calibration inputs (calibration=…): without them, a run fails")
        if options.scope == "sensitivity":
            self._allocate(model, [group for group in groups if group.sparsity is None])
        if options.method == "magnitude":
            pruned = self._by_magnitude(groups)
            groups = [group for group in groups if id(group) in pruned]
            repairs = options.repair and not context.dry_run
            if not repairs:
                for group in groups:
                    self._put(model, group, pruned[id(group)])
        else:
            repairs, pruned = False, {}
            groups = [group for group in groups if self._gains(group)]
            if context.dry_run:
                for group in groups:
                    self._announce(group)
        if groups and (repairs or options.method != "magnitude") and not context.dry_run:
            for group, fit in fit_pruned(model, context, options, groups, pruned):
                self._put_fit(model, group, fit)
        context.progress(Stage.PRUNE, len(groups), len(groups))
        if self._int8:
            more = f" and {len(self._int8) - 1} more" if len(self._int8) > 1 else ""
            context.note(
                f"pruned layers with stored int8 weights: {self._int8[0]!r}{more}; the remaining weights are kept "
                "exactly"
            )
        return ir.passes.PassResult(model, modified=bool(groups))

    def _only_rounds(self, group: PruneGroup) -> bool:
        """Mark an already sparse group to be only quantized; return False if this pass does not quantize."""
        group.sparsity, group.pattern = 0.0, Pattern()
        return self.options.weight_bits is not None and not group.keeps_stored

    def _gains(self, group: PruneGroup) -> bool:
        """Drop layers that no pass `replace` would replace after pruning; return True if any remain."""
        linear = group.linears[0]
        if self.options.weight_bits is not None and linear.k > MAX_INPUTS:
            for one in group.linears:
                self.context.layer(one).reason = too_wide(linear.k)
            return False
        zeros = group.pattern.zeros(linear.k, linear.n, group.sparsity or 0.0)
        kept = round((1 - zeros / group.pattern.units(linear.k, linear.n)) * group.weight.size)
        stored = Stored(kept, "") if group.pattern.is_two_four else Stored(kept)
        group.linears = [linear for linear in group.linears if self.context.gains(linear, stored)]
        for linear in group.linears:
            self.context.layer(linear).sparsity = 1 - kept / group.weight.size
        return bool(group.linears)

    def _allocate(self, model: ir.Model, groups: Sequence[PruneGroup]) -> None:
        for group in groups:
            group.sparsity = self.options.sparsity
        if groups and not self.context.dry_run:
            allocate_by_sensitivity(model, self.context, self.options, groups)

    def _announce(self, group: PruneGroup) -> None:
        for linear in group.linears:
            layer = self.context.layer(linear)
            layer.status, layer.bytes_after = "pruned", group.weight.nbytes
            if self.options.weight_bits is not None:
                layer.status, layer.weight_bits = "quantized", self.options.weight_bits

    def _by_magnitude(self, groups: Sequence[PruneGroup]) -> dict[int, ir.TensorProtocol]:
        """Return the pruned weights, by the id of their group."""
        if self.options.units.of:
            for group in groups:
                check_finite(group.linears[0].matrix(), group, "pruned")
                self.context.release()
            return {id(group): _without_smallest_of_groups(group) for group in groups if self._gains(group)}
        found: dict[int, ir.TensorProtocol] = {}
        steps = 0

        def step() -> None:
            nonlocal steps
            self.context.progress(Stage.PRUNE, steps, len(groups))
            self.context.release()
            steps += 1

        together = [group for group in groups if group.sparsity is None]
        for batch in [[group] for group in groups if group.sparsity is not None] + ([together] if together else []):
            sparsity = batch[0].sparsity if batch[0].sparsity is not None else self.options.sparsity
            scores = [self._scores(group) for group in batch]
            names = [group.weight_name for group in batch]
            count = round(sparsity * sum(score.size for score in scores))
            threshold = find_threshold(scores, names, count)
            ties = threshold.ties
            for group, score in zip(batch, scores, strict=True):
                step()
                tally = tally_weight(score, threshold.key)
                own_ties = min(ties, tally.equal)
                ties -= own_ties
                zeros = max(tally.zeros, tally.below + own_ties)
                kept = round((1 - zeros / score.size) * group.weight.size)
                group.linears = [linear for linear in group.linears if self.context.gains(linear, Stored(kept))]
                for linear in group.linears:
                    self.context.layer(linear).sparsity = zeros / score.size
                if group.linears and zeros > tally.zeros:
                    pruned = pruned_tensor(score, Threshold(threshold.key, own_ties))
                    if self.options.pattern == "4x1":
                        pruned = _without_blocks(group.weight, pruned, group.linears[0].transposed)
                    found[id(group)] = pruned
        return found

    def _put(self, model: ir.Model, group: PruneGroup, pruned: ir.TensorProtocol) -> None:
        """Give the layers their pruned weight. Unpruned stored int8 weights are kept exactly."""
        first, context = group.linears[0], self.context
        value = group.put(model, context, pruned, "pruned")
        if group.keeps_stored:
            assert isinstance(first.int8, StoredInt8)
            changed = dataclasses.replace(first, weight_value=value)
            context.layers.quantized[changed.weight_key] = pruned_quantized(first.int8, pruned, first.transposed)
            for linear in group.linears:
                context.layer(linear).weight_bits = first.int8.bits
            self._int8.append(first.name)

    def _put_fit(self, model: ir.Model, group: PruneGroup, fit: Fit) -> None:
        """Give the layers a weight that was fitted to their inputs: pruned, and perhaps quantized."""
        context, options = self.context, self.options
        if isinstance(fit.weights, QuantizedMatrix):
            assert options.quantization is not None
            put_quantized(model, context, group, fit.weights, options.quantization)
        else:
            self._put(model, group, spilled(context, group, fit.weights))
        values = values_of(fit.weights, options)
        for linear in group.linears:
            layer = context.layer(linear)
            layer.sparsity = np.count_nonzero(values == 0) / values.size
            layer.output_error = layer.output_error if layer.output_error is not None else fit.error
        context.release()

    def _scores(self, group: PruneGroup) -> ir.TensorProtocol:
        if self.options.pattern == "4x1":
            return block_sums(group.weight, group.linears[0].transposed)
        return group.weight

    def _is_sparse(self, group: PruneGroup) -> bool:
        """Return True, with a note, if the layers are sparse enough to be skipped (keep_sparse)."""
        if self.options.keep_sparse is None:
            return False
        scores = self._scores(group)
        sparsity = tally_weight(scores, 0).zeros / scores.size
        if sparsity < self.options.keep_sparse or sparsity == 0:
            return False
        for linear in group.linears:
            self.context.layer(linear).sparsity = sparsity
        self.context.note(
            f"layers that are already sparse, such as {group.linears[0].name!r}, are not pruned further (keep_sparse)"
        )
        return True

    def _group(self, linears: Sequence[Linear]) -> list[PruneGroup]:
        options = self.options
        found = group_layers(self.context, linears, options.select, options.exclude, "prune", "pruning")
        check_patterns(linears, "layers", tuple(options.layers), "prune")
        groups = []
        for group in found:
            first = group.linears[0]
            sparsity = self._own_sparsity(first)
            for linear in group.linears:
                if self._own_sparsity(linear) != sparsity:
                    raise RecipeError(
                        f"pass 'prune': layers {first.name!r} and {linear.name!r} share the weight "
                        f"{group.weight_name!r}, but have different sparsities; select both by the weight's name"
                    )
            keeps = self.context.plan.keeps_stored(first) and isinstance(first.int8, StoredInt8)
            groups.append(PruneGroup(group.linears, sparsity, options.units, keeps))
        return groups

    def _own_sparsity(self, linear: Linear) -> float | None:
        for glob, sparsity in self.options.layers.items():
            if linear.matches((glob,)):
                return sparsity
        return self.options.sparsity if self.options.scope == "layer" else None


def pruned_quantized(stored: QuantizedWeight, pruned: ir.TensorProtocol, transposed: bool) -> QuantizedWeight:
    """Return the stored integers, with zero where `pruned`, [k, n] or transposed, is zero."""

    def compute() -> np.ndarray:
        kept = np.asarray(pruned.numpy()) != 0
        zeros = np.int8(0) if stored.zero_points is None else stored.zero_points.numpy()
        return np.where(kept.T if transposed else kept, stored.q.numpy(), zeros)

    q = lazy(compute, stored.q.dtype, ir.Shape(stored.q.shape.numpy()))
    return QuantizedWeight(stored.bits, stored.group_size, q, stored.scales, stored.zero_points)


def _without_smallest_of_groups(group: PruneGroup) -> ir.LazyTensor:
    weight, transposed, pattern = group.weight, group.linears[0].transposed, group.pattern

    def compute() -> np.ndarray:
        matrix = np.asarray(weight.numpy())
        scores = np.abs((matrix.T if transposed else matrix).astype(np.float32))
        kept = keep_in_groups(scores, scores > 0, pattern)
        return np.where(kept.T if transposed else kept, matrix, matrix.dtype.type(0))

    return lazy(compute, weight.dtype, ir.Shape(weight.shape.numpy()))


def block_sums(weight: ir.TensorProtocol, transposed: bool) -> ir.LazyTensor:
    """Return a quarter of sum |w| of each block of four outputs, float32 [k, ceil(n / 4)], computed on access."""
    n, k = weight.shape.numpy() if transposed else reversed(weight.shape.numpy())

    def compute() -> np.ndarray:
        matrix = np.asarray(weight.numpy())
        magnitudes = np.abs((matrix.T if transposed else matrix).astype(np.float32)) / BLOCK_OUTPUTS
        padded = np.pad(magnitudes, ((0, 0), (0, -n % BLOCK_OUTPUTS)))
        sums: np.ndarray = padded.reshape(k, -1, BLOCK_OUTPUTS).sum(axis=2)
        return sums

    return lazy(compute, ir.DataType.FLOAT, ir.Shape([k, -(-n // BLOCK_OUTPUTS)]))


def _without_blocks(weight: ir.TensorProtocol, sums: ir.TensorProtocol, transposed: bool) -> ir.LazyTensor:
    def compute() -> np.ndarray:
        matrix = np.asarray(weight.numpy())
        n = matrix.shape[0 if transposed else 1]
        kept = np.repeat(sums.numpy() != 0, BLOCK_OUTPUTS, axis=1)[:, :n]
        return np.where(kept.T if transposed else kept, matrix, matrix.dtype.type(0))

    return lazy(compute, weight.dtype, ir.Shape(weight.shape.numpy()))
