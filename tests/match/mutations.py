"""Small attention graphs, and changes that mostly leave them valid for ONNX Runtime."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, ModelProto, NodeProto, TensorProto, helper, numpy_helper

from ..passes import attention_forms as forms
from ..passes import cached_graphs, test_attention_by_heads, test_fused_forms
from ..passes.attention_graphs import Graph
from ..provider import fuzz_models, test_packed_attention
from ..provider.cached_models import Form
from ..provider.fuzz_damage import Nothing, graphs, some_graph, some_node, some_of
from ..provider.fuzz_models import Rng, pick

MOST_CHANGES = 3
LEFT = (
    forms.other_axis, forms.shown_weights, forms.used_scores, forms.learned_scale, forms.unknown_heads,
    forms.other_width_of_values, forms.half, forms.capped,
)  # fmt: skip


@functools.cache
def sources() -> tuple[bytes, ...]:
    """Return serialized models: every form of attention with and without a cache, and encoders."""
    built = [*forms.FORMS.values(), *LEFT, *test_attention_by_heads.BY_HEADS.values()]
    built += test_attention_by_heads.NOT_ATTENTION.values()
    models = []
    for form in built:
        graph = Graph()
        models.append(graph.model(form(graph)))
    models += [cached_graphs.model(form) for form in (*cached_graphs.FORMS, cached_graphs.capped)]
    models += [Form(packed=packed, rotary=rotary).model() for packed in (True, False) for rotary in (None, "half")]
    models += [test_fused_forms.attention_model(mask, unidirectional=1)[0] for mask in test_fused_forms.masks()]
    models += [test_packed_attention.quantized_model(np.int8, False, fixed)[0] for fixed in (False, True)]
    return tuple(model.SerializeToString() for model in (*models, *fuzz_models.encoders()[:1]))


def attribute(rng: Rng, model: ModelProto, kinds: dict[int, Callable[[Any], Any]]) -> None:
    found = [
        (node, one) for graph in graphs(model.graph) for node in graph.node for one in node.attribute
        if one.type in kinds
    ]  # fmt: skip
    node, one = some_of(rng, found)
    new = helper.make_attribute(one.name, kinds[one.type](helper.get_attribute_value(one)), attr_type=one.type)
    node.attribute.remove(one)
    node.attribute.append(new)


def number(rng: Rng, model: ModelProto) -> None:
    """Change an axis, a number of heads, a flag, or a scale."""
    change = int(pick(rng, [-2, -1, 1, 2]))
    attribute(rng, model, {AttributeProto.INT: lambda old: old + change, AttributeProto.FLOAT: lambda old: old * 2})


def numbers(rng: Rng, model: ModelProto) -> None:
    """Permute a perm or axes."""
    attribute(rng, model, {AttributeProto.INTS: lambda old: [int(one) for one in rng.permutation(old)]})


def no_attribute(rng: Rng, model: ModelProto) -> None:
    node = some_of(rng, [node for graph in graphs(model.graph) for node in graph.node if node.attribute])
    del node.attribute[int(rng.integers(len(node.attribute)))]


def swapped_inputs(rng: Rng, model: ModelProto) -> None:
    found = [node for graph in graphs(model.graph) for node in graph.node if len(node.input) > 1]
    node = some_of(rng, found)
    one, other = rng.choice(len(node.input), 2, replace=False)
    node.input[one], node.input[other] = node.input[other], node.input[one]


def constant(rng: Rng, model: ModelProto) -> None:
    """Change a Reshape target, axes, a scale or a fill value."""
    found = [
        tensor for graph in graphs(model.graph) for tensor in graph.initializer if np.prod(tensor.dims, dtype=int) <= 8
    ]
    tensor = some_of(rng, found)
    array = numpy_helper.to_array(tensor).copy()
    kind = int(rng.integers(4))
    if kind == 0 and array.size:
        array.reshape(-1)[rng.integers(array.size)] = pick(rng, [-1, 0, 1, 2, 4, 12, 48])
    elif kind == 1:
        array = rng.permutation(array.reshape(-1)).reshape(array.shape)
    elif kind == 2 and array.dtype.kind == "f":
        array = array[None]
    elif kind == 3 and array.dtype.kind == "f":
        with np.errstate(all="ignore"):
            array = np.asarray(array * pick(rng, [-1, 0, 2, 1e30, np.inf]), array.dtype)
    tensor.CopyFrom(numpy_helper.from_array(np.asarray(array), tensor.name))


def constant_node(rng: Rng, model: ModelProto) -> None:
    """Store a constant as a Constant node, or behind an Identity."""
    graph = some_of(rng, [graph for graph in graphs(model.graph) if graph.initializer])
    tensor = pick(rng, graph.initializer)
    if rng.random() < 0.5:
        graph.node.insert(0, helper.make_node("Constant", [], [tensor.name], value=tensor))
        graph.initializer.remove(tensor)
        return
    graph.node.insert(0, helper.make_node("Identity", [f"{tensor.name}_kept"], [tensor.name]))
    tensor.name += "_kept"


def constant_input(rng: Rng, model: ModelProto) -> None:
    """Let callers replace or give a constant."""
    tensor = some_of(rng, model.graph.initializer)
    shape = pick(rng, [list(tensor.dims), [f"d{i}" for i in range(len(tensor.dims))]])
    model.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, shape))
    if rng.random() < 0.5:
        model.graph.initializer.remove(tensor)


def some_reader(rng: Rng, model: ModelProto) -> tuple[GraphProto, int]:
    """Return a graph and the position of one of its nodes, which has an input."""
    graph = some_graph(rng, model)
    place = int(rng.integers(len(graph.node)))
    if not graph.node[place].input:
        raise Nothing
    return graph, place


def other_input(rng: Rng, model: ModelProto) -> None:
    """Read another value that is computed earlier."""
    graph, place = some_reader(rng, model)
    node = graph.node[place]
    known = [one.name for one in (*graph.input, *graph.initializer)]
    known += [name for earlier in graph.node[:place] for name in earlier.output]
    node.input[int(rng.integers(len(node.input)))] = pick(rng, ["", *known])


def removed(rng: Rng, model: ModelProto) -> None:
    """Remove a node; its readers get its first input."""
    graph = some_graph(rng, model)
    node = pick(rng, graph.node)
    graph.node.remove(node)
    for other in graph.node:
        for i, name in enumerate(other.input):
            if name and name == node.output[0]:
                other.input[i] = node.input[0] if node.input else ""


def between(rng: Rng, model: ModelProto) -> None:
    """Insert a node before one input of a node."""
    graph, place = some_reader(rng, model)
    node = graph.node[place]
    index = int(rng.integers(len(node.input)))
    old, new = node.input[index], f"between_{len(graph.node)}"
    kind = pick(rng, ["Identity", "Neg", "Tanh", "Cast", "Transpose", "Mul", "Dropout"])
    attributes: dict[str, Any] = {"to": int(pick(rng, [TensorProto.FLOAT, TensorProto.INT64, TensorProto.FLOAT16]))}
    inputs = [old, old] if kind == "Mul" else [old]
    graph.node.insert(place, helper.make_node(kind, inputs, [new], **(attributes if kind == "Cast" else {})))
    node.input[index] = new


def twice(rng: Rng, model: ModelProto) -> None:
    """Duplicate a node; one of its readers reads the copy."""
    graph = some_graph(rng, model)
    place = int(rng.integers(len(graph.node)))
    copy = NodeProto()
    copy.CopyFrom(graph.node[place])
    if copy.name:
        copy.name += "_copy"
    renamed = {name: f"{name}_copy" for name in copy.output if name}
    for i, name in enumerate(copy.output):
        copy.output[i] = renamed.get(name, "")
    for other in graph.node[place + 1 :]:
        hits = [i for i, name in enumerate(other.input) if name in renamed]
        if hits:
            other.input[hits[0]] = renamed[other.input[hits[0]]]
            break
    graph.node.insert(place + 1, copy)


def reader(rng: Rng, model: ModelProto) -> None:
    """Add a reader of a value, which is an output of the graph or of no use."""
    node = some_node(rng, model)
    name = pick(rng, [name for name in node.output if name] or [""])
    kind = pick(rng, ["Shape", "Identity", "Size"])
    new = f"read_{len(model.graph.node)}"
    if name not in {name for one in model.graph.node for name in one.output}:
        raise Nothing
    model.graph.node.append(helper.make_node(kind, [name], [new]))
    if rng.random() < 0.5:
        model.graph.output.append(helper.make_empty_tensor_value_info(new))


def output(rng: Rng, model: ModelProto) -> None:
    """Make a value an output of the graph, or an output no longer one."""
    if rng.random() < 0.3 and len(model.graph.output) > 1:
        del model.graph.output[int(rng.integers(len(model.graph.output)))]
        return
    node = some_of(rng, model.graph.node)
    if not node.output[0] or node.output[0] in {one.name for one in model.graph.output}:
        raise Nothing
    model.graph.output.append(helper.make_empty_tensor_value_info(node.output[0]))


def input_shape(rng: Rng, model: ModelProto) -> None:
    """Change a dimension of an input to a number, another name or nothing."""
    tensor = some_of(rng, [one for one in model.graph.input if one.type.tensor_type.shape.dim])
    shape = tensor.type.tensor_type.shape
    if rng.random() < 0.1:
        tensor.type.tensor_type.ClearField("shape")
        return
    dim = pick(rng, shape.dim)
    dim.Clear()
    kind = int(rng.integers(4))
    if kind == 0:
        dim.dim_value = int(pick(rng, [1, 2, 4, 9, 48]))
    elif kind < 3:
        dim.dim_param = pick(rng, ["batch", "rows", "other"])


def no_output_shape(rng: Rng, model: ModelProto) -> None:
    for one in model.graph.output:
        one.type.tensor_type.ClearField("shape")


def half(rng: Rng, model: ModelProto) -> None:
    """Turn all floats, or all inputs, into float16."""
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT:
            with np.errstate(over="ignore"):
                array = numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(numpy_helper.from_array(array, tensor.name))
    for one in (*model.graph.input, *model.graph.output):
        if one.type.tensor_type.elem_type == TensorProto.FLOAT:
            one.type.tensor_type.elem_type = TensorProto.FLOAT16
    for node in model.graph.node:
        for one in node.attribute:
            if node.op_type == "Cast" and one.i == TensorProto.FLOAT:
                one.i = TensorProto.FLOAT16


def operator(rng: Rng, model: ModelProto) -> None:
    """Replace an operator by a similar one."""
    alike = (("Add", "Sub", "Mul", "Div"), ("Relu", "Tanh", "Identity", "Neg", "Sqrt", "Softmax", "LogSoftmax", "Abs"))
    kinds = {kind: family for family in alike for kind in family}
    node = some_of(rng, [node for graph in graphs(model.graph) for node in graph.node if node.op_type in kinds])
    node.op_type = pick(rng, kinds[node.op_type])


def in_branches(rng: Rng, model: ModelProto) -> ModelProto:
    """Move the graph into both branches of an If. ONNX Runtime does not tell names of the outer graph's dimensions."""
    for one in model.graph.input:
        for dim in one.type.tensor_type.shape.dim:
            if dim.dim_param:
                dim.Clear()
    return fuzz_models.in_branches(rng, model, whole=True)


def names(rng: Rng, model: ModelProto) -> None:
    for node in model.graph.node:
        node.name = pick(rng, ["", node.name])


def opset(rng: Rng, model: ModelProto) -> None:
    for one in model.opset_import:
        if one.domain == "":
            one.version = int(pick(rng, [13, 15, 18, 20, 21, 22, 23]))


CHANGES = [
    number, number, numbers, no_attribute, swapped_inputs, swapped_inputs, constant, constant, constant, constant_node,
    constant_input, other_input, other_input, removed, removed, between, between, twice, twice, reader, output,
    input_shape, input_shape, no_output_shape, half, operator, names, opset, in_branches,
]  # fmt: skip


def mutated(seed: int) -> tuple[ModelProto, list[str]]:
    """Return a model with up to MOST_CHANGES changes, and their names."""
    rng = np.random.default_rng(seed)
    model = ModelProto.FromString(pick(rng, sources()))
    done: list[str] = []
    for _ in range(int(rng.integers(1, MOST_CHANGES + 1))):
        change = pick(rng, CHANGES)
        try:
            model = change(rng, model) or model
            done.append(change.__name__)
        except (Nothing, ValueError):  # a change of a damaged model may fail
            continue
    return model, done
