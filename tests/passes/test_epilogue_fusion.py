"""The operators found after a linear layer compute its activation and residual; other graphs are not matched."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from hypothesis import given
from hypothesis import strategies as st
from onnx import TensorProto, helper
from scipy.special import erf

from ortolan.graph_passes.find.epilogue import Activation, Epilogue, Epilogues
from ortolan.graph_passes.find.linear import linears_in
from ortolan.models import tiny

from ..sampling import examples
from .epilogues import WEIGHTS, K, N, Writer, gelu_torch, run_unoptimized
from .small_models import make_model, random_weight

FLOAT = TensorProto.FLOAT

FORMULAS: dict[Activation, Callable[[np.ndarray], np.ndarray]] = {
    Activation.NONE: lambda x: x,
    Activation.RELU: lambda x: np.maximum(x, 0),
    Activation.GELU: lambda x: 0.5 * x * (1 + erf(x / math.sqrt(2))),
    Activation.GELU_TANH: lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    Activation.SILU: lambda x: x / (1 + np.exp(-x)),
}


def gelu_half_x(w: Writer, x: str) -> str:
    gate = w.node("Add", w.node("Erf", w.node("Mul", x, math.sqrt(0.5))), 1.0)
    return w.node("Mul", w.node("Mul", x, 0.5), gate)


def gelu_half_gate(w: Writer, x: str) -> str:
    gate = w.node("Add", w.node("Erf", w.node("Div", x, math.sqrt(2))), 1.0)
    return w.node("Mul", x, w.node("Mul", 0.5, gate))


def _tanh_gate(w: Writer, cubic: str) -> str:
    return w.node("Add", w.node("Tanh", cubic), 1.0)


def gelu_new(w: Writer, x: str) -> str:
    cubic = w.node("Add", x, w.node("Mul", w.node("Pow", x, 3.0), 0.044715))
    gate = _tanh_gate(w, w.node("Mul", cubic, math.sqrt(2 / math.pi)))
    return w.node("Mul", w.node("Mul", x, 0.5), gate)


def gelu_tanh_dynamo(w: Writer, x: str) -> str:
    cubic = w.node("Add", x, w.node("Mul", 0.044715, w.node("Pow", x, 3.0)))
    gate = _tanh_gate(w, w.node("Mul", math.sqrt(2 / math.pi), cubic))
    return w.node("Mul", 0.5, w.node("Mul", x, gate))


def gelu_cube_by_products(w: Writer, x: str) -> str:
    cube = w.node("Mul", w.node("Mul", x, x), x)
    cubic = w.node("Add", x, w.node("Mul", cube, 0.044715))
    gate = _tanh_gate(w, w.node("Mul", cubic, math.sqrt(2 / math.pi)))
    return w.node("Mul", x, w.node("Mul", 0.5, gate))


def gelu_fast(w: Writer, x: str) -> str:
    """Hugging Face's gelu_fast, whose constant has ten digits."""
    inner = w.node("Add", w.node("Mul", w.node("Mul", x, 0.044715), x), 1.0)
    gate = _tanh_gate(w, w.node("Mul", w.node("Mul", x, 0.7978845608), inner))
    return w.node("Mul", w.node("Mul", x, 0.5), gate)


def gelu_square_by_pow(w: Writer, x: str) -> str:
    inner = w.node("Add", w.node("Mul", w.node("Pow", x, 2.0), 0.044715), 1.0)
    gate = _tanh_gate(w, w.node("Mul", w.node("Mul", x, math.sqrt(2 / math.pi)), inner))
    return w.node("Mul", w.node("Mul", x, gate), 0.5)


def silu(w: Writer, x: str) -> str:
    return w.node("Mul", x, w.node("Sigmoid", x))


Form = Callable[[Writer, str], str]


def operator(op: str, domain: str = "", **attributes: object) -> Form:
    return lambda w, x: w.node(op, x, domain=domain, **attributes)


