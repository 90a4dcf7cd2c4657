"""Sets the least important weights of linear layers to zero, except where no pass `replace` would gain from it.

What goes is a weight by itself (pattern "unstructured"), a block of weights of one input and four consecutive outputs
("4x1"), or all but N of M consecutive inputs of an output ("2:4" and the like). The number of zeros is exact.

Here: by magnitude, of blocks by the sum of their magnitudes. Such weights are lazy: a layer is pruned anew each time
its array is asked for, from the original in the mapped file and one threshold, so no copy is kept. Of weights as large
as the threshold, the first in row-major order go. Methods that need inputs are in prune_calibrated.py.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import RecipeError
from ortolan.progress import Stage

from ..find.constants import lazy
from ..find.linear import Linear
from ..find.quantized_weight import MAX_INPUTS, QuantizedWeight, too_wide
from ..find.stored_int8 import StoredInt8
from ..options import Globs, PassOptions, takes
from ..weights.pruners.masks import BLOCK_OUTPUTS, MOST_OF_GROUP, Pattern, keep_in_groups
from ..weights.quantizers.grid import GROUP_SIZES, Quantization
from .context import PassContext, RecipePass
from .magnitude import Threshold, find_threshold, pruned_tensor, tally_weight
from .prune_calibrated import allocate_by_sensitivity, prune_calibrated
from .quantize import check_finite
from .weight_groups import WeightGroup, check_patterns, group_layers

_METHODS = ("magnitude", "wanda", "sparsegpt")
_SAME = 1e-3  # shares of N:M need not be written with more digits


@dataclass(frozen=True)
class PruneOptions(PassOptions):
    method: str = field(default="magnitude", metadata=takes("str", choices=_METHODS))
    # layer: each has the sparsity; global: one threshold for all; sensitivity: layers that bear it are sparser
    # (pruners/allocation.py).
    scope: str = field(default="layer", metadata=takes("str", choices=("layer", "global", "sensitivity")))
    pattern: str = field(default="unstructured", metadata=takes("str"))  # or "4x1", or "N:M"
    sparsity: float = field(default=0.5, metadata=takes("float", low=0.0, below=1.0))  # N:M has its own, 1 - N / M
    # Whether the weights that are kept are changed to make up for those that go, by least squares over the inputs.
    repair: bool = field(default=False, metadata=takes("bool"))
    # sparsegpt: also rounds the weights that are kept, making up for both at once. As bits, group_size and symmetric of
    # pass quantize are for that; with other names, so that each has one owner in a recipe of both passes.
    weight_bits: int | None = field(default=None, metadata=takes("int", choices=(4, 8), none=True))
    weight_group_size: int | None = field(default=None, metadata=takes("int", choices=GROUP_SIZES, none=True))
    zero_points: bool = field(default=False, metadata=takes("bool"))
    # wanda, sparsegpt, repair: what a layer's inputs come from, layers in front of it that are pruned already, or the
    # model as it was. The latter is one run of the model for many layers, the former one in pieces (segments.py).
    inputs: str = field(default="pruned", metadata=takes("str", choices=("pruned", "original")))
    # sparsegpt, repair: what is added to the diagonal of X^T X, as a share of its mean. None: chosen for each layer, by
    # how weights fitted to half of the feeds do on the other half.
    damping: float | None = field(default=None, metadata=takes("float", low=1e-4, below=100.0, none=True))
    layers: dict[str, float] = field(default_factory=dict, metadata=takes("numbers_by_glob", low=0.0, below=1.0))
    # Layers of which this share is zero already, by the pattern, were pruned by training: they stay as they are.
    keep_sparse: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        pattern = self.units
        if pattern.of and (self.scope != "layer" or self.layers):
            found = f"scope is {self.scope!r}" if self.scope != "layer" else "layers is given"
            raise RecipeError(f"{found}, but with pattern {self.pattern!r} all layers have one sparsity; leave it out")
        share = 1 - pattern.kept / pattern.of if pattern.of else self.sparsity
        if abs(share - self.sparsity) > _SAME:
            raise RecipeError(
                f"sparsity is {self.sparsity:g}, but pattern {self.pattern!r} makes it {share:g}; set sparsity to that"
            )
        if self.scope == "global" and self.method != "magnitude":
            raise RecipeError(
                f"scope is 'global', expected 'layer' or 'sensitivity' with method = {self.method!r}, whose scores of "
                "different layers cannot be compared"
            )
        if self.weight_bits is not None and self.method != "sparsegpt":
            raise RecipeError(
                f"weight_bits is {self.weight_bits}, which only method = 'sparsegpt' has; or use pass quantize"
            )
        if self.weight_bits != 4 and (self.weight_group_size is not None or self.zero_points):
            name = "weight_group_size" if self.weight_group_size is not None else "zero_points"
            raise RecipeError(f"{name} is {getattr(self, name)!r}, which only weight_bits = 4 has; leave it out")
        if self.weight_bits is not None and self.repair:
            raise RecipeError("repair is true, expected false with weight_bits, which makes up for pruning by itself")
        if self.damping is not None and self.method != "sparsegpt" and not self.repair:
            raise RecipeError(f"damping is {self.damping:g}, which only sparsegpt and repair have; leave it out")

    @property
    def units(self) -> Pattern:
        """The pattern. Raises RecipeError if it is none."""
        pattern = Pattern.read(self.pattern)
        if pattern is None:
            raise RecipeError(
                f"pattern is {self.pattern!r}, expected 'unstructured', '4x1', or 'N:M' with N < M <= {MOST_OF_GROUP}, "
                "such as '2:4'"
            )
        return pattern

    @property
    def needs_inputs(self) -> bool:
        return self.method != "magnitude" or self.repair or self.scope == "sensitivity"

    @property
    def quantization(self) -> Quantization | None:
        if self.weight_bits is None:
            return None
        group_size = None if self.weight_bits == 8 else self.weight_group_size or 128
        return Quantization(self.weight_bits, group_size, symmetric=not self.zero_points)


@dataclass
class PruneGroup(WeightGroup):
    sparsity: float | None  # None: the layers take part in the global threshold
    pattern: Pattern
    keeps_numbers: bool = False  # those that the model stores in int8 stay, but for what is pruned


class PrunePass(RecipePass):
    """Prunes each weight once, also where several layers share it."""

    options_type = PruneOptions
    options: PruneOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        if self.options.quantization is not None:
            context.quantizations.append(self._plan)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        options, context = self.options, self.context
        groups = self._group(context.survey(model))
        self._int8: list[str] = []  # layers whose stored numbers stay the same but for those that are pruned
        groups = [group for group in groups if not self._is_sparse(group) or self._only_rounds(group)]
        if options.needs_inputs and context.dry_run and context.feeds is None:
            context.note("pass 'prune' needs calibration inputs (calibration=…): without them, a run is refused")
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
            prune_calibrated(
                model, context, options, groups, pruned, lambda group, weight: self._put(model, group, weight)
            )
        context.progress(Stage.PRUNE, len(groups), len(groups))
        if self._int8:
            more = f" and {len(self._int8) - 1} more" if len(self._int8) > 1 else ""
            context.note(
                f"pruned, though stored in int8: layer {self._int8[0]!r}{more}; "
                "what is left of their numbers stays the same"
            )
        return ir.passes.PassResult(model, modified=bool(groups))

    def _plan(self, linear: Linear) -> Quantization | None:
        """How this pass is going to round a layer, if it does."""
        chosen = linear.matches(self.options.select) and not linear.matches(self.options.exclude)
        chosen = chosen and not self.context.keeps_numbers(linear)
        return self.options.quantization if chosen and linear.k <= MAX_INPUTS else None

    def _only_rounds(self, group: PruneGroup) -> bool:
        """Turns a group that is sparse already into one that is only rounded, if this pass rounds."""
        group.sparsity, group.pattern = 0.0, Pattern()
        return self.options.weight_bits is not None and not group.keeps_numbers

    def _gains(self, group: PruneGroup) -> bool:
        """Whether there are layers left that a pass replace would gain from, once the group is pruned."""
        linear = group.linears[0]
        if self.options.weight_bits is not None and linear.k > MAX_INPUTS:
            for one in group.linears:
                self.context.layer(one).reason = too_wide(linear.k)
            return False
        zeros = group.pattern.zeros(linear.k, linear.n, group.sparsity or 0.0)
        kept = round((1 - zeros / group.pattern.units(linear.k, linear.n)) * group.weight.size)
        group.linears = [linear for linear in group.linears if self.context.gains(linear, kept)]
        for linear in group.linears:
            self.context.layer(linear).sparsity = 1 - kept / group.weight.size
        return bool(group.linears)

    def _allocate(self, model: ir.Model, groups: Sequence[PruneGroup]) -> None:
        """Gives each group a sparsity of its own."""
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
        """By id of those groups that are pruned, their weights."""
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
            share = batch[0].sparsity if batch[0].sparsity is not None else self.options.sparsity
            scores = [self._scores(group) for group in batch]
            names = [group.weight_name for group in batch]
            count = round(share * sum(score.size for score in scores))
            threshold = find_threshold(scores, names, count)
            ties = threshold.ties
            for group, score in zip(batch, scores, strict=True):
                step()
                tally = tally_weight(score, threshold.key)
                own_ties = min(ties, tally.equal)
                ties -= own_ties
                # A key of 0 is a weight that was zero before.
                zeros = max(tally.zeros, tally.below + own_ties)
                kept = round((1 - zeros / score.size) * group.weight.size)
                group.linears = [linear for linear in group.linears if self.context.gains(linear, kept)]
                for linear in group.linears:
                    self.context.layer(linear).sparsity = zeros / score.size
                if group.linears and zeros > tally.zeros:
                    pruned = pruned_tensor(score, Threshold(threshold.key, own_ties))
                    if self.options.pattern == "4x1":
                        pruned = _without_blocks(group.weight, pruned, group.linears[0].transposed)
                    found[id(group)] = pruned
        return found

    def _put(self, model: ir.Model, group: PruneGroup, pruned: ir.TensorProtocol) -> None:
        """Gives the layers their pruned weight; of int8 numbers that the model stores, what is left stays the same."""
        first, context = group.linears[0], self.context
        value = group.put(model, context, pruned, "pruned")
        if group.keeps_numbers:
            assert isinstance(first.int8, StoredInt8)
            changed = dataclasses.replace(first, weight_value=value)
            context.quantized[changed.weight_key] = pruned_numbers(first.int8, pruned, first.transposed)
            for linear in group.linears:
                context.layer(linear).weight_bits = first.int8.bits
            self._int8.append(first.name)

    def _scores(self, group: PruneGroup) -> ir.TensorProtocol:
        """What the weights, or blocks of them, are compared by: by magnitude."""
        if self.options.pattern == "4x1":
            return block_sums(group.weight, group.linears[0].transposed)
        return group.weight

    def _is_sparse(self, group: PruneGroup) -> bool:
        """Whether the layers stay as they are; the report then says so."""
        if self.options.keep_sparse is None:
            return False
        scores = self._scores(group)
        share = tally_weight(scores, 0).zeros / scores.size
        if share < self.options.keep_sparse or share == 0:
            return False
        for linear in group.linears:
            self.context.layer(linear).sparsity = share
        self.context.note(
            f"layers that are sparse already, such as {group.linears[0].name!r}, were not pruned further (keep_sparse)"
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
                        f"{group.weight_name!r}, but their sparsities differ; select both by its name"
                    )
            keeps = self.context.keeps_numbers(first) and isinstance(first.int8, StoredInt8)
            groups.append(PruneGroup(group.linears, sparsity, options.units, keeps))
        return groups

    def _own_sparsity(self, linear: Linear) -> float | None:
        for glob, sparsity in self.options.layers.items():
            if linear.matches((glob,)):
                return sparsity
        return self.options.sparsity if self.options.scope == "layer" else None


def pruned_numbers(stored: QuantizedWeight, pruned: ir.TensorProtocol, transposed: bool) -> QuantizedWeight:
    """The numbers of a weight without those that are zero in `pruned`, [k, n] or transposed."""

    def compute() -> np.ndarray:
        kept = np.asarray(pruned.numpy()) != 0
        return np.where(kept.T if transposed else kept, stored.q.numpy(), np.int8(0))

    return QuantizedWeight(
        stored.bits, stored.group_size, lazy(compute, stored.q.dtype, ir.Shape(stored.q.shape.numpy())), stored.scales
    )


def _without_smallest_of_groups(group: PruneGroup) -> ir.LazyTensor:
    """N:M by magnitude."""
    weight, transposed, pattern = group.weight, group.linears[0].transposed, group.pattern

    def compute() -> np.ndarray:
        matrix = np.asarray(weight.numpy())
        scores = np.abs((matrix.T if transposed else matrix).astype(np.float32))
        kept = keep_in_groups(scores, scores > 0, pattern)
        return np.where(kept.T if transposed else kept, matrix, matrix.dtype.type(0))

    return lazy(compute, weight.dtype, ir.Shape(weight.shape.numpy()))


def block_sums(weight: ir.TensorProtocol, transposed: bool) -> ir.LazyTensor:
    """A quarter of sum |w| of each block of four outputs, float32 [k, ceil(n / 4)]; computed when it is asked for."""
    n, k = weight.shape.numpy() if transposed else reversed(weight.shape.numpy())

    def compute() -> np.ndarray:
        matrix = np.asarray(weight.numpy())
        magnitudes = np.abs((matrix.T if transposed else matrix).astype(np.float32)) / BLOCK_OUTPUTS
        padded = np.pad(magnitudes, ((0, 0), (0, -n % BLOCK_OUTPUTS)))
        sums: np.ndarray = padded.reshape(k, -1, BLOCK_OUTPUTS).sum(axis=2)
        return sums

    return lazy(compute, ir.DataType.FLOAT, ir.Shape([k, -(-n // BLOCK_OUTPUTS)]))


def _without_blocks(weight: ir.TensorProtocol, sums: ir.TensorProtocol, transposed: bool) -> ir.LazyTensor:
    """The weight without the blocks whose sum is zero."""

    def compute() -> np.ndarray:
        matrix = np.asarray(weight.numpy())
        n = matrix.shape[0 if transposed else 1]
        kept = np.repeat(sums.numpy() != 0, BLOCK_OUTPUTS, axis=1)[:, :n]
        return np.where(kept.T if transposed else kept, matrix, matrix.dtype.type(0))

    return lazy(compute, weight.dtype, ir.Shape(weight.shape.numpy()))
