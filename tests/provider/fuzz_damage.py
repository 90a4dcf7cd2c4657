"""Random damage to models and feeds. A seed gives the same damage on every machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from .fuzz_models import Feeds, Rng, in_branches, pick

ODD_WHOLES = [
    -(2**63),
    -(2**31),
    -2,
    -1,
    0,
    1,
    2,
    3,
    4,
    5,
    7,
    8,
    15,
    16,
    31,
    32,
    33,
    48,
    63,
    64,
    65,
    96,
    128,
    256,
    2**16,
]
ODD_WHOLES += [2**31 - 1, 2**31, 2**32, 2**32 + 32, 2**62, 2**63 - 1]
ODD_FLOATS = [np.nan, np.inf, -np.inf, 0.0, -0.0, -1.0, 1.0, 0.5, 1e-45, 1e-20, 1e20, 3e38]
ODD_NAMES = ["", " ", "a\nb", "%s%n", "\"'\\", "läyer/ü", "x" * 3000, "/", "linear", "x", "y", "W", "..", "\x7f"]
ODD_SIZES = [0, 1, 2, 3, 16, 24, 31, 32, 33, 48, 64, 65, 128]
ATTRIBUTES = [
    "K",
    "N",
    "bits",
    "block_size",
    "accuracy_level",
    "weight_prepacked",
    "axis",
    "epsilon",
    "stash_type",
    "to",
]
ATTRIBUTES += ["num_heads", "kv_num_heads", "do_rotary", "rotary_interleaved", "scale", "softcap", "causal"]
ATTRIBUTES += ["local_window_size", "smooth_softmax", "qk_output", "k_quant_type", "sliding_window_cache"]
ATTRIBUTES += ["alpha", "approximate", "transB", "fmod", "saturate", "no such attribute"]
OPERATORS = ["Add", "Mul", "Sub", "Div", "Pow", "Relu", "Gelu", "Erf", "Tanh", "Sigmoid", "Cast", "Identity", "MatMul"]
OPERATORS += [
    "QuantizeLinear",
    "DequantizeLinear",
    "QLinearMatMul",
    "MatMulInteger",
    "GroupQueryAttention",
    "DynamicQuantizeLinear",
    "LayerNormalization",
    "MatMulNBits",
    "FastGelu",
    "QuickGelu",
]
TYPES = [TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.DOUBLE, TensorProto.UINT8]
TYPES += [TensorProto.INT8, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.STRING]
TYPES += [TensorProto.UINT4, TensorProto.UNDEFINED]
NUMPY_TYPES = [np.float32, np.float16, np.float64, np.uint8, np.int8, np.int32, np.int64, np.bool_]


def graphs(graph: GraphProto) -> Iterator[GraphProto]:
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == AttributeProto.GRAPH:
                yield from graphs(attribute.g)


class Nothing(Exception):
    """Raised if the model has no part that this damage could change."""


def some_of(rng: Rng, found: Any) -> Any:
    found = list(found)
    if not found:
        raise Nothing
    return pick(rng, found)


def some_graph(rng: Rng, model: ModelProto) -> GraphProto:
    return some_of(rng, [graph for graph in graphs(model.graph) if graph.node])


def some_node(rng: Rng, model: ModelProto) -> NodeProto:
    return some_of(rng, some_graph(rng, model).node)


def some_tensor(rng: Rng, model: ModelProto) -> TensorProto:
    return some_of(rng, model.graph.initializer)


def some_array(rng: Rng, model: ModelProto) -> tuple[TensorProto, np.ndarray]:
    tensor = some_tensor(rng, model)
    try:
        return tensor, numpy_helper.to_array(tensor)
    except Exception as error:  # the model may already be damaged
        raise Nothing from error


def value_names(model: ModelProto) -> list[str]:
    names = [one.name for one in [*model.graph.input, *model.graph.initializer]]
    return [*names, *(name for graph in graphs(model.graph) for node in graph.node for name in node.output)]


def odd_attribute(rng: Rng, name: str) -> AttributeProto:
    values: list[Any] = [pick(rng, ODD_WHOLES), float(pick(rng, ODD_FLOATS)), pick(rng, ["tanh", "none", *ODD_NAMES])]
    values += [[1, 2], [0.5], ["a", "b"], numpy_helper.from_array(np.ones((2, 2), np.float32), "tensor")]
    return helper.make_attribute(name, pick(rng, values))


def attribute_value(rng: Rng, model: ModelProto) -> None:
    node = some_node(rng, model)
    attribute = some_of(rng, node.attribute)
    if attribute.type == AttributeProto.INT:
        attribute.i = pick(rng, ODD_WHOLES)
    elif attribute.type == AttributeProto.FLOAT:
        attribute.f = pick(rng, ODD_FLOATS)
    elif attribute.type == AttributeProto.STRING:
        attribute.s = pick(rng, ["tanh", "none", *ODD_NAMES]).encode()
    else:
        raise Nothing


def attribute_type(rng: Rng, model: ModelProto) -> None:
    attribute = some_of(rng, some_node(rng, model).attribute)
    attribute.CopyFrom(odd_attribute(rng, attribute.name))


def attribute_missing(rng: Rng, model: ModelProto) -> None:
    node = some_node(rng, model)
    some_of(rng, node.attribute)
    del node.attribute[int(rng.integers(len(node.attribute)))]


def attribute_more(rng: Rng, model: ModelProto) -> None:
    some_node(rng, model).attribute.append(odd_attribute(rng, pick(rng, ATTRIBUTES)))


def layer_attributes(rng: Rng, model: ModelProto) -> None:
    node = some_of(rng, [node for graph in graphs(model.graph) for node in graph.node if node.op_type == "MatMulNBits"])
    for attribute in node.attribute:
        if rng.random() < 0.5:
            attribute.i = pick(rng, ODD_WHOLES)


def cache_attributes(rng: Rng, model: ModelProto) -> None:
    found = [node for graph in graphs(model.graph) for node in graph.node if node.op_type == "GroupQueryAttention"]
    attribute = some_of(rng, [one for one in some_of(rng, found).attribute if one.type == AttributeProto.INT])
    attribute.i = int(pick(rng, [*range(-1, 8), *ODD_WHOLES]))


def tensor_dims(rng: Rng, model: ModelProto) -> None:
    """Declare dimensions that do not match the size of the data."""
    tensor = some_tensor(rng, model)
    dims = list(tensor.dims)
    if dims and rng.random() < 0.7:
        dims[int(rng.integers(len(dims)))] = pick(rng, [*ODD_SIZES, *ODD_WHOLES])
    else:
        dims = [int(pick(rng, ODD_SIZES)) for _ in range(int(rng.integers(0, 5)))]
    tensor.dims[:] = dims


def tensor_shape(rng: Rng, model: ModelProto) -> None:
    """Change the shape, but keep the number of elements."""
    tensor, array = some_array(rng, model)
    kind = int(rng.integers(6))
    if kind == 0:
        array = array.reshape(-1)
    elif kind == 1:
        array = array.reshape(1, *array.shape)
    elif kind == 2:
        array = array.T
    elif kind == 3:
        array = np.resize(array, tuple(int(pick(rng, ODD_SIZES)) for _ in range(int(rng.integers(0, 4)))))
    elif kind == 4 and array.ndim:
        array = np.resize(array, (*array.shape[:-1], array.shape[-1] + int(rng.integers(-1, 2))))
    elif array.size:
        array = array.reshape(-1)[:1].reshape(pick(rng, [(), (1,), (1, 1)]))
    tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), tensor.name))


def tensor_type(rng: Rng, model: ModelProto) -> None:
    if rng.random() < 0.3:
        some_tensor(rng, model).data_type = pick(rng, TYPES)
        return
    tensor, array = some_array(rng, model)
    with np.errstate(all="ignore"):
        tensor.CopyFrom(numpy_helper.from_array(array.astype(pick(rng, NUMPY_TYPES)), tensor.name))


def tensor_numbers(rng: Rng, model: ModelProto) -> None:
    tensor, array = some_array(rng, model)
    array = array.copy()
    some = rng.random(array.shape) < pick(rng, [0.05, 1.0])
    if array.dtype.kind == "f":
        array[some] = pick(rng, ODD_FLOATS)
    elif array.dtype.kind in "iu":
        limits = np.iinfo(array.dtype)
        array[some] = pick(rng, [limits.min, limits.max, 0, 1, limits.max // 2])
    tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))


def tensor_bytes(rng: Rng, model: ModelProto) -> None:
    tensor = some_tensor(rng, model)
    if rng.random() < 0.1:
        tensor.data_location = TensorProto.EXTERNAL
        for key, value in (("location", pick(rng, ["none", "../x", "/dev/zero"])), ("offset", "-1"), ("length", "4")):
            tensor.external_data.add(key=key, value=value)
        return
    raw = tensor.raw_data
    tensor.raw_data = pick(rng, [raw[:-1], raw + b"\0", raw[: len(raw) // 2], b"", raw * 2, raw[::-1]])


def tensor_becomes_node(rng: Rng, model: ModelProto) -> None:
    tensor = TensorProto.FromString(some_tensor(rng, model).SerializeToString())
    model.graph.initializer.remove(tensor)
    model.graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))


def tensor_becomes_input(rng: Rng, model: ModelProto) -> None:
    """Make an initializer an input, optional or required."""
    tensor = TensorProto.FromString(some_tensor(rng, model).SerializeToString())
    model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
    if rng.random() < 0.5:
        model.graph.initializer.remove(tensor)


def input_becomes_tensor(rng: Rng, model: ModelProto) -> None:
    value = some_of(rng, model.graph.input)
    shape = [size.dim_value or 3 for size in value.type.tensor_type.shape.dim]
    if any(not 0 <= size < 1000 for size in shape):
        raise Nothing
    array = np.ones(shape, helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type))
    model.graph.initializer.append(numpy_helper.from_array(array, value.name))
    if rng.random() < 0.7:
        model.graph.input.remove(value)


def tensor_in_the_branch(rng: Rng, model: ModelProto) -> None:
    """Rename a value of a subgraph to that of an outer value, or move an outer value into the subgraph."""
    graph = some_of(rng, list(graphs(model.graph))[1:])
    tensor = TensorProto.FromString(some_tensor(rng, model).SerializeToString())
    graph.initializer.append(tensor)
    if rng.random() < 0.7:
        model.graph.initializer.remove(tensor)


def input_missing(rng: Rng, model: ModelProto) -> None:
    node = some_node(rng, model)
    place = int(rng.integers(len(some_of(rng, [node.input]) or [0])))
    if not node.input:
        raise Nothing
    if rng.random() < 0.5:
        node.input[place] = ""
    else:
        del node.input[place]


def input_another(rng: Rng, model: ModelProto) -> None:
    node = some_node(rng, model)
    if not node.input:
        raise Nothing
    place = int(rng.integers(len(node.input)))
    kind = int(rng.integers(4))
    if kind == 0:
        node.input[place] = pick(rng, list(node.input))
    elif kind == 1:
        node.input[:] = list(node.input)[::-1]
    elif kind == 2:
        node.input.append(pick(rng, value_names(model)))
    else:
        node.input[place] = pick(rng, value_names(model))


def output_another(rng: Rng, model: ModelProto) -> None:
    node = some_node(rng, model)
    kind = int(rng.integers(3))
    if kind == 0:
        node.output[int(rng.integers(len(some_of(rng, [node.output]))))] = ""
    elif kind == 1:
        node.output.append(pick(rng, ["", "more", *value_names(model)]))
    else:
        node.output[0] = pick(rng, value_names(model))


def nodes_gone(rng: Rng, model: ModelProto) -> None:
    graph = some_graph(rng, model)
    del graph.node[int(rng.integers(len(graph.node)))]


def nodes_twice(rng: Rng, model: ModelProto) -> None:
    """Duplicate a node under a new name; its outputs may become inputs of other nodes, or outputs of the graph."""
    graph = some_graph(rng, model)
    place = int(rng.integers(len(graph.node)))
    again = NodeProto.FromString(graph.node[place].SerializeToString())
    if rng.random() < 0.8:
        again.output[:] = [name and name + "_again" for name in again.output]
    graph.node.insert(place + 1, again)
    if rng.random() < 0.5 and again.output:
        graph.output.append(helper.make_empty_tensor_value_info(again.output[0]))


def nodes_reordered(rng: Rng, model: ModelProto) -> None:
    graph = some_graph(rng, model)
    nodes = [NodeProto.FromString(node.SerializeToString()) for node in graph.node]
    del graph.node[:]
    graph.node.extend([nodes[i] for i in rng.permutation(len(nodes))])


def node_between(rng: Rng, model: ModelProto) -> None:
    """Insert a binary node between a value and its consumers; the other operand is a constant or the value itself."""
    graph = some_graph(rng, model)
    place = int(rng.integers(len(graph.node)))
    name = some_of(rng, graph.node[place].output)
    for node in graph.node:
        node.input[:] = [one if one != name else "between" for one in node.input]
    kind, shapes = pick(rng, OPERATORS), [(), (1,), (1, 1), (24,), (16,), (32,), (1, 32), (3, 1), (1, 1, 1), (0,)]
    number = numpy_helper.from_array(np.full(pick(rng, shapes), 1.5, np.float32), "number_between")
    operands = pick(rng, [[name], [name, "number_between"], ["number_between", name], [name, name]])
    attributes = {"to": pick(rng, [1, 10, 11, 6])} if kind == "Cast" else {}
    domain = "com.microsoft" if kind in ("FastGelu", "QuickGelu", "MatMulNBits") else ""
    model.graph.initializer.append(number)
    graph.node.insert(place + 1, helper.make_node(kind, operands, ["between"], domain=domain, **attributes))


def node_type(rng: Rng, model: ModelProto) -> None:
    node = some_node(rng, model)
    if rng.random() < 0.2:
        node.domain = pick(rng, ["", "ai.onnx", "com.microsoft", "ai.ortolan", "no such domain"])
    else:
        node.op_type = pick(rng, OPERATORS)


def more_readers(rng: Rng, model: ModelProto) -> None:
    graph = some_graph(rng, model)
    name = some_of(rng, [name for node in graph.node for name in node.output])
    kind = int(rng.integers(3))
    if kind:
        graph.node.append(helper.make_node("Identity", [name], ["read_too"]))
        name = "read_too"
    graph.output.append(helper.make_empty_tensor_value_info(name))


def graph_outputs(rng: Rng, model: ModelProto) -> None:
    graph = some_graph(rng, model)
    some_of(rng, graph.output)
    kind = int(rng.integers(4))
    if kind == 0:
        del graph.output[int(rng.integers(len(graph.output)))]
    elif kind == 1:
        graph.output[0].name = pick(rng, value_names(model))
    elif kind == 2:
        graph.output.append(graph.output[0])
    else:
        graph.output[0].type.tensor_type.elem_type = pick(rng, TYPES)
        graph.output[0].type.tensor_type.shape.dim.add(dim_value=int(pick(rng, ODD_SIZES)))


def graph_inputs(rng: Rng, model: ModelProto) -> None:
    value = some_of(rng, model.graph.input)
    kind, tensor = int(rng.integers(5)), value.type.tensor_type
    if kind == 0:
        tensor.elem_type = pick(rng, TYPES)
    elif kind == 1:
        tensor.ClearField("shape")
    elif kind == 2:
        del tensor.shape.dim[:]
        for _ in range(int(rng.integers(0, 5))):
            tensor.shape.dim.add(dim_param=pick(rng, ["batch", "k", ""]))
    elif kind == 3 and tensor.shape.dim:
        tensor.shape.dim[-1].dim_value = pick(rng, [*ODD_SIZES, *ODD_WHOLES])
    elif tensor.shape.dim:
        tensor.shape.dim[-1].dim_param = "k"


def value_name(rng: Rng, model: ModelProto) -> None:
    """Rename a value everywhere, or everywhere except in one place."""
    old, new = some_of(rng, value_names(model)), pick(rng, ODD_NAMES)
    for graph in graphs(model.graph):
        for node in graph.node:
            node.input[:] = [new if name == old else name for name in node.input]
            node.output[:] = [new if name == old else name for name in node.output]
        for value in [*graph.input, *graph.output, *graph.initializer]:
            if value.name == old and rng.random() < 0.95:
                value.name = new


def node_name(rng: Rng, model: ModelProto) -> None:
    for graph in graphs(model.graph):
        for node in graph.node:
            if rng.random() < 0.5:
                node.name = pick(rng, ODD_NAMES)


def versions(rng: Rng, model: ModelProto) -> None:
    imported = some_of(rng, model.opset_import)
    if rng.random() < 0.5:
        imported.version = int(rng.integers(7, 24))
    elif rng.random() < 0.5:
        model.ir_version = int(rng.integers(3, 12))
    else:
        model.opset_import.remove(imported)


def branches(rng: Rng, model: ModelProto) -> None:
    if any(node.op_type == "If" for node in model.graph.node) or not model.graph.node:
        raise Nothing
    in_branches(rng, model)


DAMAGES: list[Callable[[Rng, ModelProto], None]] = [
    attribute_value, attribute_type, attribute_missing, attribute_more, layer_attributes, cache_attributes,
    tensor_dims, tensor_shape, tensor_shape, tensor_type, tensor_numbers, tensor_numbers, tensor_bytes,
    tensor_becomes_node, tensor_becomes_input, input_becomes_tensor, tensor_in_the_branch, input_missing,
    input_another, input_another, output_another, nodes_gone, nodes_twice, nodes_reordered, node_between, node_between,
    node_type, more_readers, graph_outputs, graph_inputs, value_name, node_name, versions, branches,
]  # fmt: skip


def damaged(rng: Rng, model: ModelProto) -> list[str]:
    """Apply up to four kinds of damage to the model, and return their names."""
    done = []
    for _ in range(int(rng.choice([0, 1, 2, 3, 4], p=[0.05, 0.55, 0.25, 0.1, 0.05]))):
        damage = pick(rng, DAMAGES)
        try:
            damage(rng, model)
            done.append(damage.__name__)
        except Nothing:
            continue
    return done


def odd_feeds(rng: Rng, feeds: Feeds) -> Feeds:
    """Change the shape of an input, or insert NaN and infinities."""
    if not feeds:
        return {}
    name = pick(rng, sorted(feeds))
    array, kind = feeds[name], int(rng.integers(7))
    if kind == 0 and array.ndim:
        array = array[:0]
    elif kind == 1:
        array = array.reshape(-1)
    elif kind == 2:
        array = array[None]
    elif kind == 3 and array.ndim:
        array = np.resize(array, (*array.shape[:-1], int(pick(rng, ODD_SIZES))))
    elif kind == 4:
        array = np.resize(array, tuple(int(size) for size in rng.integers(0, 4, int(rng.integers(0, 4)))))
    elif array.dtype.kind == "f" and array.size:
        array = array.copy()
        array[rng.random(array.shape) < 0.1] = pick(rng, ODD_FLOATS)
    return feeds | {name: np.ascontiguousarray(array).reshape(array.shape)}
