"""Replaces linear layers by Ortolan's operators. An operator is one module here, and one line in REPLACEMENTS."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.errors import NothingToReplaceError, RecipeError, VerificationError

from ..constants import constant_tensor, remove_unused
from ..linear import Linear
from ..model_file import release_maps
from ..normalize import MINIMUM_IR_VERSION, MINIMUM_OPSET, ORTOLAN_DOMAIN, has_functions
from ..options import Globs, PassOptions, takes
from ..pipeline import PassContext, RecipePass, layer_key
from ..report import human_bytes
from ..verify import keep_reference
from .replacement import Replacement
from .sparse_amx_matmul import SparseAMXMatMul

REPLACEMENTS: dict[str, type[Replacement]] = {"SparseAMXMatMul": SparseAMXMatMul}

# Models with more weights are unpacked layer by layer where our library is missing: see Replacement.function.
_UNPACK_ONCE_LIMIT = 32 * 1024**2
_LARGEST_BF16 = float(np.uint32(0x7F7F0000).view(np.float32))


@dataclass(frozen=True)
class ReplaceOptions(PassOptions):
    op: str = field(default="SparseAMXMatMul", metadata=takes("str", choices=tuple(REPLACEMENTS)))
    min_sparsity: float = field(default=0.0, metadata=takes("float", low=0.0, below=1.0))
    # Also layers whose packed weight is larger than what the file stores for it: small, dense or quantized ones.
    may_grow: bool = field(default=False, metadata=takes("bool"))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


class ReplacePass(RecipePass):
    """Packs the weights of linear layers and puts the operator in the place of MatMul, Add or Gemm."""

    options_type = ReplaceOptions
    options: ReplaceOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        self._replacement = REPLACEMENTS[self.options.op]()
        context.why_not_replace.append(self._why_not)

    def requires(self, model: ir.Model) -> None:
        if model.opset_imports.get("", 0) < MINIMUM_OPSET or has_functions(model):
            raise RecipeError(
                "pass 'replace' needs pass 'normalize' before it, for models of an old opset or with "
                'functions; add [[pass]] name = "normalize" to the recipe'
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._packed: dict[tuple[Hashable, int], list[ir.Value]] = {}
        context = self.context
        linears = context.survey(model)
        context.progress("replace", 0, len(linears))
        if not context.dry_run:
            keep_reference(model, context)
        for number, linear in enumerate(linears):
            context.progress("replace", number, len(linears))
            self._replace(model, linear)
            context.release()
        context.progress("replace", len(linears), len(linears))
        if not context.report.replaced:
            raise NothingToReplaceError(self._why_nothing())
        copies = len(self._packed) - len({weight for weight, _ in self._packed})
        if copies:
            context.note(
                f"{copies} packed weights are stored again for another branch of the model: many versions of ONNX "
                "Runtime (1.24, for one) give an operator only the constants of its own branch"
            )
        if not context.dry_run:
            model.opset_imports[ORTOLAN_DOMAIN] = 1
            model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
            if context.portable:
                unpack_once = context.packed_weights <= _UNPACK_ONCE_LIMIT
                function = self._replacement.function(model.opset_imports[""], unpack_once)
                if not unpack_once:
                    context.note(
                        "without the library, this model unpacks its weights anew in each run: that takes seconds"
                    )
                model.functions[function.identifier()] = function
        return ir.passes.PassResult(model, modified=not context.dry_run)

    def _replace(self, model: ir.Model, linear: Linear) -> None:
        """Replaces one layer, or says in the report why not."""
        layer = self.context.layer(linear)
        if layer.status == "would replace":  # by another pass of this kind, in a dry run
            return
        if not linear.matches(self.options.select) or linear.matches(self.options.exclude):
            layer.reason = self._why_not(linear, 0)
            return
        matrix = linear.matrix()
        # NaN fails every comparison.
        if not (matrix.max() <= _LARGEST_BF16 and matrix.min() >= -_LARGEST_BF16):
            layer.reason = f"weight {linear.weight_names[-1]!r} holds NaN, infinity or numbers beyond bfloat16"
            return
        stored = int(np.count_nonzero(matrix))
        layer.sparsity = 1 - stored / matrix.size
        layer.reason = self._why_not(linear, stored)
        if layer.reason:
            return
        layer.new_op = self.options.op
        if self.context.dry_run:
            layer.status = "would replace"
            layer.bytes_after = self._replacement.packed_bytes(linear.k, linear.n, stored)
            return
        layer.status = "replaced"
        tensors = self._pack(model, linear, matrix)
        layer.bytes_after = sum(value.const_value.nbytes for value in tensors if value.const_value is not None)
        self._emit(model, linear, tensors)

    def _why_not(self, linear: Linear, stored: int) -> str | None:
        """Why a layer with this many non-zero weights is left as it is, if it is."""
        if not linear.matches(self.options.select):
            return "not selected"
        if linear.matches(self.options.exclude):
            return "excluded from replacement"
        sparsity = 1 - stored / (linear.k * linear.n)
        if sparsity < self.options.min_sparsity:
            return f"sparsity {sparsity:.3g} is below min_sparsity {self.options.min_sparsity:g}"
        packed = self._replacement.packed_bytes(linear.k, linear.n, stored)
        now = self.context.layer(linear).bytes_before or 0
        if packed > now and not self.options.may_grow:
            return (
                f"packed, its weight would take {human_bytes(packed)}, more than the {human_bytes(now)} it takes now "
                "(may_grow=true replaces it all the same)"
            )
        return None

    def _pack(self, model: ir.Model, linear: Linear, matrix: np.ndarray) -> list[ir.Value]:
        """The packed weight as initializers of the node's own graph; layers that share a weight share them."""
        key = (linear.weight_key, id(linear.node.graph))
        if key not in self._packed:
            values = []
            for suffix, array, dtype in self._replacement.pack(matrix):
                name = self.context.new_name(model, f"{linear.weight_value.name}.{suffix}")
                values.append(_initializer(linear, self.context.spill.add(name, array, dtype)))
            self._packed[key] = values
            self.context.packed_weights += matrix.size
        self.context.layer(linear).output_error = self._output_error(linear, matrix, self._packed[key])
        return self._packed[key]

    def _output_error(self, linear: Linear, matrix: np.ndarray, values: list[ir.Value]) -> float | None:
        """||XW - Y|| / ||XW|| for the recorded inputs X, the original W and what the operator makes of them, Y.

        Raises VerificationError if Y is more than a rounding away from the product with what was packed, `matrix`.
        """
        x = self.context.captured.get(layer_key(linear))
        original = self.context.originals.get(layer_key(linear))
        if x is None or original is None:
            return None
        tensors = [value.const_value for value in values if isinstance(value.const_value, ir.ExternalTensor)]
        packed = []
        for tensor in tensors:
            array = tensor.numpy()
            packed.append(
                (tensor.name, array.view(np.uint16) if tensor.dtype == ir.DataType.BFLOAT16 else array, tensor.dtype)
            )
        found = self._replacement.run(x, packed, linear.k, linear.n)
        del packed, array
        release_maps(tensors)
        if (np.abs(found - x @ matrix) > self._replacement.rounding * (np.abs(x) @ np.abs(matrix))).any():
            raise VerificationError(
                f"layer {linear.name!r} answers differently with its packed weight, beyond what rounding explains; "
                "nothing was saved; please report this, and exclude the layer from replacement meanwhile"
            )
        exact = x @ original()
        difference = exact - found
        norm = float(np.linalg.norm(exact))
        return float(np.linalg.norm(difference)) / norm if norm else None

    def _emit(self, model: ir.Model, linear: Linear, tensors: list[ir.Value]) -> None:
        """Puts the operator where the layer was, under its node's name; its output keeps its name."""
        graph = linear.node.graph
        assert graph is not None
        x, nodes = linear.x, []
        narrow = linear.dtype != ir.DataType.FLOAT
        if narrow:  # the operator computes on float32
            widen = ir.node("Cast", [x], {"to": ir.DataType.FLOAT}, name=f"{linear.name}/to_float")
            nodes.append(widen)
            x = widen.outputs[0]
        bias = self._bias(model, linear)
        node = ir.Node(
            ORTOLAN_DOMAIN,
            self.options.op,
            [x, *tensors, *([bias] if bias else [])],
            self._replacement.attributes(linear.k, linear.n),
            name=linear.name,
        )
        nodes.append(node)
        if narrow:
            nodes.append(ir.node("Cast", node.outputs, {"to": linear.dtype}, name=f"{linear.name}/from_float"))
        for made in nodes[:-1]:
            made.outputs[0].name = self.context.new_name(model, f"{made.name}_output")
        old_nodes = [old for old in (linear.node, linear.add) if old is not None]
        ir.convenience.replace_nodes_and_values(
            graph, linear.node, old_nodes, nodes, [linear.output], [nodes[-1].outputs[0]]
        )
        remove_unused(linear.weight_value)
        if linear.bias_value is not None:
            remove_unused(linear.bias_value)

    def _bias(self, model: ir.Model, linear: Linear) -> ir.Value | None:
        """The bias as a float32 [n] initializer: the model's own if it is one."""
        value, array = linear.bias_value, linear.bias()
        tensor = constant_tensor(value)
        if value is None or array is None or tensor is None:
            return None
        if value.is_initializer() and tensor.dtype == ir.DataType.FLOAT and list(tensor.shape) == [linear.n]:
            return value
        name = self.context.new_name(model, f"{linear.name}.bias")
        return _initializer(linear, ir.Tensor(np.array(array, np.float32), name=name))

    def _why_nothing(self) -> str:
        layers = self.context.report.layers
        name = self.context.source.name
        if not layers:
            return f"{name} holds no MatMul or Gemm, so there is nothing to replace"
        reasons = list(dict.fromkeys(f"{layer.name}: {layer.reason}" for layer in layers if layer.reason))
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        return f"none of the {len(layers)} matrix products of {name} can be replaced: {'; '.join(reasons[:5])}{more}"


def _initializer(linear: Linear, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer in the layer's own graph: many versions of ONNX Runtime (1.21 and 1.24 tried; 1.31 does better)
    give an operator only the constants of its own graph."""
    value = ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    assert linear.node.graph is not None
    linear.node.graph.register_initializer(value)
    return value
