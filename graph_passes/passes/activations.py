"""Chooses thresholds: an input of a linear layer whose magnitude is not above its layer's threshold counts as zero.

Operator MaskedMatMul (pass `replace`) applies them, and reads only the rows of the weight whose inputs are not zero. An
input is sparse by itself behind a ReLU, or one that is multiplied with it, squared or reshaped afterwards: threshold 0.
Any other is made sparse by its magnitude (TEAL, CATS), to a given share of zeros or a given error of the layer.

The model is run as the passes before have left it, on all feeds. Layers of one input share one threshold. Nothing is
changed here: context.layers.thresholds says what was chosen, and masked_inputs shows the model with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, RecipeError
from ortolan.progress import Stage

from ..find.linear import Linear, layer_key, linears_in
from ..measure.recorder import InputRecorder
from .context import RecipePass
from .plan.activations import ActivationsOptions
from .weight_groups import check_patterns

# An input of which less is zero on the feeds is as good as dense.
_LEAST_ZEROS = 0.1
_ROWS_BYTES = 64 * 1024**2  # of inputs that are kept at a time, to measure errors
_STEPS = 256  # shares of zeros that are tried for a given error: multiples of 1 / _STEPS


class ActivationsPass(RecipePass):
    """Fills context.layers.thresholds; changes nothing."""

    options_type = ActivationsOptions
    options: ActivationsOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        linears = context.survey(model)
        if not context.plan.applies_thresholds:
            raise RecipeError(
                "pass 'activations' chooses thresholds, but no pass 'replace' applies them; add one with "
                'op = "MaskedMatMul" behind it'
            )
        check_patterns(linears, "select", self.options.select, "activations")
        chosen = [
            linear
            for linear in linears
            if self.options.takes(linear) and layer_key(linear) not in context.layers.thresholds
        ]
        if context.dry_run:
            if self.options.needs_feeds and context.evidence.made_up:
                context.note(
                    "pass 'activations' needs calibration inputs (calibration=…): without them, a run is refused"
                )
            context.layers.thresholds |= {layer_key(linear): 0.0 for linear in chosen}
        elif chosen:
            self._choose(model, chosen)
        return ir.passes.PassResult(model, modified=False)

    def _choose(self, model: ir.Model, linears: Sequence[Linear]) -> None:
        context = self.context
        if context.evidence.made_up and self.options.needs_feeds:
            raise CalibrationError(
                "pass 'activations' needs calibration inputs: thresholds for made-up ones would cut off too much or "
                "too little of real ones; give calibration=… with typical inputs (an .npz file, a dict of arrays, or a "
                "list of such dicts), or leave out its options sparsity and error, so that it takes only inputs that "
                "are sparse by themselves"
            )
        by_input: dict[str, list[Linear]] = {}
        with context.evidence.recording(model, linears) as recorder:
            for linear in linears:
                if linear.x.name in recorder.names:
                    by_input.setdefault(linear.x.name, []).append(linear)
                else:
                    context.layers.thresholds[layer_key(linear)] = (
                        "its input lies in a subgraph, or the feeds lack it, so no threshold can be chosen"
                    )
            magnitudes = self._magnitudes(recorder, list(by_input))
            thresholds = self._thresholds(recorder, by_input, magnitudes)
        for name, layers in by_input.items():
            density = float(np.mean(magnitudes[name] > thresholds[name]))
            useless = not self.options.needs_feeds and not context.evidence.made_up and density > 1 - _LEAST_ZEROS
            for linear in layers:
                if useless:
                    context.layers.thresholds[layer_key(linear)] = (
                        f"only {1 - density:.1%} of its input is zero on the feeds"
                    )
                    continue
                context.layers.thresholds[layer_key(linear)] = thresholds[name]
                layer = context.layer(linear)
                layer.threshold = thresholds[name]
                layer.density = None if context.evidence.made_up else density

    def _magnitudes(self, recorder: InputRecorder, names: Sequence[str]) -> dict[str, np.ndarray]:
        """A sample of |x| for each input, float32, ascending."""
        context = self.context
        numbers = recorder.numbers(names, self.options.max_numbers, context.telling(Stage.ACTIVATIONS))
        for name in names:
            if name not in numbers:
                raise CalibrationError(
                    f"value {name!r} is empty on the calibration feeds, so no threshold can be chosen for it; give "
                    "feeds with tokens in them"
                )
            if not np.isfinite(numbers[name]).all():
                raise CalibrationError(
                    f"value {name!r} holds NaN or infinity on the calibration feeds, so no threshold can be chosen for "
                    "it; give other feeds, or exclude the layers that take it (activations.exclude)"
                )
        return {name: np.sort(np.abs(numbers[name])) for name in names}

    def _thresholds(
        self, recorder: InputRecorder, by_input: Mapping[str, Sequence[Linear]], magnitudes: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
        """For each input."""
        sparsity, error, context = self.options.sparsity, self.options.error, self.context
        if error is None:
            return {name: quantile(magnitudes[name], sparsity or 0.0) for name in by_input}
        thresholds: dict[str, float] = {}
        widths = {name: layers[0].k for name, layers in by_input.items()}
        for names in _batches(widths, self.options.max_rows):
            inputs = recorder.some_rows(names, self.options.max_rows, context.telling(Stage.ACTIVATIONS))
            for name in names:
                thresholds[name] = threshold_within(error, inputs[name], by_input[name], magnitudes[name])
                context.release()
        return thresholds


def quantile(magnitudes: np.ndarray, share: float) -> float:
    """The least of the ascending numbers [count] that is not below this share of them; 0 for none of them."""
    count = int(np.ceil(share * len(magnitudes)))
    return float(magnitudes[count - 1]) if count else 0.0


def threshold_within(error: float, x: np.ndarray, linears: Sequence[Linear], magnitudes: np.ndarray) -> float:
    """The largest threshold for inputs x float32 [rows, k] at which no layer's output is off by more than the error,
    in the root mean square over rows; found by bisection of the share of `magnitudes`, ascending, that it makes zero.
    """

    def is_within(threshold: float) -> bool:
        lost = np.where(np.abs(x) <= threshold, x, 0)
        return all(_relative(lost @ matrix, norms) <= error for matrix, norms in products)

    matrices = [linear.matrix() for linear in linears]
    products = [(matrix, np.linalg.norm(x @ matrix, axis=1)) for matrix in matrices]
    within, beyond = 0, _STEPS
    while beyond - within > 1:
        middle = (within + beyond) // 2
        if is_within(quantile(magnitudes, middle / _STEPS)):
            within = middle
        else:
            beyond = middle
    return quantile(magnitudes, within / _STEPS)


def _relative(lost: np.ndarray, norms: np.ndarray) -> float:
    """The root mean square of what rows have lost, as shares of their norms [rows]; without rows that are zero."""
    counted = norms > 0
    shares = np.linalg.norm(lost[counted], axis=1) / norms[counted]
    return float(np.sqrt(np.mean(shares * shares))) if len(shares) else 0.0


def _batches(widths: Mapping[str, int], rows: int) -> Iterator[list[str]]:
    """Splits the inputs so that the rows kept of a batch stay below _ROWS_BYTES, or are of one input."""
    batch: list[str] = []
    size = 0
    for name, width in widths.items():
        if batch and size + 4 * rows * width > _ROWS_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += 4 * rows * width
    yield batch


# ---- the model with its thresholds -----------------------------------------------------------------------------------


@contextmanager
def masked_inputs(
    model: ir.Model, thresholds: Mapping[ir.Value, float | str], new_name: Callable[[str], str]
) -> Iterator[None]:
    """Inside, layers get zeros for what is not above their threshold, by standard operators. thresholds: by layer_key.

    new_name makes a name that no value of the model has.
    """
    masked: list[tuple[ir.Node, ir.Value, list[ir.Node]]] = []
    for linear in list(linears_in(model)):
        threshold, x = thresholds.get(layer_key(linear)), linear.node.inputs[0]
        if not isinstance(threshold, float) or x is None:
            continue
        nodes = _mask_nodes(x, threshold, linear.dtype)
        for node in nodes:
            node.outputs[0].name = new_name(f"{linear.name}/masked")
        assert linear.node.graph is not None
        linear.node.graph.insert_before(linear.node, nodes)
        linear.node.replace_input_with(0, nodes[-1].outputs[0])
        masked.append((linear.node, x, nodes))
    try:
        yield
    finally:
        for node, x, nodes in masked:
            node.replace_input_with(0, x)
            assert node.graph is not None
            node.graph.remove(nodes, safe=True)


def _mask_nodes(x: ir.Value, threshold: float, dtype: ir.DataType) -> list[ir.Node]:
    zero = ir.node("Constant", [], {"value": ir.tensor(np.zeros((), dtype.numpy()))})
    limit = ir.node("Constant", [], {"value": ir.tensor(np.float32(threshold))})
    wide = ir.node("Cast", [x], {"to": ir.DataType.FLOAT})
    magnitude = ir.node("Abs", wide.outputs)
    small = ir.node("LessOrEqual", [magnitude.outputs[0], limit.outputs[0]])
    kept = ir.node("Where", [small.outputs[0], zero.outputs[0], x])
    return [zero, limit, wide, magnitude, small, kept]
