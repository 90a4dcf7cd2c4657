"""Rewrite a model into the form that the other passes expect. Results and names stay."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
from onnx import version_converter
from onnx_ir.passes import common as onnx_passes

from ortolan.errors import ModelError, RecipeError
from ortolan.progress import Stage

from ..files.model_file import to_proto
from ..find.constants import DEFAULT_DOMAINS, constant_tensor
from ..find.convolutions import unfold_convolutions
from ..find.dimensions import Dimensions
from ..find.fused_forms import unfuse
from ..find.quantized_forms import unify_quantized
from ..find.separate_experts import join_experts
from ..measure.media_inputs import keep_media
from ..names import MINIMUM_IR_VERSION, MINIMUM_OPSET, ORTOLAN_DOMAIN, RECIPE_KEY
from ..operators.nodes import new_initializer
from .context import RecipePass
from .lengths import ask_inputs

_LARGE_TENSOR = 1024


class NormalizePass(RecipePass):
    """Rewrite the model so that the other passes can match it.

    Inline functions, raise an old opset, name nodes, turn Constant nodes into initializers, split fused operators
    (find/fused_forms.py), compute lengths from inputs (lengths.py), and rewrite int8 layers (find/quantized_forms.py)
    and 1-D convolutions (find/convolutions.py) to known forms. If pass experts follows, join experts that are separate
    layers (find/separate_experts.py).
    """

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Normalize the model."""
        self.context.progress(Stage.NORMALIZE, 0, 1)
        normalize(model, self.context.source.name)
        plan = self.context.plan
        if plan.unfuses:
            unfuse(model, lambda wanted: self.context.new_name(model, wanted), plan.stores_tables)
        squeeze_weights(model, lambda wanted: self.context.new_name(model, wanted))
        ask_inputs(model, lambda wanted: self.context.new_name(model, wanted))
        if plan.joins_experts:
            self._join_experts(model)
        if plan.replaces:  # the last pass `replace` undoes this for layers that are not replaced
            self.context.layers.unified += unify_quantized(model, lambda wanted: self.context.new_name(model, wanted))
            keep_media(model)
            self.context.layers.unfolded += unfold_convolutions(
                model, lambda wanted: self.context.new_name(model, wanted)
            )
        self.context.progress(Stage.NORMALIZE, 1, 1)
        return ir.passes.PassResult(model, modified=True)

    def _join_experts(self, model: ir.Model) -> None:
        """Join experts that pass experts will replace, and report mixtures that stay separate layers."""
        context = self.context
        left = join_experts(model, lambda wanted: context.new_name(model, wanted), context.plan.why_separate)
        reasons: dict[str, list[str]] = {}
        for one in left:
            reasons.setdefault(one.reason, []).append(one.name)
        for reason, names in reasons.items():
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            context.note(f"the experts of {names[0]!r}{others} stay separate layers: {reason}")

    def ensures(self, model: ir.Model) -> None:
        """Check the opset, and that no functions remain."""
        version = model.opset_imports.get("", 0)
        if version < MINIMUM_OPSET or has_functions(model):
            raise ModelError(
                f"{self.context.source.name} has opset {version} and {len(model.functions)} functions after "
                f"normalization, expected at least opset {MINIMUM_OPSET} and 0 functions; please report this"
            )


def normalize(model: ir.Model, name: str) -> None:
    """Normalize the model in place. Error messages start with `name`."""
    if "ai.onnx" in model.opset_imports:  # another name of the default domain
        model.opset_imports.setdefault("", model.opset_imports.pop("ai.onnx"))
    model.opset_imports.setdefault("", MINIMUM_OPSET)
    drop_listed_initializers(model)
    model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
    inline_functions(model)
    if model.opset_imports[""] < MINIMUM_OPSET:
        _raise_opset(model, name)
    _name_nodes(model)
    onnx_passes.LiftConstantsToInitializersPass()(model)


def squeeze_weights(model: ir.Model, new_name: Callable[[str], str]) -> None:
    """Squeeze weights [1, K, N] of matrix products to [K, N] if the other factor has at least their rank."""
    dims = Dimensions(model.graph)
    for node in list(model.graph):
        if node.op_type not in ("MatMul", "MatMulInteger") or node.domain not in DEFAULT_DOMAINS:
            continue
        x, weight = node.inputs[:2]
        tensor = constant_tensor(weight)
        if x is None or weight is None or tensor is None or len(tensor.shape) <= 2 or set(tensor.shape[:-2]) != {1}:
            continue
        known = dims.shape(x)
        if known is None or len(known) < len(tensor.shape):
            continue
        axes = ir.Tensor(np.arange(len(tensor.shape) - 2), name=new_name(f"{weight.name}/axes"))
        squeeze = ir.node(
            "Squeeze", [weight, new_initializer(model.graph, axes)], name=new_name(f"{weight.name}/squeeze")
        )
        squeeze.outputs[0].name = new_name(f"{weight.name}/squeezed")
        squeeze.outputs[0].dtype, squeeze.outputs[0].shape = tensor.dtype, ir.Shape(tensor.shape.numpy()[-2:])
        model.graph.insert_before(node, squeeze)
        node.replace_input_with(1, squeeze.outputs[0])


