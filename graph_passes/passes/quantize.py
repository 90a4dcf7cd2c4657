"""Quantizes the weights of linear layers to whole numbers of 8 or 4 bits, except where no pass `replace` would gain.

What a weight may become is in quantizers/grid.py; the methods are

    rtn     each weight to the nearest number
    gptq    input after input, the rest making up for the error (quantizers/gptq.py); needs calibration
    awq     rtn, after inputs of large magnitude were made finer (quantizers/awq.py, fold_scales.py); needs calibration
    hqq     to the nearest, of better zero points and scales (quantizers/hqq.py); 4 bits, asymmetric

The calibrated ones run the model as the passes before have left it (pruned, not yet quantized) on all of the feeds, for
as many layers at once as memory allows: so every layer is calibrated for the inputs that it has while no layer in front
of it is quantized. (Layer by layer behind quantized ones takes many runs of the model instead of one, and gains
nothing: docs/verification.md.)

The layer itself gets the float weight that its numbers stand for, as a lazy tensor of its own type, which rounds once
more, and never to infinity.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from hashlib import blake2b

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, ModelError
from ortolan.progress import Stage

from ..find.linear import Linear, layer_key, linears_in
from ..find.quantized_weight import MAX_INPUTS, QuantizedWeight, dequantized_tensor, too_wide
from ..measure.fits import Fit, Fits
from ..measure.layer_inputs import LayerInputs, inputs_as_it_is
from ..operators.sparse_amx_matmul_storage import stored_in
from ..weights.quantizers.gptq import choose_damping, gptq
from ..weights.quantizers.grid import Quantization, Rounded, round_to_nearest
from ..weights.quantizers.hqq import half_quadratic
from .context import PassContext, RecipePass
from .fold_scales import scale_inputs
from .quantize_options import QuantizeOptions
from .weight_groups import WeightGroup, count_layers, fit_key, group_layers, note_inputs


class QuantizePass(RecipePass):
    """Quantizes each weight once, also where several layers share it; see the top of this file."""

    options_type = QuantizeOptions
    options: QuantizeOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        options, context = self.options, self.context
        chosen = group_layers(
            context, context.survey(model), options.select, options.exclude, "quantize", "quantization"
        )
        groups = [group for group in chosen if self._takes(group)]
        for bits, part in ((4, "int4"), (8, "int8")):
            stored = [group.linears[0].name for group in groups if getattr(group.linears[0], part) is not None]
            if stored:
                context.note(
                    f"{count_layers(stored)} stored in {bits} bits already, but not as a replacing operator takes "
                    "them, so their weights are rounded once more"
                )
        if context.dry_run:
            self._announce(groups)
        elif groups:
            self._quantize_all(model, groups)
        context.progress(Stage.QUANTIZE, len(groups), len(groups))
        return ir.passes.PassResult(model, modified=not context.dry_run)

    def _takes(self, group: WeightGroup) -> bool:
        """Whether there is a layer left to quantize; of one that cannot be, the report says why."""
        context = self.context
        group.linears = [linear for linear in group.linears if context.layer(linear).weight_bits is None]
        # Done by an earlier pass of this kind, or in the model already.
        if not group.linears or any(context.plan.keeps_numbers(linear) for linear in group.linears):
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
        context, options, chosen = self.context, self.options, self.options.quantization
        if options.method == "awq":
            self._scale(model, groups)
        # Only these are the same whichever other layers are quantized.
        fitted = context.evidence.fits if options.method == "gptq" and not context.layers.changed else None
        same = dataclasses.replace(options, select=("*",), exclude=())
        for number, (group, inputs) in enumerate(self._with_inputs(model, groups, fitted, same)):
            context.progress(Stage.QUANTIZE, number, len(groups))
            matrix = group.linears[0].matrix()
            check_finite(matrix, group, "quantized")
            if isinstance(inputs, Rounded):
                rounded = inputs
            elif inputs is not None:
                rounded = self._gptq(matrix, inputs, group)
                if fitted is not None:
                    fitted.keep(fit_key(group, same), Fit(rounded, inputs.rows))
            elif options.method == "hqq":
                rounded = half_quadratic(matrix, chosen)
            else:
                rounded = round_to_nearest(matrix, chosen)
            put_quantized(model, context, group, rounded, chosen)
            context.release()

    def _scale(self, model: ir.Model, groups: Sequence[WeightGroup]) -> None:
        """awq: scales inputs of layers, and makes the groups see their new weights."""
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
    ) -> Iterator[tuple[WeightGroup, LayerInputs | Rounded | None]]:
        """The groups, for gptq each with its layers' inputs, and after these what was fitted with the same options."""
        if self.options.method != "gptq":
            yield from ((group, None) for group in groups)
            return
        poor, without = list[str](), list[str]()
        self._note_made_up()
        known = [] if fitted is None else [group for group in groups if fitted.knows(fit_key(group, options))]
        others = [group for group in groups if not any(group is one for one in known)]
        found = inputs_as_it_is(
            model,
            self.context.evidence,
            others,
            self.context.telling(Stage.CALIBRATE),
        )
        for group, inputs in found if others else ():
            first = group.linears[0]
            if inputs is None:
                without.append(first.name)
            elif inputs.rows < first.k:
                poor.append(first.name)
            yield group, inputs
        for group in known:
            assert fitted is not None
            fit = fitted.read(fit_key(group, options))
            assert isinstance(fit.weights, Rounded)
            if fit.rows < group.linears[0].k:
                poor.append(group.linears[0].name)
            yield group, fit.weights
        note_inputs(self.context, without, poor, "rounded to nearest")

    def _note_made_up(self) -> None:
        if self.context.evidence.made_up:
            self.context.note(
                f"method {self.options.method!r} was calibrated on made-up inputs, which tells little of real ones; "
                "give calibration=… with typical inputs"
            )

    def _gptq(self, matrix: np.ndarray, inputs: LayerInputs, group: WeightGroup) -> Rounded:
        options, halves = self.options, inputs.halves
        self.context.evidence.fitted_to = True
        damping = choose_damping(matrix, halves, options.quantization) if options.damping is None else options.damping
        with needs_factor(group, damping, "quantize"):
            return gptq(matrix, inputs.hessian, options.quantization, damping, options.act_order is not False)


