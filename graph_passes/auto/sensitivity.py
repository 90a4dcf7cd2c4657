"""How much the errors of each layer matter: an error of a share of a layer's answers, as a share of the model's.

    s = ||F(Y (1 + e r)) - F(Y)|| / (e ||F(Y)||)

F gives the model's outputs, Y is what the layer answers, r holds a 1 or a -1 for each of its columns, drawn at random,
and e is 0.05. The error that a form makes in a layer, times its s, is about what it makes in the outputs, as long as it
is small; and the errors of several layers add up in squares, as they have nothing to do with each other.

All of a layer's answers pass through a product with a vector that is an input of the model, of ones by default: so one
session serves all layers, and each costs a run.
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
_TOKENS = 128  # of the feeds that are run
_DIRECT = 1.0  # of a layer that answers for the model


def measure_sensitivities(
    model: ir.Model,
    linears: Sequence[Linear],
    feeds: Sequence[Feeds],
    outputs: Sequence[str],
    new_name: Callable[[str], str],
    open_model: Callable[[], Any],
    on_layer: Callable[[int, int], None],
) -> dict[str, float]:
    """By layer, of that output which is changed most. The model is changed: it gets the products.

    linears: of the model's main graph. feeds: some of the smallest are run. outputs: names of those that count, which
    hold floats. new_name: makes a name that the model does not have. open_model: makes a session of the model as it is
    by then. Raises CalibrationError.
    """
    factors = {linear.name: name for linear in linears if (name := _add_factor(model, linear, new_name))}
    few = _smallest(feeds if _has_fixed_batch(model) else [_first_sequence(one) for one in feeds])
    session = open_model()
    rng = np.random.default_rng(0)

    def run(given: Feeds) -> list[list[np.ndarray]]:
        """By feed and output."""
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
        shares = [
            _share([one[index] for one in exact], [one[index] for one in changed]) for index in range(len(outputs))
        ]
        found[linear.name] = max(shares, default=_DIRECT * _SIZE) / _SIZE
    return found


def _add_factor(model: ir.Model, linear: Linear, new_name: Callable[[str], str]) -> str:
    """The name of the new input; empty: the model answers with what the layer does."""
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
    """At least one."""

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
    """Of inputs that all have the same first dimension, the first of it."""
    sizes = {array.shape[0] if array.ndim > 1 else 0 for array in one.values()}
    return {name: array[:1] for name, array in one.items()} if len(sizes) == 1 and 0 not in sizes else one


def _share(exact: Sequence[np.ndarray], changed: Sequence[np.ndarray]) -> float:
    """||changed - exact|| / ||exact|| of an output, over all feeds, where both are finite."""
    distance = norm = 0.0
    for old, new in zip(exact, changed, strict=True):
        finite = np.isfinite(old) & np.isfinite(new)
        x, y = old[finite].astype(np.float64), new[finite].astype(np.float64)
        norm, distance = norm + float(x @ x), distance + float((y - x) @ (y - x))
    return math.sqrt(distance / norm) if norm else 0.0