FORMULA_FORMS: dict[Form, Activation] = {
    gelu_torch: Activation.GELU,
    gelu_half_x: Activation.GELU,
    gelu_half_gate: Activation.GELU,
    gelu_new: Activation.GELU_TANH,
    gelu_tanh_dynamo: Activation.GELU_TANH,
    gelu_cube_by_products: Activation.GELU_TANH,
    gelu_fast: Activation.GELU_TANH,
    gelu_square_by_pow: Activation.GELU_TANH,
    silu: Activation.SILU,
}
OPERATORS = {
    "Relu": (operator("Relu"), Activation.RELU),
    "Gelu": (operator("Gelu"), Activation.GELU),
    "Gelu none": (operator("Gelu", approximate="none"), Activation.GELU),
    "Gelu tanh": (operator("Gelu", approximate="tanh"), Activation.GELU_TANH),
    "Swish": (operator("Swish"), Activation.SILU),
    "Swish 1": (operator("Swish", alpha=1.0), Activation.SILU),
    "microsoft Gelu": (operator("Gelu", "com.microsoft"), Activation.GELU),
    "FastGelu": (operator("FastGelu", "com.microsoft"), Activation.GELU_TANH),
    "QuickGelu 1": (operator("QuickGelu", "com.microsoft", alpha=1.0), Activation.SILU),
}
FORMS = [pytest.param(form, kind, id=form.__name__) for form, kind in FORMULA_FORMS.items()]
FORMS += [pytest.param(form, kind, id=name) for name, (form, kind) in OPERATORS.items()]


def find(model: onnx.ModelProto | ir.Model) -> Epilogue:
    """Return the epilogue of the model's first layer."""
    loaded = ir.from_proto(model) if isinstance(model, onnx.ModelProto) else model
    return Epilogues().of(next(linears_in(loaded)))


def finds_nothing(model: onnx.ModelProto) -> bool:
    found = find(model)
    return found.activation == Activation.NONE and not found.nodes and found.residual is None


def some_x(rows: int = 64) -> np.ndarray:
    """Inputs for which y covers the curved and the flat parts of all activations."""
    return np.random.default_rng(3).standard_normal((rows, K)).astype(np.float32) * 3


def check_values(model: onnx.ModelProto, found: Epilogue, **residuals: np.ndarray) -> None:
    """Check that the first output follows the formula of `found`, within float32 rounding of ten operations."""
    x = some_x()
    y = x.astype(np.float64) @ WEIGHTS["W"] + WEIGHTS["b"]
    expected = FORMULAS[found.activation](y)
    if found.residual is not None:
        constant = found.residual.const_value
        expected = expected + (residuals[found.residual.name] if constant is None else constant.numpy())
    assert np.abs(y).max() > 6
    (result,) = run_unoptimized(model, {"x": x, **residuals})
    np.testing.assert_allclose(result, expected, rtol=4e-6, atol=4e-6)


@pytest.mark.parametrize(("form", "activation"), FORMS)
def test_activation_is_found_and_computes_its_formula(form, activation):
    w = Writer()
    output = form(w, "y")
    model = w.model(output)
    found = find(model)
    assert found.activation == activation and found.residual is None and found.output.name == output
    assert [node.name for node in found.nodes] == [node.name for node in w.nodes[1:]]
    check_values(model, found)


@examples(150)
@given(st.sampled_from(list(FORMULA_FORMS)), st.booleans(), st.data())
def test_activation_is_found_in_any_order_of_operands(form, residual, data):
    w = Writer(lambda n: data.draw(st.integers(0, n - 1)))
    output = form(w, "y")
    if residual:
        output = w.node("Add", output, w.input("r", "batch", N))
    model = w.model(output)
    found = find(model)
    assert found.activation == FORMULA_FORMS[form] and found.output.name == output
    assert (found.residual is not None) == residual
    check_values(model, found, **({"r": random_weight(64, N, seed=5)} if residual else {}))


OPS = ("Add", "Mul", "Div", "Pow", "Erf", "Tanh", "Sigmoid")


@examples(150)
@given(st.sampled_from(list(FORMULA_FORMS)), st.data())
def test_whatever_is_found_in_a_damaged_form_is_what_it_computes(form, data):
    """One operand or operator is replaced at random. A match must still compute what the graph computes."""
    w = Writer()
    output = form(w, "y")
    index = data.draw(st.integers(1, len(w.nodes) - 1))
    node = w.nodes[index]
    if data.draw(st.booleans()):
        node.op_type = data.draw(st.sampled_from(OPS[4:] if len(node.input) == 1 else OPS[:4]))
    else:
        before = [name for earlier in w.nodes[:index] for name in earlier.output] + list(w.weights.keys() - {"W", "b"})
        node.input[data.draw(st.integers(0, len(node.input) - 1))] = data.draw(st.sampled_from(sorted(before)))
    model = w.model(output)
    found = find(model)
    if found.output.name == output and found.activation != Activation.NONE:
        check_values(model, found)


def numbers(form: Form) -> Iterator[tuple[str, Writer, str]]:
    w = Writer()
    form(w, "y")
    for name in w.weights.keys() - {"W", "b"}:
        again = Writer()
        yield name, again, form(again, "y")


