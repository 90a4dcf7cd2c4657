"""Quantize weights of linear layers to integers of 4, 5, 6 or 8 bits, if a pass `replace` would then replace the layer.

The formats are in quantizers/grid.py. The methods are

    rtn     round each weight to the nearest value
    mse     round to the nearest value, with scales and zero points (or minimums) that minimize the squared error
            (quantizers/mse.py, subgroups.py); inputs with more energy (mean x^2) count more, if calibration is given or
            the model is a decoder, which generates text itself
    gptq    round input after input, and let the rest compensate for the error (quantizers/gptq.py); needs calibration
    awq     mse, after inputs of large magnitude have been scaled up (quantizers/awq.py, fold_scales.py); needs
            calibration
    hqq     round to the nearest value, with better zero points and scales (quantizers/hqq.py); 4 bits, asymmetric

Calibrated methods run the model as earlier passes left it (pruned, not yet quantized) on all feeds, for as many layers
at a time as fit into memory. So a layer's inputs come from unquantized earlier layers. Recording after quantized layers
would need many runs, and gains nothing (docs/verification.md).

The layer gets the dequantized weight as a lazy tensor of its own type. That rounds once more, and never to infinity.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, ModelError
from ortolan.progress import Stage

from ...find.linear import Linear, layer_key, linears_in
from ...find.quantized_weight import MAX_INPUTS, QuantizedWeight, dequantized_tensor, too_wide
from ...measure.fits import Fit, Fits
from ...measure.layer_inputs import LayerInputs, energies_as_it_is, inputs_as_it_is
from ...operators.replacement import Stored
from ...operators.sparse_amx_matmul_storage import stored_in
from ...weights.quantizers.gptq import Prepared, choose_damping, gptq, prepare
from ...weights.quantizers.grid import Quantization, QuantizedMatrix, round_to_nearest
from ...weights.quantizers.hessian import damped
from ...weights.quantizers.hqq import half_quadratic
from ...weights.quantizers.mse import round_mse
from ...weights.quantizers.stored_grid import find_stored_grid
from ..context import PassContext, RecipePass
from ..plan.quantize import QuantizeOptions
from ..weight_groups import WeightGroup, count_layers, fit_key, group_layers, note_inputs
from .fold_scales import scale_inputs

_MIN_IMPORTANCE = np.float32(1e-3)  # importance of an input that is always 0; the mean is 1
_MIN_ENERGY = 1e-30

# Functions that round without layer inputs. gptq uses one if inputs cannot be recorded, awq uses one after scaling.
_ROUND: Mapping[str, Callable[[np.ndarray, Quantization], QuantizedMatrix]] = {
    "rtn": round_to_nearest,
    "mse": round_mse,
    "gptq": round_mse,
    "awq": round_mse,
    "hqq": half_quadratic,
}


class QuantizePass(RecipePass):
    """Quantize each weight once, even if several layers share it."""

    options_type = QuantizeOptions
    options: QuantizeOptions

    def __init__(self, options: QuantizeOptions, context: PassContext) -> None:
        super().__init__(options, context)
        self._stored_grids: dict[Hashable, Quantization | None] = {}  # by weight
        self._kept: list[str] = []  # layers whose weights keep such a grid

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Quantize the selected layers."""
        options, context = self.options, self.context
        chosen = group_layers(
            context, context.survey(model), options.select, options.exclude, "quantize", "quantization"
        )
        groups = [group for group in chosen if self._takes(group)]
        bits_before = [(group, group.linears[0].stored_bits) for group in groups]
        if context.dry_run:
            self._announce(groups)
        elif groups:
            self._quantize_all(model, groups)
        for bits in (4, 8):
            rounded = [group.linears[0].name for group, before in bits_before if before == bits and group.linears]
            if rounded:
                unsupported = "but in a format that no chosen operator supports"
                why = "and requantize is true" if context.plan.requantizes else unsupported
                context.note(
                    f"{count_layers(rounded)} stored in {bits} bits, {why}, so the weights are rounded once more"
                )
        if self._kept:
            context.note(
                f"{count_layers(self._kept)} already rounded to 4 bits and keep that format, so these weights do not "
                "change; options={'requantize': True} rounds them again"
            )
        context.progress(Stage.QUANTIZE, len(groups), len(groups))
        return ir.passes.PassResult(model, modified=not context.dry_run)

    def _takes(self, group: WeightGroup) -> bool:
        """Drop the layers that cannot be quantized, and report why. Return True if any remain."""
        context = self.context
        group.linears = [linear for linear in group.linears if context.layer(linear).weight_bits is None]
        if not group.linears or any(context.plan.keeps_stored(linear) for linear in group.linears):
            return False
        _leave(context, group)
        if not group.linears:
            return False
        k = group.linears[0].k
        if k > MAX_INPUTS:
            for linear in group.linears:
                context.layer(linear).reason = too_wide(k)
        return k <= MAX_INPUTS

    def _announce(self, groups: Sequence[WeightGroup]) -> None:
        for group in groups:
            for linear in group.linears:
                layer = self.context.layer(linear)
                layer.status, layer.bytes_after = "quantized", group.weight.nbytes
                layer.weight_bits = self.options.bits

    def _quantize_all(self, model: ir.Model, groups: Sequence[WeightGroup]) -> None:
        context, options = self.context, self.options
        if options.rounding == "awq":
            self._scale(model, groups)
        # Fits can be reused only if they do not depend on which other layers are quantized.
        keeps = options.rounding in ("gptq", "mse") and not context.layers.changed
        fitted = context.evidence.fits if keeps else None
        same = dataclasses.replace(options, select=("*",), exclude=())
        done = 0
        for inputs, several in self._with_inputs(model, groups, fitted, same):
            prepared = self._prepare(several, inputs) if isinstance(inputs, LayerInputs) else None
            for group in several:
                context.progress(Stage.QUANTIZE, done, len(groups))
                done += 1
                if isinstance(inputs, QuantizedMatrix):
                    rounded = inputs
                else:
                    rounded = self._round(group, inputs if prepared is None else prepared)
                    if fitted is not None:
                        rows = inputs.rows if isinstance(inputs, LayerInputs) else group.linears[0].k
                        fitted.keep(self._fit_key(group, same), Fit(rounded, rows))
                chosen = self._quantization(group)
                put_quantized(model, context, group, rounded, chosen)
                if chosen.subgroup_size != options.quantization.subgroup_size and group.linears:
                    self._kept.append(group.linears[0].name)
                context.release()

    def _round(self, group: WeightGroup, inputs: Prepared | np.ndarray | LayerInputs | None) -> QuantizedMatrix:
        """Quantize a group's weight. inputs: the Hessian for gptq; the energies of the inputs, float32 [k], for mse."""
        matrix, chosen = group.linears[0].matrix(), self._quantization(group)
        check_finite(matrix, group, "quantized")
        if isinstance(inputs, Prepared):
            return gptq(matrix, inputs, chosen)
        if isinstance(inputs, np.ndarray):
            return round_mse(matrix, chosen, inputs / max(float(inputs.mean()), _MIN_ENERGY) + _MIN_IMPORTANCE)
        return _ROUND[self.options.rounding](matrix, chosen)

    def _scale(self, model: ir.Model, groups: Sequence[WeightGroup]) -> None:
        """Scale the inputs of layers (awq), and update the groups to the new weights."""
        context = self.context
        for group in groups:
            check_finite(group.linears[0].matrix(), group, "quantized")
            context.release()
        self._note_made_up()
        with context.evidence.recording(model, [linear for group in groups for linear in group.linears]) as recorder:
            scale_inputs(model, context, groups, recorder, self.options.quantization)
        changed = {layer_key(linear): linear for linear in linears_in(model)}
        for group in groups:
            group.linears = [changed[layer_key(linear)] for linear in group.linears]

    def _with_inputs(
        self, model: ir.Model, groups: Sequence[WeightGroup], fitted: Fits | None, options: QuantizeOptions
    ) -> Iterator[tuple[LayerInputs | np.ndarray | QuantizedMatrix | None, list[WeightGroup]]]:
        """Yield the groups, with the inputs that the method needs.

        For gptq: recorded inputs, shared by neighbouring groups. For mse: the inputs' energies, unless the feeds are
        random (_knows_energies).
        Groups with a stored fit for the same options follow, with that fit.
        """
        known = [] if fitted is None else [one for one in groups if fitted.knows(self._fit_key(one, options))]
        others = [group for group in groups if not any(group is one for one in known)]
        if self.options.rounding == "gptq":
            poor = [
                group.linears[0].name
                for group in known
                if fitted is not None and fitted.rows(self._fit_key(group, options)) < group.linears[0].k
            ]
            yield from self._with_hessians(model, others, poor)
        elif self.options.rounding == "mse" and others and self._knows_energies():
            self.context.evidence.fitted_to = True
            telling = self.context.telling(Stage.CALIBRATE)
            for group, energies in energies_as_it_is(model, self.context.evidence, others, telling):
                yield energies, [group]
        else:
            yield from ((None, [group]) for group in others)
        for group in known:
            assert fitted is not None
            fit = fitted.read(self._fit_key(group, options))
            assert isinstance(fit.weights, QuantizedMatrix)
            yield fit.weights, [group]

    def _with_hessians(
        self, model: ir.Model, groups: Sequence[WeightGroup], poor: list[str]
    ) -> Iterator[tuple[LayerInputs | None, list[WeightGroup]]]:
        """Yield the groups with their layers' inputs.

        poor: layers with stored fits to too few inputs, for the note about such layers.
        """
        without = list[str]()
        self._note_made_up()
        telling = self.context.telling(Stage.CALIBRATE)
        found = inputs_as_it_is(model, self.context.evidence, groups, telling) if groups else ()
        for _, neighbours in itertools.groupby(found, key=lambda one: id(one[1])):
            pairs = list(neighbours)
            inputs, several = pairs[0][1], [group for group, _ in pairs]
            if inputs is None:
                without += [group.linears[0].name for group in several]
            elif inputs.rows < several[0].linears[0].k:
                poor += [group.linears[0].name for group in several]
            yield inputs, several
        note_inputs(self.context, without, poor, "rounded by mse")

    def _knows_energies(self) -> bool:
        """Return True if the feeds are the user's, or text that a decoder generated, whose energies are as useful."""
        evidence = self.context.evidence
        if evidence.made_up:
            evidence.feeds()  # sets `sampled`
        return not evidence.made_up or evidence.sampled

    def _note_made_up(self) -> None:
        if self.context.evidence.made_up:
            self.context.note(
                f"method {self.options.method!r} was calibrated on synthetic inputs, which differ from real ones; "
                "give calibration=… with typical inputs"
            )

    def _quantization(self, group: WeightGroup) -> Quantization:
        """Return the target format, with the scale type that the operator needs.

        Weights that are already rounded to 4 bits with floating-point scales keep these, unless stored weights are
        requantized.
        """
        options, context = self.options, self.context
        chosen = options.quantization
        if chosen.bits == 4 and chosen.subgroup_size is not None and not context.plan.requantizes:
            key = group.linears[0].weight_key
            if key not in self._stored_grids:
                matrix = group.linears[0].matrix()
                check_finite(matrix, group, "quantized")
                self._stored_grids[key] = find_stored_grid(matrix, chosen)
            return self._stored_grids[key] or chosen
        narrow = chosen.bits == 4 and chosen.symmetric and any(map(context.plan.needs_bf16_scales, group.linears))
        return dataclasses.replace(chosen, bf16_scales=narrow)

    def _fit_key(self, group: WeightGroup, options: QuantizeOptions) -> Hashable:
        return fit_key(group, (options, self._quantization(group)))

    def _prepare(self, groups: Sequence[WeightGroup], inputs: LayerInputs) -> Prepared:
        options, first = self.options, groups[0]
        self.context.evidence.fitted_to = True
        damping = options.damping
        if damping is None:
            matrices = [group.linears[0].matrix() for group in groups]
            for matrix, group in zip(matrices, groups, strict=True):
                check_finite(matrix, group, "quantized")
            damping = choose_damping(matrices, inputs.halves, self._quantization(first))
        with needs_factor(first, damping, "quantize"):
            return prepare(damped(inputs.hessian, damping), options.act_order is not False)


