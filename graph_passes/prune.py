"""Sets the smallest weights of linear layers to zero, except where no pass `replace` would gain from it.

The new weights are lazy: a layer is pruned anew each time its array is asked for, from the original in the mapped file
and one threshold, so no copy is kept. The number of zeros is exact: of weights as large as the threshold, the first in
row-major order go.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError, RecipeError

from .constants import lazy
from .linear import Linear
from .options import Globs, PassOptions, takes
from .pipeline import RecipePass
from .weights import WeightGroup, check_patterns, group_layers

# The magnitude of a weight is compared by the bits of its float32 form without the sign: the order is the same.
_MAGNITUDE_BITS = np.uint32(0x7FFFFFFF)
_INFINITY_KEY = 0x7F800000
_CHUNK = 1 << 22


@dataclass(frozen=True)
class PruneOptions(PassOptions):
    method: str = field(default="magnitude", metadata=takes("str", choices=("magnitude",)))
    scope: str = field(default="layer", metadata=takes("str", choices=("layer", "global")))
    sparsity: float = field(default=0.5, metadata=takes("float", low=0.0, below=1.0))
    layers: dict[str, float] = field(default_factory=dict, metadata=takes("numbers_by_glob", low=0.0, below=1.0))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


@dataclass
class PruneGroup(WeightGroup):
    sparsity: float | None  # None: the layers take part in the global threshold


class PrunePass(RecipePass):
    """Magnitude pruning, unstructured, with a threshold for each layer or one for all of them."""

    options_type = PruneOptions
    options: PruneOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        linears = self.context.survey(model)
        groups = self._group(linears)
        steps = 0

        def step() -> None:
            nonlocal steps
            self.context.progress("prune", steps, len(groups))
            self.context.release()
            steps += 1

        together = [group for group in groups if group.sparsity is None]
        for batch in [[group] for group in groups if group.sparsity is not None] + ([together] if together else []):
            share = batch[0].sparsity if batch[0].sparsity is not None else self.options.sparsity
            weights = [group.weight for group in batch]
            names = [group.weight_name for group in batch]
            count = round(share * sum(weight.size for weight in weights))
            threshold = find_threshold(weights, names, count)
            ties = threshold.ties
            for group, weight in zip(batch, weights, strict=True):
                step()
                tally = tally_weight(weight, threshold.key)
                own_ties = min(ties, tally.equal)
                ties -= own_ties
                # A key of 0 is a weight that was zero before.
                zeros = max(tally.zeros, tally.below + own_ties)
                group.linears = [linear for linear in group.linears if self.context.gains(linear, weight.size - zeros)]
                for linear in group.linears:
                    self.context.layer(linear).sparsity = zeros / weight.size
                if group.linears and zeros > tally.zeros:
                    group.put(model, self.context, pruned_tensor(weight, Threshold(threshold.key, own_ties)), "pruned")
        step()
        return ir.passes.PassResult(model, modified=bool(groups))

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
            groups.append(PruneGroup(group.linears, sparsity))
        return groups

    def _own_sparsity(self, linear: Linear) -> float | None:
        for glob, sparsity in self.options.layers.items():
            if linear.matches((glob,)):
                return sparsity
        return None if self.options.scope == "global" else self.options.sparsity


@dataclass(frozen=True)
class Threshold:
    """Weights whose key is below `key` become zero, and the first `ties` of those whose key is equal."""

    key: int
    ties: int


@dataclass
class Tally:
    """How many weights of a tensor are below a key, equal to it, and zero."""

    below: int = 0
    equal: int = 0
    zeros: int = 0


def find_threshold(weights: Sequence[ir.TensorProtocol], names: Sequence[str], count: int) -> Threshold:
    """The threshold that prunes the `count` smallest of all weights together.

    Reads the weights twice and keeps two histograms: one over the upper, one over the lower half of the keys.
    Raises ModelError if a weight is not finite.
    """

    def histogram(key_bin: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        total = np.zeros(1 << 16, np.int64)
        for weight, name in zip(weights, names, strict=True):
            for keys in _key_chunks(weight):
                if keys.max(initial=0) >= _INFINITY_KEY:
                    raise ModelError(
                        f"weight {name!r} holds NaN or infinity, so it cannot be pruned; export the model "
                        "again, or exclude this layer"
                    )
                total += np.bincount(key_bin(keys), minlength=1 << 16)
        return total

    upper_counts = np.cumsum(histogram(lambda keys: keys >> 16))
    upper = int(np.searchsorted(upper_counts, count))
    left = count - (int(upper_counts[upper - 1]) if upper else 0)
    lower_counts = np.cumsum(histogram(lambda keys: keys[keys >> 16 == upper] & 0xFFFF))
    lower = int(np.searchsorted(lower_counts, left))
    return Threshold(upper << 16 | lower, left - (int(lower_counts[lower - 1]) if lower else 0))


def tally_weight(weight: ir.TensorProtocol, key: int) -> Tally:
    tally = Tally()
    for keys in _key_chunks(weight):
        tally.below += int(np.count_nonzero(keys < key))
        tally.equal += int(np.count_nonzero(keys == key))
        tally.zeros += int(np.count_nonzero(keys == 0))
    return tally


def pruned_tensor(weight: ir.TensorProtocol, threshold: Threshold) -> ir.LazyTensor:
    """The weight with its smallest values set to zero, computed when it is asked for."""

    def compute() -> np.ndarray:
        result = np.array(weight.numpy())
        flat = result.reshape(-1)
        ties = threshold.ties
        for start in range(0, flat.size, _CHUNK):
            chunk = flat[start : start + _CHUNK]
            keys = _keys(chunk)
            equal = np.flatnonzero(keys == threshold.key)[:ties]
            ties -= len(equal)
            chunk[keys < threshold.key] = 0
            chunk[equal] = 0
        return result

    return lazy(compute, weight.dtype, ir.Shape(weight.shape.numpy()))


def _key_chunks(weight: ir.TensorProtocol) -> Iterator[np.ndarray]:
    flat = np.asarray(weight.numpy()).reshape(-1)
    for start in range(0, flat.size, _CHUNK):
        yield _keys(flat[start : start + _CHUNK])


def _keys(values: np.ndarray) -> np.ndarray:
    return values.astype(np.float32).view(np.uint32) & _MAGNITUDE_BITS