def put_quantized(
    model: ir.Model, context: PassContext, group: WeightGroup, rounded: Rounded, quantization: Quantization
) -> None:
    """Gives the layers of the group their quantized weight, except those that no pass replace would gain from."""
    first = group.linears[0]
    weight = _spill(context, group.weight_name, rounded, quantization)
    numbers = rounded.q if quantization.symmetric else weight.matrix()
    stored = stored_in(numbers)
    del numbers
    group.linears = [linear for linear in group.linears if context.gains(linear, stored)]
    if not group.linears:
        return
    value = group.put(model, context, dequantized_tensor(weight, first.transposed, first.dtype), "quantized")
    context.layers.quantized[dataclasses.replace(first, weight_value=value).weight_key] = weight
    for linear in group.linears:
        layer = context.layer(linear)
        layer.sparsity, layer.weight_bits = (rounded.q.size - stored.count) / rounded.q.size, quantization.bits
        layer.output_error = _output_error(context, linear, weight, quantization)


def _spill(context: PassContext, name: str, rounded: Rounded, quantization: Quantization) -> QuantizedWeight:
    add = context.spill.add
    q_type = ir.DataType.INT8 if quantization.symmetric else ir.DataType.UINT8
    zeros, minimums = rounded.zero_points, rounded.minimums
    return QuantizedWeight(
        quantization.bits,
        quantization.group_size,
        add(f"{name}.q", rounded.q, q_type),
        add(f"{name}.scales", rounded.scales, ir.DataType.FLOAT),
        None if zeros is None else add(f"{name}.zero_points", zeros, ir.DataType.UINT8),
        None if minimums is None else add(f"{name}.minimums", minimums, ir.DataType.FLOAT),
    )


def _output_error(
    context: PassContext, linear: Linear, weight: QuantizedWeight, quantization: Quantization
) -> float | None:
    """||XW - XV|| / ||XW|| for recorded inputs X, the original W and what it was rounded to, V."""
    key = layer_key(linear)
    if key not in context.layers.captured:
        return None
    x = context.layers.captured[key]

    def measure() -> float | None:
        exact = x @ context.layers.originals[key]()
        norm = float(np.linalg.norm(exact))
        return float(np.linalg.norm(exact - x @ weight.matrix())) / norm if norm else None

    # The same numbers of the same layer answer the same in every run of a search.
    digest = blake2b(weight.q.tobytes() + weight.scales.tobytes()).digest()
    return context.evidence.remembered(("quantized", linear.name, len(x), quantization, digest), measure)


def check_finite(matrix: np.ndarray, group: WeightGroup, doing: str) -> None:
    """Raises ModelError for a weight that is not; doing: "quantized"."""
    if not (np.isfinite(matrix.max()) and np.isfinite(matrix.min())):
        raise ModelError(
            f"weight {group.weight_name!r} holds NaN or infinity, so it cannot be {doing}; export the model again, "
            "or exclude this layer"
        )


@contextmanager
def needs_factor(group: WeightGroup, damping: float, pass_name: str) -> Iterator[None]:
    """Says what to do where a Hessian has no Cholesky factor."""
    try:
        yield
    except np.linalg.LinAlgError:
        raise CalibrationError(
            f"X^T X of the inputs of layer {group.linears[0].name!r} has no Cholesky factor with damping {damping:g}; "
            f"raise {pass_name}.damping, or give more calibration feeds"
        ) from None