def drop_listed_initializers(model: ir.Model) -> None:
    """Remove initializers from the inputs of a model below IR version 4, which had to list them there."""
    if model.ir_version < 4:
        kept = [value for value in model.graph.inputs if not value.is_initializer()]
        model.graph.inputs.clear()
        model.graph.inputs.extend(kept)
        model.ir_version = 4


def inline_functions(model: ir.Model) -> None:
    """Inline calls of the model's own functions. Functions of Ortolan's operators stay."""
    if has_functions(model):
        onnx_passes.InlinePass(criteria=lambda function: function.domain != ORTOLAN_DOMAIN)(model)


def has_functions(model: ir.Model) -> bool:
    """Return True if the model has functions besides those of Ortolan's operators."""
    return any(domain != ORTOLAN_DOMAIN for domain, *_ in model.functions)


def require_normalized(model: ir.Model, name: str) -> None:
    """Raise RecipeError if the model needs pass `normalize` before pass `name`."""
    if model.opset_imports.get("", 0) < MINIMUM_OPSET or has_functions(model):
        raise RecipeError(
            f"pass {name!r} needs pass 'normalize' before it, as the model has an old opset or functions; add "
            '[[pass]] name = "normalize" to the recipe'
        )


def optimized_with(model: ir.Model) -> str | None:
    """Return a description of the recipe that made this model, or None if Ortolan did not make it."""
    if RECIPE_KEY in model.metadata_props:
        return f"recipe {model.metadata_props[RECIPE_KEY]!r}"
    # Opset imports prove nothing: ONNX Runtime adds all domains that it knows to models that it saves.
    if any(node.domain == ORTOLAN_DOMAIN for node in model.graph.all_nodes()):
        return f"it holds {ORTOLAN_DOMAIN} operators"
    return None


def _name_nodes(model: ir.Model) -> None:
    """Name unnamed nodes, because reports and selectors need names."""
    taken = {node.name for node in model.graph.all_nodes()}
    for index, node in enumerate(model.graph.all_nodes()):
        if not node.name:
            name = f"{node.op_type}_{index}"
            while name in taken:
                name += "_"
            taken.add(name)
            node.name = name


def _raise_opset(model: ir.Model, name: str) -> None:
    """Raise the opset with onnx's converter.

    The converter works on a serialized model. Large weights are replaced by inputs without a value meanwhile. Small
    weights and weights of subgraphs are serialized with their data, because a reference to a file would lose the file's
    folder.
    """
    old = model.opset_imports[""]
    inputs = list(model.graph.inputs)
    weights = {
        key: value
        for key, value in model.graph.initializers.items()
        if value.const_value is not None and value.const_value.nbytes > _LARGE_TENSOR
    }
    overridable = {value.name for value in inputs}
    for key, value in weights.items():
        assert value.const_value is not None
        value.shape, value.dtype = ir.Shape(value.const_value.shape.numpy()), value.const_value.dtype
        model.graph.initializers.pop(key)
        if key not in overridable:
            model.graph.inputs.append(value)
    try:
        proto = version_converter.convert_version(to_proto(model), MINIMUM_OPSET)
    except Exception as error:  # the converter raises RuntimeError and other exceptions
        raise ModelError(
            f"{name} has opset {old} and cannot be converted to opset {MINIMUM_OPSET}: {error}; "
            f"export it again with opset {MINIMUM_OPSET} or newer"
        ) from error
    converted = ir.from_proto(proto)
    by_name = {value.name: value for value in converted.graph.inputs}
    for key, value in weights.items():
        by_name[key].const_value = value.const_value
        converted.graph.register_initializer(by_name[key])
    kept = [value for value in converted.graph.inputs if value.name in overridable]
    converted.graph.inputs.clear()
    converted.graph.inputs.extend(kept)
    converted.graph.opset_imports.update(
        {key: v for key, v in model.opset_imports.items() if key not in DEFAULT_DOMAINS}
    )
    model.graph = converted.graph
