"""Mutations that change values, types or structure: sharing, types, neutral nodes, subgraphs, functions."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from .case import Case, element_types, graphs, initializers, reads, rename, replace_reads, set_nodes, subgraphs

_LAYERS = ("MatMul", "Gemm")


def share_weights(case: Case, rng: np.random.Generator) -> str | None:
    """Make a layer read the weight of another layer with the same shape, or its transpose."""
    graph = case.model.graph
    found = initializers(case.model)
    pairs = [(a, b, False) for a in found for b in found if a is not b and list(a.dims) == list(b.dims) and a.dims]
    matrices = [one for one in found if len(one.dims) == 2]
    pairs += [(a, b, True) for a in matrices for b in matrices if list(a.dims) == list(b.dims)[::-1] and a is not b]
    pinned = {value.name for value in (*graph.input, *graph.output)}
    pairs = [pair for pair in pairs if pair[0].name not in pinned]
    if not pairs:
        return None
    old, new, turned = pairs[int(rng.integers(len(pairs)))]
    source = new.name
    if turned:
        source = case.fresh("turned")
        set_nodes(graph, [helper.make_node("Transpose", [new.name], [source], "", perm=[1, 0]), *graph.node])
    replace_reads(graph, old.name, source)
    if rng.integers(2):
        graph.initializer.remove(old)
    return f"{old.name!r} is {new.name!r}{' transposed' if turned else ''}"


def odd_weights(case: Case, rng: np.random.Generator) -> str | None:
    """Give a weight unusual values: zeros, a zero column, an outlier, equal columns, or very small values."""
    tables = {name for node in case.model.graph.node if node.op_type == "Gather" for name in node.input}
    found = [one for one in initializers(case.model, rank=2) if all(one.dims) and one.name not in tables]
    if not found:
        return None
    one = found[int(rng.integers(len(found)))]
    array = numpy_helper.to_array(one).copy()
    kind = str(rng.choice(["zeros", "zero column", "zero row", "outlier", "equal", "small", "blocks"]))
    match kind:
        case "zeros":
            array[:] = 0
        case "zero column":
            array[:, 0] = 0
        case "zero row":
            array[0] = 0
        case "outlier":
            array[0, 0] = 8
        case "equal":
            array[:] = array[:, :1]
        case "small":
            array *= np.float32(1e-12)
        case _:
            array[rng.random(array.shape) < 0.9] = 0
    one.CopyFrom(numpy_helper.from_array(array, one.name))
    return f"weight {one.name!r}: {kind}"


# ---- types ----------------------------------------------------------------------------------------------------------


def element_type(case: Case, rng: np.random.Generator) -> str:
    """Convert all float32 tensors of the model to another type."""
    wanted = int(rng.choice([TensorProto.FLOAT16, TensorProto.DOUBLE, TensorProto.BFLOAT16], p=[0.5, 0.3, 0.2]))
    dtype = helper.tensor_dtype_to_np_dtype(wanted)
    most = 6e4 if wanted == TensorProto.FLOAT16 else np.inf

    def convert(tensor: TensorProto) -> None:
        if tensor.data_type == TensorProto.FLOAT:
            array = np.clip(numpy_helper.to_array(tensor), -most, most).astype(dtype)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))

    for graph in graphs(case.model):
        for tensor in graph.initializer:
            convert(tensor)
        for value in (*graph.input, *graph.output, *graph.value_info):
            if value.type.tensor_type.elem_type == TensorProto.FLOAT:
                value.type.tensor_type.elem_type = wanted
        for node in graph.node:
            for one in node.attribute:
                if one.type == onnx.AttributeProto.TENSOR:
                    convert(one.t)
                elif one.name == "to" and one.i == TensorProto.FLOAT:
                    one.i = wanted
    return f"all floats are {TensorProto.DataType.Name(wanted).lower()}"


def half_layer(case: Case, rng: np.random.Generator) -> str | None:
    """Compute one layer in float16 or double between two Casts, as torch.autocast exports it."""
    graph, kinds = case.model.graph, element_types(case.model)
    found = [
        node
        for node in graph.node
        if node.op_type in _LAYERS and all(kinds.get(name) == TensorProto.FLOAT for name in node.input if name)
    ]
    if not found:
        return None
    node = found[int(rng.integers(len(found)))]
    wanted = TensorProto.FLOAT16 if rng.integers(3) else TensorProto.DOUBLE
    before = []
    stored = {one.name: one for one in graph.initializer}
    for index, name in enumerate(node.input):
        new = case.fresh("half")
        if name in stored and rng.integers(2):
            array = numpy_helper.to_array(stored[name]).astype(helper.tensor_dtype_to_np_dtype(wanted))
            graph.initializer.append(numpy_helper.from_array(array, new))
        else:
            before.append(helper.make_node("Cast", [name], [new], case.fresh("to_half"), to=wanted))
        node.input[index] = new
    output, new = node.output[0], case.fresh("half")
    node.output[0] = new
    after = helper.make_node("Cast", [new], [output], case.fresh("from_half"), to=TensorProto.FLOAT)
    nodes = []
    for one in graph.node:
        nodes += [*before, one, after] if one is node else [one]
    set_nodes(graph, nodes)
    return f"{node.name!r} in {TensorProto.DataType.Name(wanted).lower()}"


def input_types(case: Case, rng: np.random.Generator) -> str | None:
    """Change the type of an integer input: int32 ids, or a boolean or float mask."""
    graph = case.model.graph
    stored = {one.name for one in graph.initializer}
    found = [
        value
        for value in graph.input
        if value.type.tensor_type.elem_type == TensorProto.INT64 and value.name not in stored | set(case.extra)
    ]
    if not found:
        return None
    value = found[int(rng.integers(len(found)))]
    is_mask = case.names.get("attention_mask", "attention_mask") == value.name
    choices = [TensorProto.BOOL, TensorProto.FLOAT, TensorProto.INT32, TensorProto.UINT8]
    wanted = int(rng.choice(choices if is_mask else [TensorProto.INT32]))
    users = [node for node in graph.node if value.name in node.input]
    plain = all(node.op_type == "Gather" and list(node.input).index(value.name) == 1 for node in users)
    if not plain or is_mask or any(value.name in reads(node) - set(node.input) for node in graph.node):
        whole = case.fresh("whole")
        replace_reads(graph, value.name, whole)
        set_nodes(graph, [helper.make_node("Cast", [value.name], [whole], "", to=TensorProto.INT64), *graph.node])
    value.type.tensor_type.elem_type = wanted
    return f"input {value.name!r} is {TensorProto.DataType.Name(wanted).lower()}"


# ---- nodes that do not change values ---------------------------------------------------------------------------------


def noise(case: Case, rng: np.random.Generator) -> str | None:
    """Insert neutral nodes after up to four values, for all consumers or for one."""
    graph, kinds = case.model.graph, element_types(case.model)
    done = []
    for _ in range(int(rng.integers(1, 5))):
        made = {name for node in graph.node for name in node.output if kinds.get(name) == TensorProto.FLOAT}
        made |= {one.name for one in initializers(case.model) if one.dims}
        used = sorted(made & {name for node in graph.node for name in node.input})
        if not used:
            break
        name = str(rng.choice(used))
        kind = str(rng.choice(["Identity", "Cast", "Dropout", "Mul", "Add", "Double", "Transpose", "Concat"]))
        new = case.fresh("same")
        node = _same(case, kind, name, new)
        nodes = list(graph.node)
        index = next((place for place, one in enumerate(nodes) if name in one.output), -1)
        readers = [one for one in nodes if name in one.input]
        if len(readers) > 1 and rng.integers(2):
            chosen = readers[int(rng.integers(len(readers)))]
            for place, text in enumerate(chosen.input):
                if text == name:
                    chosen.input[place] = new
        else:
            replace_reads(graph, name, new)
        nodes[index + 1 : index + 1] = node
        set_nodes(graph, nodes)
        done.append(f"{kind} on {name!r}")
    return f"noise: {', '.join(done)}" if done else None


def _same(case: Case, kind: str, name: str, new: str) -> list[onnx.NodeProto]:
    graph = case.model.graph
    match kind:
        case "Cast":
            return [helper.make_node("Cast", [name], [new], case.fresh("noise"), to=TensorProto.FLOAT)]
        case "Mul" | "Add":
            neutral = case.fresh("neutral")
            graph.initializer.append(numpy_helper.from_array(np.array(kind == "Mul", np.float32), neutral))
            return [helper.make_node(kind, [name, neutral], [new], case.fresh("noise"))]
        case "Double" | "Transpose":
            middle = case.fresh("middle")
            if kind == "Transpose":  # two Transposes that reverse the axes
                steps: list[dict[str, int]] = [{}, {}]
            else:
                steps = [{"to": TensorProto.DOUBLE}, {"to": TensorProto.FLOAT}]
            op = "Transpose" if kind == "Transpose" else "Cast"
            return [
                helper.make_node(op, [name], [middle], case.fresh("noise"), **steps[0]),
                helper.make_node(op, [middle], [new], "", **steps[1]),
            ]
        case "Concat":  # only for a constant, whose shape is known
            for one in graph.initializer:
                if one.name == name:
                    empty = case.fresh("empty")
                    shape = [0, *one.dims[1:]]
                    graph.initializer.append(numpy_helper.from_array(np.zeros(shape, np.float32), empty))
                    return [helper.make_node("Concat", [name, empty], [new], case.fresh("noise"), axis=0)]
            return [helper.make_node("Identity", [name], [new], "")]
        case _:
            return [helper.make_node(kind, [name], [new], "")]


# ---- subgraphs and functions -----------------------------------------------------------------------------------------


def into_if(case: Case, rng: np.random.Generator) -> str | None:
    """Move a few consecutive nodes into both branches of an If."""
    graph = case.model.graph
    window = _window(case, rng)
    if window is None:
        return None
    begin, end, made = window
    flag = case.fresh("flag")
    nodes = list(graph.node)
    how = str(rng.choice(["constant", "input", "computed"]))
    before: list[onnx.NodeProto] = []
    if how == "input":
        graph.input.append(helper.make_tensor_value_info(flag, TensorProto.BOOL, []))
        case.extra[flag] = lambda rng: np.array(rng.integers(0, 2), bool)
    elif how == "constant":
        graph.initializer.append(numpy_helper.from_array(np.array(bool(rng.integers(2))), flag))
    else:
        size, none = case.fresh("size"), case.fresh("none")
        graph.initializer.append(numpy_helper.from_array(np.array(0, np.int64), none))
        before = [
            helper.make_node("Size", [_any_value(nodes[begin])], [size], ""),
            helper.make_node("Greater", [size, none], [flag], ""),
        ]
    own = bool(rng.integers(2))
    branches = {
        f"{side}_branch": _body(case, nodes[begin:end], made, own and side == "else") for side in ("then", "else")
    }
    node = helper.make_node("If", [flag], made, case.fresh("if"), **branches)
    set_nodes(graph, [*nodes[:begin], *before, node, *nodes[end:]])
    return f"nodes {begin}:{end} in an If ({how}{', own weights' if own else ''})"


def into_loop(case: Case, rng: np.random.Generator) -> str | None:
    """Move a few consecutive nodes into the body of a Loop with one iteration, whose outputs are stacked."""
    graph = case.model.graph
    window = _window(case, rng)
    if window is None:
        return None
    begin, end, made = window
    nodes = list(graph.node)
    once, go, axis = case.fresh("once"), case.fresh("go"), case.fresh("axis")
    for array, name in ((np.array(1), once), (np.array(True), go), (np.array([0]), axis)):
        graph.initializer.append(numpy_helper.from_array(array, name))
    body = _body(case, nodes[begin:end], made, bool(rng.integers(2)))
    step, state, kept = case.fresh("step"), case.fresh("state"), case.fresh("kept")
    body.input.extend(
        [
            helper.make_tensor_value_info(step, TensorProto.INT64, []),
            helper.make_tensor_value_info(state, TensorProto.BOOL, []),
        ]
    )
    body.node.append(helper.make_node("Identity", [state], [kept], ""))
    outputs = list(body.output)
    del body.output[:]
    body.output.extend([helper.make_tensor_value_info(kept, TensorProto.BOOL, []), *outputs])
    stacked = [case.fresh("stacked") for _ in made]
    loop = helper.make_node("Loop", [once, go], stacked, case.fresh("loop"), body=body)
    squeezes = [helper.make_node("Squeeze", [s, axis], [m], "") for s, m in zip(stacked, made, strict=True)]
    set_nodes(graph, [*nodes[:begin], loop, *squeezes, *nodes[end:]])
    return f"nodes {begin}:{end} in a Loop"


def into_function(case: Case, rng: np.random.Generator) -> str | None:
    """Move a few consecutive nodes into a model function."""
    graph = case.model.graph
    window = _window(case, rng)
    if window is None:
        return None
    begin, end, made = window
    nodes = list(graph.node)
    if subgraphs(nodes[begin:end]):
        return None
    inside = {name for node in nodes[begin:end] for name in node.output}
    taken = sorted({name for node in nodes[begin:end] for name in node.input if name and name not in inside})
    name, domain = case.fresh("Layer"), "fuzz.functions"
    function = helper.make_function(domain, name, taken, made, nodes[begin:end], list(case.model.opset_import))
    case.model.functions.append(function)
    if domain not in {one.domain for one in case.model.opset_import}:
        case.model.opset_import.append(helper.make_opsetid(domain, 1))
    call = helper.make_node(name, taken, made, case.fresh("call"), domain=domain)
    set_nodes(graph, [*nodes[:begin], call, *nodes[end:]])
    case.model.ir_version = max(case.model.ir_version, 8)
    return f"nodes {begin}:{end} in a function"


def _any_value(node: onnx.NodeProto) -> str:
    return next(name for name in [*node.input, *sorted(reads(node))] if name)


def _window(case: Case, rng: np.random.Generator) -> tuple[int, int, list[str]] | None:
    """Return consecutive nodes and those of their values that other nodes read.

    The result is None if the type of such a value is unknown.
    """
    graph, kinds = case.model.graph, element_types(case.model)
    nodes = list(graph.node)
    layers = [index for index, node in enumerate(nodes) if node.op_type in _LAYERS]
    begin = int(rng.choice(layers)) if layers and rng.integers(3) else int(rng.integers(len(nodes)))
    end = min(len(nodes), begin + int(rng.choice([1, 1, 2, 3, 6])))
    inside = {name for node in nodes[begin:end] for name in node.output if name}
    outside: set[str] = {value.name for value in graph.output}
    for node in [*nodes[:begin], *nodes[end:]]:
        outside |= reads(node)
    made = sorted(inside & outside)
    if not made or not any(reads(node) for node in nodes[begin:end]) or not all(name in kinds for name in made):
        return None
    if not reads(nodes[begin]):
        return None
    return begin, end, made


def _body(case: Case, nodes: list[onnx.NodeProto], made: list[str], own_weights: bool) -> onnx.GraphProto:
    """Return a graph with copies of the nodes, in which all values have new names."""
    kinds = element_types(case.model)
    holder = onnx.GraphProto(name=case.fresh("body"))
    holder.node.extend(nodes)
    names: dict[str, str] = {}
    front = [holder]
    while front:
        graph = front.pop()
        for one in graph.initializer:
            names[one.name] = case.fresh(one.name)
        for value in graph.input:
            names[value.name] = case.fresh(value.name)
        for node in graph.node:
            node.name = case.fresh(node.name) if node.name else ""
            names |= {name: case.fresh(name) for name in node.output if name}
        front += subgraphs(graph.node)
    if own_weights:
        for one in case.model.graph.initializer:
            if any(one.name in reads(node) for node in holder.node):
                names[one.name] = case.fresh(one.name)
                holder.initializer.append(one)
    model = onnx.ModelProto(graph=holder)
    rename(model, names)
    model.graph.output.extend(helper.make_tensor_value_info(names[name], kinds[name], None) for name in made)
    return model.graph
