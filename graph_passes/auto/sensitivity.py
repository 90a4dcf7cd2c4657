"""How much the errors of each layer matter: an error of a share of a layer's answers, as a share of the model's.

    s = ||F(Y (1 + e r)) - F(Y)|| / (e ||F(Y)||)

F gives the model's outputs, Y is what the layer answers, r holds a 1 or a -1 for each of its columns, drawn at random,
and e is 0.05. The error that a form makes in a layer, times its s, is about what it makes in the outputs, as long as it
is small; and the errors of several layers add up in squares, as they have nothing to do with each other.

All of a layer's answers pass through a product with a vector that is an input of the model, of ones by default: so one
session serves all layers, and each costs a run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from ortolan.errors import CalibrationError
from ortolan.session import one_line

from ..feeds import Feeds
from ..linear import Linear
from ..pipeline import layer_key

_SIZE = 0.05
_TOKENS = 128  # of the feeds that are run
_DIRECT = 1.0  # of a layer that answers for the model


def measure_sensitivities(
    model: ir.Model,
    linears: Sequence[Linear],
    feeds: Sequence[Feeds],
    outputs: Sequence[str],
    open_model: Callable[[], Any],
    on_layer: Callable[[int, int], None],
) -> dict[str, float]:
    """By layer, of that output which is changed most. The model is changed: it gets the products.

    linears: of the model's main graph. feeds: some of the smallest are run. outputs: names of those that count.
    open_model: makes a session of the model as it is by then. Raises CalibrationError.
    """
    factors = {linear.name: name for linear in linears if (name := _add_factor(model, linear)) is not None}
    few = _smallest(feeds)
    session = open_model()
    rng = np.random.default_rng(0)

    def run(given: Feeds) -> list[np.ndarray]:
        """Of each output, all numbers."""
        try:
            answers = [session.run(list(outputs), {**one, **given}) for one in few]
        except Exception as error:  # ONNX Runtime's exceptions have no common base but Exception
            raise CalibrationError(f"the original model does not run on the feeds: {one_line(error)}") from error
        return [
            np.concatenate([np.ravel(one).astype(np.float64) for one in column])
            for column in zip(*answers, strict=True)
        ]

    exact = run({})
    found: dict[str, float] = {}
    for number, linear in enumerate(linears):
        on_layer(number, len(linears))
        if linear.name not in factors:
            found[linear.name] = _DIRECT
            continue
        signs = rng.choice([-1.0, 1.0], linear.n)
        changed = run({factors[linear.name]: (1 + _SIZE * signs).astype(linear.dtype.numpy())})
        shares = [_share(old, new) for old, new in zip(exact, changed, strict=True)]
        found[linear.name] = max(shares, default=_DIRECT) / _SIZE
    return found


def _add_factor(model: ir.Model, linear: Linear) -> str | None:
    """The name of the new input; None: the model answers with what the layer does."""
    y = layer_key(linear)
    if y.is_graph_output():
        return None
    name = f"{y.name}.factor"
    ones = ir.Tensor(np.ones(linear.n, linear.dtype.numpy()), name=name)
    factor = ir.Value(name=name, shape=ir.Shape([linear.n]), type=ir.TensorType(linear.dtype), const_value=ones)
    model.graph.inputs.append(factor)
    model.graph.register_initializer(factor)
    node = ir.node("Mul", [y, factor])
    node.outputs[0].name = f"{y.name}.times_factor"
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


def _share(exact: np.ndarray, changed: np.ndarray) -> float:
    finite = np.isfinite(exact) & np.isfinite(changed)
    norm = float(np.linalg.norm(exact[finite]))
    return float(np.linalg.norm(changed[finite] - exact[finite])) / norm if norm else 0.0