def _leave(context: PassContext, group: WeightGroup, stored: Stored | None = None) -> None:
    """Drop layers that no pass `replace` would replace, and report why. stored: the quantized weight, if known."""
    for linear in list(group.linears):
        if (reason := context.why_not_quantized(linear, stored)) is not None:
            context.leave(linear, reason)
            group.linears.remove(linear)


def put_quantized(
    model: ir.Model, context: PassContext, group: WeightGroup, rounded: QuantizedMatrix, quantization: Quantization
) -> None:
    """Give the layers their quantized weight, except layers that no pass `replace` would replace."""
    first = group.linears[0]
    weight = _spill(context, group.weight_name, rounded, quantization)
    matrix = rounded.q if quantization.symmetric else weight.matrix()
    stored = stored_in(matrix)
    del matrix
    _leave(context, group, stored)
    group.linears = [linear for linear in group.linears if context.gains(linear, stored)]
    if not group.linears:
        return
    value = group.put(model, context, dequantized_tensor(weight, first.transposed, first.dtype), "quantized")
    context.layers.quantized[dataclasses.replace(first, weight_value=value).weight_key] = weight
    for linear in group.linears:
        layer = context.layer(linear)
        layer.sparsity, layer.weight_bits = (rounded.q.size - stored.count) / rounded.q.size, quantization.bits
        layer.output_error = _output_error(context, linear, weight, quantization)


