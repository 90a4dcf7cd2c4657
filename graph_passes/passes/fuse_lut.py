"""Replace element-wise operators between quantized values with LutPostOp: one table lookup (find/lut.py).

From every quantized value, the search follows all values that depend only on it: DequantizeLinear, activations in any
formula, arithmetic with scalars, QuantizeLinear. Paths may split and rejoin. Each value of this subgraph (`Cone`) that
the rest of the model uses gets a table, and unused nodes are removed:

    quantized values    if a table saves one operator (two for 16-bit indices)
    float32 values      if a table saves two, but not an output of DequantizeLinear: ONNX Runtime fuses that with the
                        MatMul after it
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from ortolan.progress import Stage

from ..find.constants import remove_unused
from ..find.lut import (
    CODE_TYPES,
    Chain,
    Cone,
    NoTableError,
    code_type,
    data_inputs,
    find_cone,
    graph_order,
    is_constant,
    make_table,
    seen_outside,
)
from ..names import ORTOLAN_DOMAIN
from ..operators.function_body import FunctionBody
from ..operators.nodes import declare_operators, new_initializer, put_function
from ..options import Globs, PassOptions, any_matches, takes
from ..report.optimization import LookupReport
from .context import PassContext, RecipePass
from .normalize import require_normalized

OP_TYPE = "LutPostOp"
_FORMAT_VERSION = 1
_STARTS = ("DequantizeLinear", "QLinearAdd", "QLinearLeakyRelu", "QLinearMul", "QLinearSigmoid")
_REASONS_SHOWN = 3


@dataclass(frozen=True)
class FuseLutOptions(PassOptions):
    """Options of pass `fuse_lut`."""

    # Largest index width; 16-bit tables take 64 to 256 KiB each.
    bits: int = field(default=16, metadata=takes("int", choices=(8, 16)))
    # Patterns that select nodes whose output is replaced by a table lookup.
    select: Globs = field(default=("*",), metadata=takes("globs"))
    exclude: Globs = field(default=(), metadata=takes("globs"))


@dataclass(frozen=True)
class _Lookup:
    """A chain, its table, and the nodes that the table makes unnecessary."""

    chain: Chain
    table: np.ndarray
    saved: tuple[ir.Node, ...]


class FuseLutPass(RecipePass):
    """Replace element-wise operators on quantized values with table lookups."""

    options_type = FuseLutOptions
    options: FuseLutOptions

    def __init__(self, options: PassOptions, context: PassContext) -> None:
        super().__init__(options, context)
        self._tables: dict[tuple[int, str, bytes], ir.Value] = {}

    def requires(self, model: ir.Model) -> None:
        """Require a normalized model."""
        require_normalized(model, "fuse_lut")

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        """Replace chains in every graph of the model."""
        self._tables.clear()
        found = 0
        graphs = list(model.graphs())
        for number, graph in enumerate(graphs):
            self.context.progress(Stage.FUSE_LUT, number, len(graphs))
            found += self._fuse(model, graph)
        self.context.progress(Stage.FUSE_LUT, len(graphs), len(graphs))
        if not found:
            self.context.note("pass 'fuse_lut' found no chain of element-wise operators on quantized values")
        elif not self.context.dry_run:
            declare_operators(model)
            if self.context.portable:
                put_function(model, lut_post_op_function(model.opset_imports[""]))
        return ir.passes.PassResult(model, modified=found > 0 and not self.context.dry_run)

    def _fuse(self, model: ir.Model, graph: ir.Graph) -> int:
        order = graph_order(graph)
        found = 0
        seen: set[ir.Value] = set()
        replaced: set[ir.Node] = set()
        for start in list(graph):
            if start.op_type not in _STARTS or start in replaced:
                continue
            # Collected before any replacement, because replacements remove constants.
            sources = [x for x in dict.fromkeys(data_inputs(start)) if x not in seen and not is_constant(x)]
            seen.update(sources)
            for x in sources:
                for lookup in self._lookups(model, start, find_cone(x, graph, order)):
                    found += 1
                    replaced.update(lookup.saved)
                    if not self.context.dry_run:
                        order[self._put(model, lookup)] = order[lookup.chain.nodes[-1]]
        return found

    def _lookups(self, model: ir.Model, start: ir.Node, cone: Cone) -> list[_Lookup]:
        report = self.context.report.lookups
        reasons = list(dict.fromkeys(cone.refused.values()))
        dtype = code_type(cone.input)
        lookups = []
        inside = set(cone.nodes)
        gone: set[ir.Node] = set()
        if dtype not in CODE_TYPES:
            found = "unknown" if dtype is None else dtype.name
            reasons = [f"the type of {cone.input.name!r} is {found}, expected 8 or 16 bits"]
        elif 8 * dtype.itemsize > self.options.bits:
            reasons = [f"{cone.input.name!r} has more than {self.options.bits} bits (option bits)"]
        else:
            # Last outputs first: their tables make earlier nodes unnecessary, so these need no tables.
            for output in reversed(list(_exits(cone, inside))):
                chain = cone.chain_to(output)
                saved = _saved(chain, gone)
                try:
                    lookups.append(_Lookup(chain, self._table(model, chain, dtype, len(saved)), saved))
                    gone.update(saved)
                except NoTableError as error:
                    reasons.insert(0, str(error))
        for lookup in lookups:
            report.append(
                LookupReport(
                    lookup.chain.nodes[-1].name or "",
                    lookup.chain.operators,
                    entries=lookup.table.size,
                    entry_type=str(lookup.table.dtype),
                    status="would replace" if self.context.dry_run else "replaced",
                )
            )
        if not lookups:
            more = f"; and {len(reasons) - _REASONS_SHOWN} more" if len(reasons) > _REASONS_SHOWN else ""
            report.append(
                LookupReport(start.name or "", [start.op_type], reason="; ".join(reasons[:_REASONS_SHOWN]) + more)
            )
        return lookups

    def _table(self, model: ir.Model, chain: Chain, dtype: ir.DataType, saved: int) -> np.ndarray:
        """Return the chain's table. Raise NoTableError with the reason if it is not worth replacing."""
        name = chain.nodes[-1].name or ""
        self.context.layers.names.append(name)
        if not any_matches([name], self.options.select) or any_matches([name], self.options.exclude):
            raise NoTableError(f"{name} is not selected")
        if saved == 0:
            raise NoTableError(f"{name} has other consumers")
        table = make_table(chain, dtype, model.opset_imports)
        types = [kind.numpy() for kind in (*CODE_TYPES, ir.DataType.FLOAT)]
        if table.dtype not in types:
            raise NoTableError(f"{name} has type {table.dtype}, expected 8 or 16 bits or float32")
        if saved < 2 and (table.dtype == np.float32 or dtype.itemsize > 1):
            raise NoTableError(f"a table for {name} would save only one operator, which is as fast as the lookup")
        return table

    def _put(self, model: ir.Model, lookup: _Lookup) -> ir.Node:
        """Insert the operator at the end of the chain, under its node's name; the output keeps its name."""
        chain = lookup.chain
        last = chain.nodes[-1]
        graph = last.graph
        assert isinstance(graph, ir.Graph)
        node = ir.Node(
            ORTOLAN_DOMAIN,
            OP_TYPE,
            [chain.input, self._initializer(model, graph, last.name or OP_TYPE, lookup.table)],
            [ir.AttrInt64("format_version", _FORMAT_VERSION)],
            name=last.name,
        )
        used = [value for old in lookup.saved for value in old.inputs if value is not None]
        constants = [value for value in used if is_constant(value)]
        ir.convenience.replace_nodes_and_values(graph, last, lookup.saved, [node], [chain.output], [node.outputs[0]])
        for value in constants:
            remove_unused(value)
        return node

    def _initializer(self, model: ir.Model, graph: ir.Graph, name: str, table: np.ndarray) -> ir.Value:
        """Return the initializer of a table, shared by equal tables of a graph."""
        key = (id(graph), str(table.dtype), table.tobytes())
        if key not in self._tables:
            new_name = self.context.new_name(model, f"{name}.table")
            self._tables[key] = new_initializer(graph, ir.Tensor(table, name=new_name))
        return self._tables[key]