@pytest.mark.parametrize("form", FORMULA_FORMS)
@pytest.mark.parametrize("error", [3e-6, -1e-4, -1.0, -2.0, math.inf, math.nan])
def test_other_numbers_are_refused(form, error):
    for name, w, output in numbers(form):
        w.weights[name] = (w.weights[name] * (1 + error)).astype(np.float32)
        assert finds_nothing(w.model(output)), name


@pytest.mark.parametrize("form", [gelu_torch, gelu_new])
@pytest.mark.parametrize("mantissa", [10, 7])
def test_numbers_rounded_to_float16_or_bfloat16_are_refused(form, mantissa):
    for name, w, output in numbers(form):
        value = float(w.weights[name])
        fraction, exponent = math.frexp(value)
        rounded = math.ldexp(round(math.ldexp(fraction, mantissa + 1)), exponent - mantissa - 1)
        if rounded != value:  # constants that need more digits than float16 has
            w.weights[name] = np.float32(rounded)
            assert finds_nothing(w.model(output)), name


def test_numbers_with_axes_that_change_the_shape_are_refused():
    for shape in ((1, 1, 1), (N,), (0,)):
        w = Writer()
        w.weights["half"] = np.full(shape, 0.5, np.float32)
        gate = w.node("Add", w.node("Erf", w.node("Div", "y", math.sqrt(2))), 1.0)
        assert finds_nothing(w.model(w.node("Mul", w.node("Mul", "y", gate), "half")))


def test_numbers_that_callers_may_replace_are_refused():
    w = Writer()
    output = gelu_torch(w, "y")
    for name in w.weights.keys() - {"W", "b"}:
        w.inputs = {name: (FLOAT, [])}
        assert finds_nothing(w.model(output)), name


def gelu_over_its_gate(w: Writer, x: str) -> str:
    gate = w.node("Add", w.node("Erf", w.node("Div", x, math.sqrt(2))), 1.0)
    return w.node("Div", w.node("Mul", w.node("Mul", x, 0.5), gate), gate)


def power_of_two_million(w: Writer, x: str) -> str:
    """Compute (x^2 + x)^(2^21), which must not be expanded."""
    power = w.node("Add", w.node("Mul", x, x), x)
    for _ in range(21):
        power = w.node("Mul", power, power)
    return power


@pytest.mark.parametrize(
    "form",
    [
        operator("QuickGelu", "com.microsoft"),
        operator("QuickGelu", "com.microsoft", alpha=1.702),
        operator("Swish", alpha=1.702),
        operator("Relu", "com.example"),
        operator("Tanh"),
        operator("Sigmoid"),
        lambda w, x: w.node("FastGelu", x, "b", domain="com.microsoft"),
        lambda w, x: w.node("Mul", x, x),
        lambda w, x: w.node("Mul", x, w.node("Sigmoid", w.node("Mul", x, 1.702))),
        lambda w, x: w.node("Mul", x, w.node("Sigmoid", w.input("other", "batch", N))),
        lambda w, x: w.node("Div", w.node("Sigmoid", x), x),
        lambda w, x: w.node("Add", x, "b", domain="com.example"),
        gelu_over_its_gate,
        power_of_two_million,
    ],
)
def test_other_functions_are_refused(form):
    w = Writer()
    assert finds_nothing(w.model(form(w, "y")))


@pytest.mark.parametrize("form", FORMULA_FORMS)
def test_operators_of_other_domains_are_refused(form):
    w = Writer()
    output = form(w, "y")
    for node in w.nodes[1:]:
        node.domain = "com.example"
        assert finds_nothing(w.model(output)), node.op_type
        node.domain = ""
    assert not finds_nothing(w.model(output))


@pytest.mark.parametrize(("form", "activation"), FORMS)
def test_values_that_others_see_stay(form, activation):
    w = Writer()
    output = form(w, "y")
    for value in ["y", *(node.output[0] for node in w.nodes[1:-1])]:
        assert finds_nothing(w.model(output, value)), f"{value} is a graph output"
        w.nodes.append(helper.make_node("Neg", [value], ["negative"]))
        assert finds_nothing(w.model(output, "negative")), f"{value} has another consumer"
        w.nodes.pop()
    assert find(w.model(output)).activation == activation


@pytest.mark.parametrize(("form", "activation"), FORMS)
def test_the_activation_itself_may_have_consumers_and_be_an_output(form, activation):
    w = Writer()
    output = form(w, "y")
    w.nodes += [helper.make_node("Add", [output, output], ["double"]), helper.make_node("Neg", [output], ["negative"])]
    found = find(w.model("double", "negative", output))
    assert found.activation == activation and found.residual is None and found.output.name == output


