"""Sensitivity of the outputs to each layer: the relative error of the outputs per relative error of a layer's result.

    s = ||F(Y (1 + e r)) - F(Y)|| / (e ||F(Y)||)

F maps a layer's result Y to the model's outputs, r has a random 1 or -1 for each column of Y, and e is 0.05. As long as
a format's error in a layer is small, its error in the outputs is about s times that. Errors of several layers are
independent and add up in squares.

Each layer's result is multiplied by a vector that is an input of the model, 1 by default. So one session serves all
layers, and each layer costs one run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError, one_line

from ..find.linear import Linear, layer_key
from ..measure.feeds import Feeds, model_inputs

_SIZE = 0.05
_TOKENS = 128  # limit of the tokens in the feeds that are run
_DIRECT = 1.0  # sensitivity to a layer whose result is a model output


def measure_sensitivities(
    model: ir.Model,
    linears: Sequence[Linear],
    feeds: Sequence[Feeds],
    outputs: Sequence[str],
    new_name: Callable[[str], str],
    open_model: Callable[[], Any],
    on_layer: Callable[[int, int], None],
) -> dict[str, float]:
    """Return the sensitivity of the most affected output to each layer. This adds the factors to the model.

    linears: Layers of the main graph. feeds: Only some of the smallest are run. outputs: Names of the float outputs
    that count. open_model: Opens a session for the changed model. on_layer: Called with the number of finished and of
    all layers.

    Raises:
        CalibrationError: The model does not run on the feeds.
    """
    factors = {linear.name: name for linear in linears if (name := _add_factor(model, linear, new_name))}
    few = _smallest(feeds if _has_fixed_batch(model) else [_first_sequence(one) for one in feeds])
    session = open_model()
    rng = np.random.default_rng(0)

    def run(given: Feeds) -> list[list[np.ndarray]]:
        """Return the outputs of each feed."""
        try:
            return [session.run(list(outputs), {**one, **given}) for one in few] if outputs else []
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise CalibrationError(
                f"the original model does not run on the feeds: {one_line(error)}; check their shapes and types"
            ) from error

    exact = run({})
    found: dict[str, float] = {}
    for number, linear in enumerate(linears):
        on_layer(number, len(linears))
        if linear.name not in factors:
            found[linear.name] = _DIRECT
            continue
        signs = rng.choice([-1.0, 1.0], linear.n)
        changed = run({factors[linear.name]: (1 + _SIZE * signs).astype(linear.dtype.numpy())})
        errors = [
            _relative_error([one[index] for one in exact], [one[index] for one in changed])
            for index in range(len(outputs))
        ]
        found[linear.name] = max(errors, default=_DIRECT * _SIZE) / _SIZE
    return found


def _add_factor(model: ir.Model, linear: Linear, new_name: Callable[[str], str]) -> str:
    """Add a factor to a layer's result; return the name of the new input, or "" if the result is an output."""
    y = layer_key(linear)
    if y.is_graph_output():
        return ""
    name = new_name(f"{y.name}.factor")
    ones = ir.Tensor(np.ones(linear.n, linear.dtype.numpy()), name=name)
    factor = ir.Value(name=name, shape=ir.Shape([linear.n]), type=ir.TensorType(linear.dtype), const_value=ones)
    model.graph.inputs.append(factor)
    model.graph.register_initializer(factor)
    node = ir.node("Mul", [y, factor])
    node.outputs[0].name = new_name(f"{y.name}.times_factor")
    uses = [(user, index) for user, index in y.uses() if user is not node]
    model.graph.insert_after(linear.node, node)
    for user, index in uses:
        user.replace_input_with(index, node.outputs[0])
    return name


def _smallest(feeds: Sequence[Feeds]) -> list[Feeds]:
    def tokens(one: Feeds) -> int:
        return max((int(np.prod(array.shape[:2])) for array in one.values()), default=0)

    found: list[Feeds] = []
    for one in sorted(feeds, key=tokens):
        if found and sum(map(tokens, [*found, one])) > _TOKENS:
            break
        found.append(one)
    return found


def _has_fixed_batch(model: ir.Model) -> bool:
    shapes = [value.shape for value in model_inputs(model)]
    return any(shape is None or len(shape) == 0 or isinstance(shape[0], int) for shape in shapes)


def _first_sequence(one: Feeds) -> Feeds:
    """Return the first sequence, if all inputs have the same first dimension."""
    sizes = {array.shape[0] if array.ndim > 1 else 0 for array in one.values()}
    return {name: array[:1] for name, array in one.items()} if len(sizes) == 1 and 0 not in sizes else one


def _relative_error(exact: Sequence[np.ndarray], changed: Sequence[np.ndarray]) -> float:
    """Return ||changed - exact|| / ||exact|| of an output over all feeds, where both are finite."""
    distance = norm = 0.0
    for old, new in zip(exact, changed, strict=True):
        finite = np.isfinite(old) & np.isfinite(new)
        x, y = old[finite].astype(np.float64), new[finite].astype(np.float64)
        norm, distance = norm + float(x @ x), distance + float((y - x) @ (y - x))
    return math.sqrt(distance / norm) if norm else 0.0
