"""Prune layers with recorded inputs: Wanda, SparseGPT, and repair of the kept weights.

    wanda       prune the smallest |w| ||x||_2 of each output (Sun, Liu, Bair, Kolter, ICLR 2024, arXiv:2306.11695)
    sparsegpt   pruners/sparsegpt.py; with `weight_bits` jointly with quantization
    repair      pruners/least_squares.py, for the mask of any method

One layer, or the layers that share an input, are pruned at a time, in graph order. Memory is about that of one Hessian.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator, Mapping, Sequence

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError
from ortolan.progress import Stage

from ...find.constants import lazy
from ...measure.fits import Fit
from ...measure.layer_inputs import GroupInputs, LayerInputs, inputs_as_it_is, inputs_in_turn
from ...weights.pruners.allocation import allocate, error_curve, levels
from ...weights.pruners.least_squares import repair
from ...weights.pruners.masks import Pattern, keep_by_output
from ...weights.pruners.sparsegpt import sparsegpt, sparsegpt_rounded
from ...weights.quantizers.grid import QuantizedMatrix, dequantize
from ...weights.quantizers.hessian import best_damping, damped, sampled
from ..context import PassContext
from ..plan.prune import PruneOptions
from ..quantize.quantize import check_finite, needs_factor
from ..weight_groups import PruneGroup, fit_key, note_inputs


def require_feeds(context: PassContext, options: PruneOptions) -> None:
    """Raise CalibrationError if the inputs are synthetic."""
    if context.evidence.made_up:
        option = f"method {options.method!r}" if options.method != "magnitude" else "repair"
        option = "scope 'sensitivity'" if options.scope == "sensitivity" else option
        raise CalibrationError(
            f"pass 'prune': {option} needs calibration inputs; give calibration=… (a list of texts with tokenizer=…, "
            "an .npz file, a dict of arrays, or a list of such dicts), or set "
            'prune.method to "magnitude", scope to "layer" and repair to false'
        )


def allocate_by_sensitivity(
    model: ir.Model, context: PassContext, options: PruneOptions, groups: Sequence[PruneGroup]
) -> None:
    """Set the sparsity of each group so that the groups together have the option's sparsity.

    Layers whose inputs cannot be recorded get the option's sparsity.
    """
    require_feeds(context, options)
    sparsities_tried = levels(options.sparsity)
    by_id = {id(group): group for group in groups}
    found: list[tuple[PruneGroup, np.ndarray]] = []
    for number, (one, inputs) in enumerate(_as_it_is(model, context, groups)):
        context.progress(Stage.SENSITIVITY, number, len(groups))
        matrix = one.linears[0].matrix()
        check_finite(matrix, one, "pruned")
        if inputs is not None:
            group = by_id[id(one)]
            found.append((group, error_curve(matrix, inputs.hessian, group.pattern, sparsities_tried)))
        del matrix
        context.release()
    context.progress(Stage.SENSITIVITY, len(groups), len(groups))
    sizes = [group.weight.size for group, _ in found]
    sparsities = allocate([curve for _, curve in found], sizes, sparsities_tried, options.sparsity)
    for (group, _), sparsity in zip(found, sparsities, strict=True):
        group.sparsity = sparsity


def fit_pruned(
    model: ir.Model,
    context: PassContext,
    options: PruneOptions,
    groups: Sequence[PruneGroup],
    masked: Mapping[int, ir.TensorProtocol],
) -> Iterator[tuple[PruneGroup, Fit]]:
    """Yield the groups with their pruned weights.

    With inputs = "pruned", the next group's inputs depend on the weights that the caller has put into the model so far.
    masked: weights pruned by magnitude, by the id of their group.
    """
    require_feeds(context, options)
    by_id = {id(group): group for group in groups}
    without, poor, dampings = list[str](), list[str](), _Dampings(options, groups)
    # Fits can be reused only if they do not depend on which other layers are pruned.
    fitted = context.evidence.fits if options.inputs == "original" and not context.layers.changed else None
    known = [group for group in groups if fitted is not None and fitted.knows(fit_key(group, dampings.key(group)))]
    others = [group for group in groups if not any(group is one for one in known)]
    for number, (found, inputs) in enumerate(_inputs_of(model, context, options, others) if others else ()):
        group = by_id[id(found)]
        context.progress(Stage.PRUNE, number, len(groups))
        first = group.linears[0]
        matrix = np.array(first.matrix())
        check_finite(matrix, group, "pruned")
        if inputs is None:
            without.append(first.name)
            identity = np.eye(first.k, dtype=np.float32)
            inputs = LayerInputs(np.stack([identity, identity]), first.k)
        elif inputs.rows < first.k:
            poor.append(first.name)
        context.evidence.fitted_to = True
        result = _pruned(options, group, matrix, inputs, masked.get(id(group)), dampings)
        error = _output_error(matrix, values_of(result, options), inputs.hessian)
        fit = Fit(result, inputs.rows, error)
        if fitted is not None:
            fitted.keep(fit_key(group, dampings.key(group)), fit)
        yield group, fit
    for group in known:
        assert fitted is not None
        fit = fitted.read(fit_key(group, dampings.key(group)))
        if fit.rows < group.linears[0].k:
            poor.append(group.linears[0].name)
        yield group, fit
    note_inputs(context, without, poor, "pruned by magnitude")


def _inputs_of(
    model: ir.Model, context: PassContext, options: PruneOptions, groups: Sequence[PruneGroup]
) -> GroupInputs[PruneGroup]:
    if options.inputs == "pruned":
        return inputs_in_turn(model, context.evidence, groups)
    return _as_it_is(model, context, groups)


def _as_it_is(model: ir.Model, context: PassContext, groups: Sequence[PruneGroup]) -> GroupInputs[PruneGroup]:
    return inputs_as_it_is(model, context.evidence, groups, context.telling(Stage.CALIBRATE))


class _Dampings:
    """Damping of each layer's inputs: the option, or chosen with the first of the layers that share the inputs."""

    def __init__(self, options: PruneOptions, groups: Sequence[PruneGroup]) -> None:
        self._options = options
        first: dict[frozenset[str], PruneGroup] = {}
        self._first = {
            id(group): first.setdefault(frozenset(linear.x.name or "" for linear in group.linears), group)
            for group in groups
            if not group.keeps_stored
        }
        self._chosen: dict[int, float] = {}

    def key(self, group: PruneGroup) -> Hashable:
        """Return what a fit depends on besides the weight and the inputs."""
        options = dataclasses.replace(self._options, select=("*",), exclude=(), layers={})
        first = self._first.get(id(group), group)
        return repr(options), *((one.weight_name, one.pattern, one.sparsity) for one in (group, first))

    def choose(self, group: PruneGroup, matrix: np.ndarray, inputs: LayerInputs) -> float:
        if self._options.damping is not None:
            return self._options.damping
        first = self._first[id(group)]
        if id(first) not in self._chosen:
            pattern, sparsity = first.pattern, first.sparsity or self._options.sparsity
            if first is not group:
                # `first` is not fitted yet, so the model has its original weight
                matrix = np.array(first.linears[0].matrix())

            def fit(weights: np.ndarray, hessian: np.ndarray) -> np.ndarray:
                if self._options.method == "sparsegpt":
                    return sparsegpt(weights, hessian, pattern, sparsity)
                # A mask of the sampled columns suffices to choose the damping.
                return repair(weights, weights, _wanda_mask(weights, hessian, pattern, sparsity), hessian)

            self._chosen[id(first)] = best_damping(sampled([matrix]), inputs.halves, fit)
        return self._chosen[id(first)]