def in_branch(build: Callable[[Writer], str]) -> onnx.ModelProto:
    """Return a model whose nodes after the linear layer are in a branch of an If."""
    w, inner = Writer(), Writer()
    result = build(inner)
    branches = [
        helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info(output, FLOAT, ["rows", "columns"])])
        for nodes, output in (
            (inner.nodes[1:], result),
            ([helper.make_node("Sign", ["x"], ["sign"])], "sign"),
        )
    ]
    w.weights |= inner.weights
    w.opset = inner.opset
    w.nodes.append(helper.make_node("If", ["flag"], ["z"], then_branch=branches[0], else_branch=branches[1]))
    w.inputs["flag"] = (TensorProto.BOOL, [])
    return w.model("z")


@pytest.mark.parametrize(("form", "activation"), FORMS)
def test_nodes_of_another_graph_are_refused(form, activation):
    assert finds_nothing(in_branch(lambda w: form(w, "y")))


def test_an_addition_in_another_graph_is_refused():
    assert finds_nothing(in_branch(lambda w: w.node("Add", "y", "b")))


def test_a_consumer_in_another_graph_keeps_the_value():
    w = Writer()
    output = silu(w, "y")
    model = in_branch(lambda inner: inner.node("Neg", "y"))
    model.graph.node.extend(w.nodes[1:])
    model.graph.output.append(helper.make_tensor_value_info(output, FLOAT, ["rows", "columns"]))
    assert finds_nothing(model)


def test_a_layer_inside_of_a_branch():
    w = Writer()
    output = w.node("Add", gelu_torch(w, "y"), "b")
    branches = [
        helper.make_graph(w.nodes, name, [], [helper.make_tensor_value_info(output, FLOAT, ["rows", "columns"])])
        for name in ("then", "else")
    ]
    w.nodes = [helper.make_node("If", ["flag"], ["z"], then_branch=branches[0], else_branch=branches[1])]
    w.inputs["flag"] = (TensorProto.BOOL, [])
    found = find(w.model("z"))
    assert found.activation == Activation.GELU and found.residual is not None and found.residual.name == "b"


@pytest.mark.parametrize(("form", "activation"), FORMS)
def test_float16_is_refused(form, activation):
    w = Writer(dtype=np.float16)
    assert finds_nothing(w.model(w.node("Add", form(w, "y"), w.input("r", "batch", N))))


@pytest.mark.parametrize("shape", [(64, N), (N,), (1, N), (64, 1), (), (2, 64, N)])
@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("form", [None, gelu_half_x, operator("Relu")])
def test_residual_of_any_shape(shape, order, form):
    for constant in (False, True):
        w = Writer(lambda n, order=order: order if n == 2 else 0)
        array = random_weight(*shape, seed=5) if shape else np.array(0.3, np.float32)
        if constant:
            w.weights["r"] = array
        else:
            w.input("r", *shape)
        output = w.node("Add", form(w, "y") if form else "y", "r")
        model = w.model(output, rank=max(2, len(shape)))
        found = find(model)
        assert found.residual is not None and found.residual.name == "r"
        assert len(found.nodes) == len(w.nodes) - 1
        check_values(model, found, **({} if constant else {"r": array}))


def test_nodes_are_in_graph_order_and_the_residual_may_come_late():
    w = Writer()
    output = gelu_half_x(w, "y")
    late = w.node("Neg", w.input("r", "batch", N))
    output = w.node("Add", late, output)
    # The node that computes 0.5 x moves to the front, before the nodes that it does not depend on.
    half = next(node for node in w.nodes if node.op_type == "Mul" and node.input[0] == "y" and node.output[0] == "v4")
    w.nodes.remove(half)
    w.nodes.insert(1, half)
    found = find(w.model(output))
    assert [node.op_type for node in found.nodes] == ["Mul", "Mul", "Erf", "Add", "Mul", "Add"]
    assert found.nodes[0].name == half.name and found.residual is not None and found.residual.name == late
    assert found.output is found.nodes[-1].outputs[0]


def test_addition_of_the_value_to_itself_or_to_something_computed_from_it_is_refused():
    w = Writer()
    assert finds_nothing(w.model(w.node("Add", "y", "y")))
    w = Writer()
    assert finds_nothing(w.model(w.node("Add", "y", w.node("Neg", "y"))))
    for use in ("v2", "y"):  # an intermediate result and y itself have another consumer
        w = Writer()
        output = silu(w, "y")
        assert output == "v2"
        output = w.node("Add", output, w.node("Neg", use))
        found = find(w.model(output))
        assert found.residual is None and found.activation == (Activation.SILU if use == "v2" else Activation.NONE)


