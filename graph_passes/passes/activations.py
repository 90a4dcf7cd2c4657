"""Chooses thresholds: an input of a linear layer whose magnitude is not above its layer's threshold counts as zero.

Operator MaskedMatMul (pass `replace`) applies them, and reads only the rows of the weight whose inputs are not zero. An
input is sparse by itself behind a ReLU, or one that is multiplied with it, squared or reshaped afterwards: threshold 0.
Any other is made sparse by its magnitude (TEAL, CATS), to a given share of zeros or a given error of the layer.

The model is run as the passes before have left it, on all feeds. Layers of one input share one threshold. Nothing is
changed here: context.thresholds says what was chosen, and masked_inputs shows the model with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, RecipeError
from ortolan.progress import Stage

from ..find.constants import DEFAULT_DOMAINS, constant_tensor
from ..find.linear import Linear, layer_key, linears_in
from ..options import Globs, PassOptions, takes
from .calibrate import InputRecorder, feeds_for, recording
from .context import PassContext, RecipePass
from .weight_groups import check_patterns

# An input of which less is zero on the feeds is as good as dense.
_LEAST_ZEROS = 0.1
_ROWS_BYTES = 64 * 1024**2  # of inputs that are kept at a time, to measure errors
_STEPS = 256  # shares of zeros that are tried for a given error: multiples of 1 / _STEPS


@dataclass(frozen=True)
class ActivationsOptions(PassOptions):
    # The share of each input that is to be zero. Neither this nor an error: only inputs that are sparse by themselves.
    sparsity: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    # The largest ||(x - x')W|| / ||xW|| of a layer, x' being what is left of its input x: the root mean square over
    # tokens, so that the few whose inputs are huge (a text's first one) do not decide. Of layers that share an input,
    # of each.
    error: float | None = field(default=None, metadata=takes("float", low=0.0, below=1.0, none=True))
    max_numbers: int = field(default=1 << 18, metadata=takes("int", low=16))  # kept of each input, drawn at random
    max_rows: int = field(default=256, metadata=takes("int", low=1))  # error: inputs (tokens) on which it is measured
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sparsity is not None and self.error is not None:
            raise RecipeError(
                f"sparsity is {self.sparsity:g} and error is {self.error:g}, expected one of them: each sets the "
                "thresholds; leave the other out"
            )


class ActivationsPass(RecipePass):
    """Fills context.thresholds; changes nothing."""

    options_type = ActivationsOptions
    options: ActivationsOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        context.threshold_plans.append(self._takes)

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        context = self.context
        linears = context.survey(model)
        if not context.applies_thresholds:
            raise RecipeError(
                "pass 'activations' chooses thresholds, but no pass 'replace' applies them; add one with "
                'op = "MaskedMatMul" behind it'
            )
        check_patterns(linears, "select", self.options.select, "activations")
        chosen = [linear for linear in linears if self._takes(linear) and layer_key(linear) not in context.thresholds]
        if context.dry_run:
            if self._needs_feeds and context.feeds is None:
                context.note(
                    "pass 'activations' needs calibration inputs (calibration=…): without them, a run is refused"
                )
            context.thresholds |= {layer_key(linear): 0.0 for linear in chosen}
        elif chosen:
            self._choose(model, chosen)
        return ir.passes.PassResult(model, modified=False)

    @property
    def _needs_feeds(self) -> bool:
        return self.options.sparsity is not None or self.options.error is not None

    def _takes(self, linear: Linear) -> bool:
        """Whether this pass chooses a threshold for the layer."""
        if not linear.matches(self.options.select) or linear.matches(self.options.exclude):
            return False
        if linear.int4 is not None or linear.int8 is not None:  # MaskedMatMul does not take such a weight
            return False
        return self._needs_feeds or is_sparse_by_itself(linear.x)

    def _choose(self, model: ir.Model, linears: Sequence[Linear]) -> None:
        context = self.context
        feeds_for(context)
        if context.feeds_made_up and self._needs_feeds:
            raise CalibrationError(
                "pass 'activations' needs calibration inputs: thresholds for made-up ones would cut off too much or "
                "too little of real ones; give calibration=… with typical inputs (an .npz file, a dict of arrays, or a "
                "list of such dicts), or leave out its options sparsity and error, so that it takes only inputs that "
                "are sparse by themselves"
            )
        by_input: dict[str, list[Linear]] = {}
        with recording(model, context, linears) as recorder:
            for linear in linears:
                if linear.x.name in recorder.names:
                    by_input.setdefault(linear.x.name, []).append(linear)
                else:
                    context.thresholds[layer_key(linear)] = (
                        "its input lies in a subgraph, or the feeds lack it, so no threshold can be chosen"
                    )
            magnitudes = self._magnitudes(recorder, list(by_input))
            thresholds = self._thresholds(recorder, by_input, magnitudes)
        for name, layers in by_input.items():
            density = float(np.mean(magnitudes[name] > thresholds[name]))
            useless = not self._needs_feeds and not context.feeds_made_up and density > 1 - _LEAST_ZEROS
            for linear in layers:
                if useless:
                    context.thresholds[layer_key(linear)] = f"only {1 - density:.1%} of its input is zero on the feeds"
                    continue
                context.thresholds[layer_key(linear)] = thresholds[name]
                layer = context.layer(linear)
                layer.threshold = thresholds[name]
                layer.density = None if context.feeds_made_up else density

    def _magnitudes(self, recorder: InputRecorder, names: Sequence[str]) -> dict[str, np.ndarray]:
        """A sample of |x| for each input, float32, ascending."""
        context = self.context
        numbers = recorder.numbers(
            names, self.options.max_numbers, lambda done, total: context.progress(Stage.ACTIVATIONS, done, total)
        )
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
            inputs = recorder.some_rows(
                names, self.options.max_rows, lambda done, total: context.progress(Stage.ACTIVATIONS, done, total)
            )
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


# ---- inputs that are sparse by themselves ----------------------------------------------------------------------------

# Operators whose output is zero wherever their first input is.
_KEEPS_ZEROS = {
    *("Identity", "Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Slice", "Expand", "Dropout", "Cast"),
    *("Abs", "Neg", "Sqrt", "Div"),
}


def is_sparse_by_itself(x: ir.Value | None) -> bool:
    """Whether zeros stand in x wherever a ReLU, in front of it, has put them."""
    waiting, seen = [x], set[ir.Node]()
    while waiting:
        value = waiting.pop()
        node = value.producer() if value is not None else None
        if node is None or node in seen or node.domain not in DEFAULT_DOMAINS or not node.inputs:
            continue
        if _makes_zeros(node):
            return True
        seen.add(node)
        waiting += _zeros_from(node)
    return False


def _makes_zeros(node: ir.Node) -> bool:
    if node.op_type == "Clip":  # ReLU6
        low = constant_tensor(node.inputs[1]) if len(node.inputs) > 1 else None
        return low is not None and low.size == 1 and float(low.numpy().item()) == 0
    if node.op_type == "Max":
        constants = [tensor for value in node.inputs if (tensor := constant_tensor(value)) is not None]
        return len(node.inputs) == 2 and len(constants) == 1 and not np.any(constants[0].numpy())
    return node.op_type in ("Relu", "ThresholdedRelu")


def _zeros_from(node: ir.Node) -> list[ir.Value | None]:
    """The inputs of which any one makes the output zero where it is."""
    if node.op_type == "Mul":
        return list(node.inputs)
    if node.op_type == "Pow":
        power = constant_tensor(node.inputs[1])
        return [node.inputs[0]] if power is not None and bool(np.all(power.numpy() > 0)) else []
    return [node.inputs[0]] if node.op_type in _KEEPS_ZEROS else []


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
