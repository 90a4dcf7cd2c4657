"""Replaces linear layers by Ortolan's operators. An operator is one module here, and one line in REPLACEMENTS."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir

from ortolan.errors import NothingToReplaceError, RecipeError, VerificationError
from ortolan.progress import Stage

from ..find.constants import constant_tensor, remove_unused
from ..find.epilogue import Activation, Epilogue, describe_epilogue, find_epilogue
from ..find.layer_norm import add_layer_norm
from ..find.linear import Linear, layer_key
from ..find.lut import graph_order
from ..find.quantized_forms import fold_back
from ..find.quantized_weight import QuantizedWeight
from ..find.stored_int4 import StoredInt4, rounds_inputs
from ..find.stored_int8 import StoredInt8, dynamic_source, layer_input, remove_unused_dynamic, unrounded
from ..names import MINIMUM_IR_VERSION, ORTOLAN_DOMAIN
from ..operators.hidden import HiddenLayer, Mlp, find_mlps, make_byte_table
from ..operators.joined import (
    PackedQkv,
    can_join,
    columns_of,
    find_gated,
    find_packed_qkv,
    join_columns,
    join_weights,
    take_packed,
)
from ..operators.masked_matmul import MaskedMatMul
from ..operators.masked_matmul_function import OP_TYPE as MASKED_MATMUL
from ..operators.nomad_attention_function import OP_TYPE as NOMAD_ATTENTION
from ..operators.nomad_attention_function import nomad_attention_function, uses_of
from ..operators.replacement import LayerWeight, Replacement, nodes_of, range_arrays, stored_tensor
from ..operators.sparse_amx_matmul import SparseAMXMatMul
from ..operators.vnni_spmm import VNNISpMM
from ..operators.w4a8_matmul import W4A8MatMul
from ..options import Globs, PassOptions, takes
from ..report.figures import human_bytes
from ..weights.quantizers.fixed_range import FixedRange, choose_range
from .context import PassContext, RecipePass
from .normalize import require_normalized
from .replace_notes import note_adopted, note_apart, note_stored_twice, why_nothing
from .verify import keep_reference

if TYPE_CHECKING:
    from ..weights.quantizers.grid import Quantization

REPLACEMENTS: dict[str, type[Replacement]] = {
    "SparseAMXMatMul": SparseAMXMatMul,
    "VNNISpMM": VNNISpMM,
    "W4A8MatMul": W4A8MatMul,
    "MaskedMatMul": MaskedMatMul,
}

# Models with more weights are unpacked layer by layer where our library is missing: see Replacement.function.
UNPACK_ONCE_LIMIT = 32 * 1024**2
_STORED = (StoredInt4, StoredInt8)


@dataclass(frozen=True)
class ReplaceOptions(PassOptions):
    op: str = field(default="SparseAMXMatMul", metadata=takes("str", choices=tuple(REPLACEMENTS)))
    min_sparsity: float = field(default=0.0, metadata=takes("float", low=0.0, below=1.0))
    # Also layers whose packed weight is larger than what the file stores for it: small, dense or quantized ones.
    may_grow: bool = field(default=False, metadata=takes("bool"))
    # Whether the operator also takes over the activation function, the residual Add and (VNNISpMM) the
    # LayerNormalization behind a layer, a layer of the same input whose output is multiplied with that, and, if pass
    # ranges has run, the layer behind the activation.
    fuse: bool = field(default=True, metadata=takes("bool"))
    # Which layers round their inputs by fixed ranges, if pass ranges has run. Those of MLPs must, to be one operator;
    # the others are as fast with a range for each token, and more exact.
    fixed_ranges: str = field(default="mlp", metadata=takes("str", choices=("mlp", "all")))
    # MaskedMatMul: how weights that are not quantized are stored; None: bf16.
    weights: str | None = field(default=None, metadata=takes("str", choices=("bf16", "float32"), none=True))
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.weights is not None and self.op != MASKED_MATMUL:
            raise RecipeError(f"weights is {self.weights!r}, which only op = {MASKED_MATMUL!r} has; leave it out")


class ReplacePass(RecipePass):
    """Packs the weights of linear layers and puts the operator in the place of MatMul, Add or Gemm."""

    options_type = ReplaceOptions
    options: ReplaceOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        self._replacement = REPLACEMENTS[self.options.op]()
        if self.options.weights is not None:
            self._replacement.weights = self.options.weights
        self._fuses = self.options.fuse and self._replacement.has_epilogue
        context.applies_thresholds |= self._replacement.masks_inputs
        self._runs = False
        context.why_not_replace.append(self._why_not)
        context.adopts.append(lambda linear: self._stored_numbers(linear) is not None)

    def requires(self, model: ir.Model) -> None:
        require_normalized(model, "replace")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self._runs = not self.context.dry_run
        self._packed: dict[tuple[Hashable, int], dict[str, ir.Value]] = {}
        self._gated: dict[Linear, Linear] = {}  # both ways
        self._gates: set[Linear] = set()
        self._mlps: dict[Linear, Mlp] = {}  # by their first layer
        self._packed_qkv: dict[Linear, PackedQkv] = {}  # by each of the three
        self._fixed_ranges: dict[ir.Value, FixedRange] = {}  # of layers' inputs
        self._ranges: dict[tuple[FixedRange, int], dict[str, ir.Value]] = {}
        context = self.context
        linears = context.survey(model)
        if self._fuses:
            pairs = find_gated(linears)
            self._gated = pairs | {up: gate for gate, up in pairs.items()}
            self._gates = set(pairs)
            if context.fixes_ranges and self._replacement.takes_ranges:
                free = [linear for linear in linears if linear not in self._gated]
                self._mlps, refused = find_mlps(free, model.graph)
                note_apart(context, refused)
            self._packed_qkv = {layer: qkv for qkv in self._find_packed_qkv(model, linears) for layer in qkv.layers}
        context.progress(Stage.REPLACE, 0, len(linears))
        if not context.dry_run:
            keep_reference(model, context)
        # Asked while the nodes are there.
        weights = {linear: linear.weight_values for linear in linears}
        stored = [linear for linear in linears if isinstance(self._quantization(linear), _STORED)]
        rounds = {linear: rounds_inputs(linear.node) for linear in stored}
        for number, linear in enumerate(linears):
            context.progress(Stage.REPLACE, number, len(linears))
            self._replace(model, linear)
            context.release()
        context.progress(Stage.REPLACE, len(linears), len(linears))
        adopted = [linear for linear in stored if context.layer(linear).new_op]
        for bits in (4, 8):
            of_bits = [linear for linear in adopted if context.layer(linear).weight_bits == bits]
            note_adopted(context, of_bits, bits, sum(rounds[linear] for linear in of_bits))
        if not context.dry_run:
            replaced = [linear for linear in linears if context.layer(linear).status == "replaced"]
            note_stored_twice(context, [value for linear in replaced for value in weights[linear]])
        if context.why_not_replace[-1] == self._why_not:  # the last pass of this kind
            if not context.report.replaced:
                raise NothingToReplaceError(why_nothing(context))
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
            if context.portable and self._packed_qkv:
                attentions = nodes_of(model, NOMAD_ATTENTION)
                function = nomad_attention_function(model.opset_imports[""], uses_of(attentions))
                model.functions[function.identifier()] = function
            if context.portable:
                unpack_once = context.packed_weights <= UNPACK_ONCE_LIMIT
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
        if weight is None or (linear in self._mlps and self._replace_mlp(model, self._mlps[linear], weight)):
            return
        qkv, other = self._packed_qkv.get(linear), self._gated.get(linear)
        if qkv is not None:
            return self._replace_joined(model, qkv.layers, "packed", qkv.attention)
        if other is not None and not self.context.layer(other).new_op and self._accepted(other) is not None:
            pair = (linear, other) if linear in self._gates else (other, linear)
            if can_join(list(map(self._quantization, pair))):
                return self._replace_joined(model, pair, "gated")
        self._put(model, [linear], weight)

    def _replace_joined(
        self, model: ir.Model, linears: Sequence[Linear], suffix: str, attention: ir.Node | None = None
    ) -> None:
        """Replaces layers of one input by one node: gate and up, or query, key and value of the attention."""
        weights = [weight for linear in linears if (weight := self._accepted(linear)) is not None]
        assert len(weights) == len(linears)
        joined = weights[0]
        if not self.context.dry_run:
            joined = join_weights(weights, self.context.spill, f"{linears[0].weight_value.name}.{suffix}")
        self._put(model, linears, joined, attention=attention)

    def _find_packed_qkv(self, model: ir.Model, linears: Sequence[Linear]) -> list[PackedQkv]:
        """Those of all attentions, if this pass replaces all of their layers."""
        free = [linear for linear in linears if not self.context.layer(linear).new_op]
        found = find_packed_qkv(free, model)
        for qkv in found:
            if None in map(self._accepted, qkv.layers) or not can_join(list(map(self._quantization, qkv.layers))):
                return []
            self.context.release()
        return found

    def _replace_mlp(self, model: ir.Model, mlp: Mlp, hidden_weight: LayerWeight) -> bool:
        """Replaces both layers by one node, if that can be."""
        context = self.context
        weight = None if context.layer(mlp.layer).new_op else self._accepted(mlp.layer)
        if weight is None:
            return False
        if context.dry_run:
            self._mark([mlp.hidden], self._between(mlp))
            self._put(model, [mlp.layer], weight)
            return True
        table = make_byte_table(mlp, context.activations, model.opset_imports)
        if isinstance(table, str):
            note_apart(context, {mlp.hidden: table})
            return False
        self._mark([mlp.hidden], self._between(mlp))
        weight = dataclasses.replace(weight, x_range=table.y)
        self._put(model, [mlp.layer], weight, HiddenLayer(mlp, hidden_weight, table))
        return True

    def _between(self, mlp: Mlp) -> list[str]:
        """For people: the activation's name, or its operators."""
        found = find_epilogue(mlp.hidden.output)
        named = found.activation != Activation.NONE and found.output is mlp.layer.x and found.residual is None
        return [found.activation.name.lower()] if named else mlp.between.operators

    def _accepted(self, linear: Linear) -> LayerWeight | None:
        """The weight that the operator takes over, or None and, in the report, why not."""
        layer = self.context.layer(linear)
        if not linear.matches(self.options.select) or linear.matches(self.options.exclude):
            layer.reason = layer.reason or self._why_not(linear, 0)  # what another pass says, tells more
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
        quantized = quantization if isinstance(quantization, QuantizedWeight) else None
        threshold = self.context.thresholds.get(layer_key(linear))
        threshold = threshold if isinstance(threshold, float) else 0.0
        return LayerWeight(matrix, quantized, self._x_range(linear), threshold)

    def _put(
        self,
        model: ir.Model,
        linears: Sequence[Linear],
        weight: LayerWeight,
        hidden: HiddenLayer | None = None,
        attention: ir.Node | None = None,
    ) -> None:
        """Puts the operator in the place of a layer, or of layers of one input; of the hidden layer before it as well.

        attention: what takes the outputs of three.
        """
        if attention is not None:
            epilogue = Epilogue(Activation.NONE, None, (), linears[0].output)
            self._mark(linears, ["key", "value"], ["into the query"])
        else:
            epilogue = self._epilogue(*linears)
            assert len(linears) == 1 or epilogue.factor is not None
            gated, norm = len(linears) == 2, epilogue.norm is not None
            fused = describe_epilogue(epilogue.activation, epilogue.residual, gated, norm)
            self._mark(linears, fused, ["into the gate"])
        if self.context.dry_run:
            return
        constants = self._pack(model, linears, weight)
        if hidden is not None:
            constants = constants | self._pack_hidden(model, hidden)
        elif weight.x_range is not None:
            constants = constants | self._range_inputs(model, linears[0], weight.x_range)
        self._emit(model, linears, weight, constants, epilogue, hidden, attention)

    def _mark(self, linears: Sequence[Linear], fused: list[str], fused_others: list[str] | None = None) -> None:
        """Tells the report that the first of the layers becomes a node of ours with so much fused, with the others."""
        for linear in linears:
            layer = self.context.layer(linear)
            layer.new_op, layer.status = self.options.op, "would replace" if self.context.dry_run else "replaced"
            quantization = self._quantization(linear)
            if isinstance(quantization, _STORED):
                layer.weight_bits = quantization.bits
            layer.fused = fused if linear is linears[0] else fused_others or []

    def _pack_hidden(self, model: ir.Model, hidden: HiddenLayer) -> dict[str, ir.Value]:
        """The constants of the hidden layer, the range of its input among them."""
        first, table = hidden.mlp.hidden, hidden.table
        assert hidden.weight.x_range is not None
        packed = self._pack(model, [first], hidden.weight)
        constants = {f"hidden_{name}": value for name, value in packed.items()}
        bias = self._bias(model, [first])
        arrays = {"table": table.table, **range_arrays("table_x", table.x), **range_arrays("table_y", table.y)}
        if bias is None:
            arrays["hidden_bias"] = np.zeros(first.n, np.float32)
        else:
            constants["hidden_bias"] = bias
        constants |= self._constants(model, first, arrays)
        return constants | self._range_inputs(model, first, hidden.weight.x_range)

    def _constants(self, model: ir.Model, linear: Linear, arrays: Mapping[str, np.ndarray]) -> dict[str, ir.Value]:
        """New initializers of the layer's graph, by the names of the inputs."""
        names = {part: self.context.new_name(model, f"{linear.name}.{part}") for part in arrays}
        return {part: _initializer(linear, ir.Tensor(array, name=names[part])) for part, array in arrays.items()}

    def _range_inputs(self, model: ir.Model, linear: Linear, chosen: FixedRange) -> dict[str, ir.Value]:
        """The range of the layer's input as constants of its graph; equal ones are shared."""
        key = (chosen, id(linear.node.graph))
        if key not in self._ranges:
            self._ranges[key] = self._constants(model, linear, range_arrays("x", chosen))
        return self._ranges[key]

    def _x_range(self, linear: Linear) -> FixedRange | None:
        """The fixed range of the layer's input, if it has one: the model's own, or one by what pass ranges recorded."""
        numbers = self.context.activations.get(linear.x.name or "")
        if not self._replacement.takes_ranges or linear.x_range is not None or numbers is None:
            return linear.x_range if self._replacement.takes_ranges else None
        in_mlp = any(linear in (mlp.hidden, mlp.layer) for mlp in self._mlps.values())
        if self.options.fixed_ranges == "mlp" and not in_mlp:
            return None
        if linear.x not in self._fixed_ranges:
            self._fixed_ranges[linear.x] = choose_range(numbers)
        return self._fixed_ranges[linear.x]

    def _epilogue(self, linear: Linear, *factors: Linear) -> Epilogue:
        """What follows the layer and the operator computes as well. It computes on float32."""
        if not self._fuses or linear.dtype != ir.DataType.FLOAT:
            return Epilogue(Activation.NONE, None, (), linear.output)
        found = find_epilogue(linear.output, [factor.output for factor in factors])
        return add_layer_norm(found, linear.n) if self._replacement.normalizes else found

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

    def _packed_bytes(self, linear: Linear, stored: int) -> int:
        return self._replacement.packed_bytes(linear.k, linear.n, stored, self._quantization(linear))

    def _why_not(self, linear: Linear, stored: int) -> str | None:
        """Why a layer with this many non-zero weights is left as it is, if it is."""
        if not linear.matches(self.options.select):
            return "not selected"
        if linear.matches(self.options.exclude):
            return "excluded from replacement"
        if problem := self._why_not_masked(linear):
            return problem
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

    def _why_not_masked(self, linear: Linear) -> str | None:
        """Why the operator cannot do with the layer's inputs what pass `activations` wants, if it cannot."""
        chosen = self.context.thresholds.get(layer_key(linear))
        if not self._replacement.masks_inputs:
            return f"only {MASKED_MATMUL} applies the threshold of its inputs" if isinstance(chosen, float) else None
        if chosen is None and not self._runs and any(plan(linear) for plan in self.context.threshold_plans):
            return None
        return (chosen or "no pass 'activations' selects it") if not isinstance(chosen, float) else None

    def _pack(self, model: ir.Model, linears: Sequence[Linear], weight: LayerWeight) -> dict[str, ir.Value]:
        """The packed weight as initializers of the node's own graph; layers that share a weight share them."""
        context, first = self.context, linears[0]
        for linear in linears:
            context.rounding[layer_key(linear)] = self._replacement.typical_rounding(weight.quantized)
        key = (tuple(linear.weight_key for linear in linears), id(first.node.graph))
        if key not in self._packed:
            values = {}
            for part, tensor in self._replacement.pack(weight).items():
                name = context.new_name(model, f"{first.weight_value.name}.{part}")
                values[part] = _initializer(first, stored_tensor(context.spill, name, tensor))
            self._packed[key] = values
            context.packed_weights += weight.matrix.size
        packed = self._packed[key]
        self._measure(linears, weight, packed)
        sizes = [value.const_value.nbytes for value in packed.values() if value.const_value is not None]
        for linear in linears:
            context.layer(linear).bytes_after = sum(sizes) // len(linears)
        return packed

    def _measure(self, linears: Sequence[Linear], weight: LayerWeight, values: dict[str, ir.Value]) -> None:
        """Reports ||XW - Y|| / ||XW|| for the recorded inputs X, the original W and what the operator makes of them, Y.

        Raises VerificationError if Y is more than a rounding away from the product with what was packed.
        """
        context, name = self.context, linears[0].name
        given = x = context.captured.get(layer_key(linears[0]))
        originals = [context.originals.get(layer_key(linear)) for linear in linears]
        if x is None or None in originals:
            return
        packed = {part: value.const_value for part, value in values.items() if value.const_value is not None}
        assert given is not None
        if weight.x_threshold:
            x = np.where(np.abs(given) <= np.float32(weight.x_threshold), np.float32(0), given)
        found = self._replacement.run(x, packed, weight)
        product = x @ weight.matrix
        if (np.abs(found - product) > self._replacement.rounding_bound(x, weight)).any():
            raise VerificationError(
                f"layer {name!r} answers differently with its packed weight, beyond what rounding explains; "
                "nothing was saved; please report this, and exclude the layer from replacement meanwhile"
            )
        columns = columns_of([linear.n for linear in linears])
        for linear, original, where in zip(linears, originals, columns, strict=True):
            assert original is not None
            key, y, xw = layer_key(linear), found[..., where], product[..., where]
            context.rounding[key] = max(context.rounding[key], _relative(y - xw, xw) or 0.0)
            exact = given @ original()
            context.layer(linear).output_error = _relative(exact - y, exact)

    def _emit(
        self,
        model: ir.Model,
        linears: Sequence[Linear],
        weight: LayerWeight,
        packed: dict[str, ir.Value],
        epilogue: Epilogue,
        hidden: HiddenLayer | None,
        attention: ir.Node | None,
    ) -> None:
        """Puts the operator where the layer was, under its node's name; what it puts out keeps its name.

        With an epilogue it stands where that ended: behind whatever computes the residual.
        """
        linear = linears[0]
        graph = linear.node.graph
        assert graph is not None
        replaced = [*linears] if hidden is None else [hidden.mlp.hidden, *linears]
        between = () if hidden is None else hidden.mlp.between.nodes
        # As they are now: whatever made the layer's input may have been replaced meanwhile.
        given, nodes = replaced[0].node.inputs[0], []
        x = layer_input(replaced[0].node)
        weights = [value for layer in replaced for value in (*layer.weight_values, layer.bias_value)]
        assert given is not None and x is not None
        if replaced[0].x_range is not None and self._replacement.takes_ranges:
            x = unrounded(x, linear.dtype)
        narrow = linear.dtype != ir.DataType.FLOAT
        if narrow:  # the operator computes on float32
            widen = ir.node("Cast", [x], {"to": ir.DataType.FLOAT}, name=f"{linear.name}/to_float")
            nodes.append(widen)
            x = widen.outputs[0]
        gated_columns = linear.n if len(linears) == 2 else 0
        epsilon = -1.0 if epilogue.norm is None else epilogue.norm.epsilon
        attributes = self._replacement.node_attributes(weight, epilogue.activation, gated_columns, epsilon)
        if epilogue.norm is not None:
            packed = packed | self._constants(model, linear, epilogue.norm.arrays())
        bias = self._bias(model, linears)
        inside, behind = (bias, None) if self._replacement.has_epilogue else (None, bias)
        node = ir.Node(
            ORTOLAN_DOMAIN,
            self.options.op,
            self._replacement.inputs(x, packed, inside, epilogue.residual),
            attributes,
            name=linear.name,
        )
        if hidden is not None:
            node.attributes["hidden_k"] = ir.AttrInt64("hidden_k", hidden.mlp.hidden.k)
        nodes.append(node)
        if behind is not None:
            nodes.append(ir.node("Add", [node.outputs[0], behind], name=f"{linear.name}/bias"))
        if narrow:
            nodes.append(ir.node("Cast", nodes[-1].outputs, {"to": linear.dtype}, name=f"{linear.name}/from_float"))
        for made in nodes[:-1]:
            made.outputs[0].name = self.context.new_name(model, f"{made.name}_output")
        own = [old for layer in replaced for old in (layer.node, layer.add) if old is not None]
        fused = (*between, *epilogue.nodes)
        constants = [value for old in fused for value in old.inputs if value is not epilogue.residual]
        last = epilogue.nodes[-1] if epilogue.nodes else own[-1]
        old_values, new_values = [epilogue.output], [nodes[-1].outputs[0]]
        if attention is not None:  # of another shape than any that there was
            node.outputs[0].name = self.context.new_name(model, f"{linear.name}/packed_output")
            take_packed(attention, node.outputs[0])
            last = max(own, key=graph_order(graph).__getitem__)
            old_values, new_values = [], []
        ir.convenience.replace_nodes_and_values(graph, last, [*own, *fused], nodes, old_values, new_values)
        for value in (*weights, *constants):
            if value is not None:
                remove_unused(value)
        # What has rounded the input.
        if (rounding := dynamic_source(given)) is not None:
            remove_unused_dynamic(rounding)
        elif replaced[0].x_range is not None:
            remove_unused(given)

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
        arrays = [
            np.zeros(linear.n, np.float32) if bias is None else np.array(bias, np.float32)
            for linear, bias in zip(linears, biases, strict=True)
        ]
        name = self.context.new_name(model, f"{first.name}.bias")
        return _initializer(first, ir.Tensor(join_columns(arrays), name=name))


def _relative(difference: np.ndarray, of: np.ndarray) -> float | None:
    norm = float(np.linalg.norm(of))
    return float(np.linalg.norm(difference)) / norm if norm else None


def _initializer(linear: Linear, tensor: ir.TensorProtocol) -> ir.Value:
    """A new initializer in the layer's own graph: many versions of ONNX Runtime (1.21 and 1.24 tried; 1.31 does better)
    give an operator only the constants of its own graph."""
    value = ir.Value(
        name=tensor.name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(tensor.shape.numpy()), const_value=tensor
    )
    assert linear.node.graph is not None
    linear.node.graph.register_initializer(value)
    return value