def _spill(context: PassContext, name: str, rounded: QuantizedMatrix, quantization: Quantization) -> QuantizedWeight:
    add = context.spill.add
    q_type = ir.DataType.INT8 if quantization.symmetric else ir.DataType.UINT8
    zeros, minimums, steps = rounded.zero_points, rounded.minimums, rounded.subgroup_scales
    if zeros is not None and quantization.fractions:
        zeros = (zeros * quantization.zero_point_steps).astype(np.uint8)
    return QuantizedWeight(
        quantization.bits,
        quantization.group_size,
        add(f"{name}.q", rounded.q, q_type),
        add(f"{name}.scales", rounded.scales, ir.DataType.FLOAT),
        None if zeros is None else add(f"{name}.zero_points", zeros, ir.DataType.UINT8),
        None if minimums is None else add(f"{name}.minimums", minimums, ir.DataType.FLOAT),
        None if steps is None else add(f"{name}.subgroup_scales", steps, ir.DataType.UINT8),
        subgroup_size=quantization.subgroup_size,
        fractions=quantization.fractions,
    )


def _output_error(
    context: PassContext, linear: Linear, weight: QuantizedWeight, quantization: Quantization
) -> float | None:
    """Return ||XW - XV|| / ||XW|| for recorded inputs X, the original weight W and the quantized weight V."""
    key = layer_key(linear)
    if key not in context.layers.captured:
        return None
    x = context.layers.captured[key]

    def measure() -> float | None:
        exact = x @ context.layers.originals[key]()
        norm = float(np.linalg.norm(exact))
        return float(np.linalg.norm(exact - x @ weight.matrix())) / norm if norm else None

    # Cached, because trials of a search often contain the same quantized layer.
    digest = blake2b(weight.q.tobytes() + weight.scales.tobytes()).digest()
    return context.evidence.remembered(("quantized", linear.name, len(x), quantization, digest), measure)


def check_finite(matrix: np.ndarray, group: WeightGroup, doing: str) -> None:
    """Raise ModelError for a weight with NaN or infinity. `doing` is "quantized" or "pruned"."""
    if not (np.isfinite(matrix.max()) and np.isfinite(matrix.min())):
        count = matrix.size - np.count_nonzero(np.isfinite(matrix))
        raise ModelError(
            f"weight {group.weight_name!r} holds NaN or infinity ({count} of {matrix.size} values), so it cannot be "
            f"{doing}; export the model again, or exclude this layer"
        )


@contextmanager
def needs_factor(group: WeightGroup, damping: float, pass_name: str) -> Iterator[None]:
    """Convert a failed Cholesky factorization of the Hessian into a CalibrationError with advice."""
    try:
        yield
    except np.linalg.LinAlgError:
        raise CalibrationError(
            f"X^T X of the inputs of layer {group.linears[0].name!r} has no Cholesky factor with damping {damping:g}; "
            f"raise {pass_name}.damping, or give more calibration feeds"
        ) from None
