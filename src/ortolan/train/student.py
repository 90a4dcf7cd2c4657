"""What of a model is trained, what of it is pruned, and the trained weights back into its file."""

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
    """The initializer of one or more linear layers. transposed: it is stored as [n, k]."""

    name: str
    transposed: bool
    linears: list[Linear]

    @property
    def inputs(self) -> list[ir.Value]:
        """What the layers read."""
        return list(dict.fromkeys(linear.x for linear in self.linears))

    def matrix(self, stored: np.ndarray) -> np.ndarray:
        """[k, n], a view."""
        return stored.T if self.transposed else stored


def pruned_weights(model: ir.Model, select: Globs, exclude: Globs, name: str) -> list[PrunedWeight]:
    """The float32 weights of the linear layers that the patterns choose. Raises ModelError if there are none."""
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
            f"{name} holds no linear layer with a float32 weight that select and exclude choose; give the model as it "
            "was exported, in float32"
        )
    return list(found.values())


def trained_names(model: ir.Model, weights: list[PrunedWeight]) -> list[str]:
    """The initializers that are trained: pruned weights, and all vectors, which are biases and scales of norms."""
    names = [weight.name for weight in weights]
    for name, value in model.graph.initializers.items():
        stored = value.const_value
        if stored is not None and stored.dtype == ir.DataType.FLOAT and len(stored.shape) == 1 and stored.size > 1:
            names.append(name)
    return names


def hidden_states(weights: list[PrunedWeight]) -> list[ir.Value]:
    """What lies between blocks: what layers read and something else reads too, a residual Add or a norm. Of a model
    without such, all that layers read."""
    nodes = {linear.node for weight in weights for linear in weight.linears}
    inputs = list(dict.fromkeys(x for weight in weights for x in weight.inputs))
    shared = [x for x in inputs if any(use.node not in nodes for use in x.uses())]
    return shared or inputs


def prune_weight(
    stored: np.ndarray, weight: PrunedWeight, hessian: np.ndarray, pattern: Pattern, sparsity: float
) -> np.ndarray:
    """The weight with this share of its units zero, as it is stored; those that stay make up for them (SparseGPT).

    hessian: X^T X of the layers' inputs, float32 [k, k].
    """
    matrix = np.ascontiguousarray(weight.matrix(stored))
    values = sparsegpt(matrix, damped(hessian, _DAMPING), pattern, sparsity)
    return np.ascontiguousarray(weight.matrix(values))


def write_back(model: ir.Model, trained: Mapping[str, np.ndarray]) -> None:
    """Gives initializers new numbers, float32 of the same shape; nothing else of the model changes."""
    for name, array in trained.items():
        value = model.graph.initializers[name]
        assert value.const_value is not None and tuple(value.const_value.shape.numpy()) == array.shape
        value.const_value = ir.Tensor(np.ascontiguousarray(array, np.float32), name=name)
