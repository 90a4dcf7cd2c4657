"""Replaces linear layers by Ortolan's operators. An operator is one module here, and one line in REPLACEMENTS."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ortolan.errors import NothingToReplaceError, RecipeError, VerificationError

from ..constants import constant_tensor, remove_unused, stored_bytes
from ..epilogue import Activation, Epilogue, describe_epilogue, find_epilogue
from ..linear import Linear
from ..model_file import release_maps
from ..normalize import MINIMUM_IR_VERSION, MINIMUM_OPSET, ORTOLAN_DOMAIN, has_functions
from ..options import Globs, PassOptions, takes
from ..pipeline import PassContext, RecipePass, layer_key
from ..quantized_forms import fold_back
from ..quantized_weight import QuantizedWeight
from ..quantizers.fixed_range import FixedRange
from ..report import human_bytes
from ..stored_int4 import StoredInt4, rounds_inputs
from ..stored_int8 import (
    StoredInt8,
    dynamic_source,
    layer_input,
    range_tensors,
    remove_unused_dynamic,
    unrounded,
)
from ..verify import keep_reference
from .gated import can_join, find_gated, join_columns, join_weights, split_columns
from .replacement import LayerWeight, PackedTensor, Replacement, nodes_of
from .sparse_amx_matmul import SparseAMXMatMul
from .vnni_spmm import VNNISpMM
from .w4a8_matmul import W4A8MatMul

if TYPE_CHECKING:
    from ..quantize import Quantization

REPLACEMENTS: dict[str, type[Replacement]] = {
    "SparseAMXMatMul": SparseAMXMatMul,
    "VNNISpMM": VNNISpMM,
    "W4A8MatMul": W4A8MatMul,
}

# Models with more weights are unpacked layer by layer where our library is missing: see Replacement.function.
_UNPACK_ONCE_LIMIT = 32 * 1024**2
_STORED = (StoredInt4, StoredInt8)


@dataclass(frozen=True)
class ReplaceOptions(PassOptions):
    op: str = field(default="SparseAMXMatMul", metadata=takes("str", choices=tuple(REPLACEMENTS)))
    min_sparsity: float = field(default=0.0, metadata=takes("float", low=0.0, below=1.0))
    # Also layers whose packed weight is larger than what the file stores for it: small, dense or quantized ones.
    may_grow: bool = field(default=False, metadata=takes("bool"))
    # Whether the operator also takes over the activation function and the residual Add behind a layer, and a layer of
    # the same input whose output is multiplied with that.
    fuse: bool = field(default=True, metadata=takes("bool"))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


class ReplacePass(RecipePass):
    """Packs the weights of linear layers and puts the operator in the place of MatMul, Add or Gemm."""

    options_type = ReplaceOptions
    options: ReplaceOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        self._replacement = REPLACEMENTS[self.options.op]()
        self._runs = False
        context.why_not_replace.append(self._why_not)
        context.adopts.append(lambda linear: self._stored_numbers(linear) is not None)

    def requires(self, model: ir.Model) -> None:
        if model.opset_imports.get("", 0) < MINIMUM_OPSET or has_functions(model):
            raise RecipeError(
                "pass 'replace' needs pass 'normalize' before it, for models of an old opset or with "
                'functions; add [[pass]] name = "normalize" to the recipe'
            )

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._runs = not self.context.dry_run
        self._packed: dict[tuple[Hashable, int], dict[str, ir.Value]] = {}
        self._ranges: dict[tuple[FixedRange, int], dict[str, ir.Value]] = {}
        self._gated: dict[Linear, Linear] = {}  # both ways
        self._gates: set[Linear] = set()
        context = self.context
        linears = context.survey(model)
        if self.options.fuse:
            pairs = find_gated(linears)
            self._gated = pairs | {up: gate for gate, up in pairs.items()}
            self._gates = set(pairs)
        context.progress("replace", 0, len(linears))
        if not context.dry_run:
            keep_reference(model, context)
        # Asked while the nodes are there.
        weights = {linear: linear.weight_values for linear in linears}
        stored = [linear for linear in linears if isinstance(self._quantization(linear), _STORED)]
        rounds = {linear: rounds_inputs(linear.node) for linear in stored}
        for number, linear in enumerate(linears):
            context.progress("replace", number, len(linears))
            self._replace(model, linear)
            context.release()
        context.progress("replace", len(linears), len(linears))
        adopted = [linear for linear in stored if context.layer(linear).new_op]
        for bits in (4, 8):
            of_bits = [linear for linear in adopted if context.layer(linear).weight_bits == bits]
            self._note_adopted(of_bits, bits, sum(rounds[linear] for linear in of_bits))
        if not context.dry_run:
            replaced = [linear for linear in linears if context.layer(linear).status == "replaced"]
            self._note_stored_twice([value for linear in replaced for value in weights[linear]])
        if context.why_not_replace[-1] == self._why_not:  # the last pass of this kind
            if not context.report.replaced:
                raise NothingToReplaceError(self._why_nothing())
            if not context.dry_run:
                fold_back(model, context.unified)
        copies = len(self._packed) - len({weights for weights, _ in self._packed})
        if copies:
            context.note(
                f"{copies} packed weights are stored again for another branch of the model: many versions of ONNX "
                "Runtime (1.24, for one) give an operator only the constants of its own branch"
            )
        if not context.dry_run and nodes_of(model, self.options.op):
            self._replacement.fill_inputs(model, lambda wanted: context.new_name(model, wanted))
            model.opset_imports[ORTOLAN_DOMAIN] = 1
            model.ir_version = max(model.ir_version, MINIMUM_IR_VERSION)
            if context.portable:
                unpack_once = context.packed_weights <= _UNPACK_ONCE_LIMIT
                function = self._replacement.function(model, model.opset_imports[""], unpack_once)
                if not unpack_once:
                    context.note(
                        "without the library, this model unpacks its weights anew in each run: that takes seconds"
                    )
                model.functions[function.identifier()] = function
        return ir.passes.PassResult(model, modified=not context.dry_run)

    def _replace(self, model: ir.Model, linear: Linear) -> None:
        """Replaces one layer, perhaps with the one it is gated with, or says in the report why not."""
        if self.context.layer(linear).new_op:  # by another pass of this kind, in a dry run, or with another layer
            return
        weight = self._accepted(linear)
        if weight is None:
            return
        other = self._gated.get(linear)
        if other is not None and not self.context.layer(other).new_op:
            other_weight = self._accepted(other)
            if other_weight is not None and can_join(self._quantization(linear), self._quantization(other)):
                gate, up = (linear, other) if linear in self._gates else (other, linear)
                weights = (weight, other_weight) if gate is linear else (other_weight, weight)
                return self._replace_gated(model, gate, up, *weights)
        self._put(model, [linear], weight)

    def _replace_gated(
        self, model: ir.Model, gate: Linear, up: Linear, gate_weight: LayerWeight, up_weight: LayerWeight
    ) -> None:
        if self.context.dry_run:
            self._put(model, [gate, up], gate_weight)
        else:
            name = f"{gate.weight_value.name}.gated"
            self._put(model, [gate, up], join_weights(gate_weight, up_weight, self.context.spill, name))

    def _accepted(self, linear: Linear) -> LayerWeight | None:
        """The weight that the operator takes over, or None and, in the report, why not."""
        layer = self.context.layer(linear)
        if not linear.matches(self.options.select) or linear.matches(self.options.exclude):
            layer.reason = self._why_not(linear, 0)
            return None
        quantization = self._quantization(linear)
        problem = self._replacement.why_not(linear.k, quantization)
        if problem and isinstance(linear.int4, str):
            problem += f" (it is stored in 4 bits, but {linear.int4})"
        elif problem and isinstance(linear.int8, str):
            problem += f" (it is stored in 8 bits, but {linear.int8})"
        if isinstance(quantization, StoredInt4):
            quantization.check_scales()
        matrix = linear.matrix()
        if quantization is None:
            problem = problem or self._replacement.why_not_matrix(matrix)
        if problem:
            # Another pass that takes the layer's own numbers has said why it left them.
            if layer.reason is None or not self.context.keeps_numbers(linear):
                layer.reason = f"weight {linear.weight_names[-1]!r} {problem}"
            return None
        layer.sparsity = 1 - int(np.count_nonzero(matrix)) / matrix.size
        stored = self._replacement.stored_weights(matrix)
        layer.reason = self._why_not(linear, stored)
        if layer.reason:
            return None
        layer.bytes_after = self._packed_bytes(linear, stored)
        return LayerWeight(matrix, quantization if isinstance(quantization, QuantizedWeight) else None)

    def _put(self, model: ir.Model, linears: Sequence[Linear], weight: LayerWeight) -> None:
        """Puts the operator in the place of a layer, or of gate and up."""
        context, gate = self.context, linears[0]
        epilogue = self._epilogue(*linears)
        assert len(linears) == 1 or epilogue.factor is not None
        for linear in linears:
            layer = context.layer(linear)
            layer.new_op, layer.status = self.options.op, "would replace" if context.dry_run else "replaced"
            quantization = self._quantization(linear)
            if isinstance(quantization, _STORED):
                layer.weight_bits = quantization.bits
            layer.fused = ["into the gate"]
        context.layer(gate).fused = describe_epilogue(epilogue.activation, epilogue.residual, gated=len(linears) == 2)
        if context.dry_run:
            return
        for linear in linears:
            context.rounding[layer_key(linear)] = self._replacement.typical_rounding(weight.quantized)
        tensors = self._pack(model, linears, weight)
        sizes = [value.const_value.nbytes for value in tensors.values() if value.const_value is not None]
        for linear in linears:
            context.layer(linear).bytes_after = sum(sizes) // len(linears)
        self._emit(model, linears, weight, tensors, epilogue)

    def _epilogue(self, linear: Linear, *factors: Linear) -> Epilogue:
        """What follows the layer and the operator computes as well. It computes on float32."""
        if not self.options.fuse or linear.dtype != ir.DataType.FLOAT:
            return Epilogue(Activation.NONE, None, (), linear.output)
        return find_epilogue(linear.output, [factor.output for factor in factors])

    def _quantization(self, linear: Linear) -> Quantization | None:
        """How the layer's weight is quantized; before this pass runs, and in a dry run, how it will be."""
        found: Quantization | None = self.context.quantized.get(linear.weight_key)
        if found is None and not self._runs:
            plans = (plan(linear) for plan in self.context.quantizations)
            found = next((plan for plan in plans if plan is not None), None)
        return self._stored_numbers(linear) if found is None else found

    def _stored_numbers(self, linear: Linear) -> StoredInt4 | StoredInt8 | None:
        """The numbers of 4 or 8 bits that the model stores for the layer, if the operator takes them over."""
        if not linear.matches(self.options.select) or linear.matches(self.options.exclude):
            return None
        found = linear.int8 if linear.int4 is None else linear.int4
        return found if isinstance(found, _STORED) and self._replacement.why_not(linear.k, found) is None else None

    def _note_adopted(self, adopted: Sequence[Linear], bits: int, rounding: int) -> None:
        """rounding: of how many of them the original rounds the inputs, too."""
        if not adopted:
            return
        layers = f"{len(adopted)} layers keep" if len(adopted) > 1 else f"layer {adopted[0].name!r} keeps"
        text = f"{layers} the {bits}-bit weights that the model stores, number by number"
        if rounding:
            text += (
                f"; the original rounds inputs of {rounding} to int8 in much the same way (accuracy_level 4), so the "
                "errors against it are smaller than what this rounding costs"
            )
        self.context.note(text)

    def _note_stored_twice(self, weights: Sequence[ir.Value]) -> None:
        """Tells of weights that other nodes use as well, such as an embedding that is also the head."""
        used = {value for value in weights if value.uses() or value.is_graph_output()}
        size = sum(stored_bytes(value) for value in used)
        if used:
            names = sorted(value.name or "" for value in used)
            others = f" and {len(names) - 1} more" if len(names) > 1 else ""
            self.context.note(
                f"{names[0]!r}{others} also serve nodes that stay, such as an embedding, so {human_bytes(size)} of "
                "weights are now stored twice"
            )

    def _packed_bytes(self, linear: Linear, stored: int) -> int:
        return self._replacement.packed_bytes(linear.k, linear.n, stored, self._quantization(linear))

    def _why_not(self, linear: Linear, stored: int) -> str | None:
        """Why a layer with this many non-zero weights is left as it is, if it is."""
        if not linear.matches(self.options.select):
            return "not selected"
        if linear.matches(self.options.exclude):
            return "excluded from replacement"
        sparsity = 1 - stored / (linear.k * linear.n)
        if sparsity < self.options.min_sparsity:
            return f"sparsity {sparsity:.3g} is below min_sparsity {self.options.min_sparsity:g}"
        packed = self._packed_bytes(linear, stored)
        now = self.context.layer(linear).bytes_before or 0
        # Stored 4-bit weights grow by no more than whole panels and tiles, which is little, or of little.
        adopted = isinstance(self._quantization(linear), StoredInt4)
        if packed > now and not adopted and not self.options.may_grow:
            return (
                f"packed, its weight would take {human_bytes(packed)}, more than the {human_bytes(now)} it takes now "
                "(may_grow=true replaces it all the same)"
            )
        return None

    def _pack(self, model: ir.Model, linears: Sequence[Linear], weight: LayerWeight) -> dict[str, ir.Value]:
        """The packed weight as initializers of the node's own graph; layers that share a weight share them."""
        first = linears[0]
        key = (tuple(linear.weight_key for linear in linears), id(first.node.graph))
        if key not in self._packed:
            values = {}
            for part, packed in self._replacement.pack(weight).items():
                name = self.context.new_name(model, f"{first.weight_value.name}.{part}")
                values[part] = _initializer(first, self._stored(name, packed))
            self._packed[key] = values
            self.context.packed_weights += weight.matrix.size
        self._measure(linears, weight, self._packed[key])
        return self._packed[key]

    def _stored(self, name: str, packed: PackedTensor) -> ir.TensorProtocol:
        if packed.array.size == 0:  # ONNX keeps no empty tensor outside of a model
            return ir.Tensor(packed.array, name=name, dtype=packed.dtype)
        return self.context.spill.add(name, packed.array, packed.dtype)

    def _measure(self, linears: Sequence[Linear], weight: LayerWeight, values: dict[str, ir.Value]) -> None:
        """Reports ||XW - Y|| / ||XW|| for the recorded inputs X, the original W and what the operator makes of them, Y.

        Raises VerificationError if Y is more than a rounding away from the product with what was packed.
        """
        context, name = self.context, linears[0].name
        x = context.captured.get(layer_key(linears[0]))
        originals = [context.originals.get(layer_key(linear)) for linear in linears]
        if x is None or None in originals:
            return
        tensors = {part: value.const_value for part, value in values.items() if value.const_value is not None}
        packed = {part: PackedTensor(_bits(tensor), tensor.dtype) for part, tensor in tensors.items()}
        found = self._replacement.run(x, packed, weight)
        del packed
        release_maps([tensor for tensor in tensors.values() if isinstance(tensor, ir.ExternalTensor)])
        product = x @ weight.matrix
        if (np.abs(found - product) > self._replacement.rounding_bound(x, weight)).any():
            raise VerificationError(
                f"layer {name!r} answers differently with its packed weight, beyond what rounding explains; "
                "nothing was saved; please report this, and exclude the layer from replacement meanwhile"
            )
        parts = [(found, product)]
        if len(linears) == 2:
            n = linears[0].n
            parts = list(zip(split_columns(found, n), split_columns(product, n), strict=True))
        for linear, original, (y, xw) in zip(linears, originals, parts, strict=True):
            assert original is not None
            key = layer_key(linear)
            context.rounding[key] = max(context.rounding[key], _relative(y - xw, xw) or 0.0)
            exact = x @ original()
            context.layer(linear).output_error = _relative(exact - y, exact)

    def _emit(
        self,
        model: ir.Model,
        linears: Sequence[Linear],
        weight: LayerWeight,
        packed: dict[str, ir.Value],
        epilogue: Epilogue,
    ) -> None:
        """Puts the operator where the layer was, under its node's name; what it puts out keeps its name.

        With an epilogue it stands where that ended: behind whatever computes the residual.
        """
        linear = linears[0]
        graph = linear.node.graph
        assert graph is not None
        # As they are now: whatever made the layer's input may have been replaced meanwhile.
        given, nodes = linear.node.inputs[0], []
        x = layer_input(linear.node)
        weights = [value for layer in linears for value in (*layer.weight_values, layer.bias_value)]
        assert given is not None and x is not None
        if linear.x_range is not None and self._replacement.takes_ranges:
            x = unrounded(x, linear.dtype)
            packed = packed | self._range(model, linear, linear.x_range)
        narrow = linear.dtype != ir.DataType.FLOAT
        if narrow:  # the operator computes on float32
            widen = ir.node("Cast", [x], {"to": ir.DataType.FLOAT}, name=f"{linear.name}/to_float")
            nodes.append(widen)
            x = widen.outputs[0]
        k, n = weight.matrix.shape
        gated_columns = linear.n if len(linears) == 2 else 0
        node = ir.Node(
            ORTOLAN_DOMAIN,
            self.options.op,
            self._replacement.inputs(x, packed, self._bias(model, linears), epilogue.residual),
            self._replacement.attributes(k, n, weight.quantized, epilogue.activation, gated_columns),
            name=linear.name,
        )
        nodes.append(node)
        if narrow:
            nodes.append(ir.node("Cast", node.outputs, {"to": linear.dtype}, name=f"{linear.name}/from_float"))
        for made in nodes[:-1]:
            made.outputs[0].name = self.context.new_name(model, f"{made.name}_output")
        own = [old for layer in linears for old in (layer.node, layer.add) if old is not None]
        constants = [value for old in epilogue.nodes for value in old.inputs if value is not epilogue.residual]
        ir.convenience.replace_nodes_and_values(
            graph,
            epilogue.nodes[-1] if epilogue.nodes else own[-1],
            [*own, *epilogue.nodes],
            nodes,
            [epilogue.output],
            [nodes[-1].outputs[0]],
        )
        for value in (*weights, *constants):
            if value is not None:
                remove_unused(value)
        # What has rounded the input.
        if (rounding := dynamic_source(given)) is not None:
            remove_unused_dynamic(rounding)
        elif linear.x_range is not None:
            remove_unused(given)

    def _range(self, model: ir.Model, linear: Linear, chosen: FixedRange) -> dict[str, ir.Value]:
        """The range of the layer's input as constants of its graph; equal ones are shared."""
        key = (chosen, id(linear.node.graph))
        if key not in self._ranges:
            self._ranges[key] = {}
            for part, tensor in range_tensors(chosen).items():
                tensor.name = self.context.new_name(model, f"{linear.name}.{part}")
                self._ranges[key][part] = _initializer(linear, tensor)
        return self._ranges[key]

    def _bias(self, model: ir.Model, linears: Sequence[Linear]) -> ir.Value | None:
        """The bias as a float32 initializer of the weight's columns: the model's own if it is one."""
        first, biases = linears[0], [linear.bias() for linear in linears]
        if all(bias is None for bias in biases):
            return None
        value, tensor = first.bias_value, constant_tensor(first.bias_value)
        if (
            len(linears) == 1
            and value is not None
            and tensor is not None
            and value.is_initializer()
            and tensor.dtype == ir.DataType.FLOAT
            and list(tensor.shape) == [first.n]
        ):
            return value
        arrays = [np.zeros(first.n, np.float32) if bias is None else np.array(bias, np.float32) for bias in biases]
        name = self.context.new_name(model, f"{first.name}.bias")
        return _initializer(first, ir.Tensor(arrays[0] if len(linears) == 1 else join_columns(*arrays), name=name))

    def _why_nothing(self) -> str:
        layers = self.context.report.layers
        name = self.context.source.name
        if not layers:
            return f"{name} holds no MatMul or Gemm, so there is nothing to replace"
        reasons = list(dict.fromkeys(f"{layer.name}: {layer.reason}" for layer in layers if layer.reason))
        more = f"; and {len(reasons) - 5} more" if len(reasons) > 5 else ""
        return f"none of the {len(layers)} matrix products of {name} can be replaced: {'; '.join(reasons[:5])}{more}"


def _relative(difference: np.ndarray, of: np.ndarray) -> float | None:
    norm = float(np.linalg.norm(of))
    return float(np.linalg.norm(difference)) / norm if norm else None


def _bits(tensor: ir.TensorProtocol) -> np.ndarray:
    """The tensor's elements; bf16 ones as uint16."""
    array = tensor.numpy()
    return array.view(np.uint16) if tensor.dtype == ir.DataType.BFLOAT16 else array


def _initializer(linear: Linear, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer in the layer's own graph: many versions of ONNX Runtime (1.21 and 1.24 tried; 1.31 does better)
    give an operator only the constants of its own graph."""
    value = ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    assert linear.node.graph is not None
    linear.node.graph.register_initializer(value)
    return value