def test_only_one_activation_and_one_addition_are_taken():
    w = Writer()
    relu = w.node("Relu", "y")
    assert find(w.model(w.node("Relu", relu))).output.name == relu
    w = Writer()
    first = w.node("Add", "y", "b")
    assert find(w.model(w.node("Add", first, "b"))).output.name == first
    w = Writer()
    first = w.node("Add", "y", w.input("r", "batch", N))
    found = find(w.model(w.node("Relu", first)))  # activation after residual
    assert found.output.name == first and found.activation == Activation.NONE


def test_nothing_behind_the_layer():
    model = Writer().model("y")
    found = find(model)
    assert finds_nothing(model) and found.output.name == "y"


def replace(epilogue: Epilogue, layer: ir.Node, op: str = "SparseAMXMatMul") -> ir.Node:
    """Insert the operator after the last node of the epilogue, as the pass does."""
    inputs = [layer.inputs[0], layer.inputs[1], epilogue.residual]
    node = ir.Node("ai.ortolan", op, inputs, [ir.Attr("activation", ir.AttributeType.INT, epilogue.activation)])
    graph = layer.graph
    assert graph is not None
    old = [layer, *epilogue.nodes]
    ir.convenience.replace_nodes_and_values(graph, old[-1], old, [node], [epilogue.output], node.outputs)
    return node


def test_of_the_sum_of_two_layers_one_takes_the_addition():
    nodes = [
        helper.make_node("MatMul", ["x", "W"], ["y1"], name="first"),
        helper.make_node("Relu", ["y1"], ["a1"]),
        helper.make_node("MatMul", ["x", "V"], ["y2"], name="second"),
        helper.make_node("Sigmoid", ["y2"], ["s2"]),
        helper.make_node("Mul", ["y2", "s2"], ["a2"]),
        helper.make_node("Add", ["a1", "a2"], ["z"]),
    ]
    weights = {"W": random_weight(K, N), "V": random_weight(K, N, seed=1)}
    model = ir.from_proto(make_model(nodes, {"x": (FLOAT, ["batch", K])}, {"z": (FLOAT, ["batch", N])}, weights))
    first, second = linears_in(model)
    epilogues = Epilogues()
    assert epilogues.of(first).output is epilogues.of(second).output

    epilogue = epilogues.of(first)
    assert epilogue.activation == Activation.RELU
    assert epilogue.residual is not None and epilogue.residual.name == "a2"
    fused = replace(epilogue, first.node)
    epilogue = epilogues.of(second)
    assert (epilogue.activation, epilogue.residual, epilogue.output.name) == (Activation.SILU, None, "a2")
    also_fused = replace(epilogue, second.node)
    assert list(model.graph) == [also_fused, fused] and fused.inputs[2] is also_fused.outputs[0]
    assert model.graph.outputs[0] is fused.outputs[0] and fused.outputs[0].name == "z"


def count(model: ir.Model) -> tuple[Counter[str], Counter[str]]:
    """Count the layers by kind of weight, activation and residual.

    Layers are replaced in graph order, as in the pass.
    """
    activations: Counter[str] = Counter()
    residuals: Counter[str] = Counter()
    epilogues = Epilogues()
    for linear in list(linears_in(model)):
        epilogue = epilogues.of(linear)
        module = linear.name.split("/")[-2]
        if module == "dense":
            module = "/".join(linear.name.split("/")[3:-1])
        if epilogue.activation:
            activations[f"{module}: {epilogue.activation.name}"] += 1
        if epilogue.residual is not None:
            residuals[module] += 1
        layer = linear.node if linear.add is None else linear.add
        replace(epilogue, layer)
    return activations, residuals


def test_bert():
    activations, residuals = count(tiny.tiny_bert(num_hidden_layers=3))
    assert activations == {"intermediate/dense: GELU": 3}
    assert residuals == {"attention/output/dense": 3, "output/dense": 3}


def test_llama():
    activations, residuals = count(tiny.tiny_llama(num_hidden_layers=3))
    assert activations == {"gate_proj: SILU": 3}
    assert residuals == {"o_proj": 3, "down_proj": 3}


@pytest.mark.parametrize("form", ["matmul", "matmul_add", "gemm", "gemm_trans_b", "transpose", "identity", "cast"])
def test_mlp_in_every_form(form):
    activations, residuals = count(tiny.mlp((12, 20, 10, 8), form))
    assert activations == {"layers.0: RELU": 1, "layers.1: RELU": 1} and not residuals
