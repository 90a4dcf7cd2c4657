"""Mutations that change no value: names, order, unused parts, shapes, symbols, versions, storage of weights."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper, version_converter

from .case import Case, element_types, graphs, initializers, reads, rename, set_nodes

Mutation = Callable[[Case, np.random.Generator], str | None]

_STYLES: dict[str, Callable[[int, str], str]] = {
    "long": lambda index, name: f"{index}/" + "module." * 60 + name,
    "unicode": lambda index, name: f"層{index}/重み·é/{name}",
    "slashes": lambda index, name: f"//{index}//{name}/",
    "our domain": lambda index, name: f"ai.ortolan/SparseAMXMatMul_{index}",
    "copies": lambda index, name: "x" + "_1" * (index % 7) + "_2" * (index // 7 % 7) + "_" * (index // 49),
    "digits": lambda index, name: str(index),
    "spaces": lambda index, name: f" {name} {index}\t",
    "packed": lambda index, name: f"packed_{index}" if index else "packed",
    "globs": lambda index, name: f"[{index}]*?{name}",
}
_SYMBOLS = ["b", "n", "bs", "unk__0", "unk__1", "?", "", "N", "seq", "past + n", "-1", "3", "batch_size"]


def rename_values(case: Case, rng: np.random.Generator) -> str:
    """Rename all intermediate values and weights, and sometimes the inputs and outputs."""
    style = str(rng.choice(list(_STYLES)))
    also_signature = rng.integers(4) == 0
    names: dict[str, str] = {}
    signature = {value.name for value in (*case.model.graph.input, *case.model.graph.output)}
    for graph in graphs(case.model):
        for name in [one.name for one in graph.initializer] + [name for node in graph.node for name in node.output]:
            if name and name not in names and (also_signature or name not in signature):
                names[name] = _STYLES[style](len(names), name)
    if also_signature:
        for value in case.model.graph.input:
            names.setdefault(value.name, _STYLES[style](len(names), value.name))
    taken = signature - set(names)
    for old, new in names.items():
        while new in taken:
            new += "_"
        taken.add(new)
        names[old] = new
    _rename(case, names)
    return f"values renamed: {style}{', signature too' if also_signature else ''}"


def _rename(case: Case, names: dict[str, str]) -> None:
    stems = {value.name for value in case.model.graph.input}
    for base in set(case.names) | (stems - set(case.names.values())):
        current = case.names.get(base, base)
        if current in case.extra:
            case.extra[names.get(current, current)] = case.extra.pop(current)
        else:
            case.names[base] = names.get(current, current)
    rename(case.model, names)


def rename_nodes(case: Case, rng: np.random.Generator) -> str:
    """Rename all nodes; names may be empty or used twice."""
    style = str(rng.choice([*_STYLES, "empty", "equal", "some empty"]))
    index = 0
    for graph in graphs(case.model):
        for node in graph.node:
            index += 1
            if style == "equal":
                node.name = "node"
            elif style == "empty" or (style == "some empty" and rng.integers(2)):
                node.name = ""
            elif style != "some empty":
                node.name = _STYLES[style](index, node.name)
    return f"nodes renamed: {style}"


def reorder(case: Case, rng: np.random.Generator) -> str:
    """Put the nodes of the main graph into a random topological order."""
    graph = case.model.graph
    nodes = list(graph.node)
    made = {name for node in nodes for name in node.output if name}
    needs = [reads(node) & made for node in nodes]
    ready: set[str] = set()
    left, order = list(range(len(nodes))), []
    while left:
        free = [index for index in left if needs[index] <= ready]
        index = int(rng.choice(free))
        left.remove(index)
        order.append(nodes[index])
        ready |= set(nodes[index].output)
    set_nodes(graph, order)
    return "nodes reordered"


def dead_nodes(case: Case, rng: np.random.Generator) -> str | None:
    """Add nodes without consumers: a MatMul with a new weight, and the Shape of a value."""
    graph, kinds = case.model.graph, element_types(case.model)
    made = [name for node in graph.node for name in node.output if kinds.get(name) == TensorProto.FLOAT]
    if not made:
        return None
    source = str(rng.choice(made))
    weight = case.fresh("dead_weight")
    graph.initializer.append(numpy_helper.from_array(np.ones((1, 5), np.float32), weight))
    column, flat = case.fresh("dead"), np.array([-1, 1], np.int64)
    shape = case.fresh("dead_shape")
    graph.initializer.append(numpy_helper.from_array(flat, shape))
    graph.node.append(helper.make_node("Reshape", [source, shape], [column], case.fresh("dead_node")))
    graph.node.append(helper.make_node("MatMul", [column, weight], [case.fresh("dead")], case.fresh("dead_node")))
    graph.node.append(helper.make_node("Shape", [source], [case.fresh("dead")], ""))
    return f"dead nodes on {source!r}"


def dead_initializers(case: Case, rng: np.random.Generator) -> str:
    arrays = [
        np.ones((40, 40), np.float32),
        np.zeros((0, 7), np.float32),
        np.array(3, np.int64),
        np.ones(5, np.float16),
    ]
    for array in arrays:
        case.model.graph.initializer.append(numpy_helper.from_array(array, case.fresh("unused")))
    return "dead initializers"


def dead_input(case: Case, rng: np.random.Generator) -> str:
    """Add an unused input, as the first or last one."""
    name = case.fresh("ignored")
    value = helper.make_tensor_value_info(name, TensorProto.INT64, [str(rng.choice(["batch", "n", "b"]))])
    inputs = list(case.model.graph.input)
    inputs.insert(0 if rng.integers(2) else len(inputs), value)
    copies = [onnx.ValueInfoProto.FromString(one.SerializeToString()) for one in inputs]
    del case.model.graph.input[:]
    case.model.graph.input.extend(copies)
    case.extra[name] = lambda rng: rng.integers(0, 3, 3)
    return "dead input"


def drop_shapes(case: Case, rng: np.random.Generator) -> str:
    """Remove value_info, and the shapes of outputs or inputs."""
    graph = case.model.graph
    what = str(rng.choice(["value_info", "output shapes", "input shapes"], p=[0.4, 0.4, 0.2]))
    del graph.value_info[:]
    if what != "value_info":
        for value in graph.output if what == "output shapes" else graph.input:
            value.type.tensor_type.ClearField("shape")
    return f"no {what}"


def add_value_info(case: Case, rng: np.random.Generator) -> str | None:
    """Store the shapes of all values, as many exporters do."""
    try:
        inferred = onnx.shape_inference.infer_shapes(case.model, data_prop=True)
    except Exception:  # shape inference fails for unknown operators
        return None
    case.model.CopyFrom(inferred)
    return "value_info written"


def odd_symbols(case: Case, rng: np.random.Generator) -> str:
    """Rename symbolic dimensions: one symbol per axis, one symbol for several axes, or none."""
    each = bool(rng.integers(2))
    mapping: dict[str, str] = {}
    for graph in graphs(case.model):
        for value in (*graph.input, *graph.output, *graph.value_info):
            for dim in value.type.tensor_type.shape.dim:
                if not dim.HasField("dim_param"):
                    continue
                new = str(rng.choice(_SYMBOLS))
                new = new if each else mapping.setdefault(dim.dim_param, new)
                dim.ClearField("dim_param")
                if new:
                    dim.dim_param = new
    return f"symbols: {'any on each axis' if each else mapping}"


def versions(case: Case, rng: np.random.Generator) -> str | None:
    """Convert the model to another opset and IR version."""
    model = case.model
    old = next(one.version for one in model.opset_import if one.domain in ("", "ai.onnx"))
    wanted = int(rng.choice([11, 13, 15, 18, 19, 20, 21, 22, 23]))
    try:
        converted = version_converter.convert_version(model, wanted) if wanted != old else model
        onnx.checker.check_model(converted)
    except Exception:  # the converter knows few other domains, and few conversions to lower versions
        converted, wanted = model, old
    kept = [one for one in model.opset_import if one.domain not in ("", "ai.onnx")]
    if not converted.graph.node or {node.op_type for node in converted.graph.node} == set():
        return None
    domains = {one.domain for one in converted.opset_import}
    converted.opset_import.extend(one for one in kept if one.domain not in domains)
    lowest = {21: 10, 22: 10, 23: 11}.get(wanted, 9 if wanted > 18 else 8)
    converted.ir_version = int(rng.choice([lowest, 10, 11])) if wanted > 13 else int(rng.choice([4, 6, 7, 8, 10]))
    if converted is not model:
        model.CopyFrom(converted)
    return f"opset {wanted}, IR {model.ir_version}"


def as_inputs(case: Case, rng: np.random.Generator) -> str | None:
    """List some initializers as inputs, as old exporters do, or all of them with IR version 3."""
    graph = case.model.graph
    listed = {value.name for value in graph.input}
    for one in graph.initializer:
        if one.name not in listed and rng.integers(3):
            graph.input.append(helper.make_tensor_value_info(one.name, one.data_type, list(one.dims)))
    return "initializers that are inputs"


def as_constants(case: Case, rng: np.random.Generator) -> str | None:
    """Move initializers into Constant nodes."""
    graph = case.model.graph
    pinned = {value.name for value in (*graph.input, *graph.output)}
    moved = [one for one in graph.initializer if one.name not in pinned and rng.integers(2)]
    if not moved:
        return None
    nodes = [helper.make_node("Constant", [], [one.name], case.fresh("constant"), value=one) for one in moved]
    kept = [one for one in graph.initializer if one not in moved]
    del graph.initializer[:]
    graph.initializer.extend(kept)
    set_nodes(graph, [*nodes, *graph.node])
    return f"{len(moved)} constants in nodes"


def external(case: Case, rng: np.random.Generator) -> str:
    case.external = True
    return "external data"


def weight_as_output(case: Case, rng: np.random.Generator) -> str | None:
    """Make a weight a graph output, directly or through an Identity."""
    graph = case.model.graph
    found = [one for one in initializers(case.model) if one.dims]
    outputs = {value.name for value in graph.output}
    if not found:
        return None
    one = found[int(rng.integers(len(found)))]
    name = one.name
    if rng.integers(2) or name in outputs:
        name = case.fresh("shown_weight")
        graph.node.append(helper.make_node("Identity", [one.name], [name], ""))
    graph.output.append(helper.make_tensor_value_info(name, one.data_type, list(one.dims)))
    return f"weight {one.name!r} is an output"


def more_outputs(case: Case, rng: np.random.Generator) -> str | None:
    """Make up to three intermediate values graph outputs."""
    graph, kinds = case.model.graph, element_types(case.model)
    outputs = {value.name for value in graph.output}
    made = [name for node in graph.node for name in node.output if name in kinds and name not in outputs]
    if not made:
        return None
    chosen = [str(name) for name in rng.choice(made, min(len(made), int(rng.integers(1, 4))), replace=False)]
    for name in chosen:
        graph.output.append(helper.make_tensor_value_info(name, kinds[name], None))
    return f"also outputs: {chosen}"
