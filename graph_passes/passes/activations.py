"""Choose thresholds for layer inputs: an element whose magnitude is at most the threshold counts as zero.

Operator MaskedMatMul (pass `replace`) applies the thresholds and skips weight rows whose input is zero. Some inputs are
sparse without pruning, so their threshold is 0: outputs of a ReLU, also after a multiplication, a square or a reshape.
Other inputs are made sparse by magnitude (TEAL, CATS), up to a given fraction of zeros or a given error of the layer.

The pass runs the model as earlier passes left it, on all feeds. Layers that share an input share a threshold. The model
does not change: `context.layers.thresholds` holds the thresholds, which `masked_inputs` applies for a comparison.
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

# An input with a smaller fraction of zeros on the feeds is reported as dense.
_MIN_ZEROS = 0.1
_ROWS_BYTES = 64 * 1024**2  # size of the input rows kept in memory at a time to measure errors
_STEPS = 256  # for a given error, multiples of 1 / _STEPS are tried as sparsity


class ActivationsPass(RecipePass):
    """Fill `context.layers.thresholds`."""

    options_type = ActivationsOptions
    options: ActivationsOptions

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Choose a threshold for the input of each selected layer."""
        context = self.context
        linears = context.survey(model)
        if not context.plan.applies_thresholds:
            raise RecipeError(
                "pass 'activations' chooses thresholds, but no pass 'replace' applies them; add a later one with "
                'op = "MaskedMatMul"'
            )
        check_patterns(linears, "select", self.options.select, "activations")
        chosen = [
            linear
            for linear in linears
            if self.options.takes(linear) and layer_key(linear) not in context.layers.thresholds
        ]
        if context.dry_run:
            if self.options.needs_feeds and context.evidence.made_up:
                context.note("pass 'activations' needs calibration inputs (calibration=…): without them, a run fails")
            context.layers.thresholds |= {layer_key(linear): 0.0 for linear in chosen}
        elif chosen:
            self._choose(model, chosen)
        return ir.passes.PassResult(model, modified=False)

    def _choose(self, model: ir.Model, linears: Sequence[Linear]) -> None:
        context = self.context
        if context.evidence.made_up and self.options.needs_feeds:
            raise CalibrationError(
                "pass 'activations' needs calibration inputs: thresholds chosen on synthetic inputs do not fit real "
                "ones; give calibration=… with typical inputs (an .npz file, a dict of arrays, or a list of such "
                "dicts), or leave out its options sparsity and error, so that it takes only inputs that are sparse "
                "without thresholds, such as outputs of a ReLU"
            )
        by_input: dict[str, list[Linear]] = {}
        with context.evidence.recording(model, linears) as recorder:
            for linear in linears:
                if linear.x.name in recorder.names:
                    by_input.setdefault(linear.x.name, []).append(linear)
                else:
                    context.layers.thresholds[layer_key(linear)] = (
                        "its input is inside a subgraph or missing from the feeds, so no threshold can be chosen"
                    )
            magnitudes = self._magnitudes(recorder, list(by_input))
            thresholds = self._thresholds(recorder, by_input, magnitudes)
        for name, layers in by_input.items():
            density = float(np.mean(magnitudes[name] > thresholds[name]))
            useless = not self.options.needs_feeds and not context.evidence.made_up and density > 1 - _MIN_ZEROS
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
        """Return a sample of |x| for each input: float32, ascending."""
        context = self.context
        samples = recorder.samples(names, self.options.max_values, context.telling(Stage.ACTIVATIONS))
        for name in names:
            if name not in samples:
                raise CalibrationError(
                    f"value {name!r} is empty on the calibration feeds, so no threshold can be chosen for it; give "
                    "feeds that contain tokens"
                )
            if not np.isfinite(samples[name]).all():
                raise CalibrationError(
                    f"value {name!r} holds NaN or infinity on the calibration feeds, so no threshold can be chosen for "
                    "it; give other feeds, or exclude the layers that read it (activations.exclude)"
                )
        return {name: np.sort(np.abs(samples[name])) for name in names}

    def _thresholds(
        self, recorder: InputRecorder, by_input: Mapping[str, Sequence[Linear]], magnitudes: Mapping[str, np.ndarray]
    ) -> dict[str, float]:
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


def quantile(magnitudes: np.ndarray, fraction: float) -> float:
    """Return the smallest magnitude m such that at least this fraction of the magnitudes is at most m.

    magnitudes are ascending, [count]. The result is 0 for fraction 0.
    """
    count = int(np.ceil(fraction * len(magnitudes)))
    return float(magnitudes[count - 1]) if count else 0.0


def threshold_within(error: float, x: np.ndarray, linears: Sequence[Linear], magnitudes: np.ndarray) -> float:
    """Return the largest threshold at which no layer's output error exceeds `error`, found by bisection.

    The error is the root mean square over rows of the relative output error. x: inputs, float32 [rows, k]. magnitudes:
    sample of |x|, ascending; the bisection is over its fraction of zeros.
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
    """Return the root mean square over rows of ||lost|| / norm, without rows whose norm is 0."""
    counted = norms > 0
    relative = np.linalg.norm(lost[counted], axis=1) / norms[counted]
    return float(np.sqrt(np.mean(relative * relative))) if len(relative) else 0.0


def _batches(widths: Mapping[str, int], rows: int) -> Iterator[list[str]]:
    """Split the inputs into batches whose rows take at most _ROWS_BYTES, or single larger inputs."""
    batch: list[str] = []
    size = 0
    for name, width in widths.items():
        if batch and size + 4 * rows * width > _ROWS_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(name)
        size += 4 * rows * width
    yield batch


# ---- The model with its thresholds -----------------------------------------------------------------------------------


@contextmanager
def masked_inputs(
    model: ir.Model, thresholds: Mapping[ir.Value, float | str], new_name: Callable[[str], str]
) -> Iterator[None]:
    """Within this context, standard operators set layer inputs with magnitudes up to their threshold to zero.

    thresholds: by layer_key; a string is the reason why the layer has no threshold. The model is restored at the end.
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
