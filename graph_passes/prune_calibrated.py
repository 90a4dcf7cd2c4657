"""Prunes layers by what goes into them: Wanda, SparseGPT, and repair of the weights that stay.

    wanda       the smallest |w| ||x||_2 of each output go (Sun, Liu, Bair, Kolter, ICLR 2024, arXiv:2306.11695): the
                input's norm says how much a weight of it counts
    sparsegpt   pruners/sparsegpt.py; with `weight_bits` jointly with quantization
    repair      pruners/least_squares.py, of whatever mask

One layer, or the layers that share an input, at a time, in the order of the graph; memory stays near one Hessian.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import ml_dtypes
import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError

from .calibrate import feeds_for
from .constants import lazy
from .layer_inputs import LayerInputs, inputs_as_it_is, inputs_in_turn, note_inputs
from .pipeline import PassContext
from .pruners.least_squares import repair
from .pruners.masks import Pattern, keep_by_output
from .pruners.sparsegpt import sparsegpt, sparsegpt_rounded
from .quantize import check_finite, needs_factor, put_quantized
from .quantizers.grid import Rounded, dequantize
from .quantizers.hessian import best_damping, damped

if TYPE_CHECKING:
    from .prune import PruneGroup, PruneOptions

Put = Callable[["PruneGroup", ir.TensorProtocol], None]


def require_feeds(context: PassContext, options: PruneOptions) -> None:
    """Raises CalibrationError where inputs would have to be made up."""
    feeds_for(context)
    if context.feeds_made_up:
        what = f"method {options.method!r}" if options.method != "magnitude" else "repair"
        raise CalibrationError(
            f"pass 'prune': {what} fits the layers to typical inputs, and none were given; give calibration=… (a list "
            "of texts with tokenizer=…, an .npz file, a dict of arrays, or a list of such dicts), or set "
            'prune.method to "magnitude" and repair to false, which need none'
        )


def prune_calibrated(
    model: ir.Model,
    context: PassContext,
    options: PruneOptions,
    groups: Sequence[PruneGroup],
    masked: Mapping[int, ir.TensorProtocol],
    put: Put,
) -> None:
    """Prunes the groups. masked: by id of a group, its weight pruned by magnitude; put: gives layers a new weight."""
    require_feeds(context, options)
    inputs_of = inputs_in_turn if options.inputs == "pruned" else inputs_as_it_is
    by_id = {id(group): group for group in groups}
    without, poor = list[str](), list[str]()
    for number, (found, inputs) in enumerate(inputs_of(model, context, groups)):
        group = by_id[id(found)]
        context.progress("prune", number, len(groups))
        first = group.linears[0]
        matrix = np.array(first.matrix())
        check_finite(matrix, group, "pruned")
        if inputs is None:
            without.append(first.name)
            alike = np.eye(first.k, dtype=np.float32)
            inputs = LayerInputs(np.stack([alike, alike]), first.k)
        elif inputs.rows < first.k:
            poor.append(first.name)
        result = _pruned(options, group, matrix, inputs, masked.get(id(group)))
        if isinstance(result, Rounded):
            assert options.quantization is not None
            put_quantized(model, context, group, result, options.quantization)
            values = dequantize(result, options.quantization.group_size)
        else:
            put(group, _spilled(context, group, result))
            values = result
        error = _output_error(matrix, values, inputs.hessian)
        for linear in group.linears:
            layer = context.layer(linear)
            layer.sparsity = np.count_nonzero(values == 0) / values.size
            layer.output_error = layer.output_error if layer.output_error is not None else error
        context.release()
    note_inputs(context, without, poor, "pruned by magnitude")


def _pruned(
    options: PruneOptions,
    group: PruneGroup,
    matrix: np.ndarray,
    inputs: LayerInputs,
    masked: ir.TensorProtocol | None,
) -> np.ndarray | Rounded:
    pattern, sparsity, halves = group.pattern, group.sparsity or 0.0, inputs.halves
    hessian = inputs.hessian
    if options.method == "sparsegpt":
        if group.keeps_numbers:  # what stays of them stays the same, so nothing can be made up for
            return np.where(_wanda_mask(matrix, hessian, pattern, sparsity), matrix, np.float32(0))

        def fit(weights: np.ndarray, damped_hessian: np.ndarray) -> np.ndarray:
            return sparsegpt(weights, damped_hessian, pattern, sparsity)

        damping = best_damping(matrix, halves, fit) if options.damping is None else options.damping
        with needs_factor(group, damping, "prune"):
            precise = damped(hessian, damping)
            if options.quantization is not None:
                return sparsegpt_rounded(matrix, precise, pattern, sparsity, options.quantization)
            values = sparsegpt(matrix, precise, pattern, sparsity)
        kept = values != 0
    else:
        if masked is not None:
            kept = np.asarray(masked.numpy()) != 0
            kept = kept.T if group.linears[0].transposed else kept
        else:
            kept = _wanda_mask(matrix, hessian, pattern, sparsity)
        values = np.where(kept, matrix, np.float32(0))
        damping = options.damping
    if not options.repair or group.keeps_numbers:
        return values
    if damping is None:
        # The mask of the sampled columns is another one: what matters is how closely weights may be fitted.
        damping = best_damping(
            matrix,
            halves,
            lambda weights, damped_hessian: _repaired_sample(weights, damped_hessian, pattern, sparsity),
        )
    return repair(matrix, values, kept, damped(hessian, damping))


def _repaired_sample(matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsity: float) -> np.ndarray:
    kept = _wanda_mask(matrix, hessian, pattern, sparsity)
    return repair(matrix, matrix, kept, hessian)


def _wanda_mask(matrix: np.ndarray, hessian: np.ndarray, pattern: Pattern, sparsity: float) -> np.ndarray:
    norms = np.sqrt(hessian.diagonal()).astype(np.float32)
    return keep_by_output(np.abs(matrix) * norms[:, None], matrix != 0, pattern, sparsity)


def _spilled(context: PassContext, group: PruneGroup, values: np.ndarray) -> ir.TensorProtocol:
    """The weight in the layer's type, kept in a file; beyond the range of its type its largest."""
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
    """||XW - XV|| / ||XW|| over all calibration inputs X, which hessian = X^T X stands for."""
    difference = matrix - values
    norm = float(np.vdot(matrix, hessian @ matrix))
    return float(np.sqrt(max(np.vdot(difference, hessian @ difference), 0.0) / norm)) if norm > 0 else None
