"""The weights of a model that are trained or pruned, and writing them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from ortolan.errors import ModelError
from ortolan.graph_passes.find.linear import Linear, linears_in
from ortolan.graph_passes.options import Globs
from ortolan.graph_passes.weights.pruners.masks import Pattern
from ortolan.graph_passes.weights.pruners.sparsegpt import sparsegpt
from ortolan.graph_passes.weights.quantizers.hessian import damped

_DAMPING = 0.01
_REORDERING = ("Identity", "Transpose")


@dataclass
class PrunedWeight:
    """The weight of one or more linear layers.

    Attributes:
        name: The name of the initializer.
        transposed: The weight is stored as [n, k].
    """

    name: str
    transposed: bool
    linears: list[Linear]

    @property
    def inputs(self) -> list[ir.Value]:
        """The inputs of the layers."""
        return list(dict.fromkeys(linear.x for linear in self.linears))

    def matrix(self, stored: np.ndarray) -> np.ndarray:
        """Return the stored weight as [k, n], a view."""
        return stored.T if self.transposed else stored


def pruned_weights(model: ir.Model, select: Globs, exclude: Globs, name: str) -> list[PrunedWeight]:
    """Return the float32 weights of the linear layers that `select` matches and `exclude` does not.

    Raises:
        ModelError: There is no such weight. `name` is the model's name for the message.
    """
    found: dict[str, PrunedWeight] = {}
    for linear in linears_in(model):
        if not linear.matches(select) or linear.matches(exclude):
            continue
        value, transposed = linear.weight_value, linear.transposed
        while (node := value.producer()) is not None and node.op_type in _REORDERING and node.inputs[0] is not None:
            value, transposed = node.inputs[0], transposed != (node.op_type == "Transpose")
        stored = value.const_value if value.is_initializer() else None
        if stored is not None and stored.dtype == ir.DataType.FLOAT and value.name:
            weight = found.setdefault(value.name, PrunedWeight(value.name, transposed, []))
            if weight.transposed == transposed:
                weight.linears.append(linear)
    if not found:
        raise ModelError(
            f"{name} has no linear layer that has a float32 weight and that select and exclude allow; give the model "
            "as exported in float32"
        )
    return list(found.values())


def trained_names(model: ir.Model, weights: list[PrunedWeight]) -> list[str]:
    """Return the names of trained initializers: pruned weights, and all vectors (biases and scales of norms)."""
    names = [weight.name for weight in weights]
    for name, value in model.graph.initializers.items():
        stored = value.const_value
        if stored is not None and stored.dtype == ir.DataType.FLOAT and len(stored.shape) == 1 and stored.size > 1:
            names.append(name)
    return names


def hidden_states(weights: list[PrunedWeight]) -> list[ir.Value]:
    """Return the hidden states between blocks: inputs of linear layers that a residual Add or a norm reads.

    If the model has no such value, return the inputs of all linear layers.
    """
    nodes = {linear.node for weight in weights for linear in weight.linears}
    inputs = list(dict.fromkeys(x for weight in weights for x in weight.inputs))
    shared = [x for x in inputs if any(use.node not in nodes for use in x.uses())]
    return shared or inputs


def prune_weight(
    stored: np.ndarray, weight: PrunedWeight, hessian: np.ndarray, pattern: Pattern, sparsity: float
) -> np.ndarray:
    """Prune a weight by SparseGPT, which changes the elements that are kept to compensate.

    hessian: X^T X of the layers' inputs, float32 [k, k].

    Returns:
        The new weight, in the same layout as `stored`.
    """
    matrix = np.ascontiguousarray(weight.matrix(stored))
    values = sparsegpt(matrix, damped(hessian, _DAMPING), pattern, sparsity)
    return np.ascontiguousarray(weight.matrix(values))


def write_back(model: ir.Model, trained: Mapping[str, np.ndarray]) -> None:
    """Replace the values of initializers by float32 arrays of the same shapes."""
    for name, array in trained.items():
        value = model.graph.initializers[name]
        assert value.const_value is not None and tuple(value.const_value.shape.numpy()) == array.shape
        value.const_value = ir.Tensor(np.ascontiguousarray(array, np.float32), name=name)