def _pruned(
    options: PruneOptions,
    group: PruneGroup,
    matrix: np.ndarray,
    inputs: LayerInputs,
    masked: ir.TensorProtocol | None,
    dampings: _Dampings,
) -> np.ndarray | QuantizedMatrix:
    pattern, sparsity = group.pattern, group.sparsity or 0.0
    if group.keeps_stored or (options.method != "sparsegpt" and masked is None):
        # Stored integers are kept exactly, so they cannot compensate for pruned ones.
        kept = _wanda_mask(matrix, inputs.hessian, pattern, sparsity)
    elif masked is not None:
        kept = np.asarray(masked.numpy()) != 0
        kept = kept.T if group.linears[0].transposed else kept
    values = matrix
    if not group.keeps_stored and (options.method == "sparsegpt" or options.repair):
        damping = dampings.choose(group, matrix, inputs)
        with needs_factor(group, damping, "prune"):
            hessian = damped(inputs.hessian, damping)
            if options.quantization is not None:
                return sparsegpt_rounded(matrix, hessian, pattern, sparsity, options.quantization)
            if options.method == "sparsegpt":
                values = sparsegpt(matrix, hessian, pattern, sparsity)
                kept = values != 0
        if options.repair:
            return repair(matrix, values, kept, hessian)
    return np.where(kept, values, np.float32(0))


def values_of(weights: np.ndarray | QuantizedMatrix, options: PruneOptions) -> np.ndarray:
    """Return the weights of a fit as floats [k, n]."""
    if isinstance(weights, np.ndarray):
        return weights
    assert options.quantization is not None
    return dequantize(weights, options.quantization.group_size)


def _wanda_mask(matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsity: float) -> np.ndarray:
    norms = np.sqrt(hessian.diagonal()).astype(np.float32)
    return keep_by_output(np.abs(matrix) * norms[:, None], matrix != 0, pattern, sparsity)


def spilled(context: PassContext, group: PruneGroup, values: np.ndarray) -> ir.TensorProtocol:
    """Return the weight in the layer's type, stored in a temporary file; values beyond the type's range are clipped."""
    first = group.linears[0]
    dtype = first.weight.dtype
    largest = np.float32(dtype.max)
    array = np.clip(values.T if first.transposed else values, -largest, largest).astype(dtype.numpy())
    shape = ir.Shape(array.shape)
    bits = np.ascontiguousarray(array).view(np.uint16) if array.dtype == ml_dtypes.bfloat16 else array
    stored = context.spill.add(f"{group.weight_name}.pruned", bits, dtype)

    def read() -> np.ndarray:
        result = np.array(stored.numpy())
        stored.release()
        return result

    return lazy(read, dtype, shape)


def _output_error(matrix: np.ndarray, values: np.ndarray, hessian: np.ndarray) -> float | None:
    """Return ||XW - XV|| / ||XW|| over all calibration inputs X, with hessian = X^T X."""
    difference = matrix - values
    norm = float(np.vdot(matrix, hessian @ matrix))
    return float(np.sqrt(max(np.vdot(difference, hessian @ difference), 0.0) / norm)) if norm > 0 else None
