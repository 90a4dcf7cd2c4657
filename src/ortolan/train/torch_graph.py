"""An ONNX graph in torch, which runs with the weights of the teacher or of the student."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from ortolan.errors import ModelError, listing
from ortolan.graph_passes.find.constants import DEFAULT_DOMAINS
from ortolan.graph_passes.find.linear import node_name, op_name

from .torch_ops import OPERATORS, TYPES, Operator, Tensor, tensor_of

_MINIMUM_OPSET = 13  # first opset in which axes of Unsqueeze, Squeeze and Split are inputs


@dataclass(frozen=True)
class _Step:
    """A node prepared for running. Missing optional inputs are None."""

    node: ir.Node
    operator: Operator
    attributes: dict[str, Any]
    inputs: list[ir.Value | None]


class TorchGraph:
    """Runs a model node by node. Values that depend on neither inputs nor parameters are computed once."""

    def __init__(self, model: ir.Model, parameters: Collection[str], name: str) -> None:
        """Prepare a model. `run` takes the initializers named by `parameters`; errors call the model `name`.

        Raises:
            ModelError: An operator, a tensor type or the opset is not supported.
        """
        version = model.opset_imports.get("", model.opset_imports.get("ai.onnx", 0))
        if version < _MINIMUM_OPSET:
            raise ModelError(
                f"{name} has opset {version}, but training needs {_MINIMUM_OPSET} or later; export the model again, "
                "for example with: optimum-cli export onnx --opset 17 --model MODEL FOLDER"
            )
        self._name = name
        self._inputs = [value for value in model.graph.inputs if not value.is_initializer()]
        self._constants: dict[ir.Value, Tensor] = {}
        self._parameters: dict[str, ir.Value] = {}
        for value_name, value in model.graph.initializers.items():
            if value_name in parameters:
                self._parameters[value_name] = value
            elif value.uses():
                self._constants[value] = self._stored(value)
        self._steps: list[_Step] = []
        for node in model.graph:
            step = self._step(node)
            if all(value is None or value in self._constants for value in step.inputs):
                self._constants.update(zip(node.outputs, self._run_step(step, self._constants), strict=True))
            else:
                self._steps.append(step)

    def run(
        self, feeds: Mapping[str, Tensor], parameters: Mapping[str, Tensor], wanted: Sequence[ir.Value]
    ) -> list[Tensor]:
        """Run the graph on the model's inputs by name, and return the values `wanted`."""
        values = dict(self._constants)
        values.update({value: feeds[value.name or ""] for value in self._inputs})
        values.update({value: parameters[name] for name, value in self._parameters.items()})
        missing = set(wanted) - values.keys()
        for step in self._steps:
            made = zip(step.node.outputs, self._run_step(step, values), strict=False)
            for value, tensor in made:
                values[value] = tensor
                missing.discard(value)
            if not missing:
                break
        return [values[value] for value in wanted]

    def _stored(self, value: ir.Value) -> Tensor:
        stored = value.const_value
        if stored is None or stored.dtype not in TYPES:
            found = "no data" if stored is None else f"type {stored.dtype.name}"
            raise ModelError(
                f"{self._name}: initializer {value.name!r} has {found}, but training needs one of "
                f"{listing(known.name for known in TYPES)}; train the model before it is quantized"
            )
        return tensor_of(stored)

    def _step(self, node: ir.Node) -> _Step:
        operator = OPERATORS.get(node.op_type) if node.domain in DEFAULT_DOMAINS else None
        if operator is None:
            raise ModelError(
                f"{self._name}: node {node_name(node)!r} is a {op_name(node)}, which training does not support; give "
                "an exported encoder with standard operators, before any optimization"
            )
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        if node.op_type == "Split":
            attributes["outputs"] = len(node.outputs)
        return _Step(node, operator, attributes, list(node.inputs))

    def _run_step(self, step: _Step, values: Mapping[ir.Value, Tensor]) -> tuple[Tensor, ...]:
        inputs = [None if value is None else values[value] for value in step.inputs]
        try:
            made = step.operator(step.attributes, *inputs)
        except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            raise ModelError(
                f"{self._name}: node {node_name(step.node)!r} ({op_name(step.node)}) does not run in torch: {error!r}"
            ) from error
        return made if isinstance(made, tuple) else (made,)