def lut_post_op_function(opset: int) -> ir.Function:
    """Return LutPostOp as an ONNX function: its specification, and the fallback without our library."""
    body = FunctionBody(opset)
    x, table = ir.val("X"), ir.val("table")
    # Negative values index from the end: entry 255 of 256 is the one of -1.
    y = body.op("Gather", table, body.op("Cast", x, to=ir.DataType.INT32))
    y.name = "Y"
    graph = ir.Graph([x, table], [y], nodes=body.nodes, opset_imports={"": opset}, name=OP_TYPE)
    attributes = [ir.Attr("format_version", ir.AttributeType.INT, None)]
    return ir.Function(ORTOLAN_DOMAIN, OP_TYPE, graph=graph, attributes=attributes)


def _exits(cone: Cone, inside: Collection[ir.Node]) -> list[ir.Value]:
    """Return the values of a cone that the rest of the model uses; for a DequantizeLinear, its input."""
    exits: dict[ir.Value, None] = {}
    for value in cone.values():
        if not seen_outside(value, inside):
            continue
        node = value.producer()
        assert node is not None
        source = node.inputs[0] if node.op_type == "DequantizeLinear" else value
        if source is not None and source is not cone.input:
            exits[source] = None
    return list(exits)


def _saved(chain: Chain, gone: Collection[ir.Node]) -> tuple[ir.Node, ...]:
    """Return the chain's nodes that become unnecessary once its output is looked up, without those in `gone`."""
    last = chain.nodes[-1]
    saved = {last}
    for node in reversed(chain.nodes[:-1]):
        if not seen_outside(node.outputs[0], {*saved, *gone}):
            saved.add(node)
    return tuple(node for node in chain.nodes if node in saved and node not in gone)
